"""Cluster simulation: cases by hand, the bundled trace, and a failure of every check."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.scheduler.handoff import Order
from radixkv.scheduler.replay.checks import Check
from radixkv.scheduler.replay.simulation.accounting import ClusterAccounts
from radixkv.scheduler.replay.simulation.cluster import (
    ClusterConfig,
    ClusterResult,
    _Cluster,
    simulate_cluster,
)
from radixkv.scheduler.replay.simulation.cost_model import (
    CostError,
    CostModel,
    GpuCosts,
    ModelCosts,
    StepCosts,
    named_costs,
)
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig
from radixkv.scheduler.replay.trace import Trace, TraceRequest
from radixkv.scheduler.request import Request

from ...profiles import scaled
from .conftest import make_trace

# Every step takes a second, a message a tenth, and a block of 64 tokens (4 bytes each) 0.01 s.
COSTS = CostModel(
    ModelCosts("toy", 1, layers=1, heads=1, kv_heads=1, head_dim=1),
    GpuCosts("toy", 1e29, 1e29, 1e9, network_bytes_per_s=25_600),
    StepCosts(overhead_s=1.0, network_efficiency=1.0, message_s=0.1),
)
NODE = SimulationConfig(block_size=64, num_blocks=64, token_budget=512)


def first_requests(trace: Trace, num_requests: int) -> Trace:
    return Trace(trace.requests[:num_requests])


def verdicts(result: ClusterResult) -> list[str]:
    return [check.verdict for check in result.checks]


def test_one_request_by_hand() -> None:
    # ASK and GRANT, then two steps of prefill. Each chunk is sent when it is computed: the second
    # part is announced at 2.2 s, together with COMMIT, and takes 0.08 s. Then two decode steps.
    trace = make_trace([0, 1], output_length=3)
    result = simulate_cluster(trace, COSTS, ClusterConfig(1, 1, NODE))
    assert (result.finished, result.refused, result.sent_blocks) == (1, 0, 16)
    assert result.sent_bytes == 16 * 64 * 4
    assert (result.prefill.steps, result.decode.steps) == (2, 2)
    latencies = result.latencies
    assert latencies.ttft_s is not None and latencies.tpot_s is not None
    assert latencies.ttft_s.p99 == pytest.approx(0.1 + 0.1 + 2.0 + 0.1 + 0.08)
    assert latencies.tpot_s.p99 == pytest.approx(1.0)
    assert result.simulated_s == pytest.approx(4.38)
    assert result.prefill.busy == pytest.approx(2 / 4.38)
    assert result.decode.busy == pytest.approx(2 / 4.38)
    assert verdicts(result) == ["PASS"] * 3


@pytest.mark.parametrize("order", ["early", "prefill_complete"])
def test_the_last_answer_is_not_the_last_message(order: Order) -> None:
    """A request of one token is answered when D has its KV; P does not know that yet."""
    result = simulate_cluster(make_trace([0]), COSTS, ClusterConfig(1, 1, NODE, order))
    assert result.simulated_s == pytest.approx(1.38)
    assert verdicts(result) == ["PASS"] * 3


def test_blocks_are_granted_after_the_prompt_is_computed() -> None:
    trace = make_trace([0, 1], output_length=3)
    config = ClusterConfig(1, 1, NODE, "prefill_complete")
    result = simulate_cluster(trace, COSTS, config)
    latencies = result.latencies
    assert latencies.ttft_s is not None
    # Two steps, ASK, GRANT, SEND, and all 16 blocks.
    assert latencies.ttft_s.p99 == pytest.approx(2.0 + 0.3 + 0.16)
    assert verdicts(result) == ["PASS"] * 3


def test_cached_blocks_are_neither_computed_nor_sent_again() -> None:
    trace = make_trace([0, 1], [0, 1], output_length=2, gap_ms=20_000.0)
    result = simulate_cluster(trace, COSTS, ClusterConfig(1, 1, NODE))
    assert result.hit_tokens == 1023  # the last token is computed for its logits
    assert (result.own_tokens, result.sent_blocks) == (1024, 16)
    assert result.prefill.steps == 3


def network(block_s: float) -> CostModel:
    """The costs with other seconds per block."""
    gpu = dataclasses.replace(COSTS.gpu, network_bytes_per_s=256 / block_s)
    return dataclasses.replace(COSTS, gpu=gpu)


def test_transfers_to_one_node_are_serialized() -> None:
    trace = make_trace([0], [1])
    result = simulate_cluster(trace, COSTS, ClusterConfig(2, 1, NODE))
    # Each is computed on its own node at the same time; the second waits for D's network.
    latencies = result.latencies
    assert latencies.end_to_end_s is not None
    assert latencies.end_to_end_s.p99 == pytest.approx(1.3 + 0.16, abs=0.01)
    assert result.simulated_s == pytest.approx(1.3 + 0.16)


def test_transfers_from_one_node_are_serialized() -> None:
    # P computes one after the other. The second, for another D, is sent when the first has left.
    result = simulate_cluster(make_trace([0], [1]), network(0.25), ClusterConfig(1, 2, NODE))
    assert result.simulated_s == pytest.approx(1.3 + 2 * 2.0)
    assert result.latencies.ttft_s is not None
    assert result.latencies.ttft_s.p50 == pytest.approx(1.3 + (2.0 + 4.0) / 2)


def test_a_decode_node_without_room_is_avoided_although_it_has_the_prefix() -> None:
    """The first request leaves a prefix on it, the second one fills it, the third has to move."""
    requests = (
        TraceRequest(0.0, 1024, 2, (0, 1)),
        TraceRequest(10_000.0, 1536, 300, (0, 1, 9)),
        TraceRequest(20_000.0, 1536, 2, (0, 1, 2)),
    )
    node = dataclasses.replace(NODE, num_blocks=32, reserve_tokens=0)
    cluster = _Cluster(Trace(requests), COSTS, ClusterConfig(1, 2, node))
    while cluster.advance():
        pass
    cluster.drain()
    result = cluster.result(0.0)
    assert (result.finished, result.busy_refusals) == (3, 1)
    # The third one does not wait for the second, whose output takes 299 steps.
    assert result.latencies.ttft_s is not None and result.latencies.ttft_s.p99 < 3.0
    assert set(cluster.router.loads().values()) == {0}, "an attempt that has ended is no load"


def test_a_prompt_that_is_computed_is_no_load_of_its_prefill_node() -> None:
    """Another prompt goes where its prefix is, although the first request is not finished."""
    requests = (TraceRequest(0.0, 1024, 30, (0, 1)), TraceRequest(10_000.0, 1536, 2, (0, 1, 2)))
    result = simulate_cluster(Trace(requests), COSTS, ClusterConfig(2, 1, NODE))
    assert result.simulated_s > 30.0
    assert result.hit_tokens == 1024


def test_each_node_has_the_options_of_its_configuration() -> None:
    node = SimulationConfig(32, num_blocks=40, token_budget=96, max_running=5, reserve_tokens=7)
    config = ClusterConfig(2, 1, node, "prefill_complete")
    cluster = _Cluster(make_trace([0]), COSTS, config)
    assert list(cluster.nodes) == ["p0", "p1", "d0"]
    for each in cluster.nodes.values():
        scheduler, manager = each.scheduler, each.scheduler.manager
        assert (scheduler.token_budget, scheduler.max_running) == (96, 5)
        assert (manager.num_blocks, manager.block_size) == (40, 32)
    assert cluster.nodes["d0"].scheduler.reserve_tokens == 7


@pytest.mark.parametrize("order", ["early", "prefill_complete"])
@pytest.mark.parametrize("reserve_tokens", [0, 512, None])
def test_a_tight_decode_node_makes_others_wait(
    bundled_trace: Trace, order: Order, reserve_tokens: int | None
) -> None:
    node = SimulationConfig(num_blocks=4_000, reserve_tokens=reserve_tokens)
    config = ClusterConfig(2, 1, node, order)
    trace = first_requests(bundled_trace, 100)
    result = simulate_cluster(trace, named_costs(), config)
    too_large = [line.input_length + line.output_length - 1 > 64_000 for line in trace.requests]
    assert result.refused == sum(too_large)
    assert result.finished + result.refused == 100
    assert result.busy_refusals > 0 or order == "prefill_complete"
    if reserve_tokens is None:
        assert result.preemptions == 0
    assert all(check.ok for check in result.checks), result.checks


def test_reservations_prevent_preemption() -> None:
    # Four prompts of 8 blocks, each of which grows by 8: a pool of 40 has room for all prompts.
    trace = make_trace([0], [1], [2], [3], output_length=512)
    node = dataclasses.replace(NODE, num_blocks=40)
    results = {
        reserve: simulate_cluster(
            trace,
            COSTS,
            ClusterConfig(1, 1, dataclasses.replace(node, reserve_tokens=reserve)),
        )
        for reserve in (0, None)
    }
    assert results[0].preemptions > 0
    assert results[0].recomputed_tokens > 0
    assert results[None].preemptions == 0
    assert verdicts(results[None]) == ["PASS"] * 4


@scaled(30)
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=8),
    st.sampled_from([0, 100, None]),
    st.sampled_from(["early", "prefill_complete"]),
    st.sampled_from([0.0, 700.0]),
    st.sampled_from([0.01, 20.0]),
)
def test_any_ratio_of_nodes_answers_everything(
    num_prefill: int,
    num_decode: int,
    paths: list[list[int]],
    reserve: int | None,
    order: Order,
    gap_ms: float,
    block_s: float,
) -> None:
    # An id stands for its whole prefix.
    prefixes = [[tuple(path[: n + 1]) for n in range(len(path))] for path in paths]
    distinct = dict.fromkeys(prefix for path in prefixes for prefix in path)
    ids = {prefix: place for place, prefix in enumerate(distinct)}
    trace = make_trace(*([ids[each] for each in path] for path in prefixes), gap_ms=gap_ms)
    trace = Trace(tuple(dataclasses.replace(line, output_length=70) for line in trace.requests))
    node = dataclasses.replace(NODE, num_blocks=30, reserve_tokens=reserve)
    config = ClusterConfig(num_prefill, num_decode, node, order)
    result = simulate_cluster(trace, network(block_s), config)
    assert result.finished == len(paths)
    assert all(check.ok for check in result.checks), result.checks
    # A block passes the links of a P and of a D, and a link has one transfer at a time.
    assert result.simulated_s >= result.sent_blocks * block_s / min(num_prefill, num_decode)


@pytest.mark.usefixtures("ticking_clocks")
def test_the_cost_of_the_schedulers_is_cpu_time() -> None:
    result = simulate_cluster(make_trace([0, 1], output_length=3), COSTS, ClusterConfig(1, 1, NODE))
    num_steps = result.prefill.steps + result.decode.steps
    spans = result.scheduler_us_per_step * num_steps / 1e6
    assert spans == pytest.approx(round(spans)) and 2 * num_steps <= spans < 100
    assert result.wall_s == 1_000


def test_two_replays_give_the_same_result(bundled_trace: Trace) -> None:
    trace, costs = first_requests(bundled_trace, 40), named_costs()
    calls: list[tuple[str, int, int]] = []
    config = ClusterConfig(2, 1)

    def run() -> ClusterResult:
        result = simulate_cluster(trace, costs, config, lambda *call: calls.append(call), "apart")
        return dataclasses.replace(result, scheduler_us_per_step=0.0, wall_s=0.0)

    assert run() == run()
    assert calls[-1] == ("apart", 40, 40)


def test_requests_larger_than_a_pool_are_refused_and_counted() -> None:
    trace = make_trace([0, 1, 2], [3], [4, 5, 6], output_length=2)
    node = dataclasses.replace(NODE, num_blocks=16)
    result = simulate_cluster(trace, COSTS, ClusterConfig(1, 1, node))
    assert (result.finished, result.refused) == (1, 2)
    assert result.checks[0].detail == "1 finished, 2 refused"
    # The prompt alone fits: only D knows that the output does not.
    grows = make_trace([0, 1], output_length=65)
    result = simulate_cluster(grows, COSTS, ClusterConfig(1, 1, node))
    assert (result.finished, result.refused) == (0, 1)


@scaled(30)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.3, 25.0])), min_size=1, max_size=6),
    st.sampled_from(["early", "prefill_complete"]),
)
def test_a_refusal_is_an_answer_at_once(arrivals: list[tuple[bool, float]], order: Order) -> None:
    """Requests that are refused take no time, wherever they come: the last answer is the same."""
    times = [sum(gap for _, gap in arrivals[: place + 1]) for place in range(len(arrivals))]
    lines = tuple(
        dataclasses.replace(line, timestamp_ms=at_s * 1e3)
        for (is_too_large, _), at_s in zip(arrivals, times, strict=True)
        for line in make_trace([0, 1, 2] if is_too_large else [3]).requests
    )
    node = dataclasses.replace(NODE, num_blocks=16)
    config = ClusterConfig(1, 1, node, order)
    result = simulate_cluster(Trace(lines), COSTS, config)
    answered = [0.0, times[-1] - times[0]]
    served = tuple(line for line in lines if line.input_length == 512)
    if served:
        without = simulate_cluster(Trace(served), COSTS, config)
        answered.append(served[0].timestamp_ms / 1e3 - times[0] + without.simulated_s)
    assert result.refused == len(lines) - len(served)
    assert result.simulated_s == pytest.approx(max(answered))


@pytest.mark.parametrize("gap_ms", [1e5, 1e9, 1.7e12, 1e17])
def test_a_gap_between_requests_costs_nothing(
    gap_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line without an epoch may stand before lines with one."""
    ticks: Counter[str] = Counter()
    tick = _Cluster._tick

    def count_tick(cluster: _Cluster) -> None:
        ticks["all"] += 1
        assert ticks["all"] < 50
        tick(cluster)

    monkeypatch.setattr(_Cluster, "_tick", count_tick)
    trace = make_trace([0], [1], [2], output_length=3, gap_ms=gap_ms)
    result = simulate_cluster(trace, COSTS, ClusterConfig(1, 1, NODE))
    assert result.finished == 3
    assert all(check.ok for check in result.checks), result.checks
    assert result.simulated_s == pytest.approx(2 * gap_ms / 1e3 + 3.38)


