"""Admission: pins the hit and reserves the other blocks, or refuses and changes nothing."""

import copy

import pytest

from radixkv.kvcache import CacheManager, OutOfBlocksError, RadixKVError, RequestTooLargeError

from .helpers import hit, serve, start
from .observe import observe


def test_a_cold_request_gets_a_block_for_every_token():
    manager = CacheManager(8, 4)
    lease = start(manager, range(9))
    assert lease.num_tokens == 9
    assert lease.num_blocks == len(set(lease.block_table.tolist())) == 3
    assert lease.num_hit_blocks == lease.num_shared_blocks == 0
    assert manager.available == 5
    manager.check()


def test_no_tokens_need_no_blocks():
    manager = CacheManager(2, 4)
    lease = start(manager, [])
    assert (lease.num_blocks, lease.num_tokens) == (0, 0)
    manager.publish(lease, [])
    manager.extend(lease, 1)
    assert lease.num_blocks == 1
    manager.check()


def test_a_partial_hit_shares_the_hit_and_reserves_the_rest():
    manager = CacheManager(8, 2)
    table = serve(manager, [1, 2, 3, 4, 5, 6])
    lease = start(manager, [1, 2, 3, 4, 9, 9, 9])
    assert lease.num_hit_blocks == lease.num_shared_blocks == 2
    assert lease.block_table.tolist()[:2] == table[:2]
    assert set(lease.block_table.tolist()[2:]).isdisjoint(table)
    assert lease.num_blocks == 4
    manager.check()


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3, 4]])
def test_a_full_hit_needs_no_block(tokens):
    manager = CacheManager(2, 2)
    table = serve(manager, [1, 2, 3, 4])
    lease = start(manager, tokens)
    assert lease.block_table.tolist() == table[: len(tokens) // 2]
    assert lease.num_hit_blocks == lease.num_blocks == len(tokens) // 2
    assert manager.stats().private_blocks == 0
    manager.check()


def test_a_full_hit_is_shared_by_many():
    manager = CacheManager(2, 2)
    serve(manager, [1, 2, 3, 4])
    leases = [start(manager, [1, 2, 3, 4]) for _ in range(100)]
    assert manager.available == 0
    manager.check()
    for lease in leases:
        assert manager.stats().idle_blocks == 0
        manager.release(lease)
    assert manager.available == 2
    manager.check()


def test_a_split_does_not_refresh_the_suffix():
    manager = CacheManager(6, 1)
    serve(manager, [1, 2, 3, 4])  # older
    serve(manager, [7, 8])
    manager.release(start(manager, [1, 2]))  # uses the first half only
    # The second half is still the least recently used, then comes [7, 8].
    assert manager.evict(2) == 2
    assert (hit(manager, [1, 2, 3, 4]), hit(manager, [7, 8])) == (2, 2)
    assert manager.evict(2) == 2
    assert (hit(manager, [1, 2]), hit(manager, [7, 8])) == (2, 0)
    manager.check()


def test_a_split_while_the_run_is_used():
    manager = CacheManager(8, 1)
    first = start(manager, [1, 2, 3, 4])
    manager.publish(first, [1, 2, 3, 4])
    second = start(manager, [1, 2, 9])
    manager.check()
    assert second.block_table.tolist()[:2] == first.block_table.tolist()[:2]
    manager.release(first)
    manager.check()
    assert manager.stats().idle_blocks == 2
    manager.release(second)
    manager.check()
    assert manager.stats().idle_blocks == 4


def test_eviction_takes_exactly_what_is_short():
    manager = CacheManager(6, 1)
    serve(manager, [1, 2, 3, 4])
    lease = start(manager, [5, 6, 7])  # two are free, so one must go
    assert manager.stats().evicted_blocks == 1
    assert hit(manager, [1, 2, 3, 4]) == 3
    assert lease.num_blocks == 3
    manager.extend(lease, 2)
    assert manager.stats().evicted_blocks == 3
    assert hit(manager, [1, 2, 3, 4]) == 1
    manager.check()


def test_nothing_is_evicted_while_blocks_are_free():
    manager = CacheManager(6, 1)
    serve(manager, [1, 2, 3])
    start(manager, [4, 5, 6])
    assert manager.stats().evicted_blocks == 0
    assert hit(manager, [1, 2, 3]) == 3


def test_the_hit_itself_is_never_evicted_for_the_rest():
    manager = CacheManager(4, 1)
    serve(manager, [7])
    serve(manager, [1, 2])
    lease = start(manager, [1, 2, 3, 4])  # [1, 2] and [7] are idle: only [7] may go
    assert lease.num_hit_blocks == 2
    assert hit(manager, [7]) == 0
    manager.check()


def test_too_little_room_when_the_hit_is_not_counted_as_evictable():
    manager = CacheManager(4, 1)
    serve(manager, [1, 2])
    held = start(manager, [9])
    match = manager.match([1, 2, 3, 4])
    before = observe(manager, [held], [(b"", [1, 2])])
    assert manager.available == 3
    assert manager.available_after(match) == 1
    with pytest.raises(OutOfBlocksError) as caught:
        manager.admit(match)
    assert str(caught.value) == "needs 2 blocks, but only 1 are free or evictable"
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert observe(manager, [held], [(b"", [1, 2])]) == before
    manager.check()


def test_a_request_larger_than_the_pool_is_refused():
    manager = CacheManager(4, 2)
    serve(manager, [1, 2, 3, 4])
    before = observe(manager, probes=[(b"", [1, 2, 3, 4])])
    with pytest.raises(RequestTooLargeError) as caught:
        start(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert str(caught.value) == "9 tokens need 5 blocks, but the pool has 4"
    error = caught.value
    assert (error.num_tokens, error.needed, error.num_blocks) == (9, 5, 4)
    assert isinstance(error, RadixKVError)
    assert observe(manager, probes=[(b"", [1, 2, 3, 4])]) == before
    assert start(manager, [1, 2, 3, 4, 5, 6, 7, 8]).num_blocks == 4


@pytest.mark.parametrize("namespace", [b"", b"a new one"])
def test_a_refusal_changes_nothing_at_all(namespace):
    manager = CacheManager(8, 1)
    serve(manager, [1, 2, 3])
    serve(manager, [1, 2, 5, 6])
    held = [start(manager, [8]), start(manager, [1, 2, 5])]
    probes = [
        (ns, tokens) for ns in (b"", namespace) for tokens in ([1, 2, 3], [1, 2, 5, 6], [8, 9])
    ]
    before = observe(manager, held, probes)
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8], list(range(9)), [0] * 1000):
        for _ in range(3):
            with pytest.raises((OutOfBlocksError, RequestTooLargeError)):
                start(manager, tokens, namespace)
    assert observe(manager, held, probes) == before
    manager.check()


