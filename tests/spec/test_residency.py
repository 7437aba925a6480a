"""The pure model of the tiers by hand: which states an operation allows, and which rule refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixkv.spec.model.tiers.residency import Prefixes, Residency, Step
from radixkv.spec.rules.rule import Violation

A, AB, ABC, D = 1, 2, 3, 4  # prefixes: A B C is a path, D another one

ON_DEVICE = Residency(
    device={A: 1, AB: 2}, host={}, offloading={}, promoting=frozenset(), num_free=3, order=()
)
FULL_HOST = replace(ON_DEVICE, host={D: 1, A: 2, ABC: 3}, num_free=0, order=(2, 1, 3))


@pytest.fixture
def prefixes() -> Prefixes:
    known = Prefixes()
    known.learn(0, [A, AB, ABC], 1, [])
    known.learn(0, [D], 1, [])
    return known


def refusal(step: Step, after: Residency, prefixes: Prefixes, held: tuple[int, ...] = ()) -> str:
    """The code of the rule that refuses a state after a step; "" if it is allowed."""
    try:
        step.allow(after, prefixes, held)
    except Violation as violation:
        return violation.rule.code
    return ""


def test_nothing_moves_by_itself(prefixes: Prefixes) -> None:
    step = Step(FULL_HOST, "back")
    assert step.allow(FULL_HOST, prefixes, ()) == set()
    assert refusal(step, replace(FULL_HOST, host={D: 1, ABC: 3}, num_free=1), prefixes) == "T24"
    copied = replace(ON_DEVICE, offloading={A: 1}, num_free=2)
    assert refusal(Step(ON_DEVICE, "back"), copied, prefixes) == "T17"
    found = replace(copied, host={A: 1}, offloading={})
    assert refusal(Step(copied, "back"), found, prefixes) == "T3"


@pytest.mark.parametrize(("write", "rule"), [("back", ""), ("exclusive", ""), ("through", "T17")])
def test_what_leaves_the_device_is_copied_unless_it_is_written_through(
    prefixes: Prefixes, write: str, rule: str
) -> None:
    demoted = replace(ON_DEVICE, device={A: 1}, offloading={AB: 1}, num_free=2)
    assert refusal(Step(ON_DEVICE, write, takes_room=True), demoted, prefixes) == rule
    lost = replace(ON_DEVICE, device={A: 1})
    assert refusal(Step(ON_DEVICE, write, takes_room=True), lost, prefixes) == (
        "" if write == "through" else "T24"
    )


def test_copies_are_dropped_for_room_alone_and_spare_ones_first(prefixes: Prefixes) -> None:
    step = Step(FULL_HOST, "back", takes_room=True)
    demoted = replace(FULL_HOST, device={A: 1}, offloading={AB: 2}, num_free=0)
    spare = replace(demoted, host={D: 1, ABC: 3}, order=(1, 3))
    assert step.allow(spare, prefixes, ()) == set()
    lost = replace(demoted, host={A: 2, ABC: 3}, offloading={AB: 1}, order=(2, 3))
    assert refusal(step, lost, prefixes) == "T21"
    assert refusal(step, replace(spare, host={ABC: 3}, order=(3,), num_free=1), prefixes) == "T24"
    assert refusal(step, spare, prefixes, held=(A,)) == "T5"
    nowhere = replace(FULL_HOST, device={A: 1}, host={A: 2, D: 1}, order=(2, 1))
    assert refusal(step, nowhere, prefixes) == "T21"
    in_order = Step(FULL_HOST, "back", takes_room=True, is_eviction=True)
    newest = replace(demoted, host={D: 1, A: 2}, offloading={AB: 3}, order=(1, 2))
    assert refusal(in_order, newest, prefixes) == "T22"


def test_a_failed_copy_takes_what_follows_it(prefixes: Prefixes) -> None:
    before = replace(ON_DEVICE, device={}, offloading={A: 1, AB: 2}, host={D: 3}, order=(3,))
    gone, arrived = (
        replace(before, offloading={}),
        replace(before, offloading={}, host={A: 1, AB: 2, D: 3}),
    )
    for results, allowed in (
        ({A: True, AB: True}, arrived),
        ({A: False, AB: True}, gone),
        ({A: True, AB: False}, replace(gone, host={A: 1, D: 3})),
    ):
        step = Step(before, "back")
        step.end_out(results, prefixes)
        assert refusal(step, allowed, prefixes) == ""
        others = [each for each in (gone, arrived) if each is not allowed]
        assert all(refusal(step, other, prefixes) in ("T14", "T15") for other in others)


def test_exclusive_tiers_move_a_hit_unless_somebody_reads_it(prefixes: Prefixes) -> None:
    before = replace(ON_DEVICE, device={}, host={A: 1, D: 2}, order=(1,))
    moved = replace(before, host={D: 2}, promoting=frozenset((A,)), order=())
    step = Step(before, "exclusive")
    step.move_in([A])
    assert refusal(step, moved, prefixes) == ""
    assert refusal(step, before, prefixes) == "T25"
    held = Step(before, "exclusive")
    held.move_in([D])
    assert refusal(held, before, prefixes) == ""
    came = replace(moved, device={A: 1}, promoting=frozenset())
    assert refusal(Step(moved, "exclusive"), came, prefixes) == ""
    lost = Step(moved, "exclusive")
    lost.end_in([A])
    assert refusal(lost, replace(moved, promoting=frozenset()), prefixes) == ""
    assert refusal(lost, moved, prefixes) == "T16"


def test_a_reset_keeps_what_it_is_to_keep(prefixes: Prefixes) -> None:
    before = replace(FULL_HOST, device={A: 1}, offloading={AB: 4})
    step = Step(before, "back")
    step.reset({D})
    kept = Residency({}, {D: 1}, {}, frozenset(), 2, (1,))
    assert refusal(step, kept, prefixes) == ""
    assert refusal(step, replace(kept, host={}, order=(), num_free=3), prefixes) == "T40"
    assert refusal(step, replace(kept, host={D: 1, A: 2}), prefixes) == "T40"
