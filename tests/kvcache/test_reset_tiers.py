"""Reset while copies are in flight and requests are parked."""

import pytest

from radixkv.kvcache import CacheManager, LeaseError, NamespaceError, OpKind

from .helpers import hit, serve, start
from .tier_memory import TierMemory


def test_a_reset_clears_every_tier():
    memory = TierMemory(4, 4)
    memory.demote([1, 2])
    memory.serve([3])
    lease = memory.start([4])
    assert memory.manager.reset() == 1
    assert memory.hit([1, 2]) == memory.hit([3]) == (0, 0)
    stats = memory.manager.stats()
    assert (stats.free_blocks, stats.live_leases) == (4, 0)
    assert memory.stats.host_free_blocks == 4
    memory.manager.release(lease)
    memory.manager.check()


def test_namespaces_are_kept_in_every_tier():
    memory = TierMemory(6, 6)
    for namespace in (b"old", b"kept"):
        memory.serve([1, 2, 3], namespace)
    memory.manager.evict(2)
    memory.manager.evict(2)
    memory.settle()
    memory.manager.reset(keep=[b"kept", b"unknown"])
    assert memory.residency([1, 2, 3], b"old") == ""
    assert memory.residency([1, 2, 3], b"kept") == "ddh"
    memory.manager.check()
    memory.serve([1, 2, 3], b"kept")


@pytest.mark.parametrize("keep", [b"kept", "kept", 1, ["kept"]])
def test_a_single_namespace_instead_of_a_list_is_refused(keep):
    memory = TierMemory(4, 4)
    lease = memory.start([1], b"kept")
    memory.serve([2])
    with pytest.raises(NamespaceError) as caught:
        memory.manager.reset(keep)
    assert str(caught.value) == "keep must be a list of namespaces, each of them bytes"
    assert memory.manager.epoch == 0
    assert memory.residency([2]) == "d"
    memory.manager.release(lease)


def test_a_kept_namespace_with_a_lease_in_it():
    memory = TierMemory(4, 4)
    lease = memory.start([1, 2, 3], b"kept")
    memory.compute(lease, [1, 2], b"kept")
    memory.manager.reset(keep=[b"kept"])
    assert memory.residency([1, 2], b"kept") == "dd"
    assert memory.manager.available == 4
    memory.manager.check()
    memory.serve([1, 2, 3], b"kept")


@pytest.mark.parametrize("keep", [[], [b""]])
def test_a_demotion_of_the_old_epoch(keep):
    memory = TierMemory(3, 3)
    memory.serve([1, 2, 3])
    memory.manager.evict(2)
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    memory.manager.reset(keep)
    assert memory.tiers.take_cancelled() == [operation.id]
    assert memory.residency([1, 2, 3]) == "d" * len(keep)
    assert memory.stats.host_free_blocks == 1  # two are still written
    memory.manager.check()
    memory.serve_without_copies([1, 7])
    assert not memory.finish(operation)
    assert memory.stats.host_free_blocks == 3
    assert memory.stats.late_completions == 1
    memory.manager.check()
    memory.demote([1, 2, 3])
    memory.serve([1, 2, 3])


@pytest.mark.parametrize("keep", [[], [b""]])
@pytest.mark.parametrize("write", ["back", "exclusive"])
def test_a_promotion_of_the_old_epoch(write, keep):
    memory = TierMemory(3, 3, write)
    memory.demote([1, 2])
    lease = memory.start([1, 2, 3])
    operation = memory.one(OpKind.HOST_TO_DEVICE)
    memory.manager.reset(keep)
    assert lease.loading is None
    assert memory.manager.available == 0  # two are still written, the third waits with them
    memory.manager.check()
    assert not memory.finish(operation)
    assert memory.manager.available == 3
    assert memory.residency([1, 2]) == ("hh" if keep and write == "back" else "")
    memory.manager.check()
    memory.serve([1, 2, 3])


def test_queued_operations_are_never_dispatched():
    memory = TierMemory(3, 3)
    memory.demote([1, 2])
    memory.start([1, 2])
    memory.manager.reset()
    assert memory.take() == []
    assert memory.tiers.take_cancelled() == []
    assert memory.manager.available == 3
    memory.manager.check()


def test_a_pending_write_through_is_cancelled():
    memory = TierMemory(3, 3, "through")
    lease = memory.start([1, 2])
    memory.compute(lease, [1, 2])
    memory.manager.reset()
    assert memory.take() == []
    memory.manager.check()


def test_a_write_to_storage_of_the_old_epoch():
    memory = TierMemory(2, 2, storage=True)
    memory.serve([1, 2])
    memory.manager.evict(2)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    storing = memory.one(OpKind.HOST_TO_STORAGE)
    memory.manager.reset()
    assert memory.stats.host_free_blocks == 0  # still read
    memory.manager.check()
    assert not memory.finish(storing)
    assert memory.stats.host_free_blocks == 2
    assert memory.stats.stored_blocks == 0
    memory.manager.check()