# A match may be old when it is admitted


def test_a_match_that_has_become_longer_is_done_again():
    manager = CacheManager(8, 2)
    match = manager.match([1, 2, 3, 4])
    table = serve(manager, [1, 2, 3, 4])
    lease = manager.admit(match)
    assert (match.num_blocks, lease.num_hit_blocks) == (0, 2)
    assert lease.block_table.tolist() == table
    manager.check()


def test_a_match_that_has_become_shorter_is_done_again():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2, 3, 4])
    match = manager.match([1, 2, 3, 4])
    manager.evict(1)
    lease = manager.admit(match)
    assert (match.num_blocks, lease.num_hit_blocks) == (2, 1)
    manager.check()


def test_a_match_whose_blocks_are_gone_is_done_again():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2, 3, 4])
    match = manager.match([1, 2, 3, 4])
    manager.evict(8)
    other = start(manager, [5, 6, 7, 8, 9])
    lease = manager.admit(match)
    assert lease.num_hit_blocks == 0
    assert set(lease.block_table.tolist()).isdisjoint(other.block_table.tolist())
    manager.check()


def test_a_match_whose_run_was_split_is_done_again():
    manager = CacheManager(16, 1)
    serve(manager, [1, 2, 3, 4])
    matches = [manager.match(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 9])]
    start(manager, [1, 5])
    for match, num_hit_blocks in zip(matches, (4, 3, 2), strict=True):
        assert manager.admit(match).num_hit_blocks == num_hit_blocks
        manager.check()


