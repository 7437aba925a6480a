"""The queues: which one a request leaves, and which departures make room."""

from __future__ import annotations

import pytest

from radixkv.scheduler.batching.queues import RequestQueues
from radixkv.scheduler.policy import Fcfs
from radixkv.scheduler.request import Request, RequestStatus

LIVE = [
    RequestStatus.WAITING,
    RequestStatus.LOADING,
    RequestStatus.RUNNING,
    RequestStatus.PREEMPTED,
]


@pytest.mark.parametrize("status", LIVE)
def test_who_leaves_a_queue_makes_room_if_it_held_blocks(status: RequestStatus) -> None:
    queues = RequestQueues(Fcfs())
    others = []
    for name, other in zip("abcd", LIVE, strict=True):
        request = Request(name, [1, 2], 3)
        request.status = other
        queues.number(request)
        if other is RequestStatus.WAITING:
            queues.add(request)
        else:
            queues.add_running(request)
            if other is RequestStatus.PREEMPTED:
                queues.suspend(request)
        others.append(request)
    assert queues.num_departures == 1, "the preempted one"
    [ends] = [each for each in others if each.status is status]
    others.remove(ends)
    queues.remove(ends)
    is_holder = status in (RequestStatus.LOADING, RequestStatus.RUNNING)
    assert queues.num_departures == 1 + is_holder
    assert queues.find(ends.request_id) is None and len(queues) == 3
    assert [*queues.waiting, *queues.running, *queues.preempted] == others
