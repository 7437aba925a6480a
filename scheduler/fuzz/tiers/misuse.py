"""Wrong calls to a cache with tiers, each with the error that it must raise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ....kvcache.storage.keys import StorageNamespace
from ....spec.rules.cache import R5
from ..misuse import Call
from ..protocols import TiersUnderTest


def wrong_calls(adapter: TiersUnderTest) -> Iterator[Call]:
    """Yield all wrong calls for the current state."""
    yield from _wrong_configs(adapter)
    for name in adapter.leases:
        yield from _wrong_of_lease(adapter, name)
    for name in adapter.parked_requests:
        yield from _wrong_of_parked(adapter, name)


def storage_of(block_size: int) -> StorageNamespace:
    """Return a storage namespace with blocks of `block_size` tokens."""
    return StorageNamespace("model", "weights", "float32", block_size, (0, 1), (0, 1))


def _wrong_configs(adapter: TiersUnderTest) -> Iterator[Call]:
    """Yield wrong configurations."""
    kvcache = adapter.kvcache
    host, manager = kvcache.HostConfig, kvcache.CacheManager
    policies = "('exclusive', 'back', 'through')"
    for arguments, text in (
        ((0,), "CountError: num_blocks must be at least 1, got 0"),
        ((1, "through", -1), "CountError: hits must be at least 0, got -1"),
        ((1, "never"), f"HostConfigError: write must be one of {policies}, got 'never'"),
        ((1, "back", 1), "HostConfigError: hits needs write='through', got write='back'"),
    ):
        yield R5, text, partial(host, *arguments)
    yield R5, "HostConfigError: host must be a HostConfig, got 4", partial(manager, 1, 1, host=4)
    text = "StorageConfigError: storage must be a StorageNamespace, got str"
    yield R5, text, lambda: manager(1, 2, host=host(1), storage="s3://bucket")
    text = "StorageConfigError: storage needs a host tier, because its blocks pass through the host"
    yield R5, text, partial(manager, 1, 1, storage=storage_of(1))
    text = "StorageConfigError: storage has blocks of 3 tokens, but the cache of 2"
    yield R5, text, lambda: manager(1, 2, host=host(1), storage=storage_of(3))


def _wrong_of_lease(adapter: TiersUnderTest, name: str) -> Iterator[Call]:
    """Yield wrong calls with a lease."""
    lease, tiers, manager = adapter.leases[name], adapter.tiers, adapter.manager
    text = "StorageConfigError: where must be 'host' or 'storage', got 'disk'"
    yield R5, text, lambda: tiers.park(lease, [], "disk")
    if tiers.storage is None:
        text = "StorageConfigError: where is 'storage', but the cache has no storage"
        yield R5, text, lambda: tiers.park(lease, [], "storage")
    if lease.loading is not None:
        text = "LeaseError: the lease cannot be published while it is loading or parking"
        for call in (manager.publish, tiers.fork, tiers.park):
            yield R5, text, partial(call, lease, [])
        text = "CountError: num_tokens must be at least 0, got -1"
        yield R5, text, partial(manager.extend, lease, -1)


def _wrong_of_parked(adapter: TiersUnderTest, name: str) -> Iterator[Call]:
    """Yield wrong calls with a parked request."""
    manager, parked = adapter.manager, adapter.parked_requests[name]
    number = parked.num_tokens
    few = manager.match(np.zeros(number - 1, np.int32))
    if parked.saved:
        text = f"LeaseError: the request was parked with {number} tokens, "
        text += f"but resumes with {number - 1}"
        yield R5, text, lambda: manager.admit(few, parked)
        return
    lease = parked.lease
    text = "LeaseError: the parked request is not saved yet: its copy is still in flight"
    yield R5, text, lambda: manager.admit(few, parked)
    text = "LeaseError: the lease cannot be published while it is loading or parking"
    yield R5, text, lambda: manager.publish(lease, [])
    text = "LeaseError: the lease is being parked: it ends with its copy"
    yield R5, text, lambda: type(manager).release(manager, lease)
