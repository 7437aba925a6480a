"""Counts of a cache and of its tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierStats:
    """Counts below the device.

    Now: `host_blocks` in all, of which `host_free_blocks` are free and `host_cached_blocks` can be
    matched; `parked` requests; `open_operations` without a result, and `quarantined_operations`
    with one, whose blocks may still be written. Events: `promoted_blocks` (host hits that arrived
    on the device), `demoted_blocks` (evicted towards the host), `dropped_blocks` (the host had them
    alone, or should have, and had no room), `stored_blocks`, `fetched_blocks` (from storage), and
    `late_completions`.
    """

    host_blocks: int
    host_free_blocks: int
    host_cached_blocks: int
    parked: int
    open_operations: int
    quarantined_operations: int
    promoted_blocks: int
    demoted_blocks: int
    dropped_blocks: int
    stored_blocks: int
    fetched_blocks: int
    late_completions: int


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks now, and of events since the manager was made.

    `num_blocks = free_blocks + cached_blocks + private_blocks`, and idle blocks are those of the
    cached that no lease uses. Events: `hit_blocks` and `admitted` at admission, `evicted_blocks`,
    and `duplicate_blocks` that two requests computed and one gave back. `tiers` is None without
    a host tier.
    """

    num_blocks: int
    free_blocks: int
    cached_blocks: int
    idle_blocks: int
    private_blocks: int
    live_leases: int
    admitted: int
    hit_blocks: int
    evicted_blocks: int
    duplicate_blocks: int
    tiers: TierStats | None = None
