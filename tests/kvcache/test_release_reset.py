"""Release ends a lease once; reset ends all leases."""

from collections.abc import Callable

import numpy as np
import pytest

from radixkv.kvcache import CacheManager, Lease, LeaseError, MatchError, RadixKVError

from .helpers import hit, serve, start
from .observe import observe

RELEASED = "the lease was released or belongs to another manager"

USES: list[Callable[[CacheManager, Lease], object]] = [
    lambda manager, lease: manager.publish(lease, []),
    lambda manager, lease: manager.publish(lease, [1, 2]),
    lambda manager, lease: manager.extend(lease, 0),
    lambda manager, lease: manager.extend(lease, 3),
    lambda manager, lease: manager.next_block(lease, [1, 2]),
]


def test_private_blocks_are_free_and_published_ones_idle():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3, 4, 5])
    manager.publish(lease, [1, 2, 3])
    manager.release(lease)
    stats = manager.stats()
    assert (stats.free_blocks, stats.idle_blocks, stats.live_leases) == (7, 1, 0)
    assert stats.private_blocks == 0
    manager.check()


def test_a_row_is_used_again():
    manager = CacheManager(8, 2)
    used = set()
    for i in range(200):
        lease = start(manager, [i, i, i])
        used.add(lease.row)
        manager.release(lease)
    assert len(used) == 1
    manager.check()


@pytest.mark.parametrize("use", [*USES, lambda manager, lease: manager.release(lease)])
def test_a_released_lease_is_refused(use):
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3])
    manager.publish(lease, [1, 2])
    manager.release(lease)
    other = start(manager, [1, 2, 3])  # takes the row
    before = observe(manager, [other], [(b"", [1, 2])])
    with pytest.raises(LeaseError) as caught:
        use(manager, lease)
    assert str(caught.value) == RELEASED
    assert isinstance(caught.value, RadixKVError)
    assert observe(manager, [other], [(b"", [1, 2])]) == before
    manager.check()


@pytest.mark.parametrize("use", [*USES, lambda manager, lease: manager.release(lease)])
def test_a_lease_of_another_manager_is_refused(use):
    mine, other = CacheManager(8, 2), CacheManager(8, 2)
    lease, foreign = start(mine, [1, 2, 3]), start(other, [1, 2, 3])
    assert lease.row == foreign.row
    before = observe(mine, [lease])
    with pytest.raises(LeaseError, match=f"^{RELEASED}$"):
        use(mine, foreign)
    assert observe(mine, [lease]) == before


NOT_LEASES = [None, 3, "r1", [], object(), type("Row", (), {"row": 0})()]


@pytest.mark.parametrize("given", NOT_LEASES)
@pytest.mark.parametrize("use", [*USES, CacheManager.release, CacheManager.count_hit])
def test_what_is_no_lease_is_refused(use, given):
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3])
    before = observe(manager, [lease])
    with pytest.raises(LeaseError) as caught:
        use(manager, given)
    assert str(caught.value) == f"lease must be a Lease, got {type(given).__name__}"
    assert observe(manager, [lease]) == before


@pytest.mark.parametrize("use", [CacheManager.admit, CacheManager.available_after])
@pytest.mark.parametrize("given", [[1, 2, 3], None, "r1", 3])
def test_what_is_no_match_is_refused(use, given):
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3])
    before = observe(manager, [lease])
    with pytest.raises(MatchError) as caught:
        use(manager, given)
    assert str(caught.value) == f"match must be a Match, got {type(given).__name__}"
    assert observe(manager, [lease]) == before
    with pytest.raises(MatchError, match=r"^match must be a Match, got Lease$"):
        use(manager, lease)


def test_leases_end_in_any_order():
    manager = CacheManager(12, 1)
    leases = [start(manager, [1, 2, i]) for i in (3, 4, 3, 5)]
    for lease, last in zip(leases, (3, 4, 3, 5), strict=True):
        manager.publish(lease, [1, 2, last])
    for i in (2, 0, 3, 1):
        manager.release(leases[i])
        manager.check()
    assert (manager.stats().idle_blocks, manager.stats().free_blocks) == (5, 7)


# Reset


def test_reset_forgets_everything():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2, 3, 4], b"a")
    lease = start(manager, [5, 6])
    manager.publish(lease, [5, 6])
    assert manager.epoch == 0
    assert manager.reset() == manager.epoch == 1
    assert hit(manager, [5, 6]) == hit(manager, [1, 2, 3, 4], b"a") == 0
    stats = manager.stats()
    assert (stats.free_blocks, stats.cached_blocks, stats.live_leases) == (8, 0, 0)
    assert manager.available == 8
    manager.check()
    assert manager.reset() == 2


