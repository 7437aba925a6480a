"""The specification of the tiers bites: every planted bug is found, and every rule finds one."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.spec.harness.engine import replay
from radixkv.spec.harness.random_engine import run
from radixkv.spec.rules.tiers import TIER_RULES

from .planted.matrix import subject_of
from .planted.plant import Bug, bug, planted_sources
from .planted.table import read_table
from .planted.tier_bugs import TIER_BUGS

KILLS = Path(__file__).parents[2] / "docs" / "specification" / "kills_tiers.jsonl"
QUICK_STEPS = 400
NO_BUG = bug("no bug", "tiers/api.py", world="tiers")


@pytest.fixture(scope="module")
def kills() -> dict:
    return read_table(KILLS)


def test_a_copy_without_a_bug_passes() -> None:
    assert run(subject_of(NO_BUG, "full"), 0, 1_500).finding is None


@pytest.mark.parametrize("planted", TIER_BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found(planted: Bug, kills: dict) -> None:
    """By the shortest trace that is known of it, and by a hunt where that does not take long."""
    row = next(row for row in kills["bugs"] if row["name"] == planted.name)
    subject, shortest = subject_of(planted, "full"), row["shortest"]
    violation = replay(subject, shortest["config"], shortest["trace"])
    assert violation is not None, "its trace breaks nothing"
    assert violation.rule.name == shortest["rule"]
    if row["depths"]["full"]["worst"] <= QUICK_STEPS:
        assert run(subject, 0, 3 * QUICK_STEPS).finding is not None


def test_the_committed_table_is_that_of_the_bugs(kills: dict) -> None:
    assert [row["name"] for row in kills["bugs"]] == [bug.name for bug in TIER_BUGS], (
        f"write {KILLS.name} anew: python -m tests.spec.planted --table kills_tiers --json FOLDER"
    )
    assert all(planted_sources(each) for each in TIER_BUGS)
    assert kills["summary"]["survivors"] == []


def test_every_rule_has_its_bug(kills: dict) -> None:
    without = [rule.name for rule in TIER_RULES if rule.name not in kills["proofs"]]
    assert not without, f"no bug proves that these rules bite: {without}"


def test_the_traces_break_their_rule_by_the_bug_alone(kills: dict) -> None:
    by_name = {bug.name: bug for bug in TIER_BUGS}
    good = subject_of(NO_BUG, "full")
    for proof in kills["proofs"].values():
        finding = proof["finding"]
        bad = subject_of(by_name[proof["bug"]], "full")
        violation = replay(bad, finding["config"], finding["trace"])
        assert violation is not None and violation.rule.name == finding["rule"], finding["rule"]
        assert replay(good, finding["config"], finding["trace"]) is None, finding["rule"]
