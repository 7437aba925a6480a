"""Cost of one eviction in a full cache.

The pool is full of published blocks that no lease holds, in leaves of `chain` blocks, each its own
sequence below the root. One call evicts `evict` of them; then as many are filled in again, in
leaves of `chain` blocks, so that every call meets a full pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kvcache import CacheManager
from .timing import (
    Nanoseconds,
    clock_cost_ns,
    now_ns,
    quiet_heap,
)
from .workload import TokenSupply, WorkloadError


@dataclass(frozen=True, slots=True)
class EvictBench:
    """What one run of the benchmark measured."""

    num_blocks: int
    evict: int
    chain: int
    block_size: int
    spans_ns: Nanoseconds
    """int64[calls]: CPU time of each call, the clock's own cost subtracted."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures: medians over the calls."""
        median_ns = float(np.median(self.spans_ns))
        return {
            "device_blocks": self.num_blocks,
            "evict": self.evict,
            "chain": self.chain,
            "block_size": self.block_size,
            "calls": len(self.spans_ns),
            "ms_per_call": round(median_ns / 1e6, 6),
            "us_per_block": round(median_ns / 1e3 / self.evict, 6),
        }


_UNTIMED_CALLS = 10
"""CPython specialises the loop of a function after some calls, not in the first ones."""


def bench_evict(
    *, num_blocks: int, evict: int, chain: int, block_size: int, calls: int
) -> EvictBench:
    """Fill a pool, then evict and refill `calls` times; untimed calls go first.

    Args:
        num_blocks: Blocks of the pool.
        evict: Blocks to evict in one call.
        chain: Blocks per leaf; the last leaf of a filling can be shorter.
        block_size: Tokens per block.
        calls: Timed calls.

    Raises:
        WorkloadError: More blocks are to be evicted, or chained, than the pool has.
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
            assert evicted == evict, f"evicted {evicted} blocks, not {evict}"
            _fill(manager, supply, evict, chain)
    return EvictBench(
        num_blocks=num_blocks,
        evict=evict,
        chain=chain,
        block_size=block_size,
        spans_ns=np.array(spans[_UNTIMED_CALLS:], dtype=np.int64) - clock_cost_ns(),
    )


def _fill(manager: CacheManager, supply: TokenSupply, num_blocks: int, chain: int) -> None:
    """Publish and release new sequences of `chain` blocks, `num_blocks` in all."""
    while num_blocks > 0:
        length = min(chain, num_blocks)
        tokens = supply.take(length * manager.block_size)
        lease = manager.admit(manager.match(tokens))
        manager.publish(lease, tokens)
        manager.release(lease)
        num_blocks -= length
