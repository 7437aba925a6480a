"""Requests over a host tier: admission, loading, and counts."""

import re

import pytest

from radixkv.kvcache import CacheManager
from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.kvcache.tiers.operations import Operation, OpKind
from radixkv.scheduler.errors import ConfigError
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.request import Request, RequestStatus

from .copier import Fate, held_when
from .harness import chunks, names
from .tier_harness import TierHarness, alone, pressed, storage_namespace

PROMPT = list(range(10, 19))
"""Four blocks of 2, and a token."""


def on_host(**options) -> TierHarness:
    """Return a harness whose host holds the four blocks of PROMPT, and whose device holds none."""
    harness = TierHarness(**{"num_blocks": 8, **options})
    harness.submit(PROMPT, name="seed")
    harness.run()
    harness.manager.evict(8)
    harness.step()
    harness.copier.deliver()
    return harness


def check_parts(harness: TierHarness) -> None:
    """Check that hits and computed tokens add up to every prompt."""
    stats = harness.scheduler.stats()
    assert stats.preemptions == 0
    hits = stats.hit_tokens + stats.host_hit_tokens + stats.storage_hit_tokens
    prompts = sum(request.num_prompt_tokens for request in harness.requests)
    assert hits + stats.prefill_tokens == prompts


# From the host


def test_host_hits_are_loaded_and_not_computed():
    harness = on_host()
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    again = harness.submit([*PROMPT[:8], 1, 2], 2, name="again")
    for _ in range(3):
        plan = harness.step()
        assert chunks(plan) == []
        assert again.status is RequestStatus.LOADING and again.lease is not None
        assert harness.scheduler.running == (again,)
    harness.copier.end(harness.copier.held(OpKind.HOST_TO_DEVICE))
    assert chunks(harness.step()) == [("again", 8, 2)]
    assert again.status is RequestStatus.RUNNING
    harness.drain()
    assert again.output_tokens == alone(harness, again)
    stats = harness.scheduler.stats()
    assert (stats.hit_tokens, stats.host_hit_tokens, stats.storage_hit_tokens) == (0, 8, 0)
    assert (again.num_hit_tokens, again.num_host_hit_tokens) == (0, 8)
    check_parts(harness)


def test_other_requests_continue_while_one_is_loading():
    harness = on_host()
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    harness.submit(PROMPT, 2, name="loads")
    harness.submit([1, 2, 3], 3, name="other")
    assert chunks(harness.step()) == [("other", 0, 3)]
    assert chunks(harness.step()) == [("other", 3, 1)]
    harness.copier.end(harness.copier.held(OpKind.HOST_TO_DEVICE))
    assert chunks(harness.step()) == [("other", 4, 1), ("loads", 8, 1)]
    harness.drain()


def test_requests_loaded_at_once_share_the_budget_in_order():
    harness = TierHarness(num_blocks=16, token_budget=4)
    prompts = {"first": PROMPT[:8], "second": [token + 50 for token in PROMPT[:8]]}
    for prompt in prompts.values():
        harness.submit(prompt)
    harness.run()
    harness.manager.evict(16)
    harness.step()
    harness.copier.deliver()
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    for name, prompt in prompts.items():
        harness.submit([*prompt, *range(6)], name=name)
    assert chunks(harness.step()) == []
    first, second = harness.copier.flights
    harness.copier.end(first)
    harness.copier.end(second)
    assert chunks(harness.step()) == [("first", 8, 4)]  # no chunk of nothing for the second
    assert chunks(harness.step()) == [("first", 12, 2), ("second", 8, 2)]
    harness.drain()
    check_parts(harness)


@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_a_whole_hit_on_the_host_computes_its_last_token(write):
    harness = on_host(host=HostConfig(16, write))
    again = harness.submit(PROMPT[:8], 2, name="again")
    harness.step()
    assert chunks(harness.step()) == [("again", 7, 1)]
    harness.drain()
    assert again.num_host_hit_tokens == 7
    check_parts(harness)


@pytest.mark.parametrize("good", [0.0, 0.25, 0.5, 0.75])
def test_blocks_that_fail_to_load_are_computed(good):
    harness = on_host()
    harness.copier.fate = lambda operation: Fate(0, good)
    again = harness.submit([*PROMPT, 1], 2, name="again")
    harness.step()
    arrived = int(8 * good)
    assert chunks(harness.step()) == [("again", arrived, min(8, 10 - arrived))]
    harness.drain()
    assert again.output_tokens == alone(harness, again)
    assert harness.scheduler.stats().host_hit_tokens == arrived
    check_parts(harness)


def test_a_request_waits_for_the_fence_of_a_failed_copy():
    harness = on_host()
    harness.copier.fate = lambda operation: Fate(None, 0.5, fenced=False)
    again = harness.submit([*PROMPT, 1], 2, name="again")
    harness.step()
    flight = harness.copier.held(OpKind.HOST_TO_DEVICE)
    harness.copier.end(flight)
    assert chunks(harness.step()) == []
    harness.copier.end(flight)
    assert chunks(harness.step()) == [("again", 4, 6)]
    harness.drain()
    assert again.output_tokens == alone(harness, again)


