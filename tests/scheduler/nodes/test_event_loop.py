"""The loop of a node: how long it waits, when messages arrive, and whom it tells what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.scheduler import DecodeScheduler, PrefillScheduler, Request
from radixkv.scheduler.gateway.cache_index import CacheReporter
from radixkv.scheduler.handoff import Ack, Ask, AttemptKey, Header, Timing
from radixkv.scheduler.handoff.gateway_messages import (
    GATEWAY,
    CancelAttempt,
    DeliveryAck,
    NodeStatus,
    RunPrefill,
)
from radixkv.scheduler.handoff.messages import Renew
from radixkv.scheduler.nodes import event_loop
from radixkv.scheduler.nodes.channel import Packet
from radixkv.scheduler.nodes.event_loop import NodeEventLoop
from radixkv.scheduler.nodes.node import PeerMessage

from .fake_channel import SILENCE_S, TIMING, Deployment, FakeChannel, Prefill


def test_nodes_tell_what_they_take() -> None:
    world = Deployment()
    world.turn(4)
    told = {name: node.status.max_model_len for name, node in world.nodes.nodes.items()}
    assert told == {"prefill-0": 24, "decode-0": 24}


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_what_wakes_nobody_is_looked_for_soon(name: str) -> None:
    """The end of a transfer, or of a copy between tiers, brings no message."""
    world = Deployment()
    world.turn(4)
    loop, engine = world.loops[name], world.engines[name]
    waits: list[float] = []

    def wait_s() -> float:
        """Let the loop find nothing to do, and return how long it waits for a message."""
        stops = iter([False, True])
        loop.run(lambda: next(stops))
        return waits.pop()

    channel: Any = loop._channel
    channel.wait = waits.append
    manager = engine.manager = CacheManager(8, 4, host=HostConfig(8, "back"))
    lease = manager.admit(manager.match(range(4)))
    manager.publish(lease, range(4))
    manager.release(lease)
    idle_s = wait_s()
    engine.scheduler.num_open = 1
    assert 0 < wait_s() < idle_s / 10
    engine.scheduler.num_open = 0
    assert wait_s() == idle_s
    assert manager.evict(1) == 1 and manager.tiers is not None
    assert manager.tiers.num_open_operations == 1
    assert 0 < wait_s() < idle_s / 10


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_heartbeat_that_arrives_during_a_long_step_is_no_older_than_its_end(name: str) -> None:
    world = Deployment()
    engine, key = world.engines[name], AttemptKey("a", 1)
    sizes: dict[str, Any] = {"epoch": 1, "timing": TIMING, "token_budget": 8, "max_running": 2}
    scheduler: Any
    if name == "prefill-0":
        peer, scheduler = "decode-0", PrefillScheduler(engine.manager, **sizes)
        scheduler.begin(Request("a", [1, 2, 3], 1), peer)
        scheduler.schedule()
        heartbeat = Renew(Header(key, 1, 1))
    else:
        peer, scheduler = "prefill-0", DecodeScheduler(engine.manager, **sizes)
        scheduler.receive(peer, Ask(Header(key, 1), bytes(12), b"", 4, 1, 1))
        heartbeat = Renew(Header(key, 1, 1, 1))
    assert scheduler.num_open == 1
    engine.scheduler = scheduler
    engine.receive = lambda message: scheduler.receive(message.peer, message.message)
    engine.poll, engine.step = lambda now: bool(scheduler.tick(now)), lambda: False
    world.now = 1 + SILENCE_S
    world.ends[name]._arrived.append(Packet(peer, name, 1, 0, heartbeat, None))
    world.loops[name].run_once()
    assert scheduler.num_open == 1
    world.now += SILENCE_S
    world.loops[name].run_once()
    assert scheduler.num_open == 0


class Alone:
    """The loop of one node, with ends of its peers that the test reads and writes."""

    def __init__(self, *peers: str, timing: Timing = TIMING, cache: bool = True) -> None:
        self.now, self.engine = 0.0, Prefill()
        self.ends: dict[str, FakeChannel] = {}
        for peer in (GATEWAY, *peers, "p0"):
            FakeChannel(self.ends, peer, lambda *_: False)
        self.channel = self.ends["p0"]
        self.loop = NodeEventLoop(
            self.engine,
            self.channel,
            gateway=self.ends[GATEWAY].address,
            transport="jax",
            timing=timing,
            cache=CacheReporter() if cache else None,
            clock=lambda: self.now,
        )

    def say(self, peer: str, message: Any, pull_info: Any = None) -> None:
        self.channel._arrived.append(Packet(peer, "p0", 1, 0, message, pull_info))

    def join(self, peer: str) -> None:
        self.say(peer, NodeStatus("decode", self.ends[peer].address, "jax", 4, 8, "m"))

    def pass_time(self, now: float) -> dict[str, list[Any]]:
        """Run once at a time; return what each peer has got."""
        self.now = now
        self.loop.run_once()
        return {
            peer: [packet.message for packet in end.receive()]
            for peer, end in self.ends.items()
            if peer != "p0"
        }


def statuses(messages: list[Any]) -> list[NodeStatus]:
    return [each for each in messages if isinstance(each, NodeStatus)]


def test_after_a_long_step_a_status_is_sent_once() -> None:
    node = Alone()
    times = [0.0, 0.5, 1.0, 11.5, 11.5, 12.0, 12.499, 12.5]
    found = [len(statuses(node.pass_time(now)[GATEWAY])) for now in times]
    assert found == [1, 0, 1, 1, 0, 0, 0, 1]


def test_only_the_gateway_is_told_more_than_how_to_reach_a_node() -> None:
    node = Alone("d0", "d1")
    for peer in ("d0", "d1"):
        node.join(peer)
    node.pass_time(0.0)
    node.join("d1")
    said = node.pass_time(SILENCE_S)
    [to_gateway], [to_d1] = statuses(said[GATEWAY]), statuses(said["d1"])
    assert (to_gateway.unheard, to_gateway.num_updates) == (("d0",), 1)
    assert to_gateway.load == node.engine.load() != to_d1.load
    assert to_d1 == replace(to_gateway, unheard=(), num_updates=0, load=to_d1.load)
    alone = Alone(cache=False)
    assert [each.num_updates for each in statuses(alone.pass_time(0.0)[GATEWAY])] == [0]


@pytest.mark.parametrize("remember_s", [6.0, 60.0])
def test_a_peer_is_unheard_from_one_time_on_and_forgotten_from_another(remember_s: float) -> None:
    """However soon attempts are forgotten, it has had the time to be named as unheard."""
    timing = replace(TIMING, remember_s=remember_s)
    forgotten_s = max(remember_s, 2 * SILENCE_S)
    for silent_s in (SILENCE_S - 0.5, SILENCE_S, forgotten_s - 0.5, forgotten_s):
        node = Alone("d0", timing=timing)
        node.join("d0")
        node.pass_time(0.0)
        said = node.pass_time(silent_s)
        is_known = silent_s < forgotten_s
        is_unheard = is_known and silent_s >= SILENCE_S
        [status] = statuses(said[GATEWAY])
        assert status.unheard == ("d0",) * is_unheard
        assert len(statuses(said["d0"])) == is_known
        assert node.channel.connected == [GATEWAY, *["d0"] * is_known]


@given(
    silent_s=st.lists(
        st.sampled_from([0.0, 4.9, SILENCE_S, 9.0, 59.9, TIMING.remember_s, 70.0]),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    num_free=st.integers(0, 2),
)
def test_only_as_many_silent_peers_are_forgotten_as_a_new_one_needs(
    silent_s: list[float], num_free: int
) -> None:
    """Those that are silent for too long, or if there is no room, the one that is the longest."""
    peers = {f"d{number}": each for number, each in enumerate(silent_s)}
    node = Alone(*peers)
    node.channel.max_peers = 1 + len(peers) + num_free
    for peer in peers:  # met in another order than heard last
        node.join(peer)
        node.pass_time(20.0)
    for peer, each in sorted(peers.items(), key=lambda item: -item[1]):
        node.join(peer)
        node.pass_time(100.0 - each)
    found = statuses(node.pass_time(101.0)[GATEWAY])  # a status is due each second
    silent = sorted((-each - 1, peer) for peer, each in peers.items() if each + 1 >= SILENCE_S)
    forgotten = [peer for each, peer in silent if -each >= TIMING.remember_s]
    if not forgotten and num_free == 0:
        forgotten = [peer for _, peer in silent[:1]]
    kept = [peer for _, peer in silent if peer not in forgotten]
    assert {*node.channel.connected} == {GATEWAY, *peers} - {*forgotten}
    assert [each.unheard for each in found] == [tuple(kept)]


def test_a_status_names_as_many_unheard_nodes_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "MAX_UNHEARD", 2)
    node = Alone("d0", "d1", "d2")
    for number, peer in enumerate(("d2", "d0", "d1")):
        node.join(peer)
        node.pass_time(0.1 * number)
    [status] = statuses(node.pass_time(2 * SILENCE_S)[GATEWAY])
    assert status.unheard == ("d2", "d0"), "those that were silent the longest"


def run_of(node: Alone, name: str, peer: str) -> RunPrefill:
    request = Request(name, [1, 2, 3], 1)
    return RunPrefill.of(AttemptKey(name, 1), 1, request, peer, node.ends[peer].address)


def test_a_message_to_a_node_that_is_not_known_is_not_sent() -> None:
    node = Alone("d0", "d1")
    node.join("d0")
    node.pass_time(0.0)
    ack = Ack(Header(AttemptKey("a", 1), 1))
    node.engine._outbox += [PeerMessage("d1", ack), PeerMessage("d0", ack)]
    said = node.pass_time(0.5)
    assert (said["d0"], said["d1"]) == ([ack], [])


def test_a_node_is_met_with_the_first_message_of_an_attempt_if_there_is_room() -> None:
    node = Alone("d0", "d1")
    node.channel.max_peers = 2
    for name, peer in (("a", "d0"), ("b", "d1")):
        node.say(GATEWAY, run_of(node, name, peer))
    said = node.pass_time(0.0)
    assert [type(each) for each in said["d0"]] == [NodeStatus, NodeStatus, Ask]
    assert said["d1"] == [] and node.channel.connected == [GATEWAY, "d0"]
    assert node.engine.begun.total() == 2
    node.pass_time(SILENCE_S)  # without room it is forgotten
    assert node.channel.connected == [GATEWAY]
    node.say(GATEWAY, run_of(node, "a", "d0"))  # once more
    node.pass_time(SILENCE_S + 1)
    assert node.channel.connected == [GATEWAY] and node.engine.begun.total() == 2


def test_a_node_that_attempts_name_again_and_again_is_silent_since_it_was_met() -> None:
    node = Alone("d0")
    for number in range(int(SILENCE_S) + 1):
        node.say(GATEWAY, run_of(node, f"{number}", "d0"))
        [status] = statuses(node.pass_time(float(number))[GATEWAY])
        assert status.unheard == ("d0",) * (number >= SILENCE_S)


def test_what_arrives_is_passed_on_and_something_to_do() -> None:
    node, received = Alone("d0"), list[PeerMessage]()
    setattr(node.engine, "receive", received.append)  # noqa: B010
    assert not node.loop.run_once()
    ack = Ack(Header(AttemptKey("a", 1), 1))
    info: Any = object()
    node.say("d0", ack, info)
    assert node.loop.run_once()
    assert received == [PeerMessage("d0", ack, info)]
    assert not node.loop.run_once()


def test_a_peer_is_answered_before_a_step_and_told_after_it_what_the_step_brought() -> None:
    acks = [Ack(Header(AttemptKey(name, 1), 1)) for name in "abc"]
    node, (answer, offered, news) = Alone("d0"), acks
    node.join("d0")
    node.pass_time(0.0)
    heard: list[Any] = []

    def receive(message: PeerMessage) -> None:
        node.engine._outbox.append(PeerMessage(message.peer, answer))

    def poll(now: float) -> bool:
        node.engine._outbox.append(PeerMessage("d0", offered))
        return True

    def step() -> bool:
        heard.extend(packet.message for packet in node.ends["d0"].receive())
        node.engine._outbox.append(PeerMessage("d0", news))
        return True

    engine: Any = node.engine
    engine.receive, engine.poll, engine.step = receive, poll, step
    node.say("d0", Ack(Header(AttemptKey("d", 1), 1)))
    said = node.pass_time(0.5)
    assert (heard, said["d0"]) == ([answer, offered], [news])


def test_the_gateway_is_answered_before_a_step() -> None:
    node = Alone("d0")
    node.pass_time(0.0)
    heard: list[Any] = []

    def step() -> bool:
        heard.extend(packet.message for packet in node.ends[GATEWAY].receive())
        return False

    node.engine.step = step  # type: ignore[method-assign]
    run = run_of(node, "a", "d0")
    node.say(GATEWAY, run)
    node.pass_time(0.5)
    assert heard == [DeliveryAck.of(run)]


@pytest.mark.parametrize("says_it", [True, False], ids=["it tells", "an attempt tells"])
def test_a_peer_that_comes_back_at_another_address_is_connected_there(says_it: bool) -> None:
    node, connected = Alone("d0"), list[tuple[str, str]]()
    node.join("d0")
    node.pass_time(0.0)
    setattr(node.channel, "connect", lambda *pair: connected.append(pair))  # noqa: B010
    address = "127.0.0.1:9"
    if says_it:
        node.say("d0", NodeStatus("decode", address, "jax", 4, 8, "m"))
    else:
        request = Request("a", [1, 2, 3], 1)
        node.say(GATEWAY, RunPrefill.of(AttemptKey("a", 1), 1, request, "d0", address))
    node.pass_time(0.5)
    assert connected == [("d0", address)]


def test_an_attempt_is_given_up_for_the_reason_of_the_gateway() -> None:
    node, given_up = Alone(), list[tuple[AttemptKey, str]]()
    setattr(node.engine, "give_up", lambda *given: given_up.append(given))  # noqa: B010
    node.say(GATEWAY, CancelAttempt(AttemptKey("a", 2), "it was aborted"))
    node.pass_time(0.0)
    assert given_up == [(("a", 2), "it was aborted")]
