"""Host hits: loaded into the lease, published and shared with other requests."""

from itertools import product

import pytest

from radixkv.kvcache import OpKind, OutOfBlocksError, RequestTooLargeError

from .tier_memory import TierMemory


@pytest.mark.parametrize(("write", "after"), [("back", "bbb"), ("exclusive", "ddd")])
def test_a_host_hit_is_loaded_into_the_lease(write, after):
    memory = TierMemory(4, 4, write)
    memory.demote([1, 2, 3])
    lease = memory.start([1, 2, 3, 4])
    assert (lease.num_hit_blocks, lease.num_ready_tokens, lease.num_shared_blocks) == (0, 0, 0)
    operation = memory.one(OpKind.HOST_TO_DEVICE)
    assert lease.loading == operation.id
    assert operation.destinations.tolist() == lease.block_table.tolist()[:3]
    assert memory.stats.promoted_blocks == 0
    memory.finish(operation)
    assert lease.loading is None
    assert (lease.num_promoted_blocks, lease.num_ready_tokens, lease.num_shared_blocks) == (3, 3, 3)
    assert memory.residency([1, 2, 3]) == after
    memory.compute(lease, [1, 2, 3, 4])
    memory.read(lease, [1, 2, 3, 4])
    assert memory.stats.promoted_blocks == 3
    memory.manager.check()


@pytest.mark.parametrize("write", ["back", "exclusive"])
def test_no_host_block_is_hit_after_the_middle_of_a_run(write):
    """Whatever else begins there on the host."""
    memory, on_host, on_device = TierMemory(6, 6, write), [3, 3], [1, 2, 3]
    memory.demote(on_host)
    memory.serve(on_device)
    assert memory.residency(on_host) == "hh"

    def common(tokens: tuple[int, ...], served: list[int]) -> int:
        return next((n for n in range(len(served)) if tokens[n] != served[n]), len(served))

    for tokens in product([1, 2, 3], repeat=3):
        assert memory.hit(tokens) == (common(tokens, on_device), common(tokens, on_host)), tokens


@pytest.mark.parametrize("write", ["back", "exclusive"])
@pytest.mark.parametrize(("ok", "num_good"), [([True, False, True], 1), ([False] * 3, 0)])
def test_blocks_that_do_not_arrive_are_computed(write, ok, num_good):
    memory = TierMemory(3, 3, write)
    memory.demote([1, 2, 3])
    lease = memory.start([1, 2, 3])
    memory.finish(memory.one(OpKind.HOST_TO_DEVICE), ok)
    assert lease.num_promoted_blocks == lease.num_ready_tokens == num_good
    memory.manager.check()
    memory.compute(lease, [1, 2, 3])
    memory.read(lease, [1, 2, 3])
    assert memory.residency([1, 2, 3]) == ("ddd" if write == "exclusive" else "bbb")
    memory.manager.check()


def test_a_loading_lease_waits_for_the_fence():
    memory = TierMemory(2, 2)
    memory.demote([1, 2])
    lease = memory.start([1, 2])
    operation = memory.one(OpKind.HOST_TO_DEVICE)
    memory.finish(operation, [True, False], fenced=False)
    assert lease.loading == operation.id  # it would compute into a block that is still written
    memory.fence(operation)
    assert lease.loading is None
    assert lease.num_ready_tokens == 1
    memory.compute(lease, [1, 2])
    memory.read(lease, [1, 2])
    memory.manager.check()


def test_a_match_of_half_of_a_host_run():
    memory = TierMemory(8, 8, block_size=2)
    memory.demote([1, 2, 3, 4, 5, 6])
    assert memory.hit([1, 2, 3, 4, 9, 9]) == (0, 2)
    lease = memory.start([1, 2, 3, 4, 9, 9])
    memory.settle()
    assert lease.num_promoted_blocks == 2
    memory.compute(lease, [1, 2, 3, 4, 9, 9])
    assert memory.residency([1, 2, 3, 4, 5, 6]) == "bbh"
    assert memory.residency([1, 2, 3, 4, 9, 9]) == "bbd"
    memory.manager.check()


def test_release_while_loading():
    memory = TierMemory(2, 2)
    memory.demote([1, 2])
    lease = memory.start([1, 2])
    operation = memory.one(OpKind.HOST_TO_DEVICE)
    memory.manager.release(lease)
    assert memory.tiers.take_cancelled() == [operation.id]
    assert memory.manager.available == 0  # its blocks may still be written
    memory.manager.check()
    assert not memory.finish(operation)
    assert memory.manager.available == 2
    assert memory.residency([1, 2]) == "hh"
    memory.serve([1, 2])
    memory.manager.check()


