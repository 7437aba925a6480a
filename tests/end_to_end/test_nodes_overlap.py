"""Steps in flight on a decode node: the tokens are those of a node that waits for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import CountError, HostConfig
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.nodes.node import NodeEngine

from .cluster import Cluster
from .conftest import complete, fresh, let_copies_end
from .test_engine import PROMPTS
from .test_overlap import NEW_TOKENS, requests_of, sampling_of


@pytest.fixture(scope="module")
def served(engine: Callable[[str, int], Engine]) -> tuple[Engine, list[list[int]]]:
    """An engine to take programs from, and what each prompt generates alone, step by step."""
    compiled = engine("llama", 4)
    alone = [
        complete(fresh(compiled, depth=1), [prompt], NEW_TOKENS, [sampling_of(index)])[0]
        for index, prompt in enumerate(PROMPTS)
    ]
    return compiled, alone


@settings(max_examples=12)
@given(
    depth=st.integers(1, 3),
    num_blocks=st.sampled_from([24, 32, 160]),
    tiers=st.sampled_from([None, "recompute", "host"]),
    stops=st.lists(st.integers(0, NEW_TOKENS - 1), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    events=st.dictionaries(st.integers(1, 60), st.sampled_from(["abort", "reset"]), max_size=4),
    data=st.data(),
)
def test_tokens_do_not_depend_on_the_depth(served, depth, num_blocks, tiers, stops, events, data):
    compiled, alone = served
    options: dict[str, Any] = {"depth": depth, "num_blocks": num_blocks, "reserve_tokens": 0}
    if tiers is not None:
        options |= {"host": HostConfig(64), "preempt": tiers}
    cluster = Cluster(compiled, decode=options, front={"max_attempts": 1000})
    requests = requests_of(alone, stops)
    for request in requests:
        cluster.front.add_request(request)
    number, ended = 0, []
    while cluster.front.has_work:
        ended += cluster.front.step()
        number += 1
        match events.get(number):
            case "abort":
                cluster.front.abort(data.draw(st.sampled_from(requests)).request_id)
            case "reset":
                cluster.front.reset_cache()
    let_copies_end(cluster.d._runner)
    cluster.assert_nothing_leaked()
    assert cluster.front.failures == {}
    for made, outputs in zip(requests, alone, strict=True):
        expected = outputs
        if made.stop_token_ids:
            [stop] = made.stop_token_ids
            expected = outputs[: outputs.index(stop) + 1]
        if made.finish_reason == "abort":
            expected = []  # what was generated stays on the node
        assert made.output_tokens == expected
        assert ended.count(made) == (made.finish_reason != "abort")


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the most steps that were in flight, by the name of the node's class."""
    most: dict[str, int] = {}
    read = NodeEngine._read

    def spy(node: Any) -> None:
        kind = type(node).__name__
        most[kind] = max(most.get(kind, 0), len(node._in_flight))
        read(node)

    monkeypatch.setattr(NodeEngine, "_read", spy)
    return most


@pytest.mark.parametrize("depth", [None, 1, 2, 3])
def test_a_decode_node_has_two_steps_in_flight_by_default(served, monkeypatch, depth):
    compiled, alone = served
    most = watch(monkeypatch)
    cluster = Cluster(compiled, decode={} if depth is None else {"depth": depth})
    assert cluster.complete([PROMPTS[0]], NEW_TOKENS, [sampling_of(0)]) == [alone[0]]
    assert most == {"PrefillEngine": 1, "DecodeEngine": depth or 2}


def test_a_depth_below_1_is_refused(served):
    with pytest.raises(CountError, match=r"^depth must be at least 1, got 0$"):
        Cluster(served[0], decode={"depth": 0})


def test_preemption_waits_for_the_steps_in_flight(served):
    compiled, alone = served
    cluster = Cluster(compiled, decode={"num_blocks": 24, "reserve_tokens": 0, "depth": 2})
    samplings = [sampling_of(index) for index in range(len(PROMPTS))]
    assert cluster.complete(PROMPTS, NEW_TOKENS, samplings) == alone
    assert cluster.d.stats().engine.scheduler.preemptions > 0


def test_a_reset_reads_the_steps_in_flight(served):
    compiled, alone = served
    cluster = Cluster(compiled, decode={"depth": 2})
    [request] = cluster.add([PROMPTS[0]], NEW_TOKENS, [sampling_of(0)])
    while not cluster.d._in_flight:
        cluster.step(1)
    num_blocks = cluster.d.manager.num_blocks
    cluster.d.reset_cache()
    assert not cluster.d._in_flight and cluster.d.manager.available == num_blocks
    assert cluster.d.scheduler.waiting, "it computes its KV again"
    assert cluster.finish() == [request] and request.output_tokens == alone[0]


def test_the_staging_memory_of_parts_is_released_while_steps_overlap(served, monkeypatch):
    """The arrays are not idle between two steps of a busy device."""
    compiled, _ = served
    cluster = Cluster(compiled)
    monkeypatch.setattr(cluster.d._kv, "is_idle", lambda: False)
    cluster.add([PROMPTS[0]], NEW_TOKENS)
    while not cluster.d._receiver._written:
        cluster.step(1)
    cluster.step(3)
    assert cluster.d._in_flight and not cluster.d._receiver._written
    cluster.finish()
