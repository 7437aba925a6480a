"""Link a class that a docstring names without its module, as the code itself does."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def _find_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Resolve a name in single backticks if exactly one object on the site is called that.

    A lower-case name must be a function's: methods have the same name in many classes. A type in a
    signature has the name of the module that defines it, which need not be the public one.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target.startswith("radixkv."):
        target = target.rpartition(".")[2]
    elif node["reftype"] != "obj":
        return None
    python: Any = env.domains["py"]
    found = [
        (name, (entry.docname, entry.node_id))
        for name, entry in python.find_obj(env, None, None, target, "obj", 1)
        if target[:1].isupper() or entry.objtype == "function"
    ]
    if len({place for _, place in found}) != 1:
        return None
    name = found[0][0]
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)


def setup(app: Sphinx) -> None:
    """Resolve what Sphinx does not."""
    app.connect("missing-reference", _find_by_last_name)
