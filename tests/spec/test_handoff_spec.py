"""The random worlds of the hand-off: what occurs in them, and what breaks at once."""

from __future__ import annotations

import pytest

from radixkv.scheduler.fuzz.handoff_adapter import make_factory
from radixkv.spec.harness.handoff.world import HandoffSubject
from radixkv.spec.harness.random_engine import run
from tests.scheduler.handoff.bugs import BUGS
from tests.scheduler.handoff.planted import planted
from tests.scheduler.handoff.worlds import subject_of

from .floors import HANDOFF_FLOORS, too_rare

SUBJECT = HandoffSubject(make_factory())


def test_the_situations_of_interest_occur_often() -> None:
    result = run(SUBJECT, 1, 6_000)
    assert result.finding is None
    assert set(result.situations) <= set(HANDOFF_FLOORS), "a situation has no floor"
    often = {name: floor for name, floor in HANDOFF_FLOORS.items() if floor >= 1_000}
    assert not too_rare(result.situations, often, result.num_steps)
    assert len(often) >= 20


@pytest.mark.nightly
def test_the_rare_situations_occur() -> None:
    result = run(SUBJECT, 2, 40_000)
    assert result.finding is None
    assert not too_rare(result.situations, HANDOFF_FLOORS, result.num_steps)


@pytest.mark.parametrize("name", ["P publishes nothing that it computed", "D publishes nothing"])
def test_a_node_that_publishes_nothing_is_found_at_once(name: str) -> None:
    [bug] = [each for each in BUGS if each.name == name]
    with planted(bug) as package:
        for seed in range(3):
            finding = run(subject_of(package), seed, 300).finding
            assert finding is not None and finding.rule.endswith("hit-is-due")
