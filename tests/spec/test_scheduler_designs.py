"""Schedulers of other designs run clean under their promises, and their planted bugs are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.spec.harness.engine import replay
from radixkv.spec.harness.findings.trace_file import read_trace_file
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.scheduler.world import SchedulerSubject

from .designs.schedulers import BROKEN, DESIGNS, ChunkWise, KeepsWithdrawn, Toy

FINDINGS = Path(__file__).parents[2] / "docs" / "howto" / "findings"

SITUATIONS = ("hit", "preempted in decode", "aborted in flight", "resumed with a hit", "flooded")


def check_clean(design: type[Toy], seed: int, num_steps: int) -> None:
    result = run(SchedulerSubject(design), seed, num_steps)
    assert result.finding is None, result.finding
    assert all(result.situations[each] for each in SITUATIONS), result.situations


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.__name__)
def test_a_design_is_clean_under_its_promises(design: type[Toy]) -> None:
    for seed in range(2):
        check_clean(design, seed, 3_000)


@pytest.mark.nightly
@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.__name__)
def test_a_design_stays_clean(design: type[Toy]) -> None:
    for seed in range(10, 13):
        check_clean(design, seed, 50_000)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_bug_in_a_design_is_found(broken: type[Toy]) -> None:
    found = run(SchedulerSubject(broken), seed=0, num_steps=20_000).finding
    assert found is not None
    assert found.rule.split()[0] == BROKEN[broken], found


def test_a_false_promise_is_found() -> None:
    """What each design leaves out of its promises is what it does otherwise."""
    for design, promise, code in (
        ("ChunkWise", "publish_on_compute", "Q22"),
        ("ChunkWise", "keeps_in_flight", "Q23"),
        ("ChunkWise", "whole", "Q21"),
        ("ChunkWise", "resumed_first", "Q3"),
        ("LateFrees", "exact", "Q36"),
        ("PrefillFirst", "bounds_running", "Q16"),
        ("PrefillFirst", "hits", "Q11"),
    ):
        [made] = [each for each in DESIGNS if each.__name__ == design]
        more = {**vars(made.promises), promise: True}
        boastful = type(design, (made,), {"promises": type(made.promises)(**more)})
        found = run(SchedulerSubject(boastful), seed=0, num_steps=20_000).finding
        assert found is not None and found.rule.split()[0] == code, (design, promise, found)


def test_the_finding_in_vllm_is_one_in_a_scheduler_of_its_design() -> None:
    """The trace breaks the rule in ours of that design too, and not when repaired."""
    finding = read_trace_file(FINDINGS / "vllm_preempted.trace.json").finding
    violation = replay(SchedulerSubject(KeepsWithdrawn), finding.config, finding.trace)

    assert violation is not None and violation.rule.name == finding.rule
    assert replay(SchedulerSubject(ChunkWise), finding.config, finding.trace) is None
