"""The helpers of the benchmarks, apart from any duration."""

from __future__ import annotations

import gc

import numpy as np

from radixkv.scheduler.bench.timing import clock_cost_ns, quiet_heap, us_summary


def test_summary_is_in_microseconds() -> None:
    spans_ns = np.array([1_000, 2_000, 9_000], dtype=np.int64)
    assert us_summary(spans_ns) == {"median": 2.0, "mean": 4.0}
    assert us_summary(spans_ns, per=4) == {"median": 0.5, "mean": 1.0}


def test_reading_the_clock_costs_something_or_nothing() -> None:
    assert clock_cost_ns() >= 0


def test_the_heap_is_frozen_within_and_collection_stays_on() -> None:
    with quiet_heap():
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
