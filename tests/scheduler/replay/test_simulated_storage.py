"""Simulated storage: its LRU order and queues by hand, and simulations with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.kvcache.errors import CountError, StorageConfigError
from radixkv.kvcache.ids import Epoch, OpId
from radixkv.kvcache.tiers import storage_recency as storage_uses
from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.kvcache.tiers.operations import Operation, OpKind
from radixkv.scheduler.batching.preemption import PreemptMode
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.replay.simulation.cost_model import (
    CostModel,
    GpuCosts,
    ModelCosts,
    StepCosts,
)
from radixkv.scheduler.replay.simulation.simulated_storage import (
    SimulatedStorage,
    simulated_namespace,
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

STORE, LOAD, LOOKUP = OpKind.HOST_TO_STORAGE, OpKind.STORAGE_TO_HOST, OpKind.LOOKUP

# A step takes one second; a block of 64 tokens is 256 bytes: 1/4 s to the host or back, 1/8 s to
# storage, 1/16 s from there. Storage answers in half a second.
COSTS = CostModel(
    ModelCosts("toy", 1, layers=1, heads=1, kv_heads=1, head_dim=1),
    GpuCosts(
        "toy",
        1e29,
        1e29,
        1e9,
        host_bytes_per_s=1280.0,
        storage_write_bytes_per_s=2560.0,
        storage_read_bytes_per_s=5120.0,
    ),
    StepCosts(overhead_s=1.0, lookup_s=0.5),
)

# 16 blocks of 64 tokens on the device and on the host, so that two prompts of 8 blocks fit in each.
CONFIG = SimulationConfig(
    64, 16, token_budget=1024, host=HostConfig(16, "back"), storage_blocks=1_000
)


def keys(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_the_least_recently_used_key_goes_first() -> None:
    storage = SimulatedStorage(3, COSTS)
    assert storage.complete(STORE, keys("abc")) == [True, True, True]
    assert storage.complete(LOOKUP, keys("ax")) == [True, False]  # no use of a
    assert storage.complete(STORE, keys("d")) == [True]
    assert storage.complete(LOOKUP, keys("abcd")) == [False, True, True, True]
    assert storage.complete(LOAD, keys("bx")) == [True, False]
    assert storage.complete(STORE, keys("ce")) == [True, True]  # c is used, too
    assert storage.complete(LOOKUP, keys("bcde")) == [True, True, False, True]
    assert storage.complete(STORE, keys("fg")) == [True, True]
    assert storage.complete(LOOKUP, keys("bcefg")) == [False, False, True, True, True]
    assert (len(storage), storage.evicted_blocks) == (3, 4)


def test_touch_reorders_stored_keys_only() -> None:
    storage = SimulatedStorage(3, COSTS)
    storage.complete(STORE, keys("abc"))
    storage.touch(keys("cxba"))
    storage.complete(STORE, keys("d"))
    assert storage.complete(LOOKUP, keys("abcdx")) == [True, True, False, True, False]


def test_a_prefix_that_is_hit_on_the_device_stays_in_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 2)  # less than storage has room for
    manager = CacheManager(2, 1, host=HostConfig(4, "through"), storage=simulated_namespace(1))
    assert manager.tiers is not None
    links = TierLinks(manager.tiers, 1.0, 1e9, SimulatedStorage(3, COSTS))
    for last in range(9):  # all begin as the first did, whose block is never written again
        serve(manager, [0, last])
        links.run_idle(float(last), last + 0.9)
    manager.reset()
    prefetch = manager.tiers.prefetch([0, 8])
    links.run_idle(9.0, 9.9)
    assert prefetch is not None and prefetch.num_blocks == 2


def test_only_missing_blocks_are_copied() -> None:
    storage = SimulatedStorage(3, COSTS)
    storage.complete(STORE, keys("ab"))
    assert storage.count_moved(STORE, keys("abc")) == 1
    assert storage.count_moved(LOAD, keys("abc")) == 2
    assert storage.count_moved(LOOKUP, keys("abc")) == 0


def test_storage_needs_blocks_and_a_host_tier() -> None:
    trace = make_trace([0])
    with pytest.raises(CountError, match=r"^num_blocks must be at least 1, got 0$"):
        simulate(trace, COSTS, dataclasses.replace(CONFIG, storage_blocks=0))
    with pytest.raises(StorageConfigError, match=r"^storage needs a host tier, because its"):
        simulate(trace, COSTS, dataclasses.replace(CONFIG, host=None))


def linked(costs: CostModel = COSTS) -> tuple[CacheManager, TierLinks]:
    manager = CacheManager(8, 1, host=HostConfig(8, "back"), storage=simulated_namespace(1))
    assert manager.tiers is not None
    storage = SimulatedStorage(100, costs)
    return manager, TierLinks(manager.tiers, 2048.0, 2048.0, storage)


def serve(manager: CacheManager, prompt: list[int]) -> None:
    lease = manager.admit(manager.match(prompt))
    manager.publish(lease, prompt)
    manager.release(lease)


def demote(manager: CacheManager, prompt: list[int]) -> None:
    serve(manager, prompt)
    manager.evict(len(prompt))


def test_a_block_passes_through_the_host_both_ways() -> None:
    manager, links = linked()  # a block: 1 s to the host, 1 s to storage, 1/2 s back
    demote(manager, [1, 2])
    links.run_idle(10.0, 13.9)  # on the host at 12, and in storage at 14
    assert manager.tiers is not None and manager.tiers.stats().stored_blocks == 0
    assert links.next_end_s == 14.0
    links.run_idle(13.9, 14.0)
    assert manager.tiers.stats().stored_blocks == 2
    manager.reset()
    prefetch = manager.tiers.prefetch([1, 2, 3])
    assert prefetch is not None
    links.run_idle(20.0, 21.4)
    assert not prefetch.done  # asked until 20.5, and read until 21.5
    links.run_idle(21.4, 21.5)
    assert prefetch.done and manager.match([1, 2]).num_host_blocks == 2
    counts = links.finish(21.5, SchedulerStats(), 0.0).storage
    assert counts is not None
    assert (counts.storage_blocks, counts.used_blocks) == (100, 2)
    assert (counts.bytes_written, counts.bytes_read) == (4096, 4096)
    assert (counts.busy_writing_s, counts.busy_reading_s) == (2.0, 1.0)
    assert counts.evicted_blocks == counts.late_blocks == 0


def test_a_late_operation_fails_at_its_deadline() -> None:
    manager, links = linked()
    assert manager.tiers is not None
    demote(manager, [1, 2, 3, 4])
    links.run_idle(0.0, 4.0)
    demote(manager, [5, 6])
    links.run_idle(4.0, 6.0)  # its write is decided at 6, begins at 8 and ends at 10: in time
    demote(manager, [7, 8])
    links.run_idle(6.0, 13.0)  # so is this: decided at 8, from 10 to 12
    assert manager.tiers.stats().stored_blocks == 8
    gpu = dataclasses.replace(COSTS.gpu, storage_write_bytes_per_s=512.0)  # 5 s for a block
    manager, links = linked(dataclasses.replace(COSTS, gpu=gpu))
    assert manager.tiers is not None
    demote(manager, [1])
    links.run_idle(0.0, 1.0)
    demote(manager, [2])
    links.run_idle(1.0, 6.9)  # the first is written from 1 to 6; the other, from 2 on, fails at 7
    assert (manager.tiers.stats().stored_blocks, links.next_end_s) == (1, 7.0)
    counts = links.finish(6.9, SchedulerStats(), 0.0).storage
    assert counts is not None
    assert (counts.used_blocks, counts.late_blocks, counts.bytes_written) == (1, 1, 2048)
    assert manager.tiers.num_open_operations == 0


class Submitted:
    """Tiers whose operations a test submits.

    Attributes:
        queued: what the link takes next.
        ended: operations that have ended, and whether they have succeeded.
    """

    def __init__(self) -> None:
        self.queued: list[Operation] = []
        self.ended: dict[OpId, bool] = {}

    def take_used(self) -> list[bytes]:
        return []

    def take_operations(self) -> list[Operation]:
        taken, self.queued = self.queued, []
        return taken

    def complete(self, op_id: OpId, ok: list[bool]) -> None:
        assert op_id not in self.ended and len(set(ok)) == 1
        self.ended[op_id] = ok[0]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from([STORE, LOAD]), st.integers(1, 4), st.integers(1, 9)
        ),
        max_size=12,
    )
)
def test_only_what_meets_its_deadline_takes_time_of_a_link(
    operations: list[tuple[int, OpKind, int, int]],
) -> None:
    """Each with the seconds before it, its blocks, and its limit; a block takes a second."""
    tiers: Any = Submitted()
    storage = SimulatedStorage(100, COSTS)
    storage.write_bytes_per_s = storage.read_bytes_per_s = 1.0
    links = TierLinks(tiers, 1.0, 1.0, storage)
    now_s = 0
    work_s = {STORE: 0, LOAD: 0}  # of each link, before it is idle
    done_s = {STORE: 0, LOAD: 0}
    expected: dict[OpId, tuple[int, bool]] = {}
    for place, (pause_s, kind, num_blocks, limit_s) in enumerate(operations):
        now_s += pause_s
        work_s = {each: max(0, left_s - pause_s) for each, left_s in work_s.items()}
        names = tuple(b"%d %d" % (place, index) for index in range(num_blocks))
        if kind is LOAD:
            storage.complete(STORE, names)
        blocks = np.arange(num_blocks, dtype=np.int32)
        op_id = OpId(place)
        tiers.queued = [Operation(op_id, Epoch(0), kind, blocks, blocks, names, float(limit_s))]
        links.dispatch(float(now_s))
        in_time = work_s[kind] + num_blocks <= limit_s
        if in_time:
            work_s[kind] += num_blocks
            done_s[kind] += num_blocks
        expected[op_id] = now_s + (work_s[kind] if in_time else limit_s), in_time
    ended: dict[OpId, tuple[float, bool]] = {}
    while (end_s := links.next_end_s) is not None:
        links.deliver(end_s)
        ended |= {each: (end_s, ok) for each, ok in tiers.ended.items() if each not in ended}
    assert ended == expected
    for kind, seconds in done_s.items():
        assert links.busy_s[kind] == links.num_bytes[kind] == seconds


def add_up(result: SimulationResult) -> bool:
    hit_tokens = result.hit_tokens + result.host_hit_tokens + result.storage_hit_tokens
    return result.prompt_tokens == hit_tokens + result.computed_tokens


def test_a_storage_hit_by_hand() -> None:
    # When [2, 3] comes, [0] is on the device and [0] and [1] are on the host; [2, 3] fills both
    # tiers. At 60 s [0] is only in storage: half a second for the lookup, half a second to read 8
    # blocks, two seconds to copy them to the device, and a step for the last token.
    trace = make_trace([0], [1], [2, 3], [4, 5], [6, 7], [8], [0], gap_ms=10_000.0)
    result = simulate(trace, COSTS, CONFIG)
    assert result.prompt_tokens == 10 * 512
    assert (result.hit_tokens, result.host_hit_tokens, result.storage_hit_tokens) == (0, 0, 511)
    assert add_up(result)
    assert result.simulated_s == pytest.approx(64.0)
    tiers = result.tiers
    assert tiers is not None and tiers.storage is not None
    assert tiers.waited_s == pytest.approx(6 * 0.5 + 0.5 + 0.5 + 2.0)
    assert (tiers.promoted_blocks, tiers.storage.bytes_read) == (8, 8 * 256)
    assert tiers.storage.busy_reading_s == pytest.approx(0.5)
    assert [check.verdict for check in result.checks] == ["PASS"] * 4, result.checks
    assert result.checks[1].detail == "5,120 = 0 + 0 + 511 + 4,609"


def test_a_new_process_hits_the_blocks_left_in_storage() -> None:
    config = dataclasses.replace(CONFIG, host=HostConfig(16, "through"), storage_blocks=None)
    storage = SimulatedStorage(1_000, COSTS)
    first = simulate(make_trace([0], [1]), COSTS, config, storage=storage)
    assert first.storage_hit_tokens == 0 and len(storage) == 16
    names = simulated_namespace(64).block_keys(list(range(512)))
    assert all(name in storage for name in names)
    second = simulate(make_trace([1], [2]), COSTS, config, storage=storage)
    assert second.storage_hit_tokens == 511
    assert add_up(second)


def test_stored_keys_equal_an_oracle() -> None:
    # One request at a time, with time for every copy. "through" stores every computed block, and
    # storage has room for all of them: every repeated prefix is found in some tier.
    paths = [[0], [0, 1], [2, 3], [4, 5], [0, 1], [6], [2, 3], [4, 7], [0, 1], [2, 8]]
    config = dataclasses.replace(CONFIG, host=HostConfig(16, "through"))
    seen: set[int] = set()
    wanted = 0
    for path in paths:
        found = next((place for place, part in enumerate(path) if part not in seen), len(path))
        wanted += min(512 * found, 512 * len(path) - 1)
        seen.update(path)
    trace = make_trace(*paths, gap_ms=100_000.0)
    result = simulate(trace, COSTS, config)
    assert result.hit_tokens + result.host_hit_tokens + result.storage_hit_tokens == wanted
    assert result.storage_hit_tokens > 0
    assert add_up(result)
    without = simulate(trace, COSTS, dataclasses.replace(config, storage_blocks=None))
    assert without.storage_hit_tokens == 0 and without.computed_tokens > result.computed_tokens
    assert simulate(trace, COSTS, config).tiers == result.tiers


def test_requests_parked_in_storage_compute_nothing_again(bundled_trace: Trace) -> None:
    trace = Trace(bundled_trace.requests[:60])
    costs = CostModel(
        ModelCosts("small", 8e9, layers=32, heads=32, kv_heads=8, head_dim=128),
        GpuCosts("fast", 989e12, 4.8e12, 141e9, storage_write_bytes_per_s=1e12),
    )
    config = SimulationConfig(
        num_blocks=2_000,
        reserve_tokens=0,
        host=HostConfig(20_000),
        storage_blocks=100_000,
        preempt="storage",
    )
    result = simulate(trace, costs, config)
    assert result.tiers is not None and result.tiers.storage is not None
    assert result.tiers.parked == result.tiers.resumed == result.preemptions > 0
    assert result.recomputed_tokens == 0
    assert result.tiers.storage.bytes_written > 0
    assert add_up(result)
    assert [check.verdict for check in result.checks] == ["PASS"] * 4, result.checks


@given(
    trace=SMALL_TRACES,
    num_blocks=st.integers(20, 70),
    host_blocks=st.sampled_from([1, 5, 40, 400]),
    storage_blocks=st.sampled_from([1, 20, 1_000]),
    preempt=st.sampled_from(["recompute", "host", "storage"]),
    storage_bytes_per_s=st.sampled_from([100.0, 2_000.0, 1e6]),
)
def test_any_small_simulation_with_storage_ends_and_adds_up(
    trace: Trace,
    num_blocks: int,
    host_blocks: int,
    storage_blocks: int,
    preempt: PreemptMode,
    storage_bytes_per_s: float,
) -> None:
    gpu = dataclasses.replace(
        COSTS.gpu,
        storage_write_bytes_per_s=storage_bytes_per_s,
        storage_read_bytes_per_s=storage_bytes_per_s,
    )
    config = SimulationConfig(
        64,
        num_blocks,
        token_budget=512,
        max_running=8,
        reserve_tokens=0,
        host=HostConfig(host_blocks, "back"),
        storage_blocks=storage_blocks,
        preempt=preempt,
    )
    result = simulate(trace, CostModel(COSTS.model, gpu, StepCosts(overhead_s=0.1)), config)
    assert all(check.ok for check in result.checks), result.checks
    assert add_up(result)
    assert result.tiers is not None and result.tiers.storage is not None
    assert result.tiers.storage.used_blocks <= storage_blocks


def test_a_wrong_storage_hit_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = MixedScheduler.schedule

    def lie(self: MixedScheduler) -> StepPlan:
        plan = schedule(self)
        for chunk in plan.chunks:
            chunk.request.num_storage_hit_tokens = 0
        return plan

    monkeypatch.setattr(MixedScheduler, "schedule", lie)
    trace = make_trace([0], [1], [2, 3], [4, 5], [6, 7], [8], [0], gap_ms=10_000.0)
    check = simulate(trace, COSTS, CONFIG).checks[1]
    assert check.detail == "1 violations, the first: request 6: 0 tokens hit, computed from 511"
