"""Sphinx configuration. The build executes the examples and fetches nothing."""

import os
import sys
import tomllib
import typing
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from sphinx.pycode import ModuleAnalyzer

# The examples run on CPU, wherever the docs are built.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "radixkv"
author = "The radixkv authors"
copyright = author
version = release = _project["version"]

sys.path.insert(0, str(Path(__file__).parent / "_generate"))
typing.GENERATING_DOCUMENTATION = "radixkv"  # type: ignore[attr-defined]  # jaxtyping: short names

extensions = [
    "chart",  # in _generate/
    "directives",  # in _generate/
    "navigation",  # in _generate/
    "names",  # in _generate/
    "objects",  # in _generate/
    "options",  # in _generate/
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_generate", "_generated/*.md", "examples/*.rst"]
default_role = "py:obj"  # single backticks in docstrings link to an object; double ones are code
highlight_language = "text"  # after :: in docstrings, most of which are diagrams
html_theme = "furo"
html_title = f"radixkv {release}"
html_static_path = ["_static"]
html_logo = html_favicon = "_static/logo.svg"
copybutton_exclude = ".linenos, .gp, .go"  # copy commands without prompts and output
html_css_files = ["site.css"]
html_js_files = ["sidebar.js"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

intersphinx_mapping = import_module("inventories").write_inventories()  # in _generate/

autosummary_filename_map = import_module("objects").FILE_NAMES
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Docstring examples begin with what a reader of the page has imported.
doctest_global_setup = """
from radixkv.kvcache import *
from radixkv.spec import GhostMemory, prefix_tags
"""

nitpick_ignore_regex = [
    ("py:class", r"jax\._src\..*"),  # no page of JAX's documentation has it
    ("py:class", r"'.*'"),  # shapes in jaxtyping annotations
    ("py:class", r"radixkv\.scheduler\.models\.transformer\.Params"),  # a tree of arrays
    ("py:class", r"~?(radixkv\..*)?(Kernel|PoolOrPools|ReportT|Made|T|W)"),  # type variables
    ("py:class", r"radixkv\.kvcache\.events\.Payload"),  # another
    ("py:class", r"starlette\..*"),  # has no inventory
    ("py:class", r"concurrent\.futures\._base\.Future"),  # Python documents its other name
    (
        "py:class",
        r"(opentelemetry|prometheus_client)\..*|ObjectStore|Tokenizer",
    ),  # have no inventory
    ("py:class", r"RefusalReason"),  # words, which `Refuse` lists
]

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": "/plot_",
    "within_subsection_order": "gallery.by_lesson",  # in _generate/
    "abort_on_example_error": True,
    "download_all_examples": False,
    "write_computation_times": False,
    "show_memory": False,
    "min_reported_time": 1e9,
}


_COLON = "\N{SMALL COLON}"


def _hide_colons(*event: Any) -> None:
    """Keep napoleon from reading the words before a colon as a type: types are in annotations.

    It does so on the first line of an attribute's docstring and of a Returns section.
    """
    what, lines = event[1], event[-1]
    describes_attribute = what in ("property", "attribute", "data")
    hide = False
    for i, line in enumerate(lines):
        is_head = line in ("Args:", "Example:", "Raises:", "Returns:")
        if line and not line.startswith(" "):
            hide = line == "Returns:" or (describes_attribute and not is_head)
        if hide and not is_head:
            lines[i] = line.replace(":", _COLON)


def _show_colons(*event: Any) -> None:
    event[-1][:] = [line.replace(_COLON, ":") for line in event[-1]]


def _skip_inherited(*event: Any) -> bool | None:
    """Leave out constructors that a class inherits from `object`, `Exception` or `Protocol`.

    The fields of a `NamedTuple` are left out, too: the docstring of its class describes them.
    """
    name, member = event[2], event[3]
    if type(member).__name__ == "_tuplegetter":
        return True
    is_written = isinstance(member, FunctionType) and "no_init" not in member.__name__
    return True if name in ("__init__", "__new__") and not is_written else None


def _analyze_module(module: ModuleAnalyzer) -> None:
    """Read a module, and the comments of data that it exports.

    Overloads would be shown in full, types included, above the parameters.
    """
    _analyze(module)
    module.overloads = {}
    for name, comment in import_module("objects").comments(module.modname).items():
        module.attr_docs.setdefault(("", name), comment)


_analyze = ModuleAnalyzer.analyze
ModuleAnalyzer.analyze = _analyze_module  # type: ignore[method-assign]


def _write_pages(app: Any) -> None:
    """Generate pages: of objects, the specification's rules and bugs, and the hand-off's states."""
    import handoff
    import objects
    import specification

    objects.write_pages()
    specification.write_pages()
    handoff.write_pages()


def setup(app: Any) -> None:
    """Generate pages, and run before and after napoleon, whose priority is the default of 500."""
    app.connect("builder-inited", _write_pages)
    app.connect("autodoc-skip-member", _skip_inherited)
    app.connect("autodoc-process-docstring", _hide_colons, priority=100)
    app.connect("autodoc-process-docstring", _show_colons, priority=900)
