"""Histograms of one thread: an observation costs less than with those of prometheus-client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

TIME_TO_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS: Final = tuple(
    float(mantissa * 10**exponent) for exponent in range(7) for mantissa in (1, 2, 5)
)
"""Bounds of buckets: those of vLLM, so that one dashboard can show both.

`INTER_TOKEN_S` begins lower, because a step of a small model takes less than vLLM's first, 10 ms.
"""


class HistogramState(NamedTuple):
    """A copy of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, inclusive; another bucket follows the last.
        counts: number of observations in each bucket.
        total: sum of all observations.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


class Histogram:
    """Counts observations by size, for one thread.

    Attributes:
        bounds: upper bounds of the buckets, ascending.
    """

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count an observation, or some equal ones."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def state(self) -> HistogramState:
        """Return a copy."""
        return HistogramState(self.bounds, tuple(self._counts), self._total)
