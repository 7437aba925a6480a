"""How many prefix blocks of a trace are in the cache: our manager, an LRU oracle, and Belady.

All count alike. Requests come in file order, one at a time; a block is one hash id; the hits
of a request are the leading run of its blocks that are resident; then all of its blocks become
resident, its own path being pinned while room is made. Outputs are not inserted, and a partial
last block counts as a block. Room is made by evicting leaves, never an inner block before its
continuation. A request of more blocks than the cache has is refused, since it could never be
served: its blocks count, it has no hits, and it changes nothing.

With a host tier, its hits are the blocks that follow those on the device. Copies are done at once,
and where a block is in one tier at a time (`HostConfig.write` "exclusive") the two tiers obey a
law; see `tier_law`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np

from ....kvcache.errors import RequestTooLargeError
from ....kvcache.manager import CacheManager
from ....kvcache.tiers.host_tier import HostConfig
from ..trace import Trace

BlockPath: TypeAlias = Sequence[int]
"""The blocks of a request from its first token on; each names itself and all before it."""


@dataclass(frozen=True, slots=True)
class HitCounts:
    """What a cache of one size did for a trace; blocks are of 512 tokens (one hash id)."""

    requests: int
    blocks: int
    hit_blocks: int
    evicted_blocks: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TieredHitCounts(HitCounts):
    """The same with a host tier; `hit_blocks` and `hit_rate` are the device's.

    Attributes:
        host_hit_blocks: copied back from the host, instead of being computed.
        demoted_blocks: copied to the host when they were evicted from the device.
        dropped_blocks: left the host for good, or found no room there.
    """

    host_hit_blocks: int
    demoted_blocks: int
    dropped_blocks: int


@dataclass(frozen=True, slots=True)
class ManagerRun:
    """A pass of a trace through a `CacheManager`.

    Attributes:
        hits: hit blocks on the device, of each request.
        evicted_blocks: evictions over the pass.
        refused: requests of more blocks than the cache has.
        host_hits: hit blocks on the host, of each request.
        demoted_blocks, dropped_blocks: see `TieredHitCounts`.
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
        trace: requests in the order of arrival.
        num_blocks: capacity in blocks of 512 tokens; None for no limit.
        host: the tier below, in blocks of 512 tokens; None: there is none.

    Returns:
        The counts; with a host tier, `TieredHitCounts`.

    Raises:
        CountError: if num_blocks is less than 1.
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
    """Add up a pass."""
    blocks = sum(len(request.hash_ids) for request in trace.requests)
    hit_blocks = sum(run.hits)
    return HitCounts(
        len(trace.requests), blocks, hit_blocks, run.evicted_blocks, hit_blocks / max(blocks, 1)
    )


def run_manager(
    trace: Trace,
    num_blocks: int,
    on_request: Callable[[int], None] = lambda done: None,
    host: HostConfig | None = None,
) -> ManagerRun:
    """Pass a trace through a manager whose blocks are one token each: a hash id.

    Args:
        trace: requests in the order of arrival.
        num_blocks: capacity.
        on_request: called with the number of requests done.
        host: the tier below, if any.
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
            _copy_at_once(manager)
            host_hits.append(lease.num_promoted_blocks)
            manager.publish(lease, tokens)
            manager.release(lease)
            _copy_at_once(manager)
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


def _copy_at_once(manager: CacheManager) -> None:
    if manager.tiers is not None:
        for operation in manager.tiers.take_operations():
            manager.tiers.complete(operation.id, [True] * operation.num_blocks)


# ---------------------------------------------------------------------- what it is checked against


def prefix_paths(trace: Trace) -> list[BlockPath]:
    """Name each block by itself and all before it, numbered by first appearance.

    In Mooncake's files a hash id does so already; in another file an id might follow two parents,
    and the oracles, which know no tree, must then tell the two apart.
    """
    numbers: dict[tuple[int, int], int] = {}
    paths: list[BlockPath] = []
    for request in trace.requests:
        path: list[int] = []
        parent = -1
        for hash_id in request.hash_ids:
            parent = numbers.setdefault((parent, hash_id), len(numbers))
            path.append(parent)
        paths.append(path)
    return paths


def num_distinct_blocks(trace: Trace) -> int:
    """How many blocks a cache needs that never evicts."""
    return len({block for path in prefix_paths(trace) for block in path})


def lru_oracle(paths: Sequence[BlockPath], num_blocks: int) -> list[int]:
    """Hits per request of block-by-block leaf LRU, in the fewest lines that can be trusted.

    A path is touched from its deepest block up, so a block is always older than the one before it
    and the oldest of all is a leaf.
    """
    resident: OrderedDict[int, None] = OrderedDict()  # oldest first
    hits = []
    for path in paths:
        hits.append(0)
        if len(path) > num_blocks:
            continue
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        hits[-1] = hit
        for block in path[:hit]:  # pinned: young, while older blocks make room
            resident.move_to_end(block)
        for _ in range(len(resident) + len(path) - hit - num_blocks):
            resident.popitem(last=False)
        for block in reversed(path):
            resident[block] = None
            resident.move_to_end(block)
    return hits


def belady(paths: Sequence[BlockPath], num_blocks: int) -> int:
    """Hits of the best evictions there are: the block whose next use is furthest goes first.

    It knows the future, so no policy that follows the rules above has more hits. It needs no tree:
    whoever uses a block uses all before it, so the furthest next use, the deepest of equals, is
    always a leaf.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    never = len(paths)
    next_use_of: dict[int, int] = {}
    next_uses: list[list[int]] = []  # per request and depth: the next request with that block
    for index in range(len(paths) - 1, -1, -1):
        path = paths[index]
        next_uses.append([next_use_of.get(block, never) for block in path])
        if len(path) <= num_blocks:  # a refused request uses nothing
            next_use_of.update((block, index) for block in path)
    next_uses.reverse()
    resident: dict[int, int] = {}  # block -> next use
    furthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale entries stay
    hits = 0
    for path, path_next_uses in zip(paths, next_uses, strict=True):
        if len(path) > num_blocks:
            continue
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        hits += hit
        for block in path[:hit]:  # pinned: out of the evictor's sight
            del resident[block]
        excess = len(resident) + len(path) - num_blocks
        while excess > 0:
            next_use, _, block = heapq.heappop(furthest)
            if resident.get(block) == -next_use:
                del resident[block]
                excess -= 1
        for depth, (block, next_use) in enumerate(zip(path, path_next_uses, strict=True)):
            resident[block] = next_use
            heapq.heappush(furthest, (-next_use, -depth, block))
    return hits
