"""The clock of the benchmarks, what reading it costs, and a heap that is quiet.

The clock is the CPU time of the calling thread: the manager runs on one thread, and neighbours
on a shared machine do not count. Reading it is a system call of about the cost of a small phase,
so each timed span is corrected by the median cost of an empty span.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

now_ns = time.thread_time_ns
"""CPU time of this thread, in ns."""

_CLOCK_SAMPLES = 10_001

Nanoseconds = npt.NDArray[np.int64]


def clock_cost_ns() -> int:
    """Return what an empty timed span shows: the median over back-to-back readings."""
    readings = [now_ns() for _ in range(_CLOCK_SAMPLES)]
    return int(np.median(np.diff(readings)))


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Collect garbage now and leave what exists alone; collection stays on for what follows."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def us_summary(spans_ns: Nanoseconds, per: int = 1) -> dict[str, float]:
    """Return the median and mean of spans, in microseconds.

    Args:
        spans_ns: int64[n], n >= 1, corrected spans; noise can make a short one negative.
        per: What one span is divided by, as requests of a batch.
    """
    return {
        "median": round(float(np.median(spans_ns)) / per / 1000, 4),
        "mean": round(float(np.mean(spans_ns)) / per / 1000, 4),
    }