@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_followers_wait_for_a_loading_leader(write):
    harness = on_host(num_blocks=16, host=HostConfig(16, write))
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    leader = harness.submit([*PROMPT, 1], name="leader")
    follower = harness.submit([*PROMPT, 2], name="follower")
    other = harness.submit([5, 6], name="other")
    assert chunks(harness.step()) == [("other", 0, 2)]
    assert names(harness.scheduler.running) == ["leader"] and other.finish_reason == "length"
    assert follower.status is RequestStatus.WAITING
    harness.copier.end(harness.copier.held(OpKind.HOST_TO_DEVICE))
    assert chunks(harness.step()) == [("leader", 8, 2), ("follower", 8, 2)]
    harness.drain()
    stats = harness.scheduler.stats()
    assert (stats.host_hit_tokens, stats.hit_tokens) == (8, 8)
    assert leader.num_host_hit_tokens == follower.num_hit_tokens == 8
    check_parts(harness)


def test_device_hits_and_host_hits_are_counted_apart():
    harness = on_host()
    harness.submit(PROMPT[:5], name="first")  # brings two blocks back
    harness.run()
    second = harness.submit([*PROMPT, 3], name="second")
    harness.run()
    assert (second.num_hit_tokens, second.num_host_hit_tokens) == (4, 4)
    harness.drain()
    check_parts(harness)


def test_a_loading_request_counts_as_running():
    """D1, D2: it holds all of its blocks, and its growth is reserved."""
    harness = on_host(num_blocks=8, reserve_tokens=None)
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    harness.submit([*PROMPT, 1], 5, name="loads")  # 5 blocks, 7 at its end
    small = harness.submit([1, 2, 3], name="small")
    for _ in range(3):
        assert chunks(harness.step()) == []
    assert small.status is RequestStatus.WAITING
    harness.copier.end(harness.copier.held(OpKind.HOST_TO_DEVICE))
    harness.drain()
    assert harness.scheduler.stats().preemptions == 0


def test_max_running_counts_loading_requests():
    harness = on_host(max_running=1, num_blocks=12)
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    harness.submit(PROMPT, name="loads")
    harness.submit([1], name="small")
    assert chunks(harness.step()) == []
    assert names(harness.scheduler.waiting) == ["small"]
    harness.drain()


def test_no_deadlock_of_requests_that_each_load_a_part():
    """D2: each needs 5 of 8 blocks, 4 of them on the host: one gets all, the other waits."""
    harness = TierHarness(8, 2, host=HostConfig(16), max_running=2)
    for first in (10, 30):
        harness.submit(range(first, first + 9), name=f"seed {first}")
        harness.run()
    harness.manager.evict(8)
    harness.step()
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    for first in (10, 30):
        harness.submit([*range(first, first + 9), 1], name=f"again {first}")
    for _ in range(3):
        assert chunks(harness.step()) == []
        assert names(harness.scheduler.running) == ["again 10"]
    harness.copier.end(harness.copier.held(OpKind.HOST_TO_DEVICE))
    assert chunks(harness.step()) == [("again 10", 8, 2)]
    harness.copier.fate = held_when()
    harness.drain()
    assert harness.scheduler.stats().host_hit_tokens == 16


# Invalid options


@pytest.mark.parametrize(
    ("preempt", "host", "prefix_cache", "text"),
    [
        (
            "swap",
            True,
            True,
            "preempt must be one of ('recompute', 'host', 'storage'), got 'swap'",
        ),
        ("host", False, True, "preempt='host' needs a host tier"),
        ("storage", True, True, "preempt='storage' needs a storage tier"),
        ("host", True, False, "preempt='host' keeps KV in the prefix cache, which is off"),
    ],
)
def test_a_preempt_mode_without_its_tier_is_refused(preempt, host, prefix_cache, text):
    manager = CacheManager(8, 2, host=HostConfig(8) if host else None)
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        MixedScheduler(
            manager, token_budget=8, max_running=4, prefix_cache=prefix_cache, preempt=preempt
        )


def test_hits_of_a_request_preempted_before_it_began_are_counted():
    manager = CacheManager(6, 1, host=HostConfig(20))
    tiers = manager.tiers
    assert tiers is not None
    scheduler = MixedScheduler(manager, token_budget=8, max_running=4, reserve_tokens=0)
    lease = manager.admit(manager.match([1, 2, 3]))
    manager.publish(lease, [1, 2, 3])
    manager.release(lease)
    manager.evict(3)
    for operation in tiers.take_operations():
        tiers.complete(operation.id, [True] * operation.num_blocks)
    grows, loads = Request("grows", [8, 9], 4), Request("loads", [1, 2, 3, 4], 1)
    scheduler.add(grows)
    scheduler.add(loads)
    slow: list[Operation] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        slow += tiers.take_operations()
        if loads.num_preemptions:
            for operation in slow:
                tiers.complete(operation.id, [True] * operation.num_blocks)
            slow = []
        if plan.chunks:
            scheduler.update(plan, [7] * len(plan.chunks))
    stats = scheduler.stats()
    assert loads.num_preemptions == 1
    counted = stats.hit_tokens + stats.host_hit_tokens + stats.prefill_tokens
    assert counted == grows.num_prompt_tokens + loads.num_prompt_tokens


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("kinds", [(), (OpKind.HOST_TO_STORAGE,), tuple(OpKind)])
def test_requests_parked_in_storage_resume_with_another_storage(num_steps, kinds):
    harness = pressed(preempt="storage", storage=True, host=HostConfig(16, "through"))
    harness.copier.fate = held_when(*kinds)
    for _ in range(num_steps):
        harness.step()
    assert harness.manager.tiers is not None
    harness.manager.tiers.storage = storage_namespace(2, "other")
    harness.drain()
    for request in harness.requests:
        assert request.output_tokens == alone(harness, request)
