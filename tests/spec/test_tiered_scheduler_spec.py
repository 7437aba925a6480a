"""The specification of a scheduler over tiers: ours keeps to it, and bugs of the seam are found."""

from __future__ import annotations

import json

import pytest

from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.harness.engine import replay
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.scheduler.world import SchedulerSubject

from .designs.schedulers import ChunkWise
from .floors import TIERED_SCHEDULER_FLOORS, too_rare
from .planted.plant import Bug
from .planted.plant_scheduler import subject_with, tiered_subject
from .planted.tiered_scheduler_bugs import TIERED_SCHEDULER_BUGS

NUM_STEPS = 20_000


def test_our_scheduler_over_tiers_keeps_to_every_rule() -> None:
    result = run(tiered_subject(), seed=0, num_steps=5_000)
    assert result.finding is None, result.finding


@pytest.mark.slow
def test_the_generator_meets_every_situation() -> None:
    result = run(tiered_subject(), seed=1, num_steps=60_000)
    assert result.finding is None, result.finding
    rare = too_rare(result.situations, TIERED_SCHEDULER_FLOORS, result.num_steps)
    assert not rare, "the generator does not come to these any more"


QUICK = ("storage is not told of new weights", "a reset forgets the parked requests",
         "an aborted request counts as ahead in the prefetches",
         "a decode step waits for blocks while any copy is in flight")  # fmt: skip
"""Bugs that a scheduler without tiers, and tiers without a scheduler, do not show."""


@pytest.mark.parametrize("name", QUICK)
def test_a_bug_of_the_seam_is_found_and_replayed(name: str) -> None:
    [planted] = [each for each in TIERED_SCHEDULER_BUGS if each.name == name]
    found = run(subject_with(planted), seed=0, num_steps=NUM_STEPS).finding
    assert found is not None
    shown = json.loads(json.dumps(found.to_json()))
    violation = replay(subject_with(planted), shown["config"], shown["trace"])
    assert violation is not None and violation.rule.name == found.rule
    # The same program on a scheduler without the bug is right.
    assert replay(tiered_subject(), shown["config"], shown["trace"]) is None


@pytest.mark.slow
@pytest.mark.parametrize("planted", TIERED_SCHEDULER_BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found_and_shrunk(planted: Bug) -> None:
    subject = subject_with(planted)
    found = run(subject, seed=0, num_steps=NUM_STEPS).finding
    assert found is not None
    small = shrink(subject, found)
    assert len(small.trace) <= 30


def test_an_adapter_without_tiers_is_refused() -> None:
    subject = SchedulerSubject(ChunkWise, has_tiers=True)
    config = tiered_subject().configure(lambda bound: 0)
    with pytest.raises(AdapterError, match=r"ChunkWise has no method take; it needs take\(\)"):
        subject.world(config)


def test_operations_that_name_nothing_are_skipped() -> None:
    world = tiered_subject().world(tiered_subject().configure(lambda bound: 0))
    for operation in (["copy", "out1", [], 1], ["elsewhere", "r1", 2]):
        assert not world.apply(operation)
    assert world.apply(["reset", [], 1]) and world.apply(["drain"])
