"""All observable state of a cache manager, and what it does next, as a value to compare."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from radixkv.kvcache import CacheManager, Lease

Probe: TypeAlias = tuple[bytes, Sequence[int]]
"""A namespace and tokens to match."""


def eviction_order(manager: CacheManager, probes: Iterable[Probe]) -> list[list[int]]:
    """Return the hits of each probe after each single-block eviction from a copy."""
    twin, probes = copy.deepcopy(manager), list(probes)
    order = []
    while twin.evict(1):
        order.append([twin.match(tokens, namespace).num_blocks for namespace, tokens in probes])
    return order


def allocation_order(manager: CacheManager) -> list[int]:
    """Return the ids that a copy allocates next, until nothing is free or evictable."""
    twin = copy.deepcopy(manager)
    lease = twin.admit(
        twin.match([0] * (twin.available * twin.block_size), b"a namespace of nobody")
    )
    return lease.block_table.tolist()


def observe(
    manager: CacheManager, leases: Iterable[Lease] = (), probes: Iterable[Probe] = ()
) -> dict[str, Any]:
    """Return the observable state of a manager and some live leases; a no-op does not change it.

    Args:
        manager: is not changed.
        leases: live leases to read through.
        probes: what to match: name every prefix of interest, and the LRU order is seen too.
    """
    tables, probes = manager.tables, list(probes)
    matches = [manager.match(tokens, namespace) for namespace, tokens in probes]
    return {
        "stats": asdict(manager.stats()),
        "available": manager.available,
        "epoch": manager.epoch,
        "table ids": tables._ids.tobytes(),
        "table starts": tables._starts.tobytes(),
        "table blocks": tables.num_blocks.tobytes(),
        "table tokens": tables.num_tokens.tobytes(),
        "table live": tables.live.tobytes(),
        "leases": [
            (
                lease.row,
                lease.epoch,
                lease.num_hit_blocks,
                lease.num_shared_blocks,
                lease.num_blocks,
                lease.num_tokens,
                lease.block_table.tolist(),
            )
            for lease in leases
        ],
        "matches": [(match.num_blocks, match.num_tokens, match.next_block) for match in matches],
        "eviction order": eviction_order(manager, probes),
        "allocation order": allocation_order(manager),
    }