def test_a_match_of_a_namespace_that_has_come_or_gone_is_done_again():
    manager = CacheManager(8, 2)
    early = manager.match([1, 2], b"a")
    serve(manager, [1, 2], b"a")
    late = manager.match([1, 2], b"a")
    assert manager.admit(early).num_hit_blocks == 1
    manager.reset()
    assert manager.admit(late).num_hit_blocks == 0
    manager.check()


def test_a_match_of_a_namespace_whose_only_request_has_ended_is_done_again():
    manager = CacheManager(8, 2)
    lease = start(manager, [9, 9], b"a")  # which published nothing
    match = manager.match([1, 2, 3, 4], b"a")
    manager.release(lease)
    late = manager.admit(match)
    manager.publish(late, [1, 2, 3, 4])
    assert hit(manager, [1, 2, 3, 4], b"a") == 2
    manager.release(late)
    manager.check()


def test_a_match_of_an_older_epoch_is_done_again():
    # As many changes after the reset as before it: the two caches must not be confused.
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 1, 5])
    manager.publish(lease, [1, 1])
    match = manager.match([1, 1, 5])
    manager.reset()
    other = start(manager, [2, 2])
    manager.publish(other, [2, 2])
    late = manager.admit(match)
    assert late.num_hit_blocks == 0
    assert set(late.block_table.tolist()).isdisjoint(other.block_table.tolist())
    manager.check()


def test_a_match_can_be_admitted_more_than_once():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2])
    match = manager.match([1, 2, 3])
    one, two = manager.admit(match), manager.admit(match)
    assert one.block_table[0] == two.block_table[0]
    assert one.block_table[1] != two.block_table[1]
    manager.check()


def test_available_after_is_what_admission_goes_by():
    manager = CacheManager(6, 1)
    serve(manager, [1, 2, 3])
    held = start(manager, [1, 2])  # of the hit below, only the third block is idle
    match = manager.match([1, 2, 3, 4])
    before = observe(manager, [held])
    assert (manager.available, manager.available_after(match)) == (4, 3)
    assert manager.available_after(manager.match([9])) == 4
    assert observe(manager, [held]) == before
    manager.evict(1)
    assert manager.available_after(match) == 4  # the match is old: counted anew


@pytest.mark.parametrize("is_held", [True, False])
def test_a_hit_that_ends_within_a_run_is_idle_only_if_no_lease_uses_the_run(is_held):
    manager = CacheManager(8, 1)
    lease = start(manager, [1, 2, 3, 4])
    manager.publish(lease, [1, 2, 3, 4])
    if not is_held:
        manager.release(lease)
    match = manager.match([1, 2, 9, 9])
    assert match.num_blocks == 2
    assert manager.available_after(match) == manager.available - (0 if is_held else 2)


def test_a_copy_of_a_manager_goes_its_own_way():
    # The helpers of these tests look ahead on copies.
    manager = CacheManager(4, 1)
    serve(manager, [1, 2])
    twin = copy.deepcopy(manager)
    twin.evict(2)
    twin.check()
    assert (hit(manager, [1, 2]), hit(twin, [1, 2])) == (2, 0)
    manager.check()


def test_a_hit_that_is_counted_late_is_what_was_hit_at_admission():
    """Blocks that the lease has published since are none of it."""
    manager = CacheManager(8, 2)
    first = manager.admit(manager.match([1, 2]))
    manager.publish(first, [1, 2])
    before = manager.stats().hit_blocks
    lease = manager.admit(manager.match([1, 2, 3, 4, 5, 6]), count_hit=False)
    manager.publish(lease, [1, 2, 3, 4, 5, 6])
    assert manager.stats().hit_blocks == before
    manager.count_hit(lease)
    assert manager.stats().hit_blocks == before + 1
