"""Host tier: when blocks are copied to it, and which blocks it drops."""

import pytest

from radixkv.kvcache import CacheManager, CountError, HostConfig, HostConfigError, OpKind

from .tier_memory import TierMemory


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_blocks": 0}, CountError, "num_blocks must be at least 1, got 0"),
        ({"num_blocks": 1, "hits": -1}, CountError, "hits must be at least 0, got -1"),
        (
            {"num_blocks": 1, "write": "never"},
            HostConfigError,
            "write must be one of ('exclusive', 'back', 'through'), got 'never'",
        ),
        (
            {"num_blocks": 1, "hits": 2},
            HostConfigError,
            "hits needs write='through', got write=None",
        ),
        (
            {"num_blocks": 1, "write": "back", "hits": 2},
            HostConfigError,
            "hits needs write='through', got write='back'",
        ),
    ],
)
def test_an_invalid_host_config_is_refused(arguments, error, message):
    with pytest.raises(error) as caught:
        HostConfig(**arguments)
    assert str(caught.value) == message


def test_without_a_host_tier_there_are_no_tiers():
    manager = CacheManager(2, 1)
    assert manager.tiers is None
    assert manager.stats().tiers is None


# To the host


@pytest.mark.parametrize("write", ["exclusive", "back"])
def test_evicted_blocks_move_to_the_host(write):
    memory = TierMemory(3, 3, write)
    memory.serve([1, 2, 3])
    assert memory.residency([1, 2, 3]) == "ddd"
    assert memory.manager.evict(2) == 2
    assert memory.manager.stats().free_blocks == 2  # at once
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    assert memory.residency([1, 2, 3]) == "dww"
    assert memory.hit([1, 2, 3]) == (1, 0)
    memory.finish(operation)
    assert memory.residency([1, 2, 3]) == "dhh"
    assert memory.hit([1, 2, 3]) == (1, 2)
    stats = memory.stats
    assert (stats.demoted_blocks, stats.dropped_blocks, stats.host_cached_blocks) == (2, 0, 2)
    memory.manager.check()


def test_write_through_when_published():
    memory = TierMemory(4, 4, "through")
    lease = memory.start([1, 2, 3])
    memory.compute(lease, [1, 2])
    memory.settle()
    assert memory.residency([1, 2, 3]) == "bb"
    memory.compute(lease, [1, 2, 3])
    memory.settle()
    assert memory.residency([1, 2, 3]) == "bbb"
    memory.manager.release(lease)
    memory.manager.evict(2)
    assert memory.take() == []  # an eviction copies nothing
    assert memory.residency([1, 2, 3]) == "bhh"
    assert memory.stats.demoted_blocks == 0


@pytest.mark.parametrize("length", [1, 2, 3])
def test_blocks_that_are_published_again_are_written_through_if_the_host_lacks_them(length):
    """Also if all blocks that the second request publishes are duplicates."""
    memory = TierMemory(6, 4, "through")
    tokens = [1, 2, 3][:length]
    first, second = memory.start(tokens), memory.start(tokens)
    memory.compute(first, tokens[:2])
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST), False)
    assert memory.residency(tokens) == "dd"[:length]
    memory.compute(second, tokens)
    memory.settle()
    assert memory.residency(tokens) == "bbb"[:length]
    memory.manager.check()


def test_write_through_after_some_hits():
    memory = TierMemory(6, 6, "through", hits=2)
    memory.serve([1, 2, 3])
    memory.serve([1, 2, 4])
    assert memory.residency([1, 2, 3]) == "ddd"
    memory.serve([1, 2, 5])
    assert memory.residency([1, 2, 3]) == "bbd"
    memory.serve([1, 2, 3])
    memory.serve([1, 2, 3])
    assert memory.residency([1, 2, 3]) == "bbb"


def test_a_split_keeps_the_hits_of_both_parts():
    memory = TierMemory(6, 6, "through", hits=2)
    memory.serve([1, 2, 3])
    memory.serve([1, 2, 3])
    memory.serve([1, 2, 4])
    assert memory.residency([1, 2, 3]) == "bbd"


@pytest.mark.parametrize("is_split_again", [False, True])
@pytest.mark.parametrize("num_above", [1, 2, 3])
@pytest.mark.parametrize("num_arrived", range(5))
def test_blocks_that_arrived_are_those_that_were_written_however_the_copy_was_split(
    num_above, num_arrived, is_split_again
):
    memory = TierMemory(8, 8, "through")
    memory.serve_without_copies([1, 2, 3, 4])
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    memory.manager.release(memory.start([*range(1, 1 + num_above), 9]))
    if is_split_again:
        memory.manager.release(memory.start([1, 8]))
    memory.finish(operation, [place < num_arrived for place in range(4)])
    assert memory.residency([1, 2, 3, 4]) == "bbbb"[:num_arrived] + "dddd"[num_arrived:]
    memory.manager.check()


