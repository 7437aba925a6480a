"""The tree in the sidebar, which the theme would make anew for each page, in half of the build.

The trees of two pages differ in their links, which are relative, and in the entries that are marked
because they lead to the page. Of every `COMPARED`-th page, the tree is compared with the theme's.
"""

from __future__ import annotations

import re
from typing import Any, Final

from furo.navigation import get_navigation_tree
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.environment.adapters.toctree import global_toctree_for_doc
from sphinx.errors import ExtensionError
from sphinx.util.osutil import relative_uri

COMPARED: Final = 60

LINK: Final = re.compile(r'<a class="reference internal" href="([^"]*)">')


class Tree:
    """The tree of the root page, which has no entry itself.

    Args:
        html: what the theme makes for the root page.
    """

    def __init__(self, html: str) -> None:
        self._parts: Final = re.split("(<[^>]*>)", html)
        self._links: Final[list[tuple[int, str, list[int]]]] = []
        self._boxes: Final[dict[int, int]] = {}
        around: list[int] = []
        for index, part in enumerate(self._parts):
            if part.startswith(("<ul", "<li")):
                around.append(index)
            elif part in ("</ul>", "</li>"):
                around.pop()
            elif part.startswith("<input"):
                self._boxes[around[-1]] = index
            elif link := LINK.fullmatch(part):
                self._links.append((index, link[1], [*around]))

    def of_page(self, page: str) -> str:
        """Return the tree of a page.

        Args:
            page: its address, from the root.
        """
        parts, own = [*self._parts], None
        for index, target, around in self._links:
            marked = "current " * (target == page)
            to = relative_uri(page, target) or "#"
            parts[index] = f'<a class="{marked}reference internal" href="{to}">'
            if marked:
                own = around[-1]
                self._mark(parts, around)
        if own is not None:
            parts[own] = parts[own].replace('">', ' current-page">')
        return "".join(parts)

    def _mark(self, parts: list[str], around: list[int]) -> None:
        """Mark and unfold the lists and entries around a link."""
        for each in around:
            if parts[each] == "<ul>":
                parts[each] = '<ul class="current">'
            elif " current" not in parts[each]:
                parts[each] = re.sub(r"(toctree-l\d+)", r"\1 current", parts[each])
                if each in self._boxes:
                    box = self._boxes[each]
                    parts[box] = parts[box].replace(" class=", ' checked="" class=')


class _Navigation:
    """Takes the tree of a page from the theme, and puts in its own."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._theirs: Any = None
        self._num_pages = 0

    def before_theme(self, app: Sphinx, page: str, template: str, context: Any, tree: Any) -> None:
        """Leave the theme without work."""
        self._theirs = context.get("toctree")
        context["toctree"] = lambda **_: ""

    def after_theme(self, app: Sphinx, page: str, template: str, context: Any, tree: Any) -> None:
        """Give the page its tree."""
        builder = app.builder
        assert isinstance(builder, StandaloneHTMLBuilder)
        context["toctree"] = self._theirs
        options = {"collapse": False, "titles_only": True, "maxdepth": -1, "includehidden": True}
        if self._tree is None:
            root = app.config.root_doc
            made = global_toctree_for_doc(app.env, root, builder, tags=builder.tags, **options)
            self._tree = Tree(get_navigation_tree(builder.render_partial(made)["fragment"]))
        ours = self._tree.of_page(builder.get_target_uri(page))
        context["furo_navigation_tree"] = ours
        if self._num_pages % COMPARED == 0 and ours != get_navigation_tree(self._theirs(**options)):
            raise ExtensionError(f"{page}: the tree in the sidebar is not that of the theme")
        self._num_pages += 1


def setup(app: Sphinx) -> None:
    """Connect before and after the theme, which has the priority 500."""
    navigation = _Navigation()
    app.connect("html-page-context", navigation.before_theme, priority=400)
    app.connect("html-page-context", navigation.after_theme, priority=600)
