"""Simulated links: their queues by hand, and simulations with a host tier."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.kvcache.tiers.host_tier import HostConfig, WritePolicy
from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.batching.preemption import PreemptMode
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.replay.simulation.cost_model import (
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
from radixkv.scheduler.replay.simulation.tier_links import TierLinks
from radixkv.scheduler.replay.trace import Trace
from radixkv.scheduler.step_plan import SchedulerStats, StepPlan

from .conftest import SMALL_TRACES, make_trace

TO_HOST, TO_DEVICE = OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE

# Every step takes one second. A block of 64 tokens has 256 bytes, and its copy takes 1/4 s.
COSTS = CostModel(
    ModelCosts("toy", 1, layers=1, heads=1, kv_heads=1, head_dim=1),
    GpuCosts("toy", 1e29, 1e29, 1e9, host_bytes_per_s=1280.0),
    StepCosts(overhead_s=1.0),
)


def fill(manager: CacheManager, *prompts: list[int]) -> None:
    for prompt in prompts:
        lease = manager.admit(manager.match(prompt))
        manager.publish(lease, prompt)
        manager.release(lease)


def test_each_direction_has_its_own_queue() -> None:
    manager = CacheManager(num_blocks=4, block_size=1, host=HostConfig(8, "exclusive"))
    assert manager.tiers is not None
    link = TierLinks(manager.tiers, bytes_per_block=100, bytes_per_s=50)
    fill(manager, [1, 2], [3, 4])
    manager.evict(1)
    link.dispatch(10.0)  # one block: until 12
    manager.evict(2)
    link.dispatch(11.0)  # two blocks behind it: until 16
    assert link.next_end_s == 12.0
    link.deliver(11.9)
    assert manager.match([1, 2]).num_host_blocks == 0
    link.deliver(12.0)
    assert (manager.match([1, 2]).num_blocks, manager.match([1, 2]).num_host_blocks) == (0, 0)
    assert link.next_end_s == 16.0
    link.deliver(20.0)
    assert link.next_end_s is None
    assert manager.match([1, 2]).num_host_blocks == 2
    lease = manager.admit(manager.match([1, 2]))
    manager.evict(1)
    link.dispatch(20.0)
    assert link.next_end_s == 22.0  # to the host, while two blocks go the other way until 24
    link.deliver(23.0)
    assert lease.loading is not None
    link.deliver(24.0)
    assert (lease.loading, lease.num_promoted_blocks) == (None, 2)
    assert link.num_bytes == {TO_HOST: 400, TO_DEVICE: 200}
    assert link.busy_s == {TO_HOST: 8.0, TO_DEVICE: 4.0}


def test_finish_completes_every_operation() -> None:
    manager = CacheManager(num_blocks=2, block_size=1, host=HostConfig(4, "back"))
    assert manager.tiers is not None
    link = TierLinks(manager.tiers, bytes_per_block=8, bytes_per_s=1)
    fill(manager, [1, 2], [3])
    counts = link.finish(0.0, SchedulerStats(parked=3, resumed_parked=2), waited_s=1.5)
    assert manager.tiers.num_open_operations == 0
    assert (counts.host_blocks, counts.demoted_blocks, counts.bytes_to_host) == (4, 1, 8)
    assert (counts.parked, counts.resumed, counts.waited_s) == (3, 2, 1.5)


def test_a_host_hit_by_hand() -> None:
    # 16 blocks of 64 tokens. [1, 2] at 10 s evicts [0]: 8 blocks, 2 s of copying. [0] at 20 s finds
    # them on the host: 2 s of copying, in which nothing else runs, and a step for the last token.
    trace = make_trace([0], [1, 2], [0], gap_ms=10_000.0)
    config = SimulationConfig(64, 16, token_budget=1024, host=HostConfig(16, "exclusive"))
    result = simulate(trace, COSTS, config)
    assert (result.prompt_tokens, result.hit_tokens, result.host_hit_tokens) == (2048, 0, 511)
    assert result.computed_tokens == 1537
    assert result.steps == 3
    assert result.simulated_s == pytest.approx(23.0)
    assert result.latencies.ttft_s is not None
    assert result.latencies.ttft_s.p99 == pytest.approx(3.0, rel=0.05)
    tiers = result.tiers
    assert tiers is not None
    assert tiers.waited_s == pytest.approx(2.0)
    assert (tiers.demoted_blocks, tiers.promoted_blocks, tiers.dropped_blocks) == (16, 8, 0)
    assert (tiers.bytes_to_host, tiers.bytes_to_device) == (16 * 256, 8 * 256)
    assert tiers.busy_to_host_s == pytest.approx(4.0)
    assert tiers.busy_to_device_s == pytest.approx(2.0)
    assert [check.verdict for check in result.checks] == ["PASS"] * 4
    assert result.checks[1].detail == "2,048 = 0 + 511 + 1,537"
    assert result.checks[3].detail == "16 of 16 free or cached, 0 parked, 0 copies"


def test_an_arrival_is_served_while_another_waits_for_its_copy() -> None:
    # As above, but [3] comes 100 ms after [0], and is computed at once.
    requests = make_trace([0], [1], [2], [0], [3], gap_ms=10_000.0).requests
    late = dataclasses.replace(requests[4], timestamp_ms=30_100.0)
    trace = Trace((*requests[:4], late))
    config = SimulationConfig(64, 16, token_budget=1024, host=HostConfig(16, "exclusive"))
    result = simulate(trace, COSTS, config)
    assert result.host_hit_tokens == 511
    assert result.tiers is not None
    assert result.tiers.waited_s == pytest.approx(0.1 + 0.9)  # 30.0 to 30.1, 31.1 to 32.0
    assert result.simulated_s == pytest.approx(33.0)


def tight(
    trace: Trace,
    num_blocks: int = 2_000,
    host: HostConfig | None = None,
    preempt: PreemptMode = "recompute",
) -> SimulationResult:
    config = SimulationConfig(16, num_blocks, reserve_tokens=0, host=host, preempt=preempt)
    return simulate(trace, named_costs(), config)


@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_parked_requests_compute_nothing_again(bundled_trace: Trace, write: WritePolicy) -> None:
    trace = Trace(bundled_trace.requests[:60])
    host = HostConfig(20_000, write)
    lost = tight(trace)
    parked = tight(trace, host=host, preempt="host")
    assert lost.preemptions > 0 and lost.recomputed_tokens > 0
    assert lost.tiers is None and lost.host_hit_tokens == 0
    assert parked.tiers is not None
    assert parked.tiers.parked == parked.tiers.resumed == parked.preemptions > 0
    assert parked.recomputed_tokens == 0
    assert parked.finished == lost.finished
    assert [check.verdict for check in parked.checks] == ["PASS"] * 4, parked.checks
    again = tight(trace, host=host, preempt="host")
    assert again.tiers == parked.tiers


def test_a_host_tier_is_hit_on_the_bundled_trace(bundled_trace: Trace) -> None:
    trace = Trace(bundled_trace.requests[:300])
    result = tight(trace, num_blocks=10_000, host=HostConfig(100_000, "back"))
    assert result.host_hit_tokens > 0 and result.hit_tokens > 0
    assert result.computed_tokens < tight(trace, num_blocks=10_000).computed_tokens
    assert result.tiers is not None and result.tiers.bytes_to_device > 0
    assert all(check.ok for check in result.checks), result.checks


@given(
    trace=SMALL_TRACES,
    num_blocks=st.integers(20, 70),
    host_blocks=st.sampled_from([1, 5, 40, 400]),
    write=st.sampled_from(get_args(WritePolicy)),
    preempt=st.sampled_from(["recompute", "host"]),
    host_bytes_per_s=st.sampled_from([100.0, 2_000.0, 1e6]),
)
def test_any_small_simulation_ends_and_holds_nothing(
    trace: Trace,
    num_blocks: int,
    host_blocks: int,
    write: WritePolicy,
    preempt: PreemptMode,
    host_bytes_per_s: float,
) -> None:
    gpu = dataclasses.replace(COSTS.gpu, host_bytes_per_s=host_bytes_per_s)
    costs = CostModel(COSTS.model, gpu, StepCosts(overhead_s=0.1))
    config = SimulationConfig(
        64,
        num_blocks,
        token_budget=512,
        max_running=8,
        reserve_tokens=0,
        host=HostConfig(host_blocks, write),
        preempt=preempt,
    )
    result = simulate(trace, costs, config)
    answered, _, returned, host_returned = result.checks
    assert answered.ok and returned.ok and host_returned.ok, result.checks
    assert result.tiers is not None
    assert result.tiers.parked == result.tiers.resumed
    if result.tiers.parked == result.preemptions:
        assert result.recomputed_tokens == 0


# -------------------------------------------------------------------------------- planted bugs


def test_a_wrong_host_hit_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = MixedScheduler.schedule

    def lie(self: MixedScheduler) -> StepPlan:
        plan = schedule(self)
        for chunk in plan.chunks:
            chunk.request.num_host_hit_tokens = 0
        return plan

    monkeypatch.setattr(MixedScheduler, "schedule", lie)
    trace = make_trace([0], [1, 2], [0], gap_ms=10_000.0)
    config = SimulationConfig(64, 16, token_budget=1024, host=HostConfig(16, "exclusive"))
    check = simulate(trace, COSTS, config).checks[1]
    assert check.detail == "1 violations, the first: request 2: 0 tokens hit, computed from 511"
