"""Preemption in the mixed scheduler, and known deadlock and starvation patterns."""

import pytest

from radixkv.kvcache import RequestTooLargeError
from radixkv.scheduler.policy import Priority
from radixkv.scheduler.request import RequestStatus

from .harness import PREFIX, Harness, names, pressed


def test_the_last_arrival_is_preempted_and_resumes_before_new_requests():
    harness = pressed()
    harness.step()
    assert names(harness.scheduler.running) == ["a", "b", "c"]
    late = harness.submit([9], 1, name="late")
    harness.step()
    plan = harness.step()
    assert names(plan.preempted) == ["c"] and plan.admitted == []
    assert names(harness.scheduler.waiting) == ["c", "late"]
    c = plan.preempted[0]
    assert c.status is RequestStatus.PREEMPTED
    assert (c.num_computed, c.num_preemptions) == (0, 1)
    admitted = []
    while harness.scheduler.has_work:
        admitted += names(harness.step().admitted)
    assert admitted == ["c", "late"]
    assert late.num_preemptions == 0
    harness.drain()
    stats = harness.scheduler.stats()
    assert (stats.preemptions, stats.resumed, stats.admitted) == (1, 1, 4)


def test_a_resumed_request_hits_its_published_blocks():
    harness = pressed(num_blocks=7)
    harness.drain()
    c = harness.requests[2]
    assert c.num_preemptions == 1
    stats = harness.scheduler.stats()
    # The others did not need its first block: it is a hit, but not a first hit.
    assert c.num_hit_tokens == 0 and stats.hit_tokens == 0
    assert stats.resumed_hit_tokens == 2
    assert stats.recomputed_tokens == 1


def test_a_resumed_request_recomputes_evicted_blocks_and_counts_them():
    harness = pressed(prefix_cache=False)
    harness.drain()
    stats = harness.scheduler.stats()
    # c had computed its three prompt tokens when a and b each needed a third block.
    assert stats.recomputed_tokens == 3
    assert stats.resumed_hit_tokens == 0
    assert stats.prefill_tokens == 3 * 3 + 4  # its first output is computed with the three lost
    assert stats.decode_tokens == 3 * 3 - 1


def test_priority_decides_admission_and_preemption():
    harness = Harness(num_blocks=6, block_size=2, token_budget=8, max_running=3, policy=Priority())
    harness.submit([1, 1, 2], 4, name="low", priority=5)
    harness.submit([2, 1, 2], 4, name="middle", priority=3)
    harness.submit([3, 1, 2], 4, name="high", priority=-1)
    assert names(harness.scheduler.waiting) == ["high", "middle", "low"]
    preempted = []
    while harness.scheduler.has_work:
        preempted += names(harness.step().preempted)
    assert preempted == ["low"]
    assert names(harness.finished) == ["high", "middle", "low"]
    harness.drain()


def test_equal_priorities_go_in_order_of_arrival():
    harness = Harness(policy=Priority(), max_running=1)
    for name in "abc":
        harness.submit([ord(name)], name=name)
    harness.run()
    assert names(harness.finished) == ["a", "b", "c"]


def test_without_a_horizon_no_request_is_preempted():
    harness = pressed(reserve_tokens=None)
    harness.step()
    assert names(harness.scheduler.running) == ["a", "b"]  # 2 of 3 may grow to 3 blocks each
    harness.drain()
    assert harness.scheduler.stats().preemptions == 0


def test_a_token_lost_twice_counts_as_recomputed_twice():
    harness = Harness(
        num_blocks=10, block_size=1, token_budget=4, max_running=3, prefix_cache=False
    )
    for prompt, max_new_tokens in ((1, 6), (2, 7), (3, 3)):
        harness.submit([5] * prompt, max_new_tokens)
    harness.drain()  # the second preemption may find less computed than the first: books are kept
    stats = harness.scheduler.stats()
    assert (stats.preemptions, stats.recomputed_tokens) == (3, 10)


# Patterns of other engines that can occur without transfers


def test_no_deadlock_of_two_prompts_that_each_hold_a_part():
    """D3: each needs 3 of 5 blocks; if admitted block by block, each could hold two."""
    harness = Harness(num_blocks=5, block_size=4, token_budget=4, max_running=2)
    harness.submit(range(12), name="a")
    harness.submit(range(20, 32), name="b")
    for _ in range(3):
        harness.step()
        assert names(harness.scheduler.running) in (["a"], [])
    assert names(harness.finished) == ["a"]
    harness.drain()


def test_no_deadlock_of_a_request_larger_than_the_pool():
    """D5: it is refused at once, and does not wait forever."""
    harness = Harness(num_blocks=4, block_size=4)
    harness.submit(range(4))
    with pytest.raises(
        RequestTooLargeError, match=r"^17 tokens need 5 blocks, but the pool has 4$"
    ):
        harness.submit(range(10), 8)
    assert len(harness.scheduler.waiting) == 1
    # The last generated token needs no KV: one less fits exactly.
    largest = harness.submit(range(50, 60), 7)
    harness.drain()
    assert len(largest.output_tokens) == 7


def test_no_starvation_of_preempted_requests_behind_small_new_ones():
    """D7: while a request is preempted, no new one is admitted, however small."""
    harness = pressed()
    while not harness.scheduler.stats().preemptions:
        harness.step()
    parked = next(r for r in harness.requests if r.status is RequestStatus.PREEMPTED)
    for i in range(50):
        harness.submit([60 + i])
        plan = harness.step()
        if parked.status is not RequestStatus.PREEMPTED:
            break
        assert plan.admitted == []
    assert parked.status in (RequestStatus.RUNNING, RequestStatus.FINISHED)
    harness.drain()


def test_no_starvation_of_a_cold_request_behind_hits():
    """D8: a stream of requests with hits does not overtake one without."""
    harness = Harness(num_blocks=8, block_size=4, token_budget=8, max_running=2)
    harness.submit(PREFIX, name="seed")
    harness.run()
    harness.submit([*PREFIX, 0], 6, name="running")
    harness.step()
    cold = harness.submit(range(200, 220), 2, name="cold")  # 5 blocks; 8 - 4 are left
    for i in range(20):
        hit = harness.submit([*PREFIX, i], name=f"hit {i}")
        harness.step()
        if cold.status is RequestStatus.RUNNING:
            break
        assert hit.status is RequestStatus.WAITING
    assert cold.status is RequestStatus.RUNNING
    harness.drain()
