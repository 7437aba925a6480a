"""The checks of the built site find what they are for, on pages that are bad in one way each."""

from pathlib import Path

import pytest

from tests.packaging.site_checks import check_site, main

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
    "<dl class='field-list'><dd><p>list[A | B | C | D]</p></dd></dl>",
    f"<pre>{'x' * 105}</pre>",
    f"<div class='highlight-sh'><pre>{'x' * 200}</pre></div>",
    "<p>a picture <img src='x.png'><br> and more",
]


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


def test_a_good_page_is_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert out == "reference/page.html: not in the sidebar, because no toctree names it\n"


def test_a_page_without_a_title_is_reported(tmp_path: Path) -> None:
    make_site(tmp_path, "")
    (tmp_path / "reference/page.html").write_text("<article>text</article>")
    assert list(check_site(tmp_path)) == ["reference/page.html: 0 titles, not one"]


def test_a_folder_without_a_site_is_reported(tmp_path: Path) -> None:
    assert list(check_site(tmp_path)) == [f"{tmp_path}: no index.html"]
