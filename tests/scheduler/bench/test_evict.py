"""The eviction benchmark evicts from a full pool in every call."""

from __future__ import annotations

import pytest

from radixkv.scheduler.bench.evict import bench_evict
from radixkv.scheduler.bench.workload import WorkloadError

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


def test_more_than_the_pool_is_refused() -> None:
    with pytest.raises(WorkloadError, match="cannot evict 9 blocks in a pool of 8"):
        bench_evict(num_blocks=8, evict=9, chain=1, block_size=2, calls=1)
    with pytest.raises(WorkloadError, match="cannot chain 9 blocks in a pool of 8"):
        bench_evict(num_blocks=8, evict=1, chain=9, block_size=2, calls=1)