def test_eviction_drops_blocks_with_too_few_hits():
    memory = TierMemory(3, 3, "through", hits=1)
    memory.serve([1, 2, 3])
    memory.serve([1, 2])
    memory.manager.evict(3)
    assert memory.take() == []
    assert memory.residency([1, 2, 3]) == "hh"
    assert memory.stats.dropped_blocks == 1
    memory.manager.check()


def test_the_rest_of_an_evicted_path_is_written_through():
    memory = TierMemory(4, 4, "through")
    lease = memory.start([1, 2, 3])
    memory.compute(lease, [1, 2, 3])
    memory.manager.release(lease)
    memory.manager.evict(1)
    memory.settle()
    assert memory.residency([1, 2, 3]) == "bb"


def test_write_through_as_far_as_there_is_room():
    memory = TierMemory(8, 3, "through")
    lease = memory.start([1, 2])
    memory.compute(lease, [1, 2])
    memory.compute(long := memory.start([3, 4]), [3, 4])
    memory.settle()
    assert memory.residency([1, 2]) == "bb"
    assert memory.residency([3, 4]) == "dd"
    memory.manager.release(lease)
    memory.manager.release(long)
    memory.manager.check()


def test_a_copy_that_several_published_paths_share_takes_its_room_once():
    memory = TierMemory(8, 4, "through")
    memory.serve([1, 2])
    for last in (3, 4):
        memory.serve_without_copies([1, 2, last])
    memory.settle()
    assert [memory.residency([1, 2, last]) for last in (3, 4)] == ["bbb", "bbb"]
    memory.manager.check()


def test_write_through_does_not_drop_the_blocks_before():
    memory = TierMemory(4, 2, "through")
    lease = memory.start([1, 2, 3])
    memory.compute(lease, [1])
    memory.settle()
    memory.compute(lease, [1, 2, 3])
    memory.settle()
    assert memory.residency([1, 2, 3]) == "bdd"
    memory.manager.release(lease)
    memory.manager.evict(3)
    assert memory.residency([1, 2, 3]) == "h"
    memory.manager.check()


def test_demotion_does_not_drop_the_blocks_before():
    memory = TierMemory(2, 1)
    memory.serve([1])
    memory.manager.evict(1)
    memory.settle()
    memory.serve([1, 2])
    assert memory.residency([1, 2]) == "bd"
    memory.manager.evict(2)
    memory.settle()
    assert memory.residency([1, 2]) == "h"
    stats = memory.stats
    assert (stats.demoted_blocks, stats.dropped_blocks) == (3, 1)
    memory.manager.check()


def test_a_copy_that_fails_in_part_keeps_its_good_blocks():
    memory = TierMemory(4, 4)
    memory.serve([1, 2, 3, 4])
    memory.manager.evict(4)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST), [True, True, False, True])
    assert memory.residency([1, 2, 3, 4]) == "hh"
    assert memory.stats.host_free_blocks == 2
    assert memory.stats.dropped_blocks == 2
    memory.manager.check()


def test_a_copy_that_fails_while_the_device_has_the_block():
    memory = TierMemory(4, 4, "through")
    lease = memory.start([1, 2])
    memory.compute(lease, [1, 2])
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST), False)
    assert memory.residency([1, 2]) == "dd"
    memory.manager.release(lease)
    memory.manager.check()


def test_good_blocks_of_an_unfenced_copy_are_hit_and_lost_ones_quarantined():
    memory = TierMemory(3, 3)
    memory.serve([1, 2, 3])
    memory.manager.evict(3)
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    memory.finish(operation, [True, False, False], fenced=False)
    assert memory.hit([1, 2, 3]) == (0, 1)
    assert memory.stats.host_free_blocks == 0
    memory.manager.check()
    memory.fence(operation)
    assert memory.stats.host_free_blocks == 2
    memory.serve([1])
    memory.manager.check()


# Room on the host


def test_the_host_drops_the_coldest_first():
    memory = TierMemory(2, 4)
    for tokens in ([1, 2], [3, 4], [5, 6]):
        memory.serve(tokens)
    assert memory.drop_order() == [(b"", (1, 2)), (b"", (1,)), (b"", (3, 4)), (b"", (3,))]
    memory.serve([1, 2])  # room for 5 6 is where 3 4 was, as 1 2 is being read
    # The device has a copy of 1 2, and evicts its head last.
    assert memory.drop_order() == [(b"", (1,)), (b"", (1, 2)), (b"", (5, 6)), (b"", (5,))]
    memory.manager.evict(1)  # now the host alone has the end of it, the warmest
    memory.settle()
    assert memory.residency([1, 2]) == "bh"
    assert memory.drop_order() == [(b"", (1,)), (b"", (5, 6)), (b"", (5,)), (b"", (1, 2))]


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_reset_counts_no_dropped_blocks(has_arrived):
    """It drops all blocks, however large the host is."""
    memory = TierMemory(3, 3)
    memory.serve([1, 2])
    memory.manager.evict(2)
    if has_arrived:
        memory.settle()
    memory.manager.reset()
    assert memory.stats.host_cached_blocks == memory.stats.dropped_blocks == 0


