"""The random worlds of the hand-off: what occurs in them, and what breaks at once."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.scheduler.fuzz import handoff_adapter
from radixkv.scheduler.fuzz.handoff_adapter import make_factory
from radixkv.spec.adapters.handoff import GATEWAY, Begun, Message, NodeCounts, Send
from radixkv.spec.harness.handoff import events
from radixkv.spec.harness.handoff.configuration import draw_config
from radixkv.spec.harness.handoff.events import settle
from radixkv.spec.harness.handoff.state import Envelope
from radixkv.spec.harness.handoff.world import HandoffSubject
from radixkv.spec.harness.random_engine import run
from radixkv.spec.model.handoff import PrefillModel
from radixkv.spec.rules.rule import Violation
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


def test_the_model_of_a_prefill_node_hears_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the hits of an attempt that was refused might be counted."""
    heard: set[bool] = set()
    monkeypatch.setattr(PrefillModel, "answered", lambda *arguments: heard.add(arguments[-1]))
    run(SUBJECT, 1, 300)
    assert heard == {True, False}


@pytest.mark.parametrize("evicts", [True, False])
def test_what_a_node_evicts_excuses_it(evicts: bool) -> None:
    published = SimpleNamespace(settle=lambda *_: evicts)
    system = SimpleNamespace(num_evicted=lambda: 1)
    node: Any = SimpleNamespace(
        model=SimpleNamespace(published=published), system=system, num_cached=len,
        has_evicted=False, num_faults=3,
    )  # fmt: skip
    settle(node)
    assert (node.has_evicted, node.num_faults) == (evicts, 3 + evicts)


def test_what_a_node_evicts_excuses_it_during_one_operation() -> None:
    world: Any = SUBJECT.world(draw_config(random.Random(0).randrange))
    for node in world.live():
        node.has_evicted = True
    assert world.apply(["tick", 1])
    assert not any(node.has_evicted for node in world.live())


def test_a_node_of_ours_counts_leases_and_parked_requests() -> None:
    """What is parked is held, too: a parked request that nobody resumes is a leak."""
    figures = SimpleNamespace(num_blocks=9, live_leases=2, hit_blocks=3)
    done = SimpleNamespace(hit_tokens=10, host_hit_tokens=200, storage_hit_tokens=3_000)
    node: Any = SimpleNamespace(
        manager=SimpleNamespace(stats=lambda: figures, available=7, block_size=4),
        scheduler=SimpleNamespace(stats=lambda: done, num_open=5),
        reporter=SimpleNamespace(num_unacked=6),
    )
    for tiers, held in ((None, 2), (SimpleNamespace(parked=40), 42)):
        figures.tiers = tiers
        assert handoff_adapter._Node.counts(node) == NodeCounts(9, 7, held, 5, 6, 3_210, 12)


@pytest.mark.parametrize("known", [None, 1, 2, 3])
@pytest.mark.parametrize(("changes", "answers"), [(False, False), (True, False), (False, True)])
def test_a_message_of_an_old_epoch_changes_nothing_at_the_gateway(
    known: int | None, changes: bool, answers: bool
) -> None:
    states = iter(["before", "after" if changes else "before"])
    gateway = SimpleNamespace(
        epoch_of=lambda source: known, state_of=lambda source: next(states),
        receive=lambda *_: None, take_messages=lambda: ["an answer"] if answers else [],
    )  # fmt: skip
    message = Message("Started", "r1.1.1")
    world: Any = SimpleNamespace(gateway=gateway, requests={}, situations=Counter())
    envelope = Envelope("m", "d0", GATEWAY, 2, 0, message)
    if known == 3 and (changes or answers):
        with pytest.raises(Violation, match=r"\[X3 .*Started of epoch 2 of d0"):
            events._deliver_to_gateway(world, envelope)
    else:
        events._deliver_to_gateway(world, envelope)
    assert world.situations["message of an old epoch"] == (known == 3)


@pytest.mark.parametrize(("num_grants", "room"), [(0, 0), (1, 4), (2, 9)])
def test_a_node_that_grants_several_at_once_may_have_had_room_for_each(
    num_grants: int, room: int
) -> None:
    counts = SimpleNamespace(available=4, num_blocks=9)
    node: Any = SimpleNamespace(system=SimpleNamespace(counts=lambda: counts))
    others = [Begun("r1.1.1"), Send("p0", Message("Refuse", "r1.1.1"))]
    grants = [Send("p0", Message("Grant", "r1.1.1"))] * num_grants
    assert events._room(node, [*others, *grants]) == room
