"""Storing: host copies are written to storage once, under the keys of their path."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from radixkv.kvcache import CacheManager, HostConfig, HostConfigError, OpKind, StorageConfigError
from radixkv.kvcache.storage.keys import StorageNamespace
from radixkv.kvcache.tiers.host_tier import WritePolicy
from radixkv.kvcache.tiers.state import COPY_TIMEOUT_S, STORAGE_TIMEOUT_S

from .tier_memory import TierMemory, as_list


def test_store_and_lookup_use_the_same_keys():
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


@pytest.mark.parametrize("storage", [False, True])
def test_by_default_storage_has_blocks_that_were_never_evicted(storage):
    memory = TierMemory(4, 4, None, storage=storage)
    memory.serve([1, 2, 3])
    memory.settle()
    assert memory.stats.stored_blocks == (3 if storage else 0)
    assert memory.residency([1, 2, 3]) == ("bbb" if storage else "ddd")
    memory.manager.evict(3)
    memory.settle()
    assert memory.residency([1, 2, 3]) == "hhh"


def test_blocks_from_storage_are_not_stored_again():
    memory = TierMemory(2, 2, storage=True)
    memory.demote([1, 2])
    memory.manager.reset()
    memory.tiers.prefetch([1, 2])
    memory.settle()
    assert memory.stats.fetched_blocks == 2
    memory.demote([1, 2])
    assert memory.stats.stored_blocks == 2


def test_the_host_keeps_blocks_while_they_are_stored():
    memory = TierMemory(2, 2, storage=True)
    memory.serve([1, 2])
    memory.manager.evict(2)
    copying = memory.one(OpKind.DEVICE_TO_HOST)
    memory.finish(copying)
    storing = memory.one(OpKind.HOST_TO_STORAGE)
    assert (copying.timeout_s, storing.timeout_s) == (COPY_TIMEOUT_S, STORAGE_TIMEOUT_S)
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


def test_each_copy_of_a_store_has_its_own_result():
    memory = TierMemory(4, 4, storage=True)
    for tokens in ([1], [2, 3], [4]):
        memory.serve(tokens)
    memory.manager.evict(4)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    memory.finish(memory.one(OpKind.HOST_TO_STORAGE), [False, True, True, False])
    memory.settle()
    assert [run.stored for run in memory.tiers.state.host.idle_runs()] == [False, True, False]


def test_blocks_after_a_dropped_block_are_dropped():
    memory = TierMemory(2, 1, storage=True)
    memory.serve([1, 2])
    memory.manager.evict(1)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    storing = memory.one(OpKind.HOST_TO_STORAGE)
    lease = memory.start([1, 2])
    memory.finish(memory.one(OpKind.HOST_TO_DEVICE))
    memory.manager.release(lease)
    assert memory.residency([1, 2]) == "db"
    memory.manager.evict(2)  # no copy of the first; nothing finds the second without it
    assert memory.take() == []
    assert memory.residency([1, 2]) == ""
    memory.finish(storing)
    memory.settle()
    assert memory.tiers.state.host.pool.num_free == 1


@pytest.mark.parametrize("fetched", [True, False])
def test_blocks_in_storage_are_parked_there_at_once(fetched):
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


def test_a_key_is_computed_once(monkeypatch):
    made, make = [], StorageNamespace.block_keys

    def count(namespace, tokens, extras=b"", parent=None):
        made.extend(as_list(tokens))
        return make(namespace, tokens, extras, parent)

    monkeypatch.setattr(StorageNamespace, "block_keys", count)
    monkeypatch.setattr(CacheManager, "check", lambda manager: None)  # it makes them all anew
    memory = TierMemory(9, 9, storage=True)
    memory.serve([1, 2, 3, 4])
    memory.manager.evict(1)
    memory.settle()
    assert made == [1, 2, 3, 4]
    memory.serve([1, 2, 5])  # splits the run
    memory.tiers.prefetch([1, 2, 3, 4, 6])
    memory.settle()
    assert made[4:] == [6]
    memory.manager.evict(9)
    memory.settle()
    assert made[5:] == [5]
    memory.manager.reset()
    memory.tiers.prefetch([1, 2, 3, 4])
    memory.settle()
    memory.serve([1, 2, 3, 4])
    assert made[6:] == [1, 2, 3, 4]
    memory.tiers.prefetch([1, 2, 3, 7])
    assert made[10:] == [7]


def test_a_run_that_has_keys_grows():
    memory = TierMemory(7, 6, storage=True, block_size=2)
    manager, tokens = memory.manager, list(range(14))
    lease = manager.admit(manager.match(tokens))
    for published in (4, 6, 8, 10):  # the second begins a run that grows
        manager.publish(lease, tokens[:published])
        memory.tiers.prefetch(tokens)
        keys = memory.namespace.block_keys(tokens)
        assert memory.one(OpKind.LOOKUP).keys == tuple(keys[published // 2 :])
        manager.check()


def test_invalid_storage_is_refused():
    storage = StorageNamespace("m", "w", "float32", 2, (0, 1), (0, 1))
    with pytest.raises(StorageConfigError) as caught:
        CacheManager(4, 2, storage=storage)
    assert (
        str(caught.value) == "storage needs a host tier, because its blocks pass through the host"
    )
    with pytest.raises(StorageConfigError) as other:
        CacheManager(4, 3, host=HostConfig(2), storage=storage)
    assert str(other.value) == "storage has blocks of 2 tokens, but the cache of 3"
    url: Any = "redis://:hunter2@host"
    with pytest.raises(StorageConfigError) as third:
        CacheManager(4, 3, host=HostConfig(2), storage=url)
    assert str(third.value) == "storage must be a StorageNamespace, got str"
    size: Any = 2
    with pytest.raises(HostConfigError) as fourth:
        CacheManager(4, 3, host=size)
    assert str(fourth.value) == "host must be a HostConfig, got 2"


def test_keys_of_another_cache_are_refused_later_too():
    memory = TierMemory(2, 2, storage=True)
    assert memory.tiers.storage is not None
    with pytest.raises(StorageConfigError) as caught:
        memory.tiers.storage = replace(memory.namespace, block_size=2)
    assert str(caught.value) == "storage has blocks of 2 tokens, but the cache of 1"
    assert memory.tiers.storage == memory.namespace


# Another namespace


def test_blocks_kept_over_new_weights_have_new_keys():
    memory = TierMemory(2, 2, storage=True)
    memory.demote([1], b"kept")
    memory.reset(keep=[b"kept"])
    memory.tiers.prefetch([1, 2], b"kept")
    assert memory.tiers.storage is not None
    assert memory.tiers.storage != memory.namespace
    keys = memory.tiers.storage.block_keys([1, 2], b"kept")
    assert memory.one_of(OpKind.LOOKUP).keys == tuple(keys[1:])


@pytest.mark.parametrize("write", get_args(WritePolicy))
def test_what_is_kept_is_stored_under_its_new_keys(write):
    tokens = [1, 2, 3, 4]
    memory = TierMemory(6, 6, write, storage=True)
    memory.demote(tokens[:2], b"kept")
    memory.serve(tokens[:3], b"kept")
    memory.serve([1, 2], b"other")
    memory.reset(keep=[b"kept"])
    memory.storage.clear()
    lease = memory.start(tokens, b"kept")
    memory.settle()
    memory.compute(lease, tokens, b"kept")
    parked = memory.tiers.park(lease, tokens, "storage")
    assert parked is not None
    memory.settle()
    assert parked.saved and not parked.runs  # the host may drop all of it
    namespace = memory.tiers.storage
    assert namespace is not None
    keys = namespace.block_keys(tokens, b"kept")
    assert memory.storage == {
        key: (b"kept", tuple(tokens[:end])) for end, key in enumerate(keys, 1)
    }


def test_what_is_kept_stays_on_the_host_until_it_is_stored_anew():
    memory = TierMemory(2, 2, "through", storage=True)
    memory.serve([1, 2], b"kept")
    memory.reset(keep=[b"kept"])
    lease = memory.start([1, 2], b"kept")
    parked = memory.tiers.park(lease, [1, 2], "storage")
    assert parked is not None and parked.saved
    storing = memory.one(OpKind.HOST_TO_STORAGE)
    memory.finish(storing, [True, False])
    memory.manager.check()
    assert memory.stats.stored_blocks == 3
    assert memory.drop_order() == []  # storage lacks a block of the copy
    memory.tiers.unpark(parked)
    assert memory.drop_order() == [(b"kept", (1, 2)), (b"kept", (1,))]


@pytest.mark.parametrize("write", get_args(WritePolicy))
def test_storage_that_comes_later_gets_what_the_host_has(write):
    memory = TierMemory(3, 3, write)
    memory.demote([1, 2, 3])
    memory.start([1, 2])  # with a move to the device under way, if the policy moves
    memory.tiers.storage = memory.namespace
    memory.settle()
    keys = memory.namespace.block_keys([1, 2, 3])
    on_host = memory.residency([1, 2, 3])
    expected = {
        key: (b"", (1, 2, 3)[: end + 1])
        for end, (key, letter) in enumerate(zip(keys, on_host, strict=True))
        if letter in "bh"
    }
    assert memory.storage == expected and expected


def test_the_same_namespace_again_changes_nothing():
    memory = TierMemory(2, 2, "through", storage=True, record_events=True)
    memory.serve([1, 2])
    memory.manager.take_events()
    memory.tiers.storage = memory.namespace
    assert memory.take() == [] and memory.manager.take_events() is None
    lease = memory.start([1, 2])
    parked = memory.tiers.park(lease, [1, 2], "storage")
    assert parked is not None and parked.saved and not parked.runs


def queue(memory: TierMemory, kind: OpKind) -> None:
    """Let a cache that has nothing queue an operation with storage, which has a block."""
    if kind is OpKind.HOST_TO_STORAGE:
        memory.serve_without_copies([1])
        memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
        return
    [key] = memory.namespace.block_keys([1])
    memory.storage[key] = (b"", (1,))
    assert memory.tiers.prefetch([1]) is not None
    if kind is OpKind.STORAGE_TO_HOST:
        memory.finish(memory.one(OpKind.LOOKUP))


@pytest.mark.parametrize("kind", [OpKind.HOST_TO_STORAGE, OpKind.LOOKUP, OpKind.STORAGE_TO_HOST])
@pytest.mark.parametrize("has_other", [True, False])
@pytest.mark.parametrize("is_dispatched", [True, False])
def test_operations_with_another_namespace_have_no_effect(kind, has_other, is_dispatched):
    memory = TierMemory(2, 2, "through", storage=True, record_events=True)
    queue(memory, kind)
    flight = [memory.one(kind)] if is_dispatched else []
    before = memory.hit([1]), memory.stats.host_cached_blocks, memory.stats.stored_blocks
    memory.tiers.take_used()
    other = replace(memory.namespace, weights_revision="other") if has_other else None
    memory.tiers.storage = other
    memory.manager.check()
    assert memory.tiers.take_cancelled() == [operation.id for operation in flight]
    memory.manager.take_events()
    for operation in flight:
        assert not memory.finish(operation)
        memory.manager.check()
    assert memory.manager.take_events() is None
    assert (memory.hit([1]), memory.stats.host_cached_blocks, memory.stats.stored_blocks) == before
    # What the host has is stored in the other one, and nothing else goes on.
    stores = other is not None and kind is OpKind.HOST_TO_STORAGE
    assert set(memory.tiers.take_used()) <= set(other.block_keys([1]) if other else ())
    assert [operation.kind for operation in memory.take()] == [kind] * stores
    memory.settle()