def test_redundant_copies_are_dropped_first():
    memory = TierMemory(3, 3)
    memory.demote([1, 2])
    memory.serve([1, 2])
    memory.serve([3])
    assert memory.residency([1, 2]) == "bb"
    memory.demote([3, 4])  # 2 goes first, and needs no copy; then 1, 4 and 3
    assert memory.stats.dropped_blocks == 1
    assert memory.residency([1, 2]) == "h"
    assert memory.residency([3, 4]) == "hh"


def test_a_redundant_copy_is_dropped_from_its_head():
    memory = TierMemory(5, 4)
    memory.demote([1, 2, 3])
    memory.serve([1, 2, 3])
    memory.serve([4, 5])
    memory.start([1, 2, 3])
    memory.manager.evict(2)
    memory.settle()
    # The device evicts 3 first, and need not copy it.
    assert (memory.residency([1, 2, 3]), memory.residency([4, 5])) == ("dbb", "hh")


def test_the_blocks_before_a_block_are_not_dropped_for_it():
    memory = TierMemory(3, 2)
    memory.demote([1])
    memory.serve([1, 2])
    memory.serve([3])
    assert (memory.residency([1, 2]), memory.residency([3])) == ("bd", "d")
    memory.manager.evict(3)  # 2, which has no copy, 1, which has one, and 3
    memory.settle()
    assert (memory.residency([1, 2]), memory.residency([3])) == ("h", "h")
    assert memory.stats.dropped_blocks == 1


def test_a_copy_of_recomputed_blocks_is_colder_than_the_blocks_before():
    memory = TierMemory(2, 2, "through")
    memory.serve([1, 2])
    memory.manager.evict(1)
    lease = memory.start([1, 2])
    memory.finish(memory.one(OpKind.HOST_TO_DEVICE), False)
    memory.compute(lease, [1, 2])
    memory.manager.check()
    assert memory.drop_order() == [(b"", (1, 2)), (b"", (1,))]


def test_with_write_through_redundant_copies_are_dropped_last():
    memory = TierMemory(2, 2, "through")
    memory.demote([1])
    memory.serve([2])
    assert (memory.residency([1]), memory.residency([2])) == ("h", "b")
    memory.serve([3])
    assert (memory.residency([1]), memory.residency([2])) == ("", "b")


def test_the_host_drops_the_last_released_blocks_last():
    memory = TierMemory(4, 4, "through")
    lease = memory.start([1, 2])
    memory.compute(lease, [1, 2])
    memory.settle()
    memory.serve([3, 4])
    assert memory.drop_order()[0] == (b"", (1, 2))
    memory.manager.release(lease)
    assert memory.drop_order()[0] == (b"", (3, 4))
    memory.manager.check()


def test_an_eviction_needs_no_room_on_the_host():
    memory = TierMemory(4, 1)
    memory.serve([1, 2, 3, 4])
    assert memory.manager.evict(4) == 4
    memory.settle()
    assert memory.residency([1, 2, 3, 4]) == "h"
    assert memory.stats.dropped_blocks == 3


def test_an_eviction_drops_when_everything_on_the_host_is_held():
    memory = TierMemory(2, 2)
    memory.demote([1, 2])
    lease = memory.start([1, 2])
    operation = memory.one(OpKind.HOST_TO_DEVICE)  # holds both host blocks
    memory.finish(operation)
    memory.compute(lease, [1, 2])
    parked = memory.tiers.park(lease, [1, 2])
    memory.settle()
    memory.serve([3, 4])
    assert memory.manager.evict(2) == 2
    assert memory.take() == []
    assert memory.residency([3, 4]) == ""
    assert memory.residency([1, 2]) == "hh"
    memory.manager.check()
    assert parked is not None
    memory.tiers.unpark(parked)
    memory.manager.check()


def test_an_eviction_while_a_copy_is_in_flight():
    memory = TierMemory(2, 2)
    memory.serve([1, 2])
    memory.manager.evict(2)
    landing = memory.one(OpKind.DEVICE_TO_HOST)
    lease = memory.start([3, 4])
    memory.compute(lease, [3, 4])
    memory.manager.release(lease)
    memory.manager.evict(2)  # what lands cannot be dropped
    assert memory.take() == []
    memory.finish(landing)
    assert (memory.residency([1, 2]), memory.residency([3, 4])) == ("hh", "")
    memory.manager.check()