def test_the_model_must_leave_room_for_blocks() -> None:
    with pytest.raises(CostError, match="llama3-70b does not fit"):
        simulate_cluster(make_trace([0]), named_costs("llama3-70b", "a100"), ClusterConfig(1, 1))


# ------------------------------------------------------------------------------ planted bugs


def accounts_of(*requests: Request) -> ClusterAccounts:
    accounts = ClusterAccounts(4)
    for request in requests:
        accounts.answers.arrive(request, 0.0)
    return accounts


def checks(
    accounts: ClusterAccounts, num_requests: int, preemptions: int | None = None
) -> list[Check]:
    manager = CacheManager(4, 4)
    return accounts.checks(num_requests, [manager, manager], preemptions)


def ended(request: Request, num_outputs: int) -> Request:
    for _ in range(num_outputs):
        request.append(1)
    request.finish_reason = "length"
    return request


def test_wrong_answers_are_found() -> None:
    first, second, third = (Request(name, [1, 2, 3, 4, 5], 2) for name in "abc")
    accounts = accounts_of(first, second, third)
    accounts.start(first, 0, 1.0)
    accounts.start(first, 0, 2.0)
    accounts.finish(ended(first, 1), 3.0)
    accounts.finish(second, 3.0)
    answered = checks(accounts, 3)[0]
    assert (answered.name, answered.ok) == ("every request is answered once, in full", False)
    assert answered.detail == "4 violations, the first: request a: starts twice"
    assert accounts.answers.violations[1:] == [
        "request a: 1 tokens of 2, finish_reason length",
        "request b: finished twice, or before its first token",
    ]


