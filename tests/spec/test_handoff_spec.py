"""The random worlds of the hand-off: what occurs in them, and what breaks at once."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from radixkv.scheduler.fuzz import handoff_adapter
from radixkv.scheduler.fuzz.handoff_adapter import make_factory
from radixkv.spec.adapters.handoff import GATEWAY, Begun, Message, NodeCounts, Send
from radixkv.spec.harness.handoff import drain, events
from radixkv.spec.harness.handoff.configuration import AMPLE_HOST, draw_config
from radixkv.spec.harness.handoff.events import settle
from radixkv.spec.harness.handoff.state import Envelope
from radixkv.spec.harness.handoff.world import HandoffSubject
from radixkv.spec.harness.random_engine import run
from radixkv.spec.model.handoff import DecodeModel, PrefillModel, Request, Requests
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


def test_what_is_cached_at_the_end_is_read_before_it_is_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_empty = drain._check_empty

    def with_wrong_kv(world: Any, node: Any) -> None:
        content = node.model.device.content
        content.update(dict.fromkeys(content, ("wrong",)))
        check_empty(world, node)

    monkeypatch.setattr(drain, "_check_empty", with_wrong_kv)
    finding = run(SUBJECT, 1, 2_000).finding
    assert finding is not None and finding.rule.startswith("X8 ")
    assert "the cache of " in finding.why and finding.trace[-1] == ["drain"]


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
    others: list[Any] = [Begun("r1.1.1"), Send("p0", Message("Refuse", "r1.1.1"))]
    grants = [Send("p0", Message("Grant", "r1.1.1"))] * num_grants
    assert events._room(node, [*others, *grants]) == room


@pytest.mark.parametrize("is_copy", [True, False])
@pytest.mark.parametrize("in_tick", [True, False])
@pytest.mark.parametrize("host_blocks", [0, 12, AMPLE_HOST])
def test_what_the_model_of_a_decode_node_is_told_of_a_grant(
    host_blocks: int, in_tick: bool, is_copy: bool
) -> None:
    """Values that storage has lost excuse the node as its own faults do."""
    model = Mock(spec=DecodeModel, published=Mock(), is_granted=Mock(return_value=is_copy),
                 grants_the_rest=Mock(return_value=True))  # fmt: skip
    request = Request((1, 2, 3), 2, 0, prompts={"r1.1.2": (1, 2, 3, 4)}, namespace=1)
    world: Any = SimpleNamespace(
        config={"host_blocks": host_blocks}, in_tick=in_tick, decode_block_size=2, num_lost=3,
        now=7, situations=Counter(), requests={"r1": request}, storage=["a", "c"],
    )  # fmt: skip
    keys = Mock(return_value=["a", "b", "c"])
    node: Any = SimpleNamespace(num_faults=2, room=5, model=model, name="d0",
                                system=SimpleNamespace(storage_keys=keys))  # fmt: skip
    events._note_stored(world, node, "r1.1.2")
    keys.assert_called_once_with((1, 2, 3, 4), 1)
    model.asked.assert_called_once_with("r1.1.2", 1, 5, 7)
    message = Message("Grant", "r1.1.2", grant=9, first_block=1)
    events._check_grant(world, node, model, message)
    kv = request.kv_of("r1.1.2")
    is_new, is_ample = not is_copy, host_blocks == AMPLE_HOST
    model.is_granted.assert_called_once_with("r1.1.2", 9)
    wanted = {
        "admitted": [("r1.1", 5, 7)] if is_new and not host_blocks else [],
        "grants_the_rest": [("r1.1.2", 1, 5, 7)] if is_new and is_ample else [],
        "granted": [("r1.1.2", 9, 1, kv, 7)],
    }
    for name, calls in wanted.items():
        assert [each.args for each in getattr(model, name).mock_calls] == calls
    hits = [] if is_copy or (in_tick and host_blocks) else [(kv, 2, "r1.1.2")]
    assert [each.args for each in model.published.hit.mock_calls] == hits
    assert world.situations["storage spared a transfer"] == (is_new and is_ample)


@pytest.mark.parametrize("has_host", [True, False])
@pytest.mark.parametrize("has_no_room", [True, False])
@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize("kind", ["Refuse", "Abort", "Started"])
def test_what_the_models_are_told_of_a_message_of_a_decode_node(
    kind: str, is_up: bool, has_no_room: bool, has_host: bool
) -> None:
    model, peer = Mock(spec=DecodeModel), Mock(spec=PrefillModel)
    world: Any = SimpleNamespace(
        config={"host_blocks": 4 * has_host}, now=7, situations=Counter(),
        nodes={"p0": SimpleNamespace(model=peer) if is_up else None},
        requests={"r1": Request((1, 2, 3), 2, 0)},
    )  # fmt: skip
    node: Any = SimpleNamespace(name="d0", model=model)
    message = Message(kind, "r1.1.2", grant=9, has_no_room=has_no_room)
    events._check_sent(world, node, "p0", message)
    answers = kind == "Refuse" and is_up
    assert peer.mock_calls == [call.answered("r1.1.2", False)] * answers
    wanted = [call.declined("r1.1.2")] * (kind in ("Refuse", "Abort"))
    if kind == "Abort":
        wanted.append(call.gave_up("r1.1.2", 9))
    elif has_no_room and not has_host:
        wanted.append(call.refused("r1.1", (1, 2, 3), 7))
    assert model.mock_calls == wanted and not world.situations


@pytest.mark.parametrize("has_no_room", [True, False])
@pytest.mark.parametrize("kind", ["Commit", "PrefillFailed", "Ask"])
def test_what_the_models_are_told_of_a_message_of_a_prefill_node(
    kind: str, has_no_room: bool
) -> None:
    model, hits = Mock(spec=PrefillModel), {"r1.1.2": 3}
    world: Any = SimpleNamespace(model=SimpleNamespace(hits=hits), situations=Counter(), nodes={})
    message = Message(kind, "r1.1.2", position=8, hits=4, has_no_room=has_no_room)
    events._check_sent(world, Mock(model=model), "d0", message)
    is_commit = kind == "Commit"
    assert model.mock_calls == [call.committed("r1.1.2", 8, 4)] * is_commit
    assert hits == {"r1.1.2": 4 if is_commit else 3}
    assert world.situations["busy"] == (kind == "PrefillFailed" and has_no_room)


@pytest.mark.parametrize("known", [1, 2])
@pytest.mark.parametrize("kind", ["DeliveryAck", "Preempted", "PrefillFailed", "Started"])
def test_what_the_model_of_the_requests_is_told_of_a_message_to_the_gateway(
    kind: str, known: int
) -> None:
    """Only a node in its present epoch acknowledges; an attempt that moved has not failed."""
    model, request = Mock(spec=Requests), Request((1, 2, 3), 2, 0, moved={"r1.1.1"})
    gateway = Mock(epoch_of=Mock(return_value=known))
    world: Any = SimpleNamespace(
        gateway=gateway, model=model, requests={"r1": request}, situations=Counter(),
        epochs={GATEWAY: 4},
    )  # fmt: skip
    failed = kind == "PrefillFailed"
    for attempt in ("r1.1.1", "r1.1.2"):
        message = Message(kind, attempt, of="Cancel", tokens=(5, 6), is_failure=failed)
        events._deliver_to_gateway(world, Envelope("m", "d0", GATEWAY, 2, 0, message))
        gateway.receive.assert_called_with("d0", 2, message)
    wanted: list[Any] = []
    if kind == "DeliveryAck" and known == 2:
        sender = f"{GATEWAY} in epoch 4"
        wanted = [call.acknowledged(sender, f"r1.1.{number}", "Cancel") for number in (1, 2)]
    elif kind == "Preempted":
        wanted = [call.preempted("r1", f"r1.1.{number}", (5, 6)) for number in (1, 2)]
    assert model.mock_calls == wanted and request.failed == ({"r1.1.2"} if failed else set())
