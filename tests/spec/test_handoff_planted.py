"""The kill table of the hand-off: each of its rules has a planted bug with a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from radixkv.spec.harness.engine import replay
from radixkv.spec.rules.handoff import HANDOFF_RULES

from .planted.handoff_bugs import HANDOFF_BUGS
from .planted.matrix import subject_of
from .planted.plant import Bug
from .planted.table import read_table

KILLS = Path(__file__).parents[2] / "docs" / "specification" / "kills_handoff.jsonl"


@pytest.fixture(scope="module")
def kills() -> dict:
    return read_table(KILLS)


def test_the_committed_table_is_that_of_the_bugs(kills: dict) -> None:
    assert [row["name"] for row in kills["bugs"]] == [bug.name for bug in HANDOFF_BUGS], (
        f"write {KILLS.name} anew: python -m tests.spec.planted --table kills_handoff --json FOLDER"
    )
    assert kills["summary"]["survivors"] == []


def test_every_rule_has_its_bug(kills: dict) -> None:
    without = [rule.name for rule in HANDOFF_RULES if rule.name not in kills["proofs"]]
    assert not without, f"no bug proves that these rules bite: {without}"


@pytest.mark.parametrize("planted", HANDOFF_BUGS, ids=lambda planted: planted.name)
def test_a_trace_breaks_its_rule_by_the_bug_alone(planted: Bug, kills: dict) -> None:
    proofs = [each["finding"] for each in kills["proofs"].values() if each["bug"] == planted.name]
    rows = [row["shortest"] for row in kills["bugs"] if row["name"] == planted.name]
    for finding in [*proofs, *filter(None, rows)]:
        violation = replay(subject_of(planted, "full"), finding["config"], finding["trace"])
        assert violation is not None and violation.rule.name == finding["rule"], finding["rule"]
        good = subject_of(replace(planted, edits=()), "full")
        assert replay(good, finding["config"], finding["trace"]) is None, finding["rule"]