@pytest.mark.parametrize("kind", [OpKind.LOOKUP, OpKind.STORAGE_TO_HOST])
@pytest.mark.parametrize("answered", [True, False])
def test_a_prefetch_of_the_old_epoch(kind, answered):
    memory = TierMemory(2, 2, storage=True)
    memory.demote([1, 2])
    memory.manager.reset()
    prefetch = memory.tiers.prefetch([1, 2])
    operation = memory.one(OpKind.LOOKUP)
    if kind is OpKind.STORAGE_TO_HOST:
        memory.finish(operation)
        operation = memory.one(kind)
    if answered:
        memory.finish(operation, fenced=False)
    memory.manager.reset(keep=[b""])
    memory.manager.check()
    if answered:
        assert memory.fence(operation)
    else:
        assert not memory.finish(operation)
    assert prefetch is not None and prefetch.done
    assert memory.take() == []
    # What had come stays with its namespace; what comes later is KV of the old weights.
    num_come = 2 if answered and kind is OpKind.STORAGE_TO_HOST else 0
    assert memory.hit([1, 2]) == (0, num_come)
    assert memory.stats.host_free_blocks == 2 - num_come
    memory.manager.check()


def test_a_fork_of_the_old_epoch():
    memory = TierMemory(4, 2, block_size=2)
    lease = memory.start([1])
    memory.compute(lease, [1])
    other = memory.tiers.fork(lease, [1])
    operation = memory.one(OpKind.DEVICE_TO_DEVICE)
    memory.manager.reset()
    assert other.loading is None
    assert memory.manager.stats().free_blocks == 3
    memory.manager.check()
    memory.finish(operation)
    assert memory.manager.stats().free_blocks == 4


# Parked requests


@pytest.mark.parametrize(("keep", "ready"), [([], 0), ([b""], 4)])
def test_a_parked_request_of_the_old_epoch_resumes(keep, ready):
    tokens = [1, 2, 3, 4, 5]
    memory = TierMemory(4, 4, block_size=2)
    lease = memory.start(tokens)
    memory.compute(lease, tokens)
    parked = memory.tiers.park(lease, tokens)
    memory.settle()
    memory.manager.reset(keep)
    memory.manager.check()
    again = memory.manager.admit(memory.manager.match(tokens), parked)
    memory.settle()
    assert again.num_ready_tokens == ready  # its tail is of no namespace, and is not kept
    memory.compute(again, tokens)
    memory.read(again, tokens)
    memory.manager.release(again)
    assert memory.stats.host_free_blocks == 4 - ready // 2


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_request_is_being_parked(dispatched):
    memory = TierMemory(4, 4, block_size=2)
    lease = memory.start([1, 2, 3])
    memory.compute(lease, [1, 2, 3])
    parked = memory.tiers.park(lease, [1, 2, 3])
    assert parked is not None
    flight = memory.take() if dispatched else []
    memory.manager.reset()
    assert (parked.saved, parked.failed) == (True, True)
    assert memory.manager.available == 4
    memory.manager.check()
    again = memory.manager.admit(memory.manager.match([1, 2, 3]), parked)
    for operation in flight:
        assert not memory.finish(operation)
    memory.compute(again, [1, 2, 3])
    memory.manager.check()
    memory.manager.release(again)
    assert memory.stats.host_free_blocks == 4


def test_unpark_after_a_reset():
    memory = TierMemory(4, 4, block_size=2)
    lease = memory.start([1, 2, 3])
    memory.compute(lease, [1, 2, 3])
    parked = memory.tiers.park(lease, [1, 2, 3])
    memory.settle()
    memory.manager.reset()
    assert memory.stats.host_free_blocks == 2
    assert parked is not None
    memory.tiers.unpark(parked)
    assert memory.stats.host_free_blocks == 4
    memory.manager.check()


def test_a_lease_of_the_old_epoch_is_parked():
    memory = TierMemory(4, 4)
    lease = memory.start([1])
    memory.manager.reset()
    for call in (memory.tiers.park, memory.tiers.fork):
        with pytest.raises(LeaseError) as caught:
            call(lease, [1])
        assert str(caught.value) == "the lease is of epoch 0, but the cache is at epoch 1"


# Without tiers


def test_namespaces_are_kept_without_tiers():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2, 3, 4], b"old")
    serve(manager, [1, 2, 3, 4], b"kept")
    lease = start(manager, [1, 2, 5], b"kept")
    assert manager.reset(keep={b"kept"}) == 1
    assert hit(manager, [1, 2, 3, 4], b"old") == 0
    assert hit(manager, [1, 2, 3, 4], b"kept") == 2
    stats = manager.stats()
    assert (stats.free_blocks, stats.idle_blocks, stats.live_leases) == (6, 2, 0)
    manager.release(lease)  # ended with the reset
    manager.check()
    assert manager.evict(8) == 2
    assert manager.reset(keep={b"kept"}) == 2
    manager.check()