def test_release_before_the_load_is_dispatched():
    memory = TierMemory(2, 2)
    memory.demote([1, 2])
    lease = memory.start([1, 2])
    memory.manager.release(lease)
    assert memory.take() == []
    assert memory.tiers.take_cancelled() == []
    assert memory.manager.stats().free_blocks == 2
    assert memory.residency([1, 2]) == "hh"
    memory.manager.check()


@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_a_refused_admission_changes_nothing(write):
    memory = TierMemory(4, 4, write)
    memory.demote([1, 2])
    taken = memory.start([7, 8, 9])
    before = memory.manager.stats(), memory.drop_order(), memory.residency([1, 2])
    with pytest.raises(OutOfBlocksError) as caught:
        memory.start([1, 2])
    assert str(caught.value) == "needs 2 blocks, but only 1 are free or evictable"
    with pytest.raises(RequestTooLargeError) as too_large:
        memory.start([1, 2, 3, 4, 5])
    assert str(too_large.value) == "5 tokens need 5 blocks, but the pool has 4"
    assert (memory.manager.stats(), memory.drop_order(), memory.residency([1, 2])) == before
    assert memory.take() == []
    memory.manager.check()
    memory.manager.release(taken)


def test_exclusive_tiers_swap_evicted_and_loaded_blocks():
    memory = TierMemory(2, 2, "exclusive")
    memory.demote([1, 2])
    memory.serve([3, 4])
    lease = memory.start([1, 2])
    out, back = memory.take()
    assert (out.kind, back.kind) == (OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE)
    assert set(out.destinations.tolist()) == set(back.sources.tolist()) == {1, 2}
    memory.finish(out)
    memory.finish(back)
    memory.compute(lease, [1, 2])
    memory.read(lease, [1, 2])
    assert (memory.residency([1, 2]), memory.residency([3, 4])) == ("dd", "hh")
    assert memory.stats.dropped_blocks == 0
    memory.manager.check()


def test_an_old_match_after_another_request_moved_its_blocks():
    memory = TierMemory(4, 2, "exclusive")
    memory.demote([1, 2])
    match = memory.manager.match([1, 2])
    assert match.num_host_blocks == 2
    memory.start([1, 2])
    late = memory.manager.admit(match)
    assert late.loading is None
    memory.settle()
    memory.compute(late, [1, 2])
    memory.read(late, [1, 2])
    memory.manager.check()


# Others publish, or wait


def test_a_follower_waits_for_the_load_of_a_leader():
    memory = TierMemory(8, 4)
    memory.serve([1])
    memory.demote([1, 2, 3])
    memory.serve([1])
    leader = memory.start([1, 2, 3, 4])
    assert leader.loading is not None
    follower = memory.manager.match([1, 2, 3, 5])
    assert follower.next_block is not None
    assert follower.next_block == memory.manager.next_block(leader, [1, 2, 3, 4])
    memory.settle()
    after = memory.manager.match([1, 2, 3, 5])
    assert after.num_blocks == 3
    assert after.next_block != memory.manager.next_block(leader, [1, 2, 3, 4])


def test_two_loads_of_the_same_blocks_leave_one_copy():
    memory = TierMemory(4, 4)
    memory.demote([1, 2])
    first, second = memory.start([1, 2]), memory.start([1, 2])
    memory.settle()
    assert first.block_table.tolist() == second.block_table.tolist()
    assert memory.manager.stats().duplicate_blocks == 2
    assert memory.manager.stats().free_blocks == 2
    memory.compute(second, [1, 2])


@pytest.mark.parametrize("write", ["back", "exclusive"])
def test_publish_while_the_host_has_a_copy(write):
    memory = TierMemory(6, 4, write, block_size=2)
    slow = memory.start([1, 2, 3, 4, 9, 9])
    memory.demote([1, 2, 3, 4, 5, 6])
    memory.compute(slow, [1, 2, 3, 4, 9, 9])
    shared = "bb" if write == "back" else "dd"
    assert memory.residency([1, 2, 3, 4, 5, 6]) == f"{shared}h"
    assert memory.residency([1, 2, 3, 4, 9, 9]) == f"{shared}d"
    memory.read(slow, [1, 2, 3, 4, 9, 9])
    memory.manager.release(slow)
    memory.manager.check()


@pytest.mark.parametrize(("write", "ok"), [("back", True), ("back", False), ("exclusive", True)])
def test_publish_while_the_host_copy_is_in_flight(write, ok):
    memory = TierMemory(6, 4, write)
    slow = memory.start([1, 2, 3])
    memory.serve([1, 2])
    memory.manager.evict(2)
    landing = memory.one(OpKind.DEVICE_TO_HOST)
    memory.compute(slow, [1, 2, 3])
    assert memory.residency([1, 2, 3]) == "ddd"
    memory.manager.check()
    memory.finish(landing, ok)
    assert memory.residency([1, 2, 3]) == ("bbd" if ok and write == "back" else "ddd")
    memory.manager.check()


