"""Parking: preempted requests keep their KV in a tier and resume without recomputation."""

import pytest

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.policy import Priority
from radixkv.scheduler.request import Request, RequestStatus

from .copier import Fate, held_when
from .harness import chunks, names
from .tier_harness import TierHarness, alone, end_all, preempted, pressed


def check_tokens(harness: TierHarness) -> None:
    for request in harness.requests:
        assert request.output_tokens == alone(harness, request), request


@pytest.mark.parametrize("preempt", ["host", "storage"])
@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_parked_kv_is_not_recomputed(preempt, write):
    harness = pressed(preempt=preempt, host=HostConfig(32, write), storage=preempt == "storage")
    victim = preempted(harness)
    assert victim.request_id == "c" and victim.status is RequestStatus.PREEMPTED
    assert victim.parked is not None and not victim.parked.saved and victim.lease is None
    tables = victim.parked.lease.block_table.tolist()
    end_all(harness)
    while victim.lease is None:
        harness.step()
    assert victim.lease.block_table.tolist() != tables
    harness.drain()
    check_tokens(harness)
    stats = harness.scheduler.stats()
    assert (stats.preemptions, stats.parked, stats.resumed, stats.resumed_parked) == (1, 1, 1, 1)
    assert stats.recomputed_tokens == 0
    assert stats.prefill_tokens == 3 * 3 + 1  # the token that it was about to compute
    assert stats.resumed_hit_tokens == 3


def test_a_request_that_needs_a_block_waits_for_the_copy_while_others_decode():
    harness = TierHarness(7, 2, preempt="host")
    harness.copier.fate = held_when(OpKind.DEVICE_TO_HOST)
    for name, prompt in (("a", 3), ("b", 4), ("c", 3)):
        harness.submit([ord(name), 1, 2, 3][:prompt], 6, name=name)
    while not (plan := harness.step()).preempted:
        pass
    [victim] = plan.preempted
    assert chunks(plan) == [("b", 5, 1)]  # a has come to the end of its blocks, b has room for one
    for _ in range(4):
        plan = harness.step()
        assert (plan.chunks, plan.preempted, plan.admitted) == ([], [], [])
    assert harness.scheduler.stats().waits_for_blocks > 0
    assert victim.parked is not None and not victim.parked.saved
    assert harness.manager.available == 0
    end_all(harness)
    assert chunks(harness.step()) == [("a", 4, 1), ("b", 6, 1)]
    assert harness.scheduler.stats().preemptions == 1
    harness.drain()
    check_tokens(harness)


def test_no_other_request_is_preempted_if_blocks_in_flight_suffice():
    """The victim releases three blocks; two requests need one each."""
    harness = pressed()
    preempted(harness)
    for _ in range(10):
        assert harness.step().preempted == []
    end_all(harness)
    harness.drain()
    assert harness.scheduler.stats().preemptions == 1


def test_another_request_is_preempted_if_blocks_in_flight_do_not_suffice():
    harness = TierHarness(8, 1, preempt="host", max_running=8)
    harness.copier.fate = held_when(OpKind.DEVICE_TO_HOST)
    for name in "abcd":
        harness.submit([ord(name), 1], 5, name=name)
    while not harness.scheduler.stats().preemptions:
        harness.step()
    # Four requests of two blocks each. The first two need two blocks, which one victim has.
    assert harness.scheduler.stats().preemptions == 2
    assert names(harness.scheduler.running) == ["a", "b"]
    end_all(harness)
    harness.drain()
    check_tokens(harness)


def test_the_first_in_policy_order_gets_the_last_block():
    harness = TierHarness(5, 1, preempt="host", policy=Priority(), token_budget=4, max_running=3)
    harness.copier.fate = held_when(OpKind.DEVICE_TO_HOST)
    harness.add(Request("late", [1, 2], 3, priority=5))
    harness.add(Request("middle", [3], 4, priority=2))
    harness.add(Request("first", [4], 4, priority=1))
    plan = harness.step()
    while not plan.preempted:
        plan = harness.step()
    assert names(plan.preempted) == ["late"]
    assert [name for name, _, _ in chunks(plan)] == ["first"]
    end_all(harness)
    harness.drain()
    check_tokens(harness)


def test_parked_requests_resume_before_new_ones_start():
    """D7: while a request is parked or being parked, no new one is admitted, however small."""
    harness = pressed()
    victim = preempted(harness)
    late = harness.submit([9], name="late")
    for _ in range(5):
        assert harness.step().admitted == []
    end_all(harness)
    admitted: list[str] = []
    while late.status is RequestStatus.WAITING:
        admitted += names(harness.step().admitted)
    assert admitted == [victim.request_id, "late"]
    harness.drain()


@pytest.mark.parametrize("good", [0.0, 0.5])
def test_kv_that_was_not_written_out_is_recomputed(good):
    harness = pressed()
    victim = preempted(harness)
    flight = harness.copier.held(OpKind.DEVICE_TO_HOST)
    flight.fate = Fate(None, good)
    harness.copier.end(flight)
    assert victim.parked is not None and victim.parked.saved and victim.parked.failed
    harness.copier.fate = lambda operation: Fate()
    harness.drain()
    check_tokens(harness)
    stats = harness.scheduler.stats()
    # The device still holds its first block; the token after that is lost.
    assert (stats.resumed_parked, stats.recomputed_tokens) == (1, 1)


