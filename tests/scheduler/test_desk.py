"""The desk of a deployment, without nodes: where attempts go, and what becomes of requests."""

from __future__ import annotations

import pytest

from radixkv.scheduler.errors import RequestError, RoutingError
from radixkv.scheduler.handoff import Hits, Key
from radixkv.scheduler.handoff.gateway import (
    Desk,
    GiveUp,
    Run,
)
from radixkv.scheduler.request import Request, RequestStatus


def make(*decode: str, now: float = 0.0) -> Desk:
    desk = Desk(4, backoff_s=1.0, request_s=100.0)
    desk.add_prefill("p0", 20)
    for name in decode:
        desk.add_decode(name, 20)
    desk.tick(now)
    return desk


def begin(desk: Desk, now: float = 0.0) -> Run:
    """The one thing that is to be done."""
    desk.tick(now)
    runs = [action for action in desk.take_actions() if isinstance(action, Run)]
    assert len(runs) == 1
    return runs[0]


def test_a_request_ends_with_its_tokens_and_counts() -> None:
    desk, request = make("d0"), Request("a", [1, 2, 3, 4, 5], 2)
    desk.add_request(request, 0.0)
    run = begin(desk)
    assert (run.key, run.route) == (("a #0.0", 1), ("p0", "d0"))
    desk.started(run.key)
    desk.finished(run.key, (7, 8), Hits(4, 1, 0), 3)
    assert desk.take_ended() == [request]
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "length")
    assert request.output_tokens == [7, 8]
    assert (request.num_hit_tokens, request.num_host_hit_tokens) == (4, 1)
    assert request.num_preemptions == 3
    assert desk.num_open == 0


def test_who_had_no_room_is_not_asked_again_while_there_are_others() -> None:
    desk = make("d0", "d1")
    desk.add_request(Request("a", [1, 2, 3], 2), 0.0)
    run = begin(desk)
    assert run.route.decode == "d0"
    desk.prefill_failed(run.key, "out of blocks", is_busy=True)
    assert begin(desk, now=1.0).route.decode == "d1"


def test_what_a_lost_node_had_is_tried_again() -> None:
    desk = make("d0", "d1")
    desk.add_request(Request("a", [1, 2, 3], 2), 0.0)
    run = begin(desk)
    desk.started(run.key)
    desk.lose("d0")
    assert desk.take_actions() == [GiveUp(run.key, "cancelled")]
    again = begin(desk, now=1.0)
    assert (again.key, again.route.decode) == (("a #0.0", 2), "d1")
    with pytest.raises(RoutingError, match=r"^there is no node 'd0'$"):
        desk.lose("d0")


def test_requests_wait_for_nodes_to_come() -> None:
    desk = make()
    desk.add_request(Request("a", [1, 2, 3], 2), 0.0)
    desk.tick(0.0)
    assert desk.take_actions() == [GiveUp(Key("a #0.0", 1), "cancelled")]
    desk.add_decode("d0", 20)
    assert begin(desk, now=1.0).route.decode == "d0"


def test_failures_have_their_reasons() -> None:
    desk = make("d0")
    large, late = Request("large", range(100), 1), Request("late", [1], 1)
    desk.add_request(large, 0.0)
    desk.tick(0.0)
    assert desk.take_ended() == [large]
    assert "25 blocks" in desk.failures["large"]
    desk.add_request(late, 0.0)
    begin(desk)
    desk.tick(100.0)
    assert desk.take_ended() == [late]
    assert desk.failures["late"] == "not done in time: attempt 1 has not ended"
    assert (late.status, late.finish_reason) == (RequestStatus.ABORTED, "abort")


def test_a_failure_has_the_name_that_the_client_gave() -> None:
    desk = make("d0")
    desk.add_request(Request("a", [1, 2, 3], 2), 0.0)
    key = begin(desk).key
    assert key.request_id != "a"
    reason = "3 prompt tokens and 2 new ones are more than max_model_len 4"
    desk.prefill_failed(key, f"request {key.request_id!r}: {reason}", is_final=True)
    desk.take_ended()
    assert desk.failures == {"a": f"request 'a': {reason}"}


def test_a_request_is_taken_in_once() -> None:
    desk, request = make("d0"), Request("a", [1], 1)
    desk.add_request(request, 0.0)
    with pytest.raises(RequestError, match=r"^request 'a' is live already$"):
        desk.add_request(Request("a", [2], 1), 0.0)
    assert desk.abort("a")
    assert not desk.abort("a")
    with pytest.raises(RequestError, match=r"^request 'a' was added before$"):
        desk.add_request(request, 0.0)


def test_a_request_may_wait_for_its_turn_as_long_as_it_takes() -> None:
    desk = Desk(4)
    desk.add_request(Request("a", [1], 1), 0.0)
    desk.tick(1e9)
    desk.add_prefill("p", 8)
    desk.add_decode("d", 8)
    desk.tick(2e9)
    [run] = [action for action in desk.take_actions() if isinstance(action, Run)]
    desk.started(run.key)
    desk.finished(run.key, [7], Hits(), 0)
    [ended] = desk.take_ended()
    assert (ended.output_tokens, desk.failures) == ([7], {})
