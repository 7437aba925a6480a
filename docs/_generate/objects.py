"""A page per object of the reference, and tables that show one line of each.

A page of the reference lists its objects::

    ```{objects} radixkv.kvcache
    CacheManager
    prefix.node.Node
    ```

The directive shows a table. Before the build, each object in it gets a page in
``docs/reference/api/``. A list without names is the index of a package: it shows all of its
``__all__``, which other lists must name.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.autosummary import import_by_name
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

REFERENCE: Final = Path(__file__).parents[1] / "reference"
PAGES: Final = REFERENCE / "api"

_LIST: Final = re.compile(r"^```\{objects\} (\S+)\n([\w.\n]+)\n```$", re.MULTILINE)

_INHERITED: Final = [":members:", ":inherited-members:"]
_MADE_BY_US: Final = [":members:", ":exclude-members: __init__"]

OPTIONS: Final = {
    "radixkv.kvcache.Operation": [":members: num_blocks"],
    "radixkv.kvcache.Tiers": [
        ":members: storage, take_operations, take_cancelled, take_used, complete, fence,"
        " num_open_operations, park, unpark, fork, prefetch, cancel, stats"
    ],
    "radixkv.kvcache.events.EventRecorder": [":members: take"],
    "radixkv.scheduler.DecodeEngine": _INHERITED,
    "radixkv.scheduler.GenerationOutput": [":members: samples"],
    "radixkv.scheduler.Guided": _MADE_BY_US,
    "radixkv.scheduler.MixedScheduler": _INHERITED,
    "radixkv.scheduler.OutputStream": [*_MADE_BY_US, ":special-members: __anext__"],
    "radixkv.scheduler.PrefillEngine": _INHERITED,
    "radixkv.scheduler.handoff.DecodeSide": _INHERITED,
    "radixkv.scheduler.handoff.PrefillSide": _INHERITED,
    "radixkv.scheduler.nodes.NodeEngine": [":exclude-members: __init__"],
    "radixkv.scheduler.replay.Progress": [":special-members: __call__"],
    "radixkv.scheduler.replay.ReplayReport": [":members:", ":exclude-members: sections"],
    "radixkv.scheduler.text.Detokenizer": _MADE_BY_US,
    "radixkv.scheduler.text.guided.TokenGuide": _MADE_BY_US,
}
"""Options of autodoc for objects that need others than ``:members:``."""

FILE_NAMES: Final = {"radixkv.spec.run": "radixkv.spec.run-function"}
"""Of files that would differ from another only by the case, which some systems ignore."""


class Objects(SphinxDirective):
    """``{objects} PACKAGE`` and names in it, one per line: a table of name and first sentence."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the table, and the entries of the sidebar."""
        package, names = self.arguments[0], list(self.content)
        lines = [
            "```{eval-rst}",
            ".. currentmodule:: None",
            ".. autosummary::",
            "   :nosignatures:",
        ]
        if names:
            folder = posixpath.dirname(self.env.docname)
            lines.append(f"   :toctree: {posixpath.relpath('reference/api', folder)}")
        else:
            names = sorted(import_module(package).__all__, key=str.lower)
        lines += ["", *(f"   ~{package}.{name}" for name in names), "```"]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, self.env.docname), 0, container)
        return list(container.children)


def write_pages() -> None:
    """Write the page of each listed object, and remove pages that no list names any more."""
    PAGES.mkdir(exist_ok=True)
    sources = [path.read_text("utf-8") for path in REFERENCE.rglob("*.md")]
    objects = [
        f"{package}.{name}"
        for source in sources
        for package, names in _LIST.findall(source)
        for name in names.split()
    ]
    pages = {PAGES / f"{FILE_NAMES.get(name, name)}.rst": _page(name) for name in objects}
    assert len({path.name.lower() for path in pages}) == len(set(objects)), "one file for two pages"
    for path in set(PAGES.iterdir()) - set(pages):
        path.unlink()
    for path, text in pages.items():
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def _page(full_name: str) -> str:
    name, found, _, module = import_by_name(full_name)
    name = name.removeprefix(f"{module}.")
    kind, options = _kind(found), OPTIONS.get(full_name, [])
    if kind in ("class", "exception"):
        options = options or [":members:"]
    elif kind == "data" and not isinstance(found, str | int | tuple):
        options = [":no-value:"]  # that of a type alias or a table is long
    lines = [
        name,
        "=" * len(name),
        "",
        f".. currentmodule:: {module}",
        "",
        f".. auto{kind}:: {name}",
    ]
    lines += [f"   {option}" for option in options]
    return "\n".join([*lines, ""])


def _kind(found: Any) -> str:
    if isinstance(found, type):
        return "exception" if issubclass(found, BaseException) else "class"
    if inspect.isroutine(found):
        return "function"
    return "class" if hasattr(found, "__supertype__") else "data"


@cache
def comments(package: str) -> dict[str, list[str]]:
    """Return the comments of data that a package exports, from the modules that define the data.

    Sphinx looks for the comment of a constant or of a type's other name only in the module by which
    a page names it.
    """
    found: dict[str, list[str]] = {}
    for name in getattr(sys.modules.get(package), "__all__", ()):
        exported = import_by_name(f"{package}.{name}")[1]
        if getattr(exported, "__qualname__", "") == name and not hasattr(exported, "__supertype__"):
            continue  # has a docstring
        for module, values in [(m, vars(v)) for m, v in sys.modules.items()]:
            if module.startswith(f"{package}.") and values.get(name) is exported:
                comment = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
                found[name] = comment or found.get(name, [])
    return {name: comment for name, comment in found.items() if comment}


def setup(app: Sphinx) -> None:
    """Add the directive."""
    app.setup_extension("sphinx.ext.autosummary")
    app.add_directive("objects", Objects)
