"""What the mixed scheduler does, one behaviour a test."""

import re

import pytest

from radixkv.kvcache import CacheManager, RadixKVError, RequestTooLargeError
from radixkv.scheduler.errors import ConfigError, RequestError, SchedulerError, StepOrderError
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.plan import StepPlan
from radixkv.scheduler.policy import Fcfs, Priority
from radixkv.scheduler.request import Request, RequestStatus

from .harness import Harness, alone


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.length) for chunk in plan.chunks]


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


# Chunks and the budget


def test_one_request_is_prefilled_in_chunks_that_fill_the_budget_and_then_decoded():
    harness = Harness(token_budget=8)
    request = harness.submit(range(100, 119), 3, name="a")
    assert [chunks(harness.step()) for _ in range(5)] == [
        [("a", 0, 8)],
        [("a", 8, 8)],
        [("a", 16, 3)],
        [("a", 19, 1)],
        [("a", 20, 1)],
    ]
    assert request.output_tokens == alone(request)[0]
    harness.drain()


def test_decode_rows_come_first_and_a_chunk_fills_the_rest():
    harness = Harness(token_budget=8)
    harness.submit([1, 2, 3], 9, name="a")
    harness.submit([4, 5], 9, name="b")
    harness.step()
    harness.submit(range(10, 30), name="c")
    plan = harness.step()
    assert chunks(plan) == [("a", 3, 1), ("b", 2, 1), ("c", 0, 6)]
    assert plan.num_decode == 2 and plan.num_tokens == 8
    harness.drain()


def test_a_prompt_in_progress_goes_before_a_new_one():
    harness = Harness(token_budget=8)
    harness.submit(range(10), 1, name="a")
    harness.submit(range(20, 30), 1, name="b")
    assert chunks(harness.step()) == [("a", 0, 8)]
    assert chunks(harness.step()) == [("a", 8, 2), ("b", 0, 6)]
    harness.drain()


def test_no_more_than_max_running_hold_blocks():
    harness = Harness(max_running=2, token_budget=8)
    for name in "abc":
        harness.submit([ord(name)], 2, name=name)
    assert chunks(harness.step()) == [("a", 0, 1), ("b", 0, 1)]
    assert names(harness.scheduler.running) == ["a", "b"]
    assert names(harness.scheduler.waiting) == ["c"]
    harness.drain()


def test_a_scheduler_without_work_plans_an_empty_step_that_counts_as_none():
    harness = Harness()
    assert harness.scheduler.schedule() == StepPlan() == harness.scheduler.schedule()
    assert not harness.scheduler.has_work
    assert harness.scheduler.stats().steps == 0


def test_the_whole_prompt_has_blocks_from_its_first_chunk():
    harness = Harness(num_blocks=8, block_size=4, token_budget=8)
    request = harness.submit(range(30))
    harness.step()
    assert request.lease is not None
    assert request.lease.num_blocks == 8 and request.num_computed == 8
    harness.drain()