def test_without_room_on_the_host_the_victim_is_recomputed():
    """D6: room is reserved there before the blocks of the victim are released, or not at all."""
    harness = pressed(host=HostConfig(1))
    victim = preempted(harness)
    assert victim.parked is None
    end_all(harness)
    harness.drain()
    check_tokens(harness)
    stats = harness.scheduler.stats()
    assert (stats.preemptions, stats.parked, stats.resumed_parked) == (1, 0, 0)


def test_a_loading_request_is_preempted_without_a_copy():
    """D1: other engines cannot preempt a block in flight; here the copy is cancelled and fenced."""
    harness = TierHarness(8, 2, preempt="host")
    harness.submit(range(10, 17), name="seed")
    harness.run()
    harness.manager.evict(8)
    harness.step()
    harness.copier.deliver()
    first = harness.submit([1, 2, 3], 10, name="first")
    harness.step()
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    loads = harness.submit([*range(10, 17), 1], 3, name="loads")
    plan = harness.step()
    while not plan.preempted:
        plan = harness.step()
    assert plan.preempted == [loads] and loads.parked is None
    stalled = harness.step()
    assert stalled.chunks == [] and harness.scheduler.running == (first,)
    end_all(harness)
    assert chunks(harness.step())[0][0] == "first"
    harness.drain()
    check_tokens(harness)


def parked_in_storage() -> tuple[TierHarness, Request]:
    """Return a harness with a request whose KV is in storage only."""
    harness = pressed(num_blocks=6, preempt="storage", storage=True, host=HostConfig(4, "back"))
    victim = preempted(harness)
    end_all(harness)
    for _ in range(2):
        harness.step()  # written to the host, and from there to storage
    assert victim.parked is not None and not victim.parked.runs
    drop_all(harness)
    return harness, victim


def drop_all(harness: TierHarness) -> None:
    """Fill the host with blocks of other requests."""
    assert harness.manager.tiers is not None
    harness.manager.tiers.offloader.make_room(4)


def check_nothing_was_recomputed(harness: TierHarness, num_fetches: int) -> None:
    check_tokens(harness)
    assert harness.copier.seen[OpKind.STORAGE_TO_HOST] == num_fetches
    stats = harness.scheduler.stats()
    assert (stats.resumed_parked, stats.recomputed_tokens) == (1, 0)


def test_a_request_parked_in_storage_comes_back_from_there():
    harness, _ = parked_in_storage()
    harness.drain()
    check_nothing_was_recomputed(harness, num_fetches=1)


@pytest.mark.parametrize("times", [1, 3])
def test_blocks_that_the_host_drops_again_are_fetched_again(times):
    harness, victim = parked_in_storage()
    harness.copier.fate = held_when(OpKind.STORAGE_TO_HOST)
    for number in range(times):
        while harness.copier.seen[OpKind.STORAGE_TO_HOST] == number:
            harness.step()
        harness.copier.end(harness.copier.held(OpKind.STORAGE_TO_HOST))
        assert victim.prefetch is not None and victim.prefetch.done
        drop_all(harness)
    end_all(harness)
    harness.drain()
    check_nothing_was_recomputed(harness, num_fetches=times + 1)


def test_blocks_lost_by_storage_are_requested_once_and_recomputed():
    harness, _ = parked_in_storage()
    harness.memories.storage.clear()
    lookups = harness.copier.seen[OpKind.LOOKUP]
    harness.drain()
    check_tokens(harness)
    assert harness.copier.seen[OpKind.LOOKUP] == lookups + 1
    assert harness.scheduler.stats().recomputed_tokens > 0


def test_prefetches_of_new_requests_do_not_delay_a_parked_one():
    harness, _ = parked_in_storage()
    harness.submit([9] * 9, 1, name="new")  # as many blocks as the host has
    harness.drain()
    check_nothing_was_recomputed(harness, num_fetches=1)


def test_a_victim_that_has_computed_nothing_is_not_parked():
    harness = TierHarness(6, 2, preempt="host", token_budget=3, max_running=3)
    for name, length in (("a", 3), ("b", 3), ("c", 4)):
        harness.submit([ord(name), *range(length - 1)], 4, name=name)
    harness.drain()
    check_tokens(harness)


def test_blocks_that_running_requests_share_are_counted_once():
    """Otherwise too many requests would be preempted."""
    harness = TierHarness(8, 1, preempt="host")
    for name, last in (("a", 1), ("b", 2)):
        harness.submit([9, 8, last], 4, name=name)
    while len(harness.scheduler.running) < 2:
        harness.step()
    running, available = harness.scheduler.running, harness.manager.available
    held = [request.lease.num_blocks for request in running if request.lease is not None]
    assert sum(held) == 8 - available + 2  # two of them are shared
    preemption = harness.scheduler._batch.preemption
    assert preemption.copies_will_free(available)
    assert not preemption.copies_will_free(available + 1)
    harness.drain()


@pytest.mark.parametrize("count", [1, 2])
def test_who_waits_for_blocks_comes_last_in_the_policys_order(count):
    harness = TierHarness(7, 2, preempt="host")
    requests = [Request(str(number), [1, 2], 4) for number in range(4)]
    for number, request in enumerate(requests):
        request.arrival, request.num_computed = -number, 2
    requests[3].num_computed = 3  # its block has room for one more token
    waits = harness.scheduler._batch.preemption._last_to_grow(requests, count)
    assert waits == set(requests[:count])
    assert harness.scheduler.stats().waits_for_blocks == count
