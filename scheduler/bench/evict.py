"""CPU time of one eviction from a full cache.

The pool is full of published blocks that no lease holds. They form leaves of `chain` blocks, each a
sequence of its own below the root. One call evicts `evict` blocks; then new leaves refill the pool,
so every call finds it full.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kvcache import CacheManager
from .timing import clock_cost_ns, now_ns, quiet_heap
from .workload import TokenSupply, WorkloadError

_UNTIMED_CALLS = 10
"""Warm-up calls: CPython specialises the loop of a function only after some calls."""


def bench_evict(
    *, num_blocks: int, evict: int, chain: int, block_size: int, calls: int
) -> dict[str, Any]:
    """Fill a pool, evict and refill `calls` times after some warm-up calls, and time the evictions.

    Returns the medians over the calls for JSON.

    Args:
        num_blocks: Number of blocks in the pool.
        evict: Blocks to evict in one call.
        chain: Blocks per leaf; the last leaf may be shorter.
        block_size: Tokens per block.
        calls: Number of timed calls.

    Raises:
        WorkloadError: `evict` or `chain` is larger than the pool.
    """
    for name, value in (("evict", evict), ("chain", chain)):
        if value > num_blocks:
            raise WorkloadError(f"cannot {name} {value} blocks in a pool of {num_blocks}")
    manager = CacheManager(num_blocks, block_size)
    supply = TokenSupply()
    _fill(manager, supply, num_blocks, chain)
    spans = []
    with quiet_heap():
        for _ in range(_UNTIMED_CALLS + calls):
            start = now_ns()
            evicted = manager.evict(evict)
            spans.append(now_ns() - start)
            assert evicted == evict, f"expected {evict} evicted blocks, got {evicted}"
            _fill(manager, supply, evict, chain)
    spans_ns = np.array(spans[_UNTIMED_CALLS:], dtype=np.int64) - clock_cost_ns()
    median_ns = float(np.median(spans_ns))
    return {
        "device_blocks": num_blocks,
        "evict": evict,
        "chain": chain,
        "block_size": block_size,
        "calls": len(spans_ns),
        "ms_per_call": round(median_ns / 1e6, 6),
        "us_per_block": round(median_ns / 1e3 / evict, 6),
    }


def _fill(manager: CacheManager, supply: TokenSupply, num_blocks: int, chain: int) -> None:
    """Publish and release `num_blocks` blocks in new sequences of `chain` blocks."""
    while num_blocks > 0:
        length = min(chain, num_blocks)
        tokens = supply.take(length * manager.block_size)
        lease = manager.admit(manager.match(tokens))
        manager.publish(lease, tokens)
        manager.release(lease)
        num_blocks -= length
