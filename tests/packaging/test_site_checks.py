"""The checks of the built site find what they are for, on pages that are bad in one way each."""

from pathlib import Path

import pytest

from tests.packaging import site_checks
from tests.packaging.site_checks import check_site, main, public_objects

SIDEBAR = '<div class="sidebar-tree"><a href="reference/page.html">Page</a></div>'

BAD = [
    ("<p>Call <cite>admit</cite>.</p>", "a name in italics"),
    ("<blockquote>indented</blockquote>", "a quotation, so wrongly indented text"),
    ("<p><code>replay</code>\n: replay a trace</p>", "a definition as a paragraph: '... : replay"),
    ("<p>radixkv &ndash;help</p>", "an option with a dash"),
    ("<p>see [how to](../howto/adapter.md)</p>", "a link in Markdown"),
    ("<p>call `admit` first</p>", "a backtick"),
    ("<p>see :class:`Engine`</p>", "a backtick"),
    ("<p>see :py:class:Engine</p>", "a role that was not understood"),
    ("<p>q | row 0 .... | row 1 | padding</p>", "a diagram as flowing text"),
    (f"<pre>{'x' * 106}</pre>", "a code box is cut off: 105 characters fit, not 106"),
    ("<h1>Again</h1>", "2 titles, not one"),
]

GOOD = [
    "<p>Call <code>`admit`</code> first, 2&ndash;3 times &ndash; or not.</p>",
    "<ul><li><p><code>back</code>: the same</p></li></ul>",
    "<p>alias of Sequence[A | B | C | D]</p>",
    "<dl class='field-list'><dd><p>list[A | B | C | D]</p></dd></dl>",
    f"<pre>{'x' * 105}</pre>",
    f"<div class='highlight-sh'><pre>{'x' * 200}</pre></div>",
    "<p>a picture <img src='x.png'><br> and more",
]

LINK = "reference/api/radixkv.Engine.html"
TITLE = "<h1>Engine<a href='#'>¶</a></h1>"
OBJECT = (
    "<dl><dt class='sig sig-object py' id='radixkv.Engine'>class Engine</dt><dd>"
    "<dl><dt class='sig sig-object py' id='radixkv.Engine.step'>step()</dt></dl></dd></dl>"
)
OTHER = "<dl><dt class='sig sig-object py' id='radixkv.Other'>class Other</dt></dl>"
TABLE = "<table class='autosummary'><tr><td><a href='api/radixkv.Engine.html#radixkv.Engine'>"


def make_site(folder: Path, body: str, sidebar: str = SIDEBAR) -> Path:
    """Write a site of a front page and a page of the reference with this body."""
    (folder / "reference").mkdir()
    (folder / "index.html").write_text(f"{sidebar}<article><h1>Front</h1></article>")
    page = folder / "reference/page.html"
    page.write_text(f"<p>&ndash;frame `</p><article><h1>Page</h1>{body}</article>")
    return folder


@pytest.mark.parametrize(("body", "problem"), BAD)
def test_a_bad_page_is_reported(tmp_path: Path, body: str, problem: str) -> None:
    problems = list(check_site(make_site(tmp_path, body)))
    assert len(problems) == 1
    assert problems[0].startswith(f"reference/page.html: {problem}")


def test_a_good_page_is_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_checks, "public_objects", list)
    make_site(tmp_path, "".join(GOOD))
    (tmp_path / "search.html").write_text("no title, not in the sidebar")
    assert main(str(tmp_path)) == 0
    assert capsys.readouterr().out == "the site looks as it should\n"


def test_a_quotation_is_right_outside_the_reference(tmp_path: Path) -> None:
    make_site(tmp_path, "")
    (tmp_path / "index.html").write_text(
        f"{SIDEBAR}<article><h1>Front</h1><blockquote>said</blockquote></article>"
    )
    assert list(check_site(tmp_path)) == []


def test_a_page_that_no_toctree_names_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_site(tmp_path, "", sidebar="<a href='reference/page.html'>not in the sidebar</a>")
    assert main(str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert out.startswith("reference/page.html: not in the sidebar, because no toctree names it\n")
    assert "\nradixkv.LLM: public, with 0 pages of its own, not one\n" in out


def test_a_page_without_a_title_is_reported(tmp_path: Path) -> None:
    make_site(tmp_path, "")
    (tmp_path / "reference/page.html").write_text("<article>text</article>")
    assert list(check_site(tmp_path)) == ["reference/page.html: 0 titles, not one"]


def test_a_folder_without_a_site_is_reported(tmp_path: Path) -> None:
    assert list(check_site(tmp_path)) == [f"{tmp_path}: no index.html"]


@pytest.mark.parametrize(
    ("listing", "title", "body", "problem"),
    [
        (TABLE, TITLE, OBJECT, None),
        ("", TITLE, OBJECT, "in no table of objects"),
        (TABLE, "<h1>The engine</h1>", OBJECT, "its title is 'The engine', not the name of the"),
        (TABLE, TITLE, "", "describes [], not the object that it is named after"),
        (TABLE, TITLE, OBJECT + OTHER, "describes ['radixkv.Engine', 'radixkv.Other'], not the"),
    ],
)
def test_a_page_of_an_object_describes_it_alone_and_is_listed(
    tmp_path: Path, listing: str, title: str, body: str, problem: str | None
) -> None:
    make_site(tmp_path, listing, sidebar=SIDEBAR.replace("</div>", f"<a href='{LINK}'></div>"))
    (tmp_path / "reference/api").mkdir()
    (tmp_path / LINK).write_text(f"<article>{title}{body}</article>")
    found = [text.removeprefix(f"{LINK}: ") for text in check_site(tmp_path)]
    assert len(found) == (problem is not None)
    assert all(text.startswith(problem or "") for text in found)


def test_each_public_object_has_one_page(tmp_path: Path) -> None:
    make_site(tmp_path, TABLE, sidebar=SIDEBAR.replace("</div>", f"<a href='{LINK}'></div>"))
    (tmp_path / "reference/api").mkdir()
    (tmp_path / LINK).write_text(f"<article>{TITLE}{OBJECT}</article>")
    public = [frozenset(("radixkv.Engine", "radixkv.scheduler.Engine"))]
    assert list(check_site(tmp_path, public)) == []
    public.append(frozenset(("radixkv.Other",)))
    problem = "radixkv.Other: public, with 0 pages of its own, not one"
    assert list(check_site(tmp_path, public)) == [problem]


def test_an_object_that_two_packages_export_is_one_public_object() -> None:
    both = {"radixkv.LLM", "radixkv.scheduler.serving.LLM"}
    assert [names for names in public_objects() if names & both] == [both]