@pytest.mark.parametrize("stop", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_a_stop_token_ends_a_request_and_is_kept(stop):
    harness = Harness()
    request = harness.add(Request("a", [7, 8], 6, stop_token_ids=stop))
    harness.run()
    assert (request.output_tokens, request.finish_reason) == alone(request)
    assert (request.finish_reason == "stop") == (request.output_tokens[-1] in stop)
    assert request.status is RequestStatus.FINISHED
    harness.drain()


def test_update_returns_what_ended_in_that_step():
    harness = Harness()
    short, long = harness.submit([1], 1), harness.submit([2], 3)
    ended = []
    for _ in range(3):
        before = len(harness.finished)
        harness.step()
        ended.append(harness.finished[before:])
    assert ended == [[short], [], [long]]


# The prefix cache

PREFIX = list(range(100, 112))
"""Three blocks."""


def test_followers_wait_for_the_leader_and_the_prefix_is_computed_once():
    harness = Harness(num_blocks=64, token_budget=8, max_running=4)
    for i in range(4):
        harness.submit([*PREFIX, i], 2, name="abcd"[i])
    assert chunks(harness.step()) == [("a", 0, 8)]
    assert names(harness.scheduler.waiting) == ["b", "c", "d"]
    # The third block is computed in this step, and published at its end.
    assert chunks(harness.step()) == [("a", 8, 5)]
    assert chunks(harness.step()) == [("a", 13, 1), ("b", 12, 1), ("c", 12, 1), ("d", 12, 1)]
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.prefill_tokens == len(PREFIX) + 4
    assert stats.hit_tokens == 3 * len(PREFIX)
    assert stats.waits_for_leader == 3  # in the second step; the first had no budget left
    assert harness.manager.stats().duplicate_blocks == 0


def test_followers_wait_only_for_the_block_they_need_next():
    harness = Harness(num_blocks=64, token_budget=32)
    harness.submit(PREFIX, name="a")
    harness.submit([*PREFIX[:4], 1, 2, 3, 4], name="b")
    harness.submit([5, 6, 7, 8], name="c")
    assert chunks(harness.step()) == [("a", 0, 12), ("c", 0, 4)]
    assert chunks(harness.step()) == [("b", 4, 4)]
    harness.drain()


def test_a_request_shorter_than_a_block_waits_for_nobody():
    harness = Harness(num_blocks=64, token_budget=32)
    harness.submit(PREFIX, name="a")
    harness.submit(PREFIX[:3], name="b")
    assert chunks(harness.step()) == [("a", 0, 12), ("b", 0, 3)]
    harness.drain()


def test_followers_of_another_namespace_do_not_wait():
    harness = Harness(num_blocks=64, token_budget=32)
    for name in ("a", "b"):
        harness.add(Request(name, PREFIX, 1, namespace=name.encode()))
    assert chunks(harness.step()) == [("a", 0, 12), ("b", 0, 12)]
    harness.drain()
    assert harness.scheduler.stats().hit_tokens == 0


def test_when_the_leader_is_aborted_a_follower_leads():
    harness = Harness(num_blocks=64, token_budget=8)
    a, b, c = (harness.submit([*PREFIX, i], name="abc"[i]) for i in range(3))
    harness.step()
    harness.abort(a)
    # Two blocks were published, the third is now b's to compute.
    assert chunks(harness.step()) == [("b", 8, 5)]
    assert chunks(harness.step()) == [("c", 12, 1)]
    assert (b.num_hit_tokens, c.num_hit_tokens) == (8, 12)
    harness.drain()
    assert harness.scheduler.stats().prefill_tokens == 8 + 5 + 1


def test_when_the_leader_is_aborted_in_a_step_what_it_computed_there_is_lost():
    harness = Harness(num_blocks=64, token_budget=8)
    a, b = (harness.submit([*PREFIX, i], name="ab"[i]) for i in range(2))
    harness.step(during=lambda plan: harness.abort(a) and None)
    assert chunks(harness.step()) == [("b", 0, 8)]
    harness.drain()
    assert b.num_hit_tokens == 0


def test_when_the_leader_is_preempted_its_follower_waits_until_it_is_back():
    harness = Harness(num_blocks=6, block_size=4, token_budget=3, max_running=3)
    first = harness.submit([1, 2, 3], 14, name="first")
    leader = harness.submit([*PREFIX, 0], 2, name="leader")
    follower = harness.submit([*PREFIX, 1], 2, name="follower")
    while not leader.num_preemptions:
        harness.step()
    assert harness.seen["preempted in prefill"] == 1
    harness.drain()
    assert first.num_preemptions == 0
    assert follower.num_hit_tokens == 12 and harness.computed[follower] == 1


def test_a_whole_hit_computes_one_token_and_writes_into_no_shared_block():
    harness = Harness(token_budget=32)
    harness.submit(PREFIX)
    harness.run()
    again = harness.submit(PREFIX, 2, name="again")
    assert chunks(harness.step()) == [("again", 11, 1)]  # the ghost checks what is written
    assert again.num_hit_tokens == 12
    harness.drain()
    assert harness.scheduler.stats().hit_tokens == 11


def test_generated_tokens_are_found_by_the_next_turn():
    harness = Harness(token_budget=32)
    first = harness.submit(PREFIX[:6], 7)
    harness.run()
    turn = harness.submit([*PREFIX[:6], *first.output_tokens, 50], name="turn")
    harness.run()
    assert turn.num_hit_tokens == 12  # the KV of the 13th token was never computed
    harness.drain()


def test_without_prefix_cache_nothing_is_shared_and_nobody_waits():
    harness = Harness(num_blocks=64, token_budget=64, prefix_cache=False)
    for name in "abc":
        harness.submit([*PREFIX, 1], 5, name=name)
    assert chunks(harness.step()) == [("a", 0, 13), ("b", 0, 13), ("c", 0, 13)]
    harness.drain()
    assert harness.scheduler.stats().hit_tokens == 0
    assert harness.manager.stats().cached_blocks == 0


def test_hits_are_counted_once_however_long_a_request_waits_for_blocks():
    harness = Harness(num_blocks=4, token_budget=16, max_running=2, reserve_tokens=None)
    harness.submit(PREFIX[:5], name="seed")
    harness.run()
    harness.submit([1, 2, 3, 4, 5, 6, 7, 8], 5, name="a")
    harness.submit([*PREFIX[:4], 9, 9], 3, name="b")
    for _ in range(5):
        harness.step()
        assert names(harness.scheduler.waiting) == ["b"]
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.admitted == 3
    assert stats.hit_tokens == 4
    assert stats.hit_tokens + stats.prefill_tokens == 5 + 8 + 6


# Preemption


def pressed(**options) -> Harness:
    """Six blocks for three requests that come to need three each; nothing is reserved."""
    defaults = {"num_blocks": 6, "block_size": 2, "token_budget": 8, "reserve_tokens": 0}
    harness = Harness(**{**defaults, **options})
    for name in "abc":
        harness.submit([ord(name), 1, 2], 4, name=name)
    return harness


def test_the_last_to_come_is_preempted_and_resumed_before_anybody_new():
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


def test_a_resumed_request_finds_what_it_published():
    harness = pressed(num_blocks=7)
    harness.drain()
    c = harness.requests[2]
    assert c.num_preemptions == 1
    stats = harness.scheduler.stats()
    # Its first block was not needed by the others: it is found, and does not count as a first hit.
    assert c.num_hit_tokens == 0 and stats.hit_tokens == 0
    assert stats.resumed_hit_tokens == 2
    assert stats.recomputed_tokens == 1


def test_a_resumed_request_computes_what_the_cache_lost_and_that_is_counted():
    harness = pressed(prefix_cache=False)
    harness.drain()
    stats = harness.scheduler.stats()
    # c had computed its three prompt tokens when a and b each needed a third block.
    assert stats.recomputed_tokens == 3
    assert stats.resumed_hit_tokens == 0
    assert stats.prefill_tokens == 3 * 3 + 4  # its first output is computed with the three lost
    assert stats.decode_tokens == 3 * 3 - 1


def test_priority_decides_who_goes_first_and_who_is_preempted():
    harness = Harness(
        num_blocks=6, block_size=2, token_budget=8, max_running=3, policy=Priority()
    )
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


def test_with_no_horizon_nobody_is_preempted():
    harness = pressed(reserve_tokens=None)
    harness.step()
    assert names(harness.scheduler.running) == ["a", "b"]  # 2 of 3 may grow to 3 blocks each
    harness.drain()
    assert harness.scheduler.stats().preemptions == 0


# The deadlocks and starvations of DESIGN that a scheduler without transfers can meet


def test_no_deadlock_of_two_prompts_that_each_hold_a_part():
    """D3: both need 3 of 5 blocks; in chunks of a block, both could hold two."""
    harness = Harness(num_blocks=5, block_size=4, token_budget=4, max_running=2)
    harness.submit(range(12), name="a")
    harness.submit(range(20, 32), name="b")
    for _ in range(3):
        harness.step()
        assert names(harness.scheduler.running) in (["a"], [])
    assert names(harness.finished) == ["a"]
    harness.drain()


def test_no_deadlock_of_a_request_larger_than_the_pool():
    """D5: it is refused at the door, and not when it has waited for ever."""
    harness = Harness(num_blocks=4, block_size=4)
    harness.submit(range(4))
    with pytest.raises(RequestTooLargeError, match=r"^17 tokens need 5 blocks, but the pool has 4$"):
        harness.submit(range(10), 8)
    assert len(harness.scheduler.waiting) == 1
    # The last token generated needs no KV: one less fits exactly.
    largest = harness.submit(range(50, 60), 7)
    harness.drain()
    assert len(largest.output_tokens) == 7


def test_no_starvation_of_preempted_requests_behind_small_new_ones():
    """D7: as long as one is parked, nobody new gets in, however small."""
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
    """D8: a stream of requests that hit does not overtake one that does not."""
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


# Aborts


def test_abort_of_a_waiting_request():
    harness = Harness(max_running=1)
    harness.submit([1], 3)
    waiting = harness.submit([2], 3)
    harness.step()
    assert harness.abort(waiting)
    assert not harness.abort(waiting)
    harness.drain()
    assert waiting.output_tokens == []
    assert harness.scheduler.stats().admitted == 1


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_abort_of_a_running_request_frees_its_blocks_at_once(num_steps):
    harness = Harness(token_budget=8)
    request = harness.submit(range(14), 9)
    for _ in range(num_steps):
        harness.step()
    assert harness.abort(request)
    stats = harness.manager.stats()
    assert stats.free_blocks + stats.idle_blocks == stats.num_blocks
    assert request.lease is None and not harness.scheduler.has_work
    harness.drain()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_within_a_step_frees_the_blocks_with_its_update(num_steps):
    harness = Harness(token_budget=8)
    request = harness.submit(range(14), 9)
    other = harness.submit([99], 9)
    for _ in range(num_steps):
        harness.step()
    held = []

    def abort(plan: StepPlan) -> None:
        before = harness.manager.stats()
        outputs = list(request.output_tokens)
        harness.abort(request)
        assert harness.manager.stats() == before
        assert request.output_tokens == outputs
        held.append(harness.manager.stats().private_blocks)

    harness.step(during=abort)
    assert request.lease is None
    assert harness.manager.stats().private_blocks < held[0]
    harness.drain()
    assert len(other.output_tokens) == 9


def test_abort_of_a_preempted_request():
    harness = pressed()
    while not harness.scheduler.stats().preemptions:
        harness.step()
    parked = next(r for r in harness.requests if r.status is RequestStatus.PREEMPTED)
    assert harness.abort(parked)
    new = harness.submit([9], name="new")
    harness.drain()
    assert new.finish_reason == "length"
    assert harness.scheduler.stats().resumed == 0


def test_abort_of_a_request_in_the_step_that_preempted_it():
    harness = pressed()
    while not (plan := harness.scheduler.schedule()).preempted:
        harness.scheduler.update(plan, [0] * len(plan.chunks))
    victim = plan.preempted[0]
    assert harness.scheduler.abort(victim.request_id)
    assert harness.scheduler.waiting == ()
    harness.scheduler.update(plan, [0] * len(plan.chunks))
    harness.manager.check()
    assert victim.status is RequestStatus.ABORTED


def test_abort_of_what_has_ended_or_never_was():
    harness = Harness()
    request = harness.submit([1])
    harness.run()
    assert not harness.abort(request)
    assert request.status is RequestStatus.FINISHED and request.finish_reason == "length"
    assert not harness.scheduler.abort("never was")


def test_the_id_of_an_aborted_request_may_be_used_again_within_the_same_step():
    harness = Harness()
    old = harness.submit([1, 2], 5, name="a")
    harness.step(during=lambda plan: harness.abort(old) and harness.submit([3], 2, name="a") and None)
    harness.drain()
    assert (old.status, len(old.output_tokens)) == (RequestStatus.ABORTED, 0)
    new = harness.requests[1]
    assert (new.status, len(new.output_tokens)) == (RequestStatus.FINISHED, 2)


def test_the_pool_is_whole_again_when_every_request_is_aborted_within_a_step():
    harness = pressed()
    harness.step()

    def abort_all(plan: StepPlan) -> None:
        for request in harness.requests:
            harness.abort(request)

    harness.step(during=abort_all)
    assert not harness.scheduler.has_work
    harness.drain()


# Refusals


def refused(error: type[RadixKVError], text: str):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def test_a_live_id_is_refused():
    harness = Harness()
    harness.submit([1], name="a")
    with refused(RequestError, "request 'a' is live already"):
        harness.submit([2], name="a")
    harness.drain()
    assert harness.submit([2], name="a").status is RequestStatus.WAITING


def test_a_request_that_was_added_before_is_refused():
    harness = Harness()
    ended, aborted = harness.submit([1], name="a"), harness.submit([1], name="b")
    harness.abort(aborted)
    harness.run()
    for request in (ended, aborted):
        text = f"request {request.request_id!r} was added before"
        with refused(RequestError, text):
            harness.scheduler.add(request)
    assert not harness.scheduler.has_work


@pytest.mark.parametrize(
    ("budget", "running", "reserve", "text"),
    [
        (4, 0, 0, "max_running must be at least 1 and at most token_budget 4, got 0"),
        (4, 5, 0, "max_running must be at least 1 and at most token_budget 4, got 5"),
        (0, 1, 0, "max_running must be at least 1 and at most token_budget 0, got 1"),
        (4, 1, -1, "reserve_tokens must be at least 0 or None, got -1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(budget, running, reserve, text):
    with refused(ConfigError, text):
        MixedScheduler(
            CacheManager(4, 4), token_budget=budget, max_running=running, reserve_tokens=reserve
        )


def test_calls_out_of_turn_are_refused_and_change_nothing():
    harness = Harness()
    scheduler = harness.scheduler
    with refused(StepOrderError, "update was called with a plan that is not in flight"):
        scheduler.update(StepPlan(), [])
    request = harness.submit([1, 2], 2)
    plan = scheduler.schedule()
    with refused(StepOrderError, "schedule was called again before update"):
        scheduler.schedule()
    with refused(StepOrderError, "update was called with a plan that is not in flight"):
        scheduler.update(StepPlan(), [])
    for tokens in ([], [1, 2]):
        text = f"update got {len(tokens)} tokens for 1 chunks"
        with refused(StepOrderError, text):
            scheduler.update(plan, tokens)
    assert request.num_computed == 0
    assert scheduler.update(plan, [1]) == []
    with refused(StepOrderError, "update was called with a plan that is not in flight"):
        scheduler.update(plan, [1])
    assert request.output_tokens == [1]
    harness.manager.check()


def test_the_errors_are_of_one_family():
    for error in (RequestError, ConfigError, StepOrderError):
        assert issubclass(error, SchedulerError) and issubclass(error, RadixKVError)
    assert issubclass(RequestError, ValueError) and issubclass(ConfigError, ValueError)


def test_stats_are_a_copy_and_the_default_policy_is_first_come_first_served():
    scheduler = MixedScheduler(CacheManager(4, 4), token_budget=4, max_running=2)
    scheduler.stats().steps = 7
    assert scheduler.stats().steps == 0
    assert isinstance(scheduler.policy, Fcfs)
    assert scheduler.reserve_tokens == 512
