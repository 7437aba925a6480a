"""Percentiles and goodput by hand, and the times of requests of which they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler.replay.simulation import cluster, single_node
from radixkv.scheduler.replay.simulation.cluster import ClusterConfig, simulate_cluster
from radixkv.scheduler.replay.simulation.latency import (
    Latencies,
    Percentiles,
    RequestTimes,
    summarize_latencies,
)
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig, simulate
from radixkv.scheduler.replay.trace import Trace

from ...profiles import scaled
from .conftest import SMALL_TRACES
from .test_cluster import COSTS

NODE = SimulationConfig(64, 70, token_budget=512)
TIERED = dataclasses.replace(NODE, host=HostConfig(40, "back"), storage_blocks=100)


@scaled(30)
@given(SMALL_TRACES, st.sampled_from([NODE, TIERED, ClusterConfig(1, 2, NODE)]))
def test_a_request_waits_from_its_timestamp_on(
    trace: Trace, config: SimulationConfig | ClusterConfig
) -> None:
    """Also one that comes during a step."""
    taken: list[RequestTimes] = []

    def take(times: Sequence[RequestTimes], *more: Any) -> Latencies:
        taken.extend(times)
        return summarize_latencies(times, *more)

    with pytest.MonkeyPatch.context() as patch:
        for module in (cluster, single_node):
            patch.setattr(module, "summarize_latencies", take)
        if isinstance(config, ClusterConfig):
            simulate_cluster(trace, COSTS, config)
        else:
            simulate(trace, COSTS, config)
    arrivals = sorted(each.timestamp_ms / 1e3 for each in trace.requests)
    assert sorted(each.arrival_s for each in taken) == arrivals
    assert all(each.arrival_s < each.first_token_s <= each.last_token_s for each in taken)


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


@pytest.mark.parametrize("more", [0.0, 0.125])
@pytest.mark.parametrize("limit", ["ttft", "tpot"])
def test_a_request_at_both_limits_is_good_and_one_past_either_is_not(
    limit: str, more: float
) -> None:
    first_s = 3.0 + more * (limit == "ttft")
    last_s = first_s + 4 * (1.0 + more * (limit == "tpot"))
    times = [RequestTimes(0.0, first_s, last_s, num_outputs=5)]
    latencies = summarize_latencies(times, 0, 10.0, slo_ttft_s=3.0, slo_tpot_s=1.0)
    assert latencies.slo_attainment == (more == 0.0)
    assert (latencies.slo_ttft_s, latencies.slo_tpot_s) == (3.0, 1.0)


def test_answers_of_one_token_have_no_time_per_output_token() -> None:
    latencies = summarize_latencies([RequestTimes(0.0, 1.0, 1.0, 1)], 0, 1.0, 30.0, 0.1)
    assert latencies.tpot_s is None
    assert latencies.slo_attainment == 1.0
    assert latencies.end_to_end_s == Percentiles(1.0, 1.0, 1.0)


def test_nothing_finished() -> None:
    latencies = summarize_latencies([], 3, 0.0, 30.0, 0.1)
    assert (latencies.ttft_s, latencies.tpot_s, latencies.end_to_end_s) == (None, None, None)
    assert (latencies.slo_attainment, latencies.goodput_requests_per_s) == (0.0, 0.0)
