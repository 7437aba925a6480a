"""Single-node simulation: small cases by hand, determinism, and a failure of every check."""

from __future__ import annotations

import dataclasses

import pytest

from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.replay.simulation.cost_model import (
    CostError,
    CostModel,
    GpuCosts,
    ModelCosts,
    StepCosts,
    named_costs,
)
from radixkv.scheduler.replay.simulation.single_node import (
    SimulationConfig,
    SimulationResult,
    simulate,
)
from radixkv.scheduler.replay.trace import Trace
from radixkv.scheduler.request import Request
from radixkv.scheduler.step_plan import StepPlan

from .conftest import make_trace

# Every step takes one second, regardless of its chunks.
ONE_SECOND = CostModel(
    ModelCosts("toy", 1, layers=1, heads=1, kv_heads=1, head_dim=1),
    GpuCosts("toy", 1e29, 1e29, 1e9),
    StepCosts(overhead_s=1.0),
)


def without_real_time(result: SimulationResult) -> SimulationResult:
    return dataclasses.replace(result, scheduler_us_per_step=0.0, wall_s=0.0)


def first_requests(trace: Trace, num_requests: int) -> Trace:
    return Trace(trace.requests[:num_requests])


def test_two_requests_by_hand() -> None:
    # The first arrives at 0 s, takes 1 step of prefill and 2 of decode; the second arrives at 10 s
    # with the same first block: it computes 512 tokens of 1024.
    trace = make_trace([0], [0, 1], output_length=3, gap_ms=10_000.0)
    config = SimulationConfig(block_size=64, num_blocks=32, token_budget=1024)
    result = simulate(trace, ONE_SECOND, config)
    assert (result.finished, result.refused, result.steps) == (2, 0, 6)
    assert (result.prompt_tokens, result.hit_tokens, result.recomputed_tokens) == (1536, 512, 0)
    assert result.simulated_s == pytest.approx(13.0)
    assert result.mean_budget_use == pytest.approx((512 + 2 + 512 + 2) / (6 * 1024))
    latencies = result.latencies
    assert latencies.ttft_s is not None and latencies.ttft_s.p99 == pytest.approx(1.0)
    assert latencies.tpot_s is not None and latencies.tpot_s.p50 == pytest.approx(1.0)
    assert latencies.end_to_end_s is not None and latencies.end_to_end_s.p50 == pytest.approx(3.0)
    assert latencies.goodput_requests_per_s == 0.0  # a second a token is slow
    assert result.peak_occupancy == 17 / 32
    assert [check.verdict for check in result.checks] == ["PASS"] * 3


@pytest.mark.usefixtures("ticking_clocks")
def test_the_cost_of_the_scheduler_is_cpu_time() -> None:
    trace = make_trace([0], [0, 1], output_length=3, gap_ms=10_000.0)
    result = simulate(trace, ONE_SECOND, SimulationConfig(64, 32, token_budget=1024))
    assert result.scheduler_us_per_step == 2e6, "a span to schedule, another to update"
    assert result.wall_s == 1_000


def test_goodput_counts_requests_within_the_slo() -> None:
    trace = make_trace([0], [0, 1], output_length=3, gap_ms=10_000.0)
    config = SimulationConfig(64, 32, token_budget=1024, slo_tpot_s=1.001)
    latencies = simulate(trace, ONE_SECOND, config).latencies
    assert latencies.slo_attainment == 1.0
    assert latencies.goodput_requests_per_s == pytest.approx(2 / 13)


def test_a_full_hit_computes_one_token() -> None:
    trace = make_trace([0], [0], gap_ms=10_000.0)
    result = simulate(trace, ONE_SECOND, SimulationConfig(64, 32))
    assert (result.prompt_tokens, result.hit_tokens) == (1024, 511)
    assert [check.verdict for check in result.checks] == ["PASS"] * 3


def test_two_replays_give_the_same_result(bundled_trace: Trace) -> None:
    trace, costs = first_requests(bundled_trace, 60), named_costs()
    calls: list[tuple[str, int, int]] = []
    first = simulate(
        trace, costs, progress=lambda stage, done, total: calls.append((stage, done, total))
    )
    assert without_real_time(first) == without_real_time(simulate(trace, costs))
    assert first.finished == 60
    assert first.prompt_tokens == trace.num_input_tokens
    assert first.hit_tokens > 0
    assert all(check.ok for check in first.checks)
    assert calls[-1] == ("simulation", 60, 60)