def test_publish_while_the_host_copy_is_promoted():
    memory = TierMemory(6, 2, "exclusive")
    slow = memory.start([1, 2, 3])
    memory.demote([1, 2])
    loading = memory.start([1, 2])
    operation = memory.one(OpKind.HOST_TO_DEVICE)
    assert memory.residency([1, 2]) == "ww"
    memory.compute(slow, [1, 2, 3])
    assert memory.residency([1, 2, 3]) == "ddd"
    memory.finish(operation, False)
    assert loading.num_ready_tokens == 0
    memory.compute(loading, [1, 2])
    assert loading.block_table.tolist() == slow.block_table.tolist()[:2]
    memory.manager.check()


# A request ends while it is loaded, and the host has given its copies up


def _left(tokens=(1, 2, 3)):
    """Release a request while its copy is under way; return the memory, and that operation."""
    memory = TierMemory(6, 3, "exclusive")
    memory.demote(tokens)
    lease = memory.start([*tokens, 4])
    operation = memory.one(OpKind.HOST_TO_DEVICE)
    memory.manager.release(lease)
    assert (lease.row, lease.loading) == (-1, None)
    memory.manager.check()
    return memory, operation


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize(
    ("ok", "left"), [(True, "ddd"), ([True, True, False], "dd"), (False, "")], ids=str
)
def test_blocks_moved_for_a_released_lease_are_published(ok, left, fenced):
    memory, operation = _left()
    assert memory.tiers.take_cancelled() == []
    stats = memory.manager.stats()
    assert (stats.live_leases, stats.private_blocks) == (0, 4)
    assert memory.finish(operation, ok, fenced=fenced)
    memory.manager.check()
    if not fenced:
        assert memory.residency([1, 2, 3]) == "www"
        assert memory.fence(operation)
        memory.manager.check()
    assert memory.residency([1, 2, 3]) == left
    stats = memory.manager.stats()
    assert (stats.cached_blocks, stats.idle_blocks) == (len(left), len(left))
    assert (stats.free_blocks, memory.stats.promoted_blocks) == (6 - len(left), len(left))
    lease = memory.start([1, 2, 3, 4])
    memory.compute(lease, [1, 2, 3, 4])
    memory.read(lease, [1, 2, 3, 4])
    memory.manager.check()


def test_a_queued_move_continues_after_its_lease_is_released():
    memory = TierMemory(6, 3, "exclusive")
    memory.demote([1, 2, 3])
    memory.manager.release(memory.start([1, 2, 3]))
    memory.manager.check()
    memory.settle()
    assert memory.residency([1, 2, 3]) == "ddd"


def test_a_detached_lease_keeps_the_blocks_before_it():
    memory = TierMemory(4, 4, "exclusive")
    memory.demote([1, 2, 3])
    memory.serve([1])
    lease = memory.start([1, 2, 3])
    operation = memory.one(OpKind.HOST_TO_DEVICE)
    memory.manager.release(lease)
    assert memory.manager.evict(4) == 0
    memory.finish(operation)
    assert memory.residency([1, 2, 3]) == "ddd"
    assert memory.manager.evict(1) == 1
    memory.settle()
    assert memory.residency([1, 2, 3]) == "ddh"  # last used as one path: the tail goes first


def test_blocks_that_another_request_computed_meanwhile_stay():
    memory, operation = _left(tokens=(1, 2))
    other = memory.start([1, 2])
    memory.compute(other, [1, 2])
    table = other.block_table.tolist()
    memory.finish(operation)
    assert other.block_table.tolist() == table
    stats = memory.manager.stats()
    assert (stats.duplicate_blocks, stats.free_blocks) == (2, 4)
    memory.read(other, [1, 2])
    memory.manager.check()


@pytest.mark.parametrize("keep", [[], [b""]])
@pytest.mark.parametrize("taken", [True, False])
def test_a_reset_ends_detached_leases(keep, taken):
    memory = TierMemory(6, 3, "exclusive")
    memory.demote([1, 2, 3])
    memory.serve([1])
    lease = memory.start([1, 2, 3])
    operations = memory.take() if taken else []
    memory.manager.release(lease)
    memory.reset(keep)
    memory.manager.check()
    left = "d" if keep else ""
    assert memory.residency([1, 2, 3])[:1] == ("d" if keep else "")
    for operation in operations:
        assert not memory.finish(operation)
    assert memory.residency([1, 2, 3]) == left
    assert memory.manager.stats().free_blocks == 6 - len(left)
    memory.manager.check()
