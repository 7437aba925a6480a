"""`NodesMetrics`: what a scrape shows of nodes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixkv.scheduler import (
    AsyncEngine,
    EngineClosedError,
    EngineFailedError,
    GenerationParams,
)
from radixkv.scheduler.gateway.remote_node import RemoteNode
from radixkv.scheduler.handoff.gateway_messages import NodeLoad, NodeStatus
from radixkv.scheduler.metrics import NodesMetrics
from radixkv.scheduler.metrics.nodes_metrics import NODE_METRICS
from radixkv.scheduler.request import Request
from radixkv.scheduler.serving.nodes_front import serve_nodes

from ..nodes.fake_channel import Deployment


class Turning:
    """Nodes that turn at each step of the gateway."""

    def __init__(self, **options: Any) -> None:
        self.deployment = Deployment(stream=True, **options)
        self.failures = self.deployment.nodes.failures
        self.add_request = self.deployment.nodes.add_request
        self.abort = self.deployment.nodes.abort

    @property
    def has_work(self) -> bool:
        return self.deployment.nodes.has_work

    @property
    def advanced(self) -> Any:
        return self.deployment.nodes.advanced

    def step(self) -> list[Request]:
        return self.deployment.turn()


async def scrape(metrics: NodesMetrics) -> dict[tuple[str, str], float]:
    """The values by metric, and by node and tier."""
    values = {}
    for family in text_string_to_metric_families((await metrics.scrape()).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            role = labels.pop("role", "")
            assert labels.get("node", "").startswith(role)
            place = sample.name, "/".join(labels.values())
            assert place not in values, f"{place} comes twice"
            values[place] = sample.value
    return values


def test_each_node_has_its_values_until_it_is_gone() -> None:
    async def test() -> None:
        nodes = Turning(num_decode=2)
        async with serve_nodes(nodes, lambda: None) as engine:
            metrics = NodesMetrics(engine, nodes.deployment.nodes, model_name="tiny")
            async for _ in engine.generate([1, 2, 3], GenerationParams(2)):
                pass
            # A status may be from when the request ran: hear the next one of each node.
            await engine.call(lambda _: nodes.deployment.turn(8))
            seen = await scrape(metrics)
            assert seen["radixkv:engine_up", ""] == 1
            assert seen["radixkv:num_requests_open", ""] == 0
            for name in ("num_requests_moved", "num_attempts_lost", "num_nodes_lost"):
                assert seen[f"radixkv:{name}_total", ""] == 0
            for name in ("prefill-0", "decode-0", "decode-1"):
                assert seen["radixkv:node_up", name] == 1
                assert seen["radixkv:num_requests_running", name] == 0
                assert seen["radixkv:num_requests_waiting", name] == 0
                assert seen["radixkv:kv_cache_usage_perc", name] == 0
                assert seen["radixkv:num_preemptions_total", name] == 0
                hits = 7 if name == "prefill-0" else 0
                assert seen["radixkv:prefix_cache_hits_total", name] == hits
                assert (
                    seen["radixkv:prompt_tokens_cached_by_source_total", f"{name}/device"] == hits
                )
                assert seen["radixkv:prompt_tokens_cached_by_source_total", f"{name}/host"] == 0
            await lose(engine, nodes, "decode-1")
            seen = await scrape(metrics)
            assert seen["radixkv:node_up", "decode-1"] == 0
            assert seen["radixkv:num_nodes_lost_total", ""] == 1
            assert seen["radixkv:num_attempts_lost_total", ""] == 0  # it had none
            assert seen["radixkv:node_up", "decode-0"] == 1
            assert ("radixkv:num_requests_running", "decode-1") not in seen
        last = await scrape(metrics)
        assert last == seen | {("radixkv:engine_up", ""): 0}

    asyncio.run(test())


def test_a_node_that_comes_back_and_is_refused_is_there_once() -> None:
    """The gateway counts it among those that are gone, until it serves again."""

    async def test() -> None:
        nodes = Turning(num_decode=2)
        async with serve_nodes(nodes, lambda: None) as engine:
            metrics = NodesMetrics(engine, nodes.deployment.nodes, model_name="tiny")
            gateway = nodes.deployment.nodes._gateway

            def come_back(status: NodeStatus) -> str:
                other = replace(status, model="another model")
                gateway.receive("decode-1", 10**9, other, nodes.deployment.nodes._clock())
                return gateway.nodes["decode-1"].refusal

            await engine.call(lambda _: nodes.deployment.turn(8))
            status = await engine.call(lambda _: gateway.nodes["decode-1"].status)
            await lose(engine, nodes, "decode-1")
            assert await engine.call(lambda _: come_back(status))
            seen = await scrape(metrics)
            assert seen["radixkv:node_up", "decode-1"] == 0
            assert seen["radixkv:node_up", "decode-0"] == 1

    asyncio.run(test())


class Confined:
    """Nodes that only the thread of the engine may read."""

    def __init__(self, nodes: Any) -> None:
        self._nodes = nodes

    def __getattr__(self, name: str) -> Any:
        assert threading.current_thread().name == "radixkv-engine", name
        return getattr(self._nodes, name)


def test_only_the_engines_thread_reads_the_nodes() -> None:
    """It changes their dictionaries, also while a scrape would go through them."""

    async def test() -> None:
        nodes = Turning()
        async with serve_nodes(nodes, lambda: None) as engine:
            metrics = NodesMetrics(engine, Confined(nodes.deployment.nodes), model_name="tiny")
            await engine.call(lambda _: nodes.deployment.turn(8))
            seen = await scrape(metrics)
            assert seen["radixkv:node_up", "prefill-0"] == 1

    asyncio.run(test())


async def lose(engine: AsyncEngine, nodes: Turning, name: str) -> None:
    """Silence a node until the gateway misses it."""
    await engine.call(lambda _: nodes.deployment.loops.pop(name))
    while not await engine.call(lambda _: nodes.deployment.nodes.gone):
        pass


class Ended:
    """An engine whose thread reads nodes until it has ended with an error."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def call(self, function: Callable[[Any], Any]) -> Any:
        if self.error is not None:
            raise self.error
        return function(None)


