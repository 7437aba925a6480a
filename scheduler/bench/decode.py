"""CPU time of extending a running batch by one token.

All prompts have the same length, so all requests need a new block in the same step. The mean
includes the allocations; the 99th percentile shows that step if `block_size` is below 100.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kvcache import CacheManager
from ...kvcache.tokens import Int32Array
from .timing import clock_cost_ns, now_ns, quiet_heap, us_summary
from .workload import TokenSupply


def bench_decode(*, batch: int, steps: int, prompt_tokens: int, block_size: int) -> dict[str, Any]:
    """Admit `batch` different prompts, extend all by one token `steps` times, and time the steps.

    The same runs once before on another manager, to warm up. Returns the results for JSON, per
    request and step, and per step.

    Args:
        batch: Number of running requests.
        steps: Number of steps.
        prompt_tokens: Length of each prompt.
        block_size: Tokens per block.
    """
    num_blocks = batch * -(-(prompt_tokens + steps) // block_size)
    for _ in range(2):
        manager = CacheManager(num_blocks, block_size)
        rows = _admit_batch(manager, batch, prompt_tokens)
        spans = _grow(manager, rows, steps)
    spans_ns = np.array(spans, dtype=np.int64) - clock_cost_ns()
    p50_us, p99_us = np.percentile(spans_ns, [50, 99]) / 1000
    return {
        "batch": batch,
        "steps": len(spans_ns),
        "prompt_tokens": prompt_tokens,
        "block_size": block_size,
        "us_per_request": us_summary(spans_ns, per=batch),
        "us_per_step": {
            "mean": round(float(spans_ns.mean()) / 1000, 4),
            "p50": round(float(p50_us), 4),
            "p99": round(float(p99_us), 4),
        },
    }


def _admit_batch(manager: CacheManager, batch: int, prompt_tokens: int) -> Int32Array:
    supply = TokenSupply()
    leases = [manager.admit(manager.match(supply.take(prompt_tokens))) for _ in range(batch)]
    return np.array([lease.row for lease in leases], dtype=np.int32)


def _grow(manager: CacheManager, rows: Int32Array, steps: int) -> list[int]:
    spans = []
    with quiet_heap():
        for _ in range(steps):
            start = now_ns()
            manager.extend_batch(rows)
            spans.append(now_ns() - start)
    return spans
