"""The decode benchmark takes as many steps as it is told."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.kvcache import CacheManager
from radixkv.scheduler.bench.decode import bench_decode
from radixkv.scheduler.bench.timing import us_summary

from .conftest import Clock

pytestmark = pytest.mark.usefixtures("no_collection")


def test_each_step_is_measured() -> None:
    figures = bench_decode(batch=3, steps=9, prompt_tokens=5, block_size=4)
    assert (figures["batch"], figures["steps"]) == (3, 9)
    assert set(figures["us_per_request"]) == {"median", "mean", "p99_9", "max"}
    assert set(figures["us_per_step"]) == {"mean", "p50", "p99"}


@pytest.mark.parametrize("steps", [1, 3, 200])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_figures_are_those_of_the_second_run(steps: int, block_size: int, clock: Clock) -> None:
    def duration(call: int) -> int:
        return 10**6 + 1003 * call * call

    clock.takes(CacheManager, "extend_batch", duration)
    figures = bench_decode(batch=3, steps=steps, prompt_tokens=5, block_size=block_size)
    spans_ns = np.array([duration(call) for call in range(steps, 2 * steps)])
    p50, p99 = np.percentile(spans_ns, [50, 99])
    assert figures == {
        "batch": 3,
        "steps": steps,
        "prompt_tokens": 5,
        "block_size": block_size,
        "us_per_request": us_summary(spans_ns, per=3),
        "us_per_step": {
            "mean": round(float(np.mean(spans_ns)) / 1000, 4),
            "p50": round(float(p50) / 1000, 4),
            "p99": round(float(p99) / 1000, 4),
        },
    }
    blocks = 3 * -(-(5 + steps) // block_size)
    assert clock.managers == [(blocks, block_size)] * 2, "the smallest pools with room for all"
