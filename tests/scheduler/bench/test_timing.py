"""The helpers of the benchmarks, apart from any duration."""

from __future__ import annotations

import functools
import gc
import itertools

import numpy as np
import pytest

from radixkv.scheduler.bench import timing
from radixkv.scheduler.bench.timing import clock_cost_ns, quiet_heap, us_summary


def test_summary_is_in_microseconds() -> None:
    spans_ns = np.array([1_000, 2_000, 9_000], dtype=np.int64)
    expected = {"median": 2.0, "mean": 4.0, "p99_9": 8.986, "max": 9.0}
    assert us_summary(spans_ns) == expected
    assert us_summary(spans_ns, per=2) == {word: us / 2 for word, us in expected.items()}


def test_a_pause_is_the_maximum_and_not_the_percentile_of_many_spans() -> None:
    spans_ns = np.full(10_001, 1_000, dtype=np.int64)
    spans_ns[5_000] = 24_000_000
    assert us_summary(spans_ns) == {"median": 1.0, "mean": 3.3997, "p99_9": 1.0, "max": 24_000.0}


def test_reading_the_clock_costs_something_or_nothing() -> None:
    assert clock_cost_ns() >= 0


def test_the_heap_is_frozen_within_and_collection_stays_on() -> None:
    with quiet_heap():
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_before_the_heap_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, functools.partial(done.append, name))
    with quiet_heap():
        done.append("block")
    assert done == ["collect", "freeze", "block", "unfreeze"]


def test_the_cost_of_the_clock_is_the_median_of_its_readings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = itertools.cycle([3, 40, 5, 1000, 5])  # of a reading, now and then with a pause
    monkeypatch.setattr(timing, "now_ns", itertools.accumulate(costs).__next__)
    assert clock_cost_ns() == 5


def test_the_heap_is_thawed_if_a_benchmark_fails() -> None:
    with pytest.raises(ValueError, match=r"^no room$"), quiet_heap():
        raise ValueError("no room")
    assert gc.get_freeze_count() == 0