def test_events_are_counted_across_a_reset():
    manager = CacheManager(4, 1)
    serve(manager, [1, 2])
    serve(manager, [1, 2])
    manager.evict(1)
    manager.reset()
    stats = manager.stats()
    assert (stats.admitted, stats.hit_blocks, stats.evicted_blocks) == (2, 2, 1)


@pytest.mark.parametrize("use", USES)
def test_a_lease_of_an_older_epoch_is_refused(use):
    manager = CacheManager(8, 2)
    old = start(manager, [1, 2, 3])
    manager.reset()
    new = start(manager, [1, 2, 3])
    assert new.row == old.row
    before = observe(manager, [new], [(b"", [1, 2])])
    with pytest.raises(LeaseError) as caught:
        use(manager, old)
    assert str(caught.value) == "the lease is of epoch 0, but the cache is at epoch 1"
    assert observe(manager, [new], [(b"", [1, 2])]) == before
    manager.check()


def test_releasing_a_lease_of_an_older_epoch_is_harmless_however_often():
    manager = CacheManager(8, 2)
    old = start(manager, [1, 2, 3])
    manager.publish(old, [1, 2])
    manager.reset()
    new = start(manager, [1, 2, 3])
    manager.publish(new, [1, 2])
    before = observe(manager, [new], [(b"", [1, 2])])
    for _ in range(3):
        manager.release(old)
    assert observe(manager, [new], [(b"", [1, 2])]) == before
    manager.check()


def test_a_lease_released_before_the_reset_is_harmless_after_it():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3])
    manager.release(lease)
    manager.reset()
    manager.release(lease)
    manager.check()
    assert manager.stats().free_blocks == 8


def test_rows_of_an_older_epoch_are_dead():
    manager = CacheManager(8, 2)
    rows = np.array([start(manager, [1]).row], np.int32)
    manager.reset()
    with pytest.raises(LeaseError, match=r"^rows \[0\] are not all rows of live leases$"):
        manager.extend_batch(rows)


# Stats


def test_the_counts_add_up():
    manager = CacheManager(12, 2)
    serve(manager, [1, 2, 3, 4])
    lease = start(manager, [1, 2, 5, 6, 7])
    manager.publish(lease, [1, 2, 5, 6])
    stats = manager.stats()
    assert stats.num_blocks == stats.free_blocks + stats.cached_blocks + stats.private_blocks == 12
    assert (stats.cached_blocks, stats.private_blocks, stats.idle_blocks) == (3, 1, 1)
    assert (stats.live_leases, stats.admitted, stats.hit_blocks) == (1, 2, 1)
    assert manager.available == stats.free_blocks + stats.idle_blocks == 9


def test_hits_are_counted_at_admission_and_only_there():
    manager = CacheManager(4, 1)
    serve(manager, [1, 2])
    held = start(manager, [7, 8])
    for _ in range(3):
        match = manager.match([1, 2, 3])
        with pytest.raises(RadixKVError):
            manager.admit(match)
    assert manager.stats().hit_blocks == 0
    manager.release(held)
    manager.admit(match)
    assert (manager.stats().hit_blocks, manager.stats().admitted) == (2, 3)


def test_a_hit_may_be_counted_later_than_at_admission():
    manager = CacheManager(8, 1)
    serve(manager, [1, 2])
    given_up = manager.admit(manager.match([1, 2, 3]), count_hit=False)
    manager.release(given_up)
    lease = manager.admit(manager.match([1, 2, 3]), count_hit=False)
    manager.publish(lease, [1, 2, 3])
    assert (manager.stats().hit_blocks, manager.stats().admitted) == (0, 3)
    manager.count_hit(lease)
    assert manager.stats().hit_blocks == 2, "the block published since is no hit"
    text = "^the lease was released or belongs to another manager$"
    with pytest.raises(LeaseError, match=text):
        manager.count_hit(given_up)
    manager.reset()
    with pytest.raises(LeaseError, match=r"^the lease is of epoch 0, but the cache is at epoch 1$"):
        manager.count_hit(lease)
    assert manager.stats().hit_blocks == 2


def test_stats_are_a_value():
    manager = CacheManager(4, 1)
    before = manager.stats()
    serve(manager, [1])
    assert (before.free_blocks, before.admitted) == (4, 0)
    with pytest.raises(AttributeError):
        before.free_blocks = 3  # type: ignore[misc]
