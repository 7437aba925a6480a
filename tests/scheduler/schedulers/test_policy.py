"""Policies: orders that are total and do not change."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.errors import ConfigError
from radixkv.scheduler.policy import Fcfs, Policy, Priority, as_policy
from radixkv.scheduler.request import Request

from .harness import Harness


def arrived(priorities: list[int]) -> list[Request]:
    requests = [Request(str(i), [1], 1, priority=p) for i, p in enumerate(priorities)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    return requests


@given(st.lists(st.integers(-3, 3)))
def test_fcfs_is_the_order_of_arrival(priorities):
    requests = arrived(priorities)
    assert sorted(reversed(requests), key=Fcfs().order) == requests


@given(st.lists(st.integers(-3, 3)))
def test_priority_is_by_number_and_by_arrival_among_equals(priorities):
    requests = arrived(priorities)
    expected = sorted(requests, key=lambda request: request.priority)  # stable
    assert sorted(reversed(requests), key=Priority().order) == expected


@pytest.mark.parametrize("policy", [Fcfs(), Priority()])
@given(priorities=st.lists(st.integers(-3, 3)))
def test_an_order_is_unique_and_does_not_change_as_a_request_goes_on(
    policy: Policy, priorities: list[int]
):
    requests = arrived(priorities)
    orders = [policy.order(request) for request in requests]
    assert len(set(orders)) == len(orders)
    for request in requests:
        request.append(3)
        request.num_preemptions += 1
    assert [policy.order(request) for request in requests] == orders


def test_a_policy_that_raises_leaves_no_request_behind():
    class ByUser:
        def order(self, request: Request) -> tuple[int, ...]:
            return {"known": 0}[request.request_id], request.arrival

    harness = Harness(policy=ByUser())
    with pytest.raises(KeyError):
        harness.scheduler.add(Request("unknown", [1], 1))
    assert not harness.scheduler.has_work
    assert not harness.scheduler.abort("unknown")
    harness.submit([1], name="known")
    harness.drain()


@pytest.mark.parametrize(
    "policy", [Fcfs, "fcfs", 1, object()], ids=["class", "name", "number", "object"]
)
def test_what_is_no_policy_is_refused(policy: Any):
    with pytest.raises(ConfigError, match=r"^policy must be an object with a method `order`, such"):
        as_policy(policy)


def test_the_default_is_first_come_first_served():
    assert isinstance(as_policy(None), Fcfs)
    chosen = Priority()
    assert as_policy(chosen) is chosen