def remote(role: str, refusal: str = "") -> RemoteNode:
    status = NodeStatus(role, "127.0.0.1:5", "jax", 4, 12, "m")  # type: ignore[arg-type]
    return RemoteNode(status, epoch=1, heard_at=0.0, refusal=refusal)


@pytest.mark.parametrize("error", [EngineClosedError("closed"), EngineFailedError("failed")])
def test_what_a_scrape_shows_stays_after_the_end_of_the_engine(error: Exception) -> None:
    """A node that is refused has no values, also one that has never served."""
    alive = {"prefill-0": remote("prefill"), "decode-0": remote("decode", "another model")}
    gone = {"decode-1": remote("decode")}
    watched = SimpleNamespace(
        nodes=alive, gone=gone, num_open=3, num_moved=4, num_attempts_lost=5, num_nodes_lost=6
    )
    engine: Any = Ended()
    metrics = NodesMetrics(engine, watched, model_name="tiny")
    seen = asyncio.run(scrape(metrics))
    counts = {name.removeprefix("radixkv:"): seen[name, place] for name, place in seen if not place}
    assert counts == {
        "engine_up": 1,
        "num_requests_open": 3,
        "num_requests_moved_total": 4,
        "num_attempts_lost_total": 5,
        "num_nodes_lost_total": 6,
    }
    up = {place: seen[name, place] for name, place in seen if name == "radixkv:node_up"}
    assert up == {"prefill-0": 1, "decode-0": 0, "decode-1": 0}
    has_values = {place.partition("/")[0] for name, place in seen if not name.endswith("_up")}
    assert has_values == {"", "prefill-0"}
    engine.error = error
    alive.clear()
    gone.clear()
    assert asyncio.run(scrape(metrics)) == seen | {("radixkv:engine_up", ""): 0}


def test_each_metric_has_its_own_count() -> None:
    load = NodeLoad(*range(1, 1 + len(NodeLoad._fields)))
    status = NodeStatus("decode", "127.0.0.1:5", "jax", 4, 12, "m")
    node = RemoteNode(status, epoch=1, heard_at=0.0, load=load)
    assert {each.name: each.read(node) for each in NODE_METRICS} == {
        "num_requests_running": load.num_running,
        "num_requests_waiting": load.num_waiting,
        "kv_cache_usage_perc": load.num_used_blocks / 12,
        "num_preemptions": load.preemptions,
        "prefix_cache_queries": load.prompt_tokens,
        "prefix_cache_hits": load.hit_tokens,
        "prompt_tokens_cached_by_source": {
            ("device",): load.hit_tokens,
            ("host",): load.host_hit_tokens,
            ("storage",): load.storage_hit_tokens,
        },
    }


def test_the_table_of_the_docs_is_that_of_the_metrics() -> None:
    page = Path(__file__).parents[3] / "docs" / "howto" / "nodes.md"
    rows = re.findall(r"^\| `radixkv:(\w+)` \| (\w+) \| (.*) \|$", page.read_text(), re.MULTILINE)
    documented = {name: (kind, text) for name, kind, text in rows}
    for each in NODE_METRICS:
        assert documented.pop(each.name) == (each.kind, each.text)
    assert set(documented) == {
        *("engine_up", "num_requests_open", "num_requests_moved", "num_attempts_lost"),
        *("num_nodes_lost", "node_up"),
    }
