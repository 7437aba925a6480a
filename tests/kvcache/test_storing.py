"""What the host has a copy of is written to storage: once, under the keys of its path."""

import pytest

from radixkv.kvcache import CacheManager, HostConfig, OpKind, StorageConfigError
from radixkv.kvcache.storage.keys import StorageNamespace

from .tier_memory import TierMemory


def test_what_is_stored_has_the_keys_that_are_asked_for():
    memory = TierMemory(6, 6, "through", storage=True)
    memory.serve([1, 2, 3], b"lora")
    memory.serve([1, 2, 4, 5], b"lora")  # splits the run
    assert set(memory.storage) == {
        *memory.namespace.block_keys([1, 2, 3], b"lora"),
        *memory.namespace.block_keys([1, 2, 4, 5], b"lora"),
    }
    memory.manager.reset()
    prefetch = memory.tiers.prefetch([1, 2, 4, 5], b"lora")
    memory.settle()
    assert prefetch is not None and prefetch.num_blocks == 4
    memory.serve([1, 2, 4, 5], b"lora")


@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_a_copy_is_stored_once(write):
    memory = TierMemory(4, 4, write, storage=True)
    memory.demote([1, 2, 3])
    assert memory.stats.stored_blocks == 3
    if write == "exclusive":
        return  # comes back to the host as another copy
    memory.demote([1, 2, 3])
    memory.demote([1, 2, 3])
    assert memory.stats.stored_blocks == 3


def test_what_came_from_storage_is_not_stored():
    memory = TierMemory(2, 2, storage=True)
    memory.demote([1, 2])
    memory.manager.reset()
    memory.tiers.prefetch([1, 2])
    memory.settle()
    assert memory.stats.fetched_blocks == 2
    memory.demote([1, 2])
    assert memory.stats.stored_blocks == 2


def test_the_host_keeps_what_is_being_stored():
    memory = TierMemory(2, 2, storage=True)
    memory.serve([1, 2])
    memory.manager.evict(2)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    storing = memory.one(OpKind.HOST_TO_STORAGE)
    memory.serve_without_copies([3, 4])
    memory.manager.evict(2)
    assert memory.take() == []
    assert memory.residency([1, 2]) == "hh"
    memory.finish(storing, [True, False], fenced=False)
    assert memory.drop_order() == []
    memory.manager.check()
    memory.fence(storing)
    assert len(memory.drop_order()) == 2
    assert memory.stats.stored_blocks == 1


@pytest.mark.parametrize("fetched", [True, False])
def test_what_storage_has_is_parked_there_at_once(fetched):
    memory = TierMemory(5, 5, "through", storage=True)
    memory.serve([1, 2, 3])
    if fetched:
        memory.manager.reset()
        memory.tiers.prefetch([1, 2, 3])
        memory.settle()
    memory.serve([1, 2, 4])  # splits the run: both parts are stored
    lease = memory.start([1, 2, 3])
    memory.settle()
    memory.compute(lease, [1, 2, 3])
    parked = memory.tiers.park(lease, [1, 2, 3], "storage")
    assert parked is not None and parked.saved
    assert memory.take() == []
    assert len(memory.drop_order()) == 4
    memory.manager.check()


def test_storage_that_a_cache_cannot_have():
    storage = StorageNamespace("m", "w", "float32", 2, (0, 1), (0, 1))
    with pytest.raises(StorageConfigError) as caught:
        CacheManager(4, 2, storage=storage)
    assert str(caught.value) == "storage needs a host tier, through which its blocks pass"
    with pytest.raises(StorageConfigError) as other:
        CacheManager(4, 3, host=HostConfig(2), storage=storage)
    assert str(other.value) == "storage has blocks of 2 tokens, the cache of 3"
