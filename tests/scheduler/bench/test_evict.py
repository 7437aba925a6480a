"""The eviction benchmark evicts from a full pool in every call."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.kvcache import CacheManager
from radixkv.scheduler.bench.evict import bench_evict
from radixkv.scheduler.bench.workload import WorkloadError

from .conftest import Clock

pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.mark.parametrize(
    ("num_blocks", "evict", "chain"),
    [(64, 16, 8), (64, 64, 1), (30, 7, 8), (8, 8, 8)],
    ids=["whole leaves", "everything", "parts of leaves", "one leaf"],
)
def test_each_call_is_measured(num_blocks: int, evict: int, chain: int) -> None:
    figures = bench_evict(num_blocks=num_blocks, evict=evict, chain=chain, block_size=2, calls=4)
    assert figures["calls"] == 4
    assert figures["us_per_block"] == pytest.approx(figures["ms_per_call"] * 1000 / evict, abs=1e-3)
    assert (figures["device_blocks"], figures["evict"], figures["chain"]) == (
        num_blocks,
        evict,
        chain,
    )


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("evict", [1, 7])
def test_figures_are_medians_of_the_calls_after_the_warm_up(
    calls: int, evict: int, clock: Clock
) -> None:
    def duration(call: int) -> int:
        return 3_000_000 + 123_457 * call * call

    clock.takes(CacheManager, "evict", duration)
    clock.takes(CacheManager, "publish", lambda call: 10**7)  # refilling is not timed
    figures = bench_evict(num_blocks=30, evict=evict, chain=8, block_size=2, calls=calls)
    median = float(np.median([duration(call) for call in range(10, 10 + calls)]))
    assert figures == {
        "device_blocks": 30,
        "evict": evict,
        "chain": 8,
        "block_size": 2,
        "calls": calls,
        "ms_per_call": round(median / 1e6, 6),
        "us_per_block": round(median / 1e3 / evict, 6),
    }
    assert clock.managers == [(30, 2)]
    assert clock.calls == {"evict": 10 + calls, "publish": 4 + 10 + calls}, "chains are whole"


def test_more_than_the_pool_is_refused() -> None:
    with pytest.raises(WorkloadError, match="cannot evict 9 blocks in a pool of 8"):
        bench_evict(num_blocks=8, evict=9, chain=1, block_size=2, calls=1)
    with pytest.raises(WorkloadError, match="cannot chain 9 blocks in a pool of 8"):
        bench_evict(num_blocks=8, evict=1, chain=9, block_size=2, calls=1)
