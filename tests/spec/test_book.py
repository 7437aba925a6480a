"""The book in docs/specification: its tables and links are made from the rules and the bugs."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from radixkv.spec.rules.rule import RULES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "specification.md", *(DOCS / "specification").rglob("*.md")]


@pytest.fixture(scope="module")
def generate():
    """The modules that make the tables."""
    sys.path.insert(0, str(DOCS / "_generate"))
    try:
        yield importlib.import_module("sources"), importlib.import_module("tables")
    finally:
        sys.path.remove(str(DOCS / "_generate"))


def test_every_number_of_another_project_is_a_link(generate) -> None:
    sources, tables = generate
    for bug in tables.planted_bugs().values():
        for place in sources.others([bug.seen_in]):
            unlinked = re.sub(r"\[[^]]*\]\([^)]*\)", "", place)
            assert not re.search(r"\d{3,}", unlinked), (bug.name, place)


@pytest.mark.parametrize(
    ("seen_in", "links"),
    [
        ("FastDeploy PR 7885 review", ["[FastDeploy 7885]({fd}/pull/7885) review"]),
        ("FastDeploy 7364", ["[FastDeploy 7364]({fd}/pull/7364)"]),
        ("FastDeploy PR 1, PR 2", ["[FastDeploy 1]({fd}/pull/1)", "[FastDeploy 2]({fd}/pull/2)"]),
        ("vLLM #12621", ["[vLLM 12621](https://github.com/vllm-project/vllm/issues/12621)"]),
        (
            "vllm-ascend #1",
            ["[vllm-ascend 1](https://github.com/vllm-project/vllm-ascend/issues/1)"],
        ),
        ("own, at first", []),
        ("FastDeploy v1", ["FastDeploy v1"]),
    ],
)
def test_where_a_bug_was_seen(generate, seen_in: str, links: list[str]) -> None:
    sources, _ = generate
    fd = "https://github.com/PaddlePaddle/FastDeploy"
    assert sources.others([seen_in]) == [link.format(fd=fd) for link in links]


def test_each_rule_stands_on_one_page(generate) -> None:
    _, tables = generate
    pages = tables.rule_pages().values()
    names = [rule.name for page in pages for section in page for rule in section.rules]
    assert sorted(names) == sorted(RULES)


def test_the_book_names_only_rules_that_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"\{rule\}`([^`]+)`", page.read_text("utf-8")):
            assert name in RULES, (page.name, name)


def test_the_book_shows_only_bugs_that_are_planted(generate) -> None:
    _, tables = generate
    for page in PAGES:
        for name in re.findall(r"\{planted-bug\} \"([^\"]+)\"", page.read_text("utf-8")):
            assert name in tables.planted_bugs(), (page.name, name)


def test_a_change_is_shown_with_its_lines(generate) -> None:
    _, tables = generate
    shown = list(tables.show_bug("nothing is ever published"))
    assert shown[0] == "```{code-block} diff\n:caption: kvcache/manager.py\n"
    assert "- if last <= first:" in shown and "+ if True:" in shown
