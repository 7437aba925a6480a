"""Percentiles and goodput by hand."""

from __future__ import annotations

import pytest

from radixkv.scheduler.replay.simulation.latency import (
    Percentiles,
    RequestTimes,
    summarize_latencies,
)


def test_latencies_by_hand() -> None:
    times = [
        RequestTimes(arrival_s=0.0, first_token_s=1.0, last_token_s=3.0, num_outputs=5),  # good
        RequestTimes(arrival_s=2.0, first_token_s=8.0, last_token_s=8.0, num_outputs=1),  # late
        RequestTimes(arrival_s=3.0, first_token_s=5.0, last_token_s=9.0, num_outputs=2),  # slow
    ]
    latencies = summarize_latencies(times, 1, 10.0, slo_ttft_s=3.0, slo_tpot_s=1.0)
    assert latencies.ttft_s is not None and latencies.ttft_s.p50 == 2.0
    assert latencies.ttft_s.p90 == pytest.approx(2.0 + 0.8 * 4.0)
    assert latencies.tpot_s is not None and latencies.tpot_s.p50 == (0.5 + 4.0) / 2
    assert latencies.end_to_end_s is not None and latencies.end_to_end_s.p50 == 6.0
    assert latencies.slo_attainment == 1 / 4
    assert latencies.goodput_requests_per_s == 0.1


def test_answers_of_one_token_have_no_time_per_output_token() -> None:
    latencies = summarize_latencies([RequestTimes(0.0, 1.0, 1.0, 1)], 0, 1.0, 30.0, 0.1)
    assert latencies.tpot_s is None
    assert latencies.slo_attainment == 1.0
    assert latencies.end_to_end_s == Percentiles(1.0, 1.0, 1.0)


def test_nothing_finished() -> None:
    latencies = summarize_latencies([], 3, 0.0, 30.0, 0.1)
    assert (latencies.ttft_s, latencies.tpot_s, latencies.end_to_end_s) == (None, None, None)
    assert (latencies.slo_attainment, latencies.goodput_requests_per_s) == (0.0, 0.0)
