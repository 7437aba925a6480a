"""Latencies of requests (TTFT, TPOT, end to end) and goodput under an SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of arrival, first token and last token of one request."""

    arrival_s: float
    first_token_s: float
    last_token_s: float
    num_outputs: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if there is only one."""
        if self.num_outputs == 1:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_outputs - 1)

    @property
    def end_to_end_s(self) -> float:
        """Time from arrival to last token."""
        return self.last_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a sample in seconds, interpolated linearly."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """Distributions over the finished requests, and goodput.

    A request is good if its TTFT is within slo_ttft_s and its TPOT, if any, within slo_tpot_s.

    Attributes:
        ttft_s: Time to first token; None if no request finished.
        tpot_s: Mean time per token after the first; None if no request has two tokens.
        end_to_end_s: Time from arrival to last token; None if no request finished.
        slo_ttft_s, slo_tpot_s: Limits of the SLO.
        slo_attainment: Fraction of good requests among all, refused ones included.
        goodput_requests_per_s: Good requests per second of simulated time.
    """

    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    end_to_end_s: Percentiles | None
    slo_ttft_s: float
    slo_tpot_s: float
    slo_attainment: float
    goodput_requests_per_s: float


def summarize_latencies(
    times: Sequence[RequestTimes],
    refused: int,
    duration_s: float,
    slo_ttft_s: float,
    slo_tpot_s: float,
) -> Latencies:
    """Compute the latencies and goodput of a run.

    Args:
        times: Times of each finished request.
        refused: Number of requests that were not served; they are never good.
        duration_s: Duration of the run.
        slo_ttft_s, slo_tpot_s: Limits of the SLO.
    """
    good = sum(
        request.ttft_s <= slo_ttft_s and (request.tpot_s is None or request.tpot_s <= slo_tpot_s)
        for request in times
    )
    return Latencies(
        ttft_s=_percentiles([request.ttft_s for request in times]),
        tpot_s=_percentiles([t for request in times if (t := request.tpot_s) is not None]),
        end_to_end_s=_percentiles([request.end_to_end_s for request in times]),
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
        slo_attainment=good / max(len(times) + refused, 1),
        goodput_requests_per_s=good / duration_s if duration_s > 0 else 0.0,
    )


def _percentiles(sample: Sequence[float]) -> Percentiles | None:
    if not sample:
        return None
    p50, p90, p99 = np.percentile(np.asarray(sample), (50, 90, 99)).tolist()
    return Percentiles(p50, p90, p99)
