"""The clock of the benchmarks, its cost, and a heap without garbage.

The clock is the CPU time of the calling thread, because the manager runs on one thread and other
processes of a shared machine must not count. Reading it is a system call that costs about as much
as a short phase, so the median cost of an empty span is subtracted from each timed span.
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
    """Return the median of the time between two readings of the clock."""
    readings = [now_ns() for _ in range(_CLOCK_SAMPLES)]
    return int(np.median(np.diff(readings)))


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Collect garbage, and exclude existing objects from collections within the block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def us_summary(spans_ns: Nanoseconds, per: int = 1) -> dict[str, float]:
    """Return the median, mean, 99.9th percentile and maximum of spans, in microseconds.

    The maximum of many spans shows pauses of the garbage collector, if it is on.

    Args:
        spans_ns: int64[n], n >= 1, without the cost of the clock; a short span may be negative.
        per: Divisor of each span, such as the requests of a batch.
    """
    median, p99_9, most = np.percentile(spans_ns, [50, 99.9, 100])
    figures = {"median": median, "mean": np.mean(spans_ns), "p99_9": p99_9, "max": most}
    return {name: round(float(value) / per / 1000, 4) for name, value in figures.items()}
