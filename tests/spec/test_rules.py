"""The rules as a document: names, sentences, and the invariants that they cover."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import radixkv.spec.rules
from radixkv.spec.rules.cache import A1, CACHE_RULES
from radixkv.spec.rules.events import EVENT_RULES
from radixkv.spec.rules.group import GROUP_RULES
from radixkv.spec.rules.handoff import HANDOFF_RULES
from radixkv.spec.rules.rule import RULES, Rule, Violation, not_judging, require, rule
from radixkv.spec.rules.scheduler import SCHEDULER_RULES
from radixkv.spec.rules.tiers import TIER_RULES

INVARIANTS = Path(__file__).parents[2] / "docs" / "specification" / "invariants.jsonl"
FAMILIES = (CACHE_RULES, TIER_RULES, SCHEDULER_RULES, HANDOFF_RULES, EVENT_RULES, GROUP_RULES)
"""In the order of the document."""

CODES = {each.code for each in RULES.values()}


def test_every_name_is_a_code_and_words_joined_by_dashes() -> None:
    assert all(re.fullmatch(r"[A-Z]\d+ [a-z]+(-[a-z]+)*", name) for name in RULES)
    assert len(CODES) == len(RULES), "two rules have the same code"
    assert len(RULES) >= 45
    assert all(name == each.name for name, each in RULES.items())


def test_all_rules_are_known_at_once_and_in_the_order_of_the_document() -> None:
    """In a new process, in which nothing else has imported a chapter."""
    program = "from radixkv.spec import RULES\nprint(*RULES, sep='\\n')"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [rule.name for family in FAMILIES for rule in family]
    modules = {path.stem for path in Path(radixkv.spec.rules.__file__).parent.glob("*.py")}
    assert len(modules - {"__init__", "rule"}) == len(FAMILIES)


def test_every_sentence_is_one() -> None:
    for each in RULES.values():
        assert re.fullmatch(r"[A-Z].*[a-z]\.", each.sentence), each
    assert len({each.sentence for each in CACHE_RULES}) == len(CACHE_RULES)


def test_every_rule_is_demanded_somewhere() -> None:
    """A rule that nothing refers to is a wish."""
    folder = Path(radixkv.spec.__file__).parent
    files = [*folder.rglob("*.py"), *(folder.parent / "scheduler" / "fuzz").glob("*.py")]
    source = "\n".join(path.read_text() for path in files if path.parent.name != "rules")
    unused = [code for code in CODES if not re.search(rf"\b{code}\b(?!\")", source)]
    assert unused == []


def test_a_violation_says_rule_and_what_was_seen() -> None:
    with pytest.raises(Violation) as caught:
        require(False, A1, "block {} belongs to {}", 3, "r1")
    assert str(caught.value) == "[A1 allocate-only-free] block 3 belongs to r1"
    assert (caught.value.rule, caught.value.why) == (A1, "block 3 belongs to r1")


def test_what_holds_formats_nothing() -> None:
    require(True, A1, "{} {} {}", "too few")
    require([0], A1, "anything that is true holds")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="two rules have the name A1 allocate-only-free"):
        rule("A1 allocate-only-free", "Again.")
    assert isinstance(A1, Rule) and A1.code == "A1"


def test_every_invariant_is_covered_or_says_why_not() -> None:
    invariants = list(map(json.loads, INVARIANTS.read_text("utf-8").splitlines()))
    assert [each["invariant"] for each in invariants] == [f"I{number}" for number in range(1, 46)]
    for each in invariants:
        assert each["title"] and set(each["rules"]) <= CODES, each
        assert each["rules"] or each["elsewhere"], each
        assert each["sentence"].endswith("."), each
        assert "\n" not in each.get("elsewhere", ""), each


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_rules_are_judged_again_after_a_block_that_does_not_judge_them(
    error: type[BaseException] | None,
) -> None:
    with suppress(KeyError, KeyboardInterrupt), not_judging([A1.name]) as met:
        require(False, A1, "not judged")
        if error is not None:
            raise error
    assert met == {A1.name: 1}
    with pytest.raises(Violation):
        require(False, A1, "judged")
