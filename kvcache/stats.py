"""Counts of a cache and of its tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierStats:
    """Counts of the host and storage tiers.

    Current: ``host_blocks`` in total, of which ``host_free_blocks`` are free and
    ``host_cached_blocks`` can be matched; ``parked`` requests; ``open_operations`` without a
    result; and ``quarantined_operations`` with a result whose blocks may still be written. Events:
    ``promoted_blocks`` (host hits loaded to the device), ``demoted_blocks`` (evicted towards the
    host), ``dropped_blocks`` (that then neither device nor host had, for lack of room or after a
    failed copy, and not by a reset; storage may have them), ``stored_blocks``, ``fetched_blocks``
    (loaded from storage) and ``late_completions``.
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
    """Current counts of blocks, and counts of events since the manager was created.

    ``num_blocks = free_blocks + cached_blocks + private_blocks``. Idle blocks are cached blocks
    that no lease uses. Events: ``admitted`` leases and their ``hit_blocks``, ``evicted_blocks``,
    and ``duplicate_blocks``, which two requests computed and one recycled. ``tiers`` is None
    without a host tier.

    A lease is not a request: one that is preempted is admitted again and hits again, and one that a
    decode node refuses is admitted again, but its hit counts only when the decode node grants. For
    a hit rate, use the `SchedulerStats`, which count each request once.
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
