"""Lost messages between the gateway and nodes: each request ends exactly once."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from radixkv.scheduler.handoff.gateway_messages import DeliveryAck, Finished, RunPrefill
from radixkv.scheduler.request import Request, RequestStatus

from .fake_channel import SILENCE_S, TIMING, Deployment, is_of_request, tokens_of

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
    world = Deployment(lost(RunPrefill), max_attempts=2)
    request = Request("a", [1, 2, 3], 2)
    assert world.complete([request]) == [request]
    assert world.nodes.failures == {"a": "prefill-0 does not acknowledge the request"}
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
