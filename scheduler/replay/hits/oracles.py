"""LRU and Belady oracles: what block-level LRU must hit, and the most that any policy can."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from ..trace import Trace

BlockPath: TypeAlias = Sequence[int]
"""The blocks of a request, first to last; each number identifies a block and its whole prefix."""


def prefix_paths(trace: Trace) -> list[BlockPath]:
    """Number every distinct prefix by first appearance, and return the path of each request.

    In Mooncake's files a hash id already identifies its whole prefix. In other files one id may
    follow two different parents; the oracles know no tree and need two numbers for these.
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
    """Return the number of blocks with which a cache never evicts."""
    return len({block for path in prefix_paths(trace) for block in path})


def lru_oracle(paths: Sequence[BlockPath], num_blocks: int) -> list[int]:
    """Return the hits per request of block-by-block leaf LRU, in code short enough to trust.

    Each path is touched from its deepest block up. A block is therefore always older than its
    parent, and the oldest block of all is a leaf.
    """
    resident: OrderedDict[int, None] = OrderedDict()  # oldest first
    hits = []
    for path in paths:
        hits.append(0)
        if len(path) > num_blocks:
            continue
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        hits[-1] = hit
        for block in path[:hit]:  # pinned while older blocks are evicted
            resident.move_to_end(block)
        for _ in range(len(resident) + len(path) - hit - num_blocks):
            resident.popitem(last=False)
        for block in reversed(path):
            resident[block] = None
            resident.move_to_end(block)
    return hits


def belady(paths: Sequence[BlockPath], num_blocks: int) -> int:
    """Return the hits of optimal eviction: the block with the furthest next use goes first.

    It knows the future, so no policy under the same rules can hit more. It needs no tree: a request
    that uses a block uses its whole prefix, so among the blocks with the furthest next use the
    deepest is always a leaf.

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
    furthest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block), some stale
    hits = 0
    for path, path_next_uses in zip(paths, next_uses, strict=True):
        if len(path) > num_blocks:
            continue
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        hits += hit
        for block in path[:hit]:  # pinned: hidden from eviction
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
