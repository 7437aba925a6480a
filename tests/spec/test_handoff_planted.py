"""The committed traces of the hand-off: each of its rules has a planted bug that breaks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from radixkv.spec.harness.engine import replay
from radixkv.spec.rules.handoff import HANDOFF_RULES
from radixkv.spec.rules.rule import Rule

from .planted.handoff_bugs import HANDOFF_BUGS
from .planted.matrix import subject_of
from .planted.table import read_table

PROOFS = Path(__file__).parents[2] / "docs" / "specification" / "handoff_proofs.jsonl"


@pytest.mark.parametrize("rule", HANDOFF_RULES, ids=lambda rule: rule.name)
def test_a_trace_breaks_its_rule_by_the_bug_alone(rule: Rule) -> None:
    rows = [row for row in read_table(PROOFS)["bugs"] if row["rule"] == rule.name]
    assert rows, f"write {PROOFS.name} anew: python -m tests.scheduler.handoff.proofs FILE"
    [bug] = [bug for bug in HANDOFF_BUGS if bug.name == rows[0]["name"]]
    finding = rows[0]["shortest"]
    violation = replay(subject_of(bug, "full"), finding["config"], finding["trace"])
    assert violation is not None and violation.rule.name == rule.name
    good = subject_of(replace(bug, edits=()), "full")
    assert replay(good, finding["config"], finding["trace"]) is None
