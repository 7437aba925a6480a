"""Lost messages between the gateway and nodes: each request ends exactly once."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import BlockRemoved, BlockStored, EventBatch
from radixkv.scheduler.errors import NodesMissingError
from radixkv.scheduler.gateway.network_gateway import NetworkGateway
from radixkv.scheduler.handoff.gateway_messages import (
    GATEWAY,
    CacheUpdate,
    DeliveryAck,
    Finished,
    NodeStatus,
    RunPrefill,
    Started,
)
from radixkv.scheduler.request import Request, RequestStatus

from .fake_channel import (
    SILENCE_S,
    TIMING,
    TURN_S,
    Deployment,
    FakeChannel,
    is_of_request,
    tokens_of,
)

MOST_LOST = 3
NUM_MESSAGES = {"nowhere": 6, "prefill": 12, "decode": 14}
"""Number of messages per request without losses, by the role whose first attempt fails."""


class Loses:
    """Loses the messages at some positions; periodic messages do not count."""

    def __init__(self, places: tuple[int, ...] = ()) -> None:
        self.places = places
        self.seen: list[Any] = []

    def __call__(self, sender: str, receiver: str, message: Any) -> bool:
        if not is_of_request(message):
            return False
        self.seen.append(message)
        return len(self.seen) - 1 in self.places


@pytest.mark.parametrize("fails", NUM_MESSAGES)
def test_any_three_losses_only_cost_time(fails: str) -> None:
    for num_lost in range(MOST_LOST + 1):
        for places in combinations(range(NUM_MESSAGES[fails] + 2), num_lost):
            loses = Loses(places)
            world = Deployment(loses)
            if fails == "prefill":
                world.prefill.failures = ["it was too cold"]
            elif fails == "decode":
                world.decode.failures = ["it was too warm"]
            request = Request("abc", [1, 2, 3], 2)
            assert world.complete([request]) == [request], places
            assert request.status is RequestStatus.FINISHED, (places, world.nodes.failures)
            assert request.output_tokens == [*tokens_of("abc")]
            # Nothing was begun twice, and nothing was tried again but what had failed.
            assert set(world.prefill.begun.values()) == {1}, places
            attempts = [key.attempt for key in world.prefill.begun]
            assert attempts == ([1] if fails == "nowhere" else [1, 2]), places
            assert num_lost or len(loses.seen) == NUM_MESSAGES[fails]


def lost(*kinds: type) -> Any:
    """Loses all messages of some classes."""
    return lambda sender, receiver, message: isinstance(message, kinds)


def test_an_attempt_fails_if_the_prefill_node_does_not_answer() -> None:
    world = Deployment(lost(RunPrefill), lost_s=SILENCE_S)
    request = Request("a", [1, 2, 3], 2)
    assert world.complete([request]) == [request]
    reason = "attempts were lost for 5 s: prefill-0 does not acknowledge the request"
    assert world.nodes.failures == {"a": reason}
    assert 2 * SILENCE_S <= world.now < 2 * SILENCE_S + 2


def test_an_aborted_request_is_not_repeated() -> None:
    world = Deployment(lost(RunPrefill))
    world.nodes.add_request(Request("a", [1, 2, 3], 2))
    world.turn()
    assert world.num_unacked == 1
    assert world.nodes.abort("a")
    assert world.num_unacked == 0


def test_all_nodes_cancel_an_aborted_request() -> None:
    world = Deployment()
    world.turn(2)
    world.nodes.add_request(Request("a", [1, 2, 3], 2))
    world.turn()
    assert world.nodes.abort("a")
    world.turn()
    assert world.prefill.given_up == world.decode.given_up == [("a #1.0", 1)]


def test_a_report_without_answer_expires() -> None:
    world = Deployment(lost(DeliveryAck))
    request = Request("a", [1, 2, 3], 2)
    assert world.complete([request]) == [request]
    assert request.status is RequestStatus.FINISHED
    assert TIMING.transfer_s <= world.now < TIMING.transfer_s + 2
    assert world.prefill.begun == {("a #1.0", 1): 1}


def test_a_new_gateway_receives_old_reports_and_ends_them() -> None:
    world = Deployment(lost(Finished, DeliveryAck))
    world.nodes.add_request(Request("a", [1, 2, 3], 2))
    while not world.loops["decode-0"]._reporter.num_unacked:
        world.turn()
    world._is_lost = lambda *_: False
    world.new_gateway(2)
    for end in world.ends.values():
        end._is_lost = lambda *_: False
    world.turn(20)
    assert world.num_unacked == 0
    request = Request("a", [1, 2, 3], 2)
    assert world.complete([request]) == [request]


def test_a_stopping_node_processes_received_messages() -> None:
    world = Deployment()
    world.turn(3)
    world.nodes.add_request(Request("abc", [1, 2, 3], 2))
    world.nodes.step()
    loop = world.loops["prefill-0"]
    assert world.prefill.begun == {}
    loop.run(lambda: True)
    assert sum(world.prefill.begun.values()) == 1


NAMES = [("prefill-0", "prefill-1", "prefill-2"), ("decode-0", "decode-1")]
LINKS = [link for p in NAMES[0] for d in NAMES[1] for link in ((p, d), (d, p))]
"""One-way links between nodes of different roles."""


@settings(max_examples=60)
@given(
    cut=st.sets(st.sampled_from(LINKS)),
    whole=st.tuples(*map(st.sampled_from, NAMES)),
    healed_at=st.integers(0, 200),
    num_requests=st.integers(1, 6),
)
def test_cut_links_cost_time_if_any_pair_can_talk(cut, whole, healed_at, num_requests):
    cut -= {whole, whole[::-1]}

    def is_lost(sender: str, receiver: str, message: Any) -> bool:
        return (sender, receiver) in cut and world.now < healed_at * TURN_S

    world = Deployment(is_lost, num_prefill=3, num_decode=2, max_attempts=1)
    requests = [Request(f"r{place}", [1, 2, 3], 2) for place in range(num_requests)]
    world.complete(requests)
    assert world.nodes.failures == {}
    for request in requests:
        assert request.output_tokens == [*tokens_of(request.request_id)]


def test_a_pair_that_is_known_to_be_broken_gets_no_attempt() -> None:
    broken = {("prefill-0", "decode-0"), ("decode-0", "prefill-0")}
    is_cut = True

    def is_lost(sender: str, receiver: str, message: Any) -> bool:
        return is_cut and (sender, receiver) in broken

    world = Deployment(is_lost, num_prefill=2, num_decode=1)
    world.turn(2)
    world.complete([Request(name, [1, 2, 3], 2) for name in "ab"])  # one of them meets it
    assert world.nodes._gateway._gateway._unheard == {"prefill-0": {"decode-0"}}
    begun = world.engines["prefill-0"].begun
    before = len(begun)
    world.complete([Request(f"later {place}", [1, 2, 3], 2) for place in range(8)])
    assert len(begun) == before
    is_cut = False
    world.turn(8)
    assert world.nodes._gateway._gateway._unheard == {}
    world.complete([Request(f"last {place}", [1, 2, 3], 2) for place in range(8)])
    assert len(begun) > before


@settings(max_examples=20)
@given(
    ends_at=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    requests_at=st.lists(st.integers(0, 120), min_size=1, max_size=6),
    loss=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_nodes_with_another_transport_take_over_when_those_before_end(
    ends_at, requests_at, loss, seed
):
    """The gateway refuses them until then, and no request is lost."""
    draw, is_quiet = Random(seed), False
    new = dict.fromkeys(["prefill-1", "decode-1", "decode-2"], "nixl")
    world = Deployment(
        lambda *_: not is_quiet and draw.random() < loss,
        num_prefill=2,
        num_decode=3,
        transports=new,
        max_attempts=1,
    )
    ends = dict(zip(("prefill-0", "decode-0"), ends_at, strict=True))
    requests = [Request(f"r{place}", [1, 2, 3], 2) for place in range(len(requests_at))]
    for turn in range(121):
        for name in [name for name, end in ends.items() if turn == end]:
            del world.loops[name]
        for request, at in zip(requests, requests_at, strict=True):
            if at == turn:
                world.nodes.add_request(request)
        world.turn()
        transports = {
            each.status.transport for each in world.nodes.nodes.values() if not each.refusal
        }
        assert len(transports) <= 1
    is_quiet = True
    world.turn(30)
    world.complete([])
    assert world.nodes.failures == {}
    for request in requests:
        assert request.output_tokens == [*tokens_of(request.request_id)]
    assert {name for name, node in world.nodes.nodes.items() if not node.refusal} == set(new)


def test_a_node_forgets_peers_that_are_silent_for_long() -> None:
    world = Deployment(lambda sender, receiver, message: sender == "decode-0" and world.now > 2)
    world.complete([Request("a", [1, 2, 3], 2)])
    loop = world.loops["prefill-0"]
    assert "decode-0" in loop._heard_at
    world.turn(int((TIMING.remember_s - 3) / TURN_S))
    assert "decode-0" in loop._heard_at, "its attempts may go on"
    world.turn(int(6 / TURN_S))
    assert loop._heard_at.keys() == {GATEWAY}


def test_without_room_the_peer_that_is_silent_the_longest_is_forgotten() -> None:
    """And a node that a new one has no room for is met as soon as there is some."""
    silent: set[str] = set()
    world = Deployment(lambda sender, *_: sender in silent, num_prefill=4)
    channel = world.loops["decode-0"]._channel
    assert isinstance(channel, FakeChannel)
    channel.max_peers = 3
    world.complete([Request(f"{place}", [1, place], 2) for place in range(8)])
    assert channel.connected == [GATEWAY, *channel.connected[1:]]
    assert len(channel.connected) == 3
    first = channel.connected[1]
    silent.add(first)
    world.turn(int((2 * SILENCE_S + 2) / TURN_S))
    assert first not in channel.connected
    world.complete([Request(f"{place}", [1, place], 2) for place in range(8, 16)])
    assert len(channel.connected) == 3
    assert first not in channel.connected


def test_the_gateway_remembers_the_nodes_that_were_lost_last() -> None:
    gateway = NetworkGateway(silence_s=1.0)
    for life in range(250):
        role = ("prefill", "decode")[life >= 220]
        status = NodeStatus(role, "127.0.0.1:1", "jax", 4, 8, "m")  # type: ignore[arg-type]
        gateway.receive(f"{role}-{life}", 1, status, 2.0 * life)
        gateway.tick(2.0 * life + 1)
    gone = list(gateway.gone)
    assert gone[:100] == [f"prefill-{life}" for life in range(120, 220)]
    assert gone[100:] == [f"decode-{life}" for life in range(220, 250)]
    with pytest.raises(NodesMissingError, match=r"^prefill-120 and .* other prefill node serves$"):
        gateway.check(5.0, 2.0 * 249)


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
@settings(max_examples=10)
def test_the_gateway_learns_what_nodes_have_though_messages_are_lost(
    seed: int, loss: float
) -> None:
    draw, is_quiet = Random(seed), False
    world = Deployment(
        lambda sender, receiver, message: not is_quiet and draw.random() < loss, num_prefill=2
    )
    held: dict[str, set[int]] = {name: set() for name in world.engines}
    for _ in range(20):
        for name, cache in world.caches.items():
            new = {draw.randrange(1, 1000) for _ in range(draw.randrange(3))} - held[name]
            gone = set(draw.sample(sorted(held[name]), draw.randint(0, len(held[name]))))
            held[name] = held[name] - gone | new
            tokens = np.zeros(len(new), np.int32)
            stored = BlockStored("GPU", tuple(new), None, tokens, 1, b"")
            cache.take_in(EventBatch(0, (BlockRemoved("GPU", tuple(gone)), stored)))
        world.turn(draw.randint(1, 4))
        if draw.random() < 0.1:
            world.new_gateway(2 + int(world.now / TURN_S))
    is_quiet = True
    world.turn(30)
    router = world.nodes._gateway._gateway._router
    for name in world.engines:
        index = router._node(name).index
        assert index is not None
        assert index.held == {"GPU": held[name], "CPU": set()}


def test_the_gateway_hears_what_a_node_has_got_before_the_end_that_tells_of_it() -> None:
    """Else the next request of the same prompt would go to another node."""
    world = Deployment()
    world.turn(4)
    step, cache = world.decode.step, world.caches["decode-0"]

    def step_and_publish() -> bool:
        was_busy = step()
        if world.decode._reports:
            blocks = BlockStored("GPU", (11,), None, np.arange(4, dtype=np.int32), 4, b"")
            cache.take_in(EventBatch(0, (blocks,)))
        return was_busy

    world.decode.step = step_and_publish  # type: ignore[method-assign]
    heard: list[Any] = []
    receive = world.nodes._gateway.receive

    def receive_and_note(peer: str, epoch: int, message: Any, now: float) -> None:
        heard.append(message)
        receive(peer, epoch, message, now)

    world.nodes._gateway.receive = receive_and_note  # type: ignore[method-assign]
    world.complete([Request("a", [1, 2, 3], 2)])
    kinds = [type(each) for each in heard if isinstance(each, CacheUpdate | Started | Finished)]
    assert kinds == [CacheUpdate, Started, Finished]
