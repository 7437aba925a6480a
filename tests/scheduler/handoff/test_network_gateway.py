"""`NetworkGateway`: which messages count, and what is left of nodes and requests that are gone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.scheduler.errors import NodesMissingError
from radixkv.scheduler.gateway import remote_node
from radixkv.scheduler.gateway.network_gateway import (
    Connect,
    Disconnect,
    NetworkGateway,
    SendToNode,
)
from radixkv.scheduler.handoff import Hits
from radixkv.scheduler.handoff.gateway_messages import (
    CacheAsk,
    CacheUpdate,
    CancelAttempt,
    DeliveryAck,
    Finished,
    FollowAttempt,
    NewTokens,
    NodeStatus,
    Preempted,
    PrefillFailed,
    Progress,
    Role,
    RunPrefill,
    Started,
)
from radixkv.scheduler.handoff.messages import NodeId
from radixkv.scheduler.request import Request

SILENCE_S = 5.0


def join(gateway: NetworkGateway, name: str, now: float, epoch: int = 1, **more: Any) -> None:
    role: Role = "prefill" if name[0] == "p" else "decode"
    status = NodeStatus(role, "127.0.0.1:5", "jax", 4, 64, "m")
    gateway.receive(name, epoch, replace(status, **more), now)


def make(*names: str, **options: Any) -> NetworkGateway:
    gateway = NetworkGateway(silence_s=SILENCE_S, backoff_s=0.0, **options)
    for name in names:
        join(gateway, name, 0.0)
    gateway.take_actions()
    return gateway


def run(gateway: NetworkGateway, now: float) -> RunPrefill:
    """Return the only attempt that the gateway sends."""
    gateway.tick(now)
    sent = [each.message for each in gateway.take_actions() if isinstance(each, SendToNode)]
    [found] = [message for message in sent if isinstance(message, RunPrefill)]
    return found


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["p0", "d0"], "d0 has not been heard of for 7 s, and no other decode node serves"),
        (["p0", "d0", "d1"], "d0 and d1 have not been heard of for 7 s, and no other decode node"),
    ],
)
def test_missing_nodes_are_named_after_the_time(names: list[str], text: str) -> None:
    gateway = make(*names)
    for now in (0.0, 4.0, 8.0):
        join(gateway, "p0", now)
        gateway.tick(now)
    gateway.check(7.0, 6.999)
    with pytest.raises(NodesMissingError, match=f"^{re.escape(text)}"):
        gateway.check(7.0, 7.0)
    gateway = make(*names)
    gateway.tick(SILENCE_S)
    with pytest.raises(NodesMissingError, match=f" for {SILENCE_S:g} s, and no "):
        gateway.check(1.0, SILENCE_S)  # those silent for less are not gone
    gateway.check(1.0, SILENCE_S - 1)


def test_nodes_are_missed_from_the_last_message_of_any_of_them_on() -> None:
    gateway = make("p0", "d0", "d1")
    join(gateway, "d1", 3.0)
    for now in (4.0, 8.0):
        join(gateway, "p0", now)
        gateway.tick(now)
    assert list(gateway.gone) == ["d0", "d1"]
    gateway.check(7.0, 9.999)
    with pytest.raises(NodesMissingError, match=r"^d0 and d1 have not been heard of for 7 s"):
        gateway.check(7.0, 10.0)


@pytest.mark.parametrize("epoch", [1, 3])
def test_only_the_epoch_that_joined_is_heard(epoch: int) -> None:
    gateway = make("d0")
    join(gateway, "p0", 0.0, epoch=2)
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    key = run(gateway, 0.0).key
    gateway.receive("p0", epoch, PrefillFailed(key, "no", is_final=True), 4.0)
    assert (gateway.take_actions(), gateway.nodes["p0"].heard_at) == ([], 0.0)
    gateway.receive("p0", 2, PrefillFailed(key, "no", is_final=True), 4.0)
    assert gateway.failures == {"a": "no"} and gateway.nodes["p0"].heard_at == 4.0


def test_a_message_that_waits_in_vain_counts_as_no_attempt() -> None:
    gateway = make("p0", "d0", max_attempts=1)
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    for now in range(4):
        gateway.unsent("p0", run(gateway, float(now)))
        for name in ("p0", "d0"):
            join(gateway, name, float(now))
    assert gateway.failures == {}
    gateway.unsent("p0", run(gateway, 4.0), error="it has 9 bytes, the limit is 8")
    assert gateway.failures == {"a": "it has 9 bytes, the limit is 8"}


@pytest.mark.parametrize("moves", [False, True])
def test_an_attempt_avoids_the_prefill_node_that_takes_no_more_messages(moves: bool) -> None:
    """Its decode node, which has the prompt as the prefill node has, is none the worse for it."""
    gateway = make("p0", "p1", "d0", "d1")

    def begin() -> tuple[NodeId, RunPrefill]:
        gateway.tick(0.0)
        sent = [each for each in gateway.take_actions() if isinstance(each, SendToNode)]
        [found] = [(x.peer, x.message) for x in sent if isinstance(x.message, RunPrefill)]
        return found

    gateway.add_request(Request("a", list(range(9)), 2), 0.0)
    peer, sent = begin()
    if moves:
        gateway.receive("d0", 1, Started(sent.key), 0.0)
        gateway.receive("d0", 1, Preempted(sent.key, (4,), Hits(), 1), 0.0)
        peer, sent = begin()
    assert (peer, sent.decode_node) == ("p0", "d1" if moves else "d0")
    gateway.unsent(peer, sent)
    peer, again = begin()
    assert (peer, again.decode_node) == ("p1", sent.decode_node)


@pytest.mark.parametrize("has_new_names", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nothing_is_left_of_nodes_and_attempts_that_are_gone(
    role: str, has_new_names: bool
) -> None:
    gateway = make(stream=True)
    sizes = []
    for life in range(1, 4):
        now = 100.0 * life
        p, d = (f"p{life}", f"d{life}") if has_new_names else ("p0", "d0")
        for name in (p, d):
            join(gateway, name, now, epoch=life, num_updates=2, unheard=("d9",))
            missed = CacheUpdate(1, False, b"", b"", b"", b"")
            gateway.receive(name, life, missed, now)
        gateway.add_request(Request(f"ends {life}", [1, 2, 3], 2), now)
        key = run(gateway, now).key
        gateway.receive(d, life, Started(key), now)
        gateway.receive(d, life, Finished(key, (1, 2), Hits(), 0), now)
        gateway.add_request(Request(f"is lost {life}", [1, 2, 3], 2), now)
        started = run(gateway, now).key
        gateway.receive(d, life, Started(started), now)
        gateway.receive(d, life, Progress(()), now)
        join(gateway, d if role == "prefill" else p, now + 4, epoch=life)
        gateway.tick(now + SILENCE_S)
        assert len(gateway.nodes) == 1
        gateway.abort(f"is lost {life}")
        gateway.tick(now + 2 * SILENCE_S)
        assert not gateway.nodes
        gateway.take_ended(), gateway.take_advanced(), gateway.take_actions()
        sizes.append((gateway.num_open, gateway.num_unacked, len(gateway._asked)))
    assert sizes == [(0, 0, 0)] * 3
    join(gateway, "d0", 1000.0, epoch=9)
    join(gateway, "d0", 1001.0, epoch=9)  # now it looks at what it follows
    assert gateway._followed == {}


@pytest.mark.parametrize("lost", ["p0", "d0"])
@pytest.mark.parametrize("how", ["is silent", "comes back"])
def test_a_lost_node_costs_its_requests_one_attempt(lost: str, how: str) -> None:
    gateway = make("p0", "d0", max_attempts=1)
    for name in "abc":
        gateway.add_request(Request(name, [1, 2, 3], 2), 0.0)
    gateway.tick(0.0)
    for name in ("p1", "d1"):
        join(gateway, name, 0.0)
    others = sorted({"p0", "p1", "d0", "d1"} - {lost})
    assert (gateway.num_nodes_lost, gateway.num_attempts_lost) == (0, 0)
    now = SILENCE_S
    if how == "comes back":
        join(gateway, lost, now, epoch=2)
    for name in others:
        join(gateway, name, now)
    gateway.take_actions()
    for _ in range(3):
        gateway.tick(now)
    sent = [each.message for each in gateway.take_actions() if isinstance(each, SendToNode)]
    runs = [message for message in sent if isinstance(message, RunPrefill)]
    begun = sorted((each.key.request_id.split()[0], each.key.attempt) for each in runs)
    assert begun == [("a", 2), ("b", 2), ("c", 2)]
    assert (gateway.num_nodes_lost, gateway.num_attempts_lost) == (1, 3)
    assert gateway.failures == {}
    gateway.drain(others[0])
    for name in others[1:]:
        join(gateway, name, now + 4)
    gateway.tick(now + SILENCE_S)  # one that was drained has ended
    assert gateway.num_nodes_lost == (2 if how == "comes back" else 1)


NIXL: Any = {"transport": "nixl"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "transport": {"p-new": NIXL, "d-new": NIXL},
    "model": {name: {"model": "another"} for name in ("p-new", "d-new")},
    "dtype": {name: {"model": "m bfloat16"} for name in ("p-new", "d-new")},
    "block size": {name: {"block_size": 129} for name in ("p-new", "d-new")},
    "block limit": {"p-new": {"num_blocks": 100}, "d-new": {"num_blocks": 100}},
}


def refused(gateway: NetworkGateway) -> dict[str, str]:
    return {name: node.refusal for name, node in gateway.nodes.items() if node.refusal}


@pytest.mark.parametrize("new", KINDS.values(), ids=KINDS)
def test_nodes_of_another_kind_serve_once_those_before_are_gone(
    new: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_node, "_MAX_BLOCKS", 200)
    gateway = make("p-old", "d-old")
    for now in range(1, 11):
        for name in ("p-old", "d-old") if now <= 5 else ():
            join(gateway, name, now)
        for name, more in new.items():
            join(gateway, name, now, **more, num_updates=3, unheard=("d-old",))
        gateway.tick(now)
        assert refused(gateway).keys() == new.keys()
        assert gateway.num_attempts("p-new") == gateway.num_attempts("d-new") == 0
    assert (list(gateway.gone), gateway.num_nodes_lost) == (["p-old", "d-old"], 2)
    gateway.add_request(Request("a", [1, 2, 3], 2), 10.0)
    gateway.tick(10.0)
    gateway.take_actions()
    for name, more in new.items():
        join(gateway, name, 11.0, **more, num_updates=3)
    asked = [SendToNode(name, CacheAsk(0)) for name in new]
    address = "127.0.0.1:5"
    connected = [Connect(name, address) for name in new]
    assert gateway.take_actions() == [connected[0], asked[0], connected[1], asked[1]]
    assert refused(gateway) == {}
    assert (gateway.count("prefill"), gateway.count("decode")) == (1, 1)
    sent = run(gateway, 11.0)
    assert (sent.decode_node, gateway.num_attempts("p-new")) == ("d-new", 1)
    gateway.check(SILENCE_S, 100.0)


def test_refused_nodes_that_differ_serve_one_kind_after_the_other() -> None:
    """The kind of the node that is heard first, when none serves any more, is next."""
    gateway = make("p0", "d0")
    kinds = {"p1": "a", "p2": "b", "d2": "b", "p3": "a"}
    last = {"p1": 20.0, "p3": 20.0}
    seen: list[set[NodeId]] = []
    for turn in range(40):
        now = float(turn)
        for name, transport in kinds.items():
            if now <= last.get(name, now):
                join(gateway, name, now, transport=transport)
        gateway.tick(now)
        serving = {name for name, node in gateway.nodes.items() if not node.refusal}
        if serving and serving not in seen:
            seen.append(serving)
        if serving == {"p1", "p3"}:
            reason = "its transport is b, but that of p1 is a"
            assert refused(gateway) == {"p2": reason, "d2": reason}
    assert seen == [{"p0", "d0"}, {"p1", "p3"}, {"p2", "d2"}]


def test_a_node_that_restarts_is_not_replaced_by_one_that_was_refused() -> None:
    gateway = make("p0")
    for epoch in (1, 2, 3):
        join(gateway, "p0", float(epoch), epoch=epoch)
        join(gateway, "d0", float(epoch), **NIXL)
        assert refused(gateway) == {"d0": "its transport is nixl, but that of p0 is jax"}


@pytest.mark.parametrize(
    "more", [{"address": "127.0.0.1:6"}, {"num_blocks": 65}, {"max_model_len": 9}], ids=str
)
def test_a_node_that_says_something_else_of_itself_is_another_one(more: dict[str, Any]) -> None:
    """Even in the same epoch: what it was told before went to the one that it was."""
    gateway = make("p0", "d0")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    first = run(gateway, 0.0)
    for now in (1.0, 2.0):
        join(gateway, "d0", now, **more)
        actions = gateway.take_actions()
        connections = [each for each in actions if isinstance(each, Connect | Disconnect)]
        address = more.get("address", "127.0.0.1:5")
        expected = [Disconnect("d0"), Connect("d0", address)] if now == 1.0 else []
        assert connections == expected
    again = run(gateway, 2.0)
    assert (again.key.attempt, again.decode_address) == (2, address) and first.key.attempt == 1
    assert (gateway.num_nodes_lost, gateway.num_attempts_lost) == (1, 1)


def test_a_refused_node_that_was_drained_does_not_serve_later() -> None:
    gateway = make("p0")
    join(gateway, "d0", 4.0, **NIXL)
    gateway.drain("d0")
    gateway.tick(SILENCE_S)
    join(gateway, "d0", 6.0, **NIXL)
    assert refused(gateway) == {"d0": "it was drained, and its name is not used again"}


@pytest.mark.parametrize("first", ["joins", "is refused"])
def test_what_a_node_does_not_hear_counts_from_its_first_status_on(first: str) -> None:
    gateway = make("p0", "p1")
    if first == "is refused":
        join(gateway, "d0", 0.0, unheard=("p1",), **NIXL)
    join(gateway, "d0", 0.0, epoch=2, unheard=("p0",))
    for name in "ab":
        gateway.add_request(Request(name, [1, 2, 3], 2), 0.0)
        run(gateway, 0.0)
    assert (gateway.num_attempts("p0"), gateway.num_attempts("p1")) == (0, 2)


def test_what_a_refused_node_does_not_hear_is_forgotten() -> None:
    gateway = make("p0", "p1")
    for number in range(3):
        now = 10.0 * number
        for name in ("p0", "p1"):
            join(gateway, name, now)
        join(gateway, "d0", now, epoch=1, unheard=("p0",), **NIXL)
        join(gateway, "d0", now + 1, epoch=1, unheard=("p0",), **NIXL)
        join(gateway, f"d0-{number}", now, unheard=("p0",), **NIXL)
        join(gateway, f"d0-{number}", now + 1, unheard=("p0",), **NIXL)
        gateway.tick(now + 9.0)
    for name in ("p0", "p1"):
        join(gateway, name, 40.0)
    join(gateway, "d0", 40.0, epoch=2)
    assert gateway._gateway._unheard == {}
    gateway.add_request(Request("a", [1, 2, 3], 2), 40.0)
    run(gateway, 40.0)
    assert gateway.num_attempts("p0") == 1


EVENTS = st.one_of(
    st.tuples(
        st.just("joins"),
        st.sampled_from(["p0", "p1", "d0", "d1"]),
        st.sampled_from([(1, "jax"), (1, "jax"), (2, "jax"), (1, "nixl")]),
    ),
    st.tuples(
        st.sampled_from(["passes", "asks", "aborts", "fails"]), st.just(""), st.just((0, ""))
    ),
)


PASSES, ASKS = ("passes", "", (0, "")), ("asks", "", (0, ""))
JOIN = [("joins", name, (1, "jax")) for name in ("p0", "d0")]


@settings(max_examples=100)
@example([*JOIN, PASSES, ASKS, PASSES, PASSES])  # it is lost when a message is due again
@given(st.lists(EVENTS, max_size=30))
def test_only_a_connected_node_is_sent_anything(
    events: list[tuple[str, str, tuple[int, str]]],
) -> None:
    """A node is connected while it serves, and what it never acknowledged is not kept after it."""
    gateway, now, connected, names = make(), 0.0, dict[NodeId, str](), list[str]()
    last: tuple[NodeId, RunPrefill] | None = None
    for number, (what, peer, (epoch, transport)) in enumerate(events):
        match what:
            case "joins":
                join(gateway, peer, now, epoch=epoch, transport=transport)
            case "passes":
                now += 2.0
            case "asks":
                names.append(str(number))
                gateway.add_request(Request(names[-1], [1, 2, 3], 2), now)
            case "aborts" if names:
                gateway.abort(names.pop())
            case _ if last is not None:
                gateway.unsent(*last)
        gateway.tick(now)
        for action in gateway.take_actions():
            match action:
                case Connect(peer, address):
                    assert peer not in connected
                    connected[peer] = address
                case Disconnect(peer):
                    del connected[peer]
                case SendToNode(peer, message):
                    assert peer in connected
                    if isinstance(message, RunPrefill):
                        last = peer, message
        serving = {name for name, node in gateway.nodes.items() if not node.refusal}
        assert connected.keys() == serving
        assert not gateway.gone.keys() & serving
        assert {peer for peer, _ in gateway._unacked._waiting} <= serving
        keys = {key for _, key in gateway._unacked._waiting}
        assert all(gateway._gateway.num_heard(key) is not None for key in keys)


def test_a_request_is_sent_five_times_unless_its_node_says_anything_of_it() -> None:
    for says in ("nothing", "ack", "failed", "started"):
        gateway, sent = make("p0", "d0", lost_s=1e9), []
        gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
        for turn in range(10):
            now = turn / 2
            for name in ("p0", "d0"):
                join(gateway, name, now)
            gateway.tick(now)
            for action in gateway.take_actions():
                if isinstance(action, SendToNode) and isinstance(action.message, RunPrefill):
                    sent.append((now, action.message.key.attempt))
                    key = action.message.key
            if turn == 3:
                report: Any = {
                    "ack": ("p0", DeliveryAck(key, "RunPrefill")),
                    "failed": ("p0", PrefillFailed(key, "no")),
                    "started": ("d0", Started(key)),
                }.get(says)
                if report is not None:
                    gateway.receive(report[0], 1, report[1], now)
                    assert gateway.num_unacked == 0
        first = [(0.0, 1), (1.0, 1)]
        expected = {
            "nothing": [(float(now), 1) for now in range(5)],
            "failed": [*first, (2.0, 2), (3.0, 2), (4.0, 2)],
        }
        assert sent == expected.get(says, first)
        for name in ("p0", "d0"):
            join(gateway, name, 5.0)
        assert gateway.num_attempts_lost == 0
        gateway.tick(5.0)
        assert gateway.num_attempts_lost == (says == "nothing")


def test_a_node_that_takes_no_more_messages_is_not_sent_its_request_again() -> None:
    gateway = make("p0", "d0")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    sent = run(gateway, 0.0)
    assert gateway.num_unacked == 1
    gateway.unsent("d0", CancelAttempt(sent.key, "cancelled"))  # which is only told
    assert gateway.num_unacked == 1
    gateway.unsent("p0", sent)
    assert (gateway.num_unacked, gateway.num_attempts("p0")) == (0, 0)


def test_nodes_that_are_gone_are_listed_in_the_order_in_which_they_went_last() -> None:
    gateway = make("d0", "d1")
    gateway.tick(SILENCE_S)
    assert list(gateway.gone) == ["d0", "d1"]
    join(gateway, "d0", 6.0)
    assert list(gateway.gone) == ["d1"]
    gateway.tick(6.0 + SILENCE_S)
    assert list(gateway.gone) == ["d1", "d0"]
    join(gateway, "d1", 20.0)
    join(gateway, "d1", 21.0, epoch=2)  # it has gone, and is back
    assert list(gateway.gone) == ["d0"] and gateway.num_nodes_lost == 4


def asks(gateway: NetworkGateway) -> list[SendToNode]:
    return [
        each
        for each in gateway.take_actions()
        if isinstance(each, SendToNode) and isinstance(each.message, CacheAsk)
    ]


def test_missing_updates_are_asked_for_once_in_each_status() -> None:
    gateway = make("p0")
    missed = CacheUpdate(2, False, b"", b"", b"", b"")
    for _ in range(2):
        for _ in range(3):
            gateway.receive("p0", 1, missed, 0.0)
        assert asks(gateway) == [SendToNode("p0", CacheAsk(0))]
        join(gateway, "p0", 1.0, num_updates=0)  # none was missing when it was sent
        assert asks(gateway) == []
    join(gateway, "p0", 1.0, num_updates=3)
    gateway.receive("p0", 1, missed, 0.0)
    assert asks(gateway) == [SendToNode("p0", CacheAsk(0))]
    for number in range(3):
        gateway.receive("p0", 1, CacheUpdate(number, not number, b"", b"", b"", b""), 1.0)
    join(gateway, "p0", 2.0, num_updates=3)
    assert asks(gateway) == []
    gateway.receive("p0", 1, replace(missed, number=4), 2.0)
    assert asks(gateway) == [SendToNode("p0", CacheAsk(3))]
    join(gateway, "p0", 3.0, epoch=2)
    gateway.receive("p0", 2, missed, 3.0)  # of the new epoch, nothing was asked yet
    assert asks(gateway) == [SendToNode("p0", CacheAsk(0))]


def test_tokens_are_asked_for_again_only_by_the_status_of_their_node() -> None:
    gateway = make("p0", "d0", "d1", stream=True)
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    key = run(gateway, 0.0).key
    gateway.receive("d1", 1, Progress((NewTokens(key, 0, (7,)),)), 0.0)
    assert gateway.take_actions() == [] and gateway.take_advanced() == [], "it was not asked"
    gateway.receive("d0", 1, Started(key), 0.0)
    question = SendToNode("d0", FollowAttempt(key, 0))
    assert gateway.take_actions()[-1] == question
    for name in ("p0", "d1", "d0"):
        join(gateway, name, 1.0)
        assert gateway.take_actions() == [question] * (name == "d0")
    gateway.receive("d0", 1, Progress((NewTokens(key, 0, (7,)),)), 1.0)
    join(gateway, "d0", 2.0)
    assert gateway.take_actions() == []


@pytest.mark.parametrize("more", [0, 1])
def test_the_gateway_follows_as_many_blocks_as_it_may(
    monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """Those of nodes that it refuses do not count, nor are others compared with such nodes."""
    monkeypatch.setattr(remote_node, "_MAX_BLOCKS", 200)
    gateway = make("p0")
    join(gateway, "p1", 0.0, num_blocks=150, model="another")
    join(gateway, "p2", 0.0, block_size=129)  # hands nothing over to p0
    assert refused(gateway).keys() == {"p1"}
    join(gateway, "p3", 0.0, num_blocks=200 - 2 * 64 + more)
    assert ("p3" in refused(gateway)) is bool(more)
