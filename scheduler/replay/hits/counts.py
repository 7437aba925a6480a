"""Hit counts of a trace: requests passed one by one through the real `CacheManager`.

A block is one hash id, a partial last block included. The hits of a request are the leading blocks
that are resident when it comes. Then all its blocks become resident, while its own path is pinned;
room is made by evicting leaves. Outputs are not inserted. A request with more blocks than the cache
is refused: its blocks count, it hits nothing and changes nothing.

With a host tier, the host hits are the blocks that follow those on the device. Copies complete at
once. With ``HostConfig.write="exclusive"`` the two tiers obey a law; see `tier_law`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from ....kvcache.errors import RequestTooLargeError
from ....kvcache.manager import CacheManager
from ....kvcache.tiers.host_tier import HostConfig
from ..trace import Trace
from .oracles import num_distinct_blocks


@dataclass(frozen=True, slots=True)
class HitCounts:
    """Hits and evictions of a trace in a cache of one size, in blocks of 512 tokens (one hash id).

    Attributes:
        requests: Requests of the trace.
        blocks: Blocks of all requests.
        hit_blocks: Blocks found in the cache.
        evicted_blocks: Evictions over the whole trace.
        hit_rate: ``hit_blocks / blocks``.
        refused: Requests with more blocks than the cache.
    """

    requests: int
    blocks: int
    hit_blocks: int
    evicted_blocks: int
    hit_rate: float
    refused: int


@dataclass(frozen=True, slots=True)
class TieredHitCounts(HitCounts):
    """Counts with a host tier; ``hit_blocks`` and ``hit_rate`` are those of the device.

    Attributes:
        host_hit_blocks: Blocks copied back from the host instead of being computed.
        demoted_blocks: Blocks copied to the host when the device evicted them.
        dropped_blocks: Blocks that left the host, or found no room there.
    """

    host_hit_blocks: int
    demoted_blocks: int
    dropped_blocks: int


@dataclass(frozen=True, slots=True)
class ManagerRun:
    """One pass of a trace through a `CacheManager`.

    Attributes:
        hits: Device hits of each request, in blocks.
        evicted_blocks: Evictions over the pass.
        refused: As in `HitCounts`.
        host_hits: Host hits of each request, in blocks.
        demoted_blocks, dropped_blocks: As in `TieredHitCounts`.
    """

    hits: list[int]
    evicted_blocks: int
    refused: int
    host_hits: list[int]
    demoted_blocks: int
    dropped_blocks: int


def count_hits(
    trace: Trace, num_blocks: int | None, host: HostConfig | None = None
) -> HitCounts | TieredHitCounts:
    """Count the hits of a trace in a cache of num_blocks blocks, with the real manager.

    Args:
        trace: Requests in order of arrival.
        num_blocks: Capacity in blocks of 512 tokens; None for no limit.
        host: Host tier below the device, in blocks of 512 tokens; None for none.

    Returns:
        The counts; `TieredHitCounts` if there is a host tier.

    Raises:
        CountError: If num_blocks is less than 1.
    """
    num_blocks = num_distinct_blocks(trace) if num_blocks is None else num_blocks
    run = run_manager(trace, num_blocks, host=host)
    counts = summarize(trace, run)
    if host is None:
        return counts
    return TieredHitCounts(
        **asdict(counts),
        host_hit_blocks=sum(run.host_hits),
        demoted_blocks=run.demoted_blocks,
        dropped_blocks=run.dropped_blocks,
    )


def summarize(trace: Trace, run: ManagerRun) -> HitCounts:
    """Add up the counts of one pass."""
    blocks = sum(len(request.hash_ids) for request in trace.requests)
    hit_blocks = sum(run.hits)
    hit_rate = hit_blocks / max(blocks, 1)
    return HitCounts(
        len(trace.requests), blocks, hit_blocks, run.evicted_blocks, hit_rate, run.refused
    )


def run_manager(
    trace: Trace,
    num_blocks: int,
    on_request: Callable[[int], None] = lambda done: None,
    host: HostConfig | None = None,
) -> ManagerRun:
    """Pass a trace through a manager with blocks of one token: each token is a hash id.

    Args:
        trace: Requests in order of arrival.
        num_blocks: Capacity.
        on_request: Called after each request with the number of requests done.
        host: Host tier, or None.
    """
    manager = CacheManager(num_blocks, block_size=1, host=host)
    hits: list[int] = []
    host_hits: list[int] = []
    refused = 0
    for done, request in enumerate(trace.requests, start=1):
        tokens = np.asarray(request.hash_ids, dtype=np.int32)
        try:
            lease = manager.admit(manager.match(tokens))
        except RequestTooLargeError:
            refused += 1
            hits.append(0)
            host_hits.append(0)
        else:
            hits.append(lease.num_hit_blocks)
            _complete_copies(manager)
            host_hits.append(lease.num_promoted_blocks)
            manager.publish(lease, tokens)
            manager.release(lease)
            _complete_copies(manager)
        on_request(done)
    manager.check()
    stats = manager.stats()
    tiers = stats.tiers
    return ManagerRun(
        hits,
        stats.evicted_blocks,
        refused,
        host_hits,
        demoted_blocks=0 if tiers is None else tiers.demoted_blocks,
        dropped_blocks=0 if tiers is None else tiers.dropped_blocks,
    )


def _complete_copies(manager: CacheManager) -> None:
    if manager.tiers is not None:
        for operation in manager.tiers.take_operations():
            manager.tiers.complete(operation.id, [True] * operation.num_blocks)
