"""Checks of the built site, for what Sphinx does not warn of.

`python -m tests.packaging.site_checks HTML` prints what is wrong with a folder of pages. A page can
build without a warning and still show raw markup, a diagram as flowing text, or not be linked from
anywhere, and an object that is public can have no page. `.ci/run` checks the pages that it has just
built.
"""

from __future__ import annotations

import pkgutil
import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Final

import radixkv

NO_CONTENT: Final = {"genindex.html", "py-modindex.html", "search.html"}
"""Pages that Sphinx generates, whose links stand in the page frame."""

OBJECTS: Final = "reference/api/"
"""Folder of the pages of one object each, named after it."""

FITS: Final = 105
"""Characters of a line of code that fit into the text column."""

WRAPPED: Final = ("highlight-sh", "highlight-console", "highlight-json", "sphx-glr-script-out")
"""Code boxes that wrap long lines, by the style sheet."""

VOID: Final = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source"}

IN_TEXT: Final = {
    r"`": "a backtick, so markup that was not understood",
    r"\]\([^)]*\)": "a link in Markdown, in text that is not Markdown",
    r":\w+:\w+:|\{\w+\}": "a role that was not understood",
    "(?<!\\w)\N{EN DASH}\\w": "an option with a dash: write it as code",
}
"""What must not stand outside code, and what it means."""

DIAGRAM: Final = re.compile(r"\|[^|]*\|[^|]*\|")
"""Three bars. The types of parameters and the values of type aliases have them too."""


class Page(HTMLParser):
    """The content of one page: what the theme puts around it is left out.

    Attributes:
        problems: what is wrong, in the order of the page.
        titles: texts of the headings of the first level.
        links: addresses in the sidebar.
        objects: full names of the objects that it describes, without their members.
        listed: addresses in its tables of objects.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.titles: list[str] = []
        self.links: set[str] = set()
        self.objects: list[str] = []
        self.listed: set[str] = set()
        self._in_reference = name.startswith("reference/")
        self._open: list[tuple[str, str]] = []  # tags and classes
        self._text: list[str] = []  # of the paragraph, with code as one character
        self._code = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        classes = dict(attributes).get("class") or ""
        if tag == "a" and any(name == "sidebar-tree" for _, name in self._open):
            self.links.add((dict(attributes).get("href") or "").split("#")[0])
        if tag not in VOID:
            self._open.append((tag, classes))
        if not self._inside("article"):
            return
        if tag == "a" and any("autosummary" in name for _, name in self._open):
            self.listed.add((dict(attributes).get("href") or "").split("#")[0])
        if tag == "dt" and "sig-object" in classes and not self._inside("dd"):
            self.objects.append(dict(attributes).get("id") or "")
        if tag == "cite":
            self.problems.append("a name in italics: single backticks without a role")
        if tag == "blockquote" and self._in_reference:
            self.problems.append("a quotation, so wrongly indented text")
        if tag == "p":
            self._text = []
        if tag == "h1":
            self.titles.append("")
        if tag == "pre":
            self._code = ""

    def handle_endtag(self, tag: str) -> None:
        inside = self._inside("article")
        if tag == "p" and inside:
            self._check_text("".join(self._text))
        if tag == "pre" and inside:
            self._check_code()
        if self._inside(tag):
            while self._open.pop()[0] != tag:
                pass  # a tag that HTML allows to leave open

    def handle_data(self, data: str) -> None:
        if not self._inside("article"):
            return
        if self._inside("pre"):
            self._code += data
        elif self._inside("h1"):
            self.titles[-1] += data
        elif self._inside("p"):
            self._text.append("\0" if self._inside("code") else data)

    @property
    def title(self) -> str:
        """The first title, without the sign that links to it."""
        return self.titles[0].strip("#¶ \n") if self.titles else ""

    def _inside(self, tag: str) -> bool:
        return any(name == tag for name, _ in self._open)

    def _check_text(self, text: str) -> None:
        if re.match(r"\0+\s*:\s", text) and not (self._inside("li") or self._inside("td")):
            self._report("a definition as a paragraph", text)
        is_type = text.startswith("alias of ") or any("field-list" in c for _, c in self._open)
        if DIAGRAM.search(text) and not is_type:
            self._report("a diagram as flowing text, without :: before it", text)
        for pattern, meaning in IN_TEXT.items():
            if re.search(pattern, text):
                self._report(meaning, text)

    def _check_code(self) -> None:
        if any(name in classes for _, classes in self._open for name in WRAPPED):
            return
        longest = max(self._code.split("\n"), key=len)
        if len(longest) > FITS:
            self._report(
                f"a code box is cut off: {FITS} characters fit, not {len(longest)}", longest
            )

    def _report(self, meaning: str, text: str) -> None:
        shown = " ".join(text.replace("\0", "...").split())
        self.problems.append(f"{meaning}: {shown[:120]!r}")


def public_objects() -> Collection[frozenset[str]]:
    """Return the full names of each object that a package has in its ``__all__``."""
    found = defaultdict(set)
    packages = [m.name for m in pkgutil.walk_packages(radixkv.__path__, "radixkv.") if m.ispkg]
    for package in map(import_module, ["radixkv", *packages]):
        for name in getattr(package, "__all__", ()):
            found[name, id(getattr(package, name))].add(f"{package.__name__}.{name}")
    return [frozenset(names) for names in found.values()]


def check_site(root: Path, public: Iterable[frozenset[str]] = ()) -> Iterator[str]:
    """Yield what is wrong with the site in a folder, each with the name of its page.

    Args:
        root: the folder.
        public: the names of each object that must have a page.
    """
    pages = {}
    for path in sorted(root.rglob("*.html")):
        name = path.relative_to(root).as_posix()
        if name not in NO_CONTENT and not name.startswith("_"):
            pages[name] = page = Page(name)
            page.feed(path.read_text(encoding="utf-8"))
    if "index.html" not in pages:
        yield f"{root}: no index.html"
        return
    reachable = pages["index.html"].links | {"index.html", "#", ""}
    for name, page in pages.items():
        yield from (f"{name}: {problem}" for problem in page.problems)
        if len(page.titles) != 1 or not page.title:
            yield f"{name}: {len(page.titles)} titles, not one"
        if name not in reachable:
            yield f"{name}: not in the sidebar, because no toctree names it"
    yield from _check_objects(pages, public)


def _check_objects(pages: Mapping[str, Page], public: Iterable[frozenset[str]]) -> Iterator[str]:
    listed = {
        posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        for name, page in pages.items()
        for link in page.listed
    }
    objects = {
        name: name.removeprefix(OBJECTS).removesuffix(".html").removesuffix("-function")
        for name in pages
        if name.startswith(OBJECTS)
    }
    for name in objects:
        page, full_name = pages[name], objects[name]
        if page.objects != [full_name]:
            yield f"{name}: describes {page.objects}, not the object that it is named after"
        if page.title != full_name.rpartition(".")[2]:
            yield f"{name}: its title is {page.title!r}, not the name of the object"
        if name not in listed:
            yield f"{name}: in no table of objects"
    for names in public:
        described = sum(name in objects.values() for name in names)
        if described != 1:
            yield f"{min(names)}: public, with {described} pages of its own, not one"


def main(folder: str) -> int:
    """Print what is wrong with a site; return the exit status."""
    problems = list(check_site(Path(folder), public_objects()))
    print("\n".join(problems) or "the site looks as it should")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