def test_a_request_without_an_answer_is_found() -> None:
    answered = checks(accounts_of(Request("a", [1], 2)), 1)[0]
    assert answered.detail == "1 violations, the first: 0 answers to 1 requests, 1 pending"


def test_an_unnecessary_transfer_is_found() -> None:
    request = Request("a", [1, 2, 3, 4, 5], 1)
    accounts = accounts_of(request)
    accounts.start(request, 4, 1.0)
    accounts.finish(ended(request, 1), 1.0)
    accounts.sent_blocks = 2
    sent = checks(accounts, 1)[1]
    assert (sent.name, sent.ok) == ("D receives exactly the blocks it lacks", False)
    assert sent.detail == "2 blocks sent, 1 lacked"


def test_a_leak_on_one_node_is_found() -> None:
    leaky = CacheManager(4, 4)
    leaky.admit(leaky.match([1]))
    leaked = accounts_of().checks(0, [CacheManager(4, 4), leaky], None)[2]
    assert (leaked.ok, leaked.detail) == (False, "3 free + 0 idle of 4 blocks, 1 leases")


def test_an_unexpected_preemption_is_found() -> None:
    preempted = checks(accounts_of(), 0, preemptions=2)[3]
    assert (preempted.ok, preempted.detail) == (False, "2 preemptions")
