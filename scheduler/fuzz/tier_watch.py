"""What a cache with tiers does is watched where blocks pass, and reported as it happens."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...spec.adapters.tiers import TierEvents
from .protocols import TiersUnderTest


def watch(adapter: TiersUnderTest, told: TierEvents) -> None:
    """Report from now on what happens below the device, and to leases that end by themselves."""
    manager, tiers = adapter.manager, adapter.tiers
    tree, pool, reader = tiers.state.tree, tiers.state.host.pool, tiers.reader
    names: dict[Any, str] = {}  # of heirs of leases
    del tree.evict  # of a tree without tiers

    def watched_evict(num_blocks: int) -> np.ndarray:
        victims: np.ndarray = type(tiers.writer).evict(tiers.writer, num_blocks)
        told.evicted(victims.tolist())
        return victims

    def watched_adopt(node: Any, tokens: bytes, device_blocks: bytes) -> Any:
        adopted = type(tree).adopt(tree, node, tokens, device_blocks)
        blocks = memoryview(adopted.device_blocks).cast("i").tolist()
        told.published(adapter.publisher, blocks)
        return adopted

    def watched_allocate(num_blocks: int) -> np.ndarray:
        ids: np.ndarray = type(pool).allocate(pool, num_blocks)
        told.host_allocated(ids.tolist())
        return ids

    def watched_recycle(ids: np.ndarray) -> None:
        type(pool).recycle(pool, ids)
        told.host_freed(ids.tolist())

    def watched_release(lease: Any) -> None:
        leases = {**adapter.leases, **adapter.parking}
        name = next((name for name, each in leases.items() if each is lease), "")
        if adapter.ends_as_asked or not name:
            type(manager).release(manager, lease)
            return
        told.ends(name)
        type(manager).release(manager, lease)
        adapter.parking.pop(name, None)
        told.ended(name)

    def watched_abandon(lease: Any) -> None:
        type(reader).abandon(reader, lease)
        names.update({heir: f"op {heir.loading}" for heir in reader.heirs.values()})

    def watched_end_heir(promotion: Any) -> None:
        if promotion not in reader.heirs:
            return
        name = names.pop(reader.heirs[promotion])
        told.ends(name)
        type(reader).end_heir(reader, promotion)
        told.ended(name)

    def watched_reset() -> None:
        for heir in reversed(reader.heirs.values()):
            told.forgotten(names.pop(heir))
        type(reader).reset(reader)

    reader.abandon, reader.reset = watched_abandon, watched_reset
    reader.end_heir = watched_end_heir
    tiers.writer.evict, tree.adopt = watched_evict, watched_adopt
    pool.allocate, pool.recycle = watched_allocate, watched_recycle
    manager.release = watched_release
