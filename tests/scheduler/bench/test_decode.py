"""The decode benchmark takes as many steps as it is told."""

from __future__ import annotations

import pytest

from radixkv.scheduler.bench.decode import bench_decode

pytestmark = pytest.mark.usefixtures("no_collection")


def test_each_step_is_measured() -> None:
    figures = bench_decode(batch=3, steps=9, prompt_tokens=5, block_size=4)
    assert (figures["batch"], figures["steps"]) == (3, 9)
    assert set(figures["us_per_request"]) == {"median", "mean", "p99_9", "max"}
    assert set(figures["us_per_step"]) == {"mean", "p50", "p99"}
