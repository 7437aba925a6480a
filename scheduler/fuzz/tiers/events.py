"""Events of a cache with tiers, reported by wrapping its methods."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....spec.adapters.tiers import TierEvents
from ..protocols import TiersUnderTest


def report_events(adapter: TiersUnderTest, events: TierEvents) -> None:
    """Report events of the host tier, and of leases that end by themselves, from now on."""
    manager, tiers = adapter.manager, adapter.tiers
    tree, pool, loader = tiers.state.tree, tiers.state.host.pool, tiers.loader
    names: dict[Any, str] = {}  # of detached leases
    del tree.evict  # of a tree without tiers

    def watched_evict(num_blocks: int) -> np.ndarray:
        victims: np.ndarray = type(tiers.offloader).evict(tiers.offloader, num_blocks)
        events.evicted(victims.tolist())
        return victims

    def watched_add(node: Any, tokens: bytes, device_blocks: bytes) -> Any:
        added = type(tree).add_device_blocks(tree, node, tokens, device_blocks)
        blocks = memoryview(added.device_blocks).cast("i").tolist()
        events.published(adapter.publisher, blocks)
        return added

    def watched_allocate(num_blocks: int) -> np.ndarray:
        ids: np.ndarray = type(pool).allocate(pool, num_blocks)
        events.host_allocated(ids.tolist())
        return ids

    def watched_recycle(ids: np.ndarray) -> None:
        type(pool).recycle(pool, ids)
        events.host_freed(ids.tolist())

    def watched_release(lease: Any) -> None:
        leases = {**adapter.leases, **adapter.parking}
        name = next((name for name, each in leases.items() if each is lease), "")
        if not name:  # the adapter releases it, and no longer knows it
            type(manager).release(manager, lease)
            return
        events.ends(name)
        type(manager).release(manager, lease)
        adapter.parking.pop(name, None)
        events.ended(name)

    def watched_detach(lease: Any) -> None:
        type(loader).detach(loader, lease)
        names.update({lease: f"op {lease.loading}" for lease in loader.detached.values()})

    def watched_release_detached(completion: Any) -> None:
        if completion not in loader.detached:
            return
        name = names.pop(loader.detached[completion])
        events.ends(name)
        type(loader).release_detached(loader, completion)
        events.ended(name)

    def watched_reset() -> None:
        for lease in reversed(loader.detached.values()):
            events.forgotten(names.pop(lease))
        type(loader).reset(loader)

    loader.detach, loader.reset = watched_detach, watched_reset
    loader.release_detached = watched_release_detached
    tiers.offloader.evict, tree.add_device_blocks = watched_evict, watched_add
    pool.allocate, pool.recycle = watched_allocate, watched_recycle
    manager.release = watched_release