def test_without_the_cache_nothing_hits(bundled_trace: Trace) -> None:
    config = SimulationConfig(prefix_cache=False)
    result = simulate(first_requests(bundled_trace, 30), named_costs(), config)
    assert result.hit_tokens == 0
    assert all(check.ok for check in result.checks)


def test_a_tight_pool_preempts_and_still_answers_all(bundled_trace: Trace) -> None:
    config = SimulationConfig(block_size=16, num_blocks=2_000, reserve_tokens=0)
    trace = first_requests(bundled_trace, 60)
    result = simulate(trace, named_costs(), config)
    too_large = [  # the last output token needs no KV
        request.input_length + request.output_length - 1 > 32_000 for request in trace.requests
    ]
    assert result.refused == sum(too_large) > 0
    assert result.finished + result.refused == 60
    assert result.preemptions > 0
    assert result.recomputed_tokens > 0
    assert result.evicted_blocks > 0
    assert result.peak_occupancy <= 1.0
    assert all(check.ok for check in result.checks)


def test_requests_larger_than_the_pool_are_refused_and_counted() -> None:
    trace = make_trace([0, 1, 2], [3], [4, 5, 6], output_length=2)
    result = simulate(trace, ONE_SECOND, SimulationConfig(64, num_blocks=16))
    assert (result.finished, result.refused) == (1, 2)
    assert result.latencies.slo_attainment <= 1 / 3
    assert result.checks[0].detail == "1 finished, 2 refused"
    nothing = simulate(make_trace([0, 1]), ONE_SECOND, SimulationConfig(64, num_blocks=4))
    assert (nothing.finished, nothing.refused, nothing.steps) == (0, 1, 0)
    assert nothing.latencies.ttft_s is None


def test_arrivals_out_of_order_are_replayed_in_order_of_time() -> None:
    late, early = make_trace([0], [1], gap_ms=5_000.0).requests
    swapped = Trace((early, late))
    result = simulate(swapped, ONE_SECOND, SimulationConfig(64, 32))
    assert result.simulated_s == pytest.approx(6.0)


def test_the_model_must_leave_room_for_blocks() -> None:
    with pytest.raises(CostError, match="llama3-70b does not fit"):
        simulate(make_trace([0]), named_costs("llama3-70b", "a100"))


# ------------------------------------------------------------------------------ planted bugs


def test_a_wrong_hit_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = MixedScheduler.schedule

    def lie(self: MixedScheduler) -> StepPlan:
        plan = schedule(self)
        for chunk in plan.chunks:
            chunk.request.num_hit_tokens = 64
        return plan

    monkeypatch.setattr(MixedScheduler, "schedule", lie)
    check = simulate(make_trace([0]), ONE_SECOND, SimulationConfig(64, 32)).checks[1]
    assert check.name == "prompt = hit + computed tokens, each request"
    assert check.detail == "1 violations, the first: request 0: 64 tokens hit, computed from 0"
    assert not check.ok


def test_an_answer_cut_short_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = MixedScheduler.update

    def cut(self: MixedScheduler, plan: StepPlan, next_tokens: range) -> list[Request]:
        finished = update(self, plan, next_tokens)
        for request in finished:
            request.output_tokens.pop()
        return finished

    monkeypatch.setattr(MixedScheduler, "update", cut)
    trace = make_trace([0], output_length=3)
    check = simulate(trace, ONE_SECOND, SimulationConfig(64, 32)).checks[0]
    assert (check.name, check.ok) == ("every request is answered once, in full", False)
    assert check.detail == (
        "1 violations, the first: request 0: 2 tokens of 3, finish_reason length"
    )


def test_a_double_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = MixedScheduler.update
    monkeypatch.setattr(
        MixedScheduler, "update", lambda self, plan, tokens: update(self, plan, tokens) * 2
    )
    check = simulate(make_trace([0]), ONE_SECOND, SimulationConfig(64, 32)).checks[0]
    assert (
        check.detail
        == "1 violations, the first: request 0: finished twice, or before its first token"
    )
