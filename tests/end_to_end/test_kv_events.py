"""KV events of engines and nodes: after each step, a consumer has what the manager has."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.kvcache import CacheManager, EventBatch, HostConfig
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.events.check import StreamChecker
from radixkv.scheduler.events.subscriber import Message
from radixkv.scheduler.events.wire import encode_batch
from radixkv.scheduler.gateway.cache_index import CacheIndex, CacheReporter

from .cluster import Cluster
from .conftest import complete, fresh
from .test_engine import PROMPTS, SAMPLED


class Router:
    """Checks the events of a manager at each batch, beside the manager."""

    def __init__(self) -> None:
        self.manager: CacheManager | None = None
        self.checker = StreamChecker(lambda seq: ())
        self.num_batches = 0
        self.reporter, self.index = CacheReporter(), CacheIndex()

    def __call__(self, batch: EventBatch) -> None:
        assert self.manager is not None
        assert batch.seq == self.num_batches
        self.num_batches += 1
        self.checker.receive(Message(batch.seq, encode_batch(float(batch.seq), batch.events)))
        assert not self.checker.findings, self.checker.examples
        stats = self.manager.stats()
        wanted = {"GPU": stats.cached_blocks}
        if stats.tiers is not None:
            wanted["CPU"] = stats.tiers.host_cached_blocks
        assert {medium: self.num_blocks(medium) for medium in wanted} == wanted
        self.reporter.take_in(batch)
        assert all(self.index.apply(update) for update in self.reporter.take_messages())
        assert {medium: len(self.index.held[medium]) for medium in wanted} == wanted

    def num_blocks(self, medium: str) -> int:
        return self.checker.num_blocks().get(medium, 0)


def engine_of(llama: Engine, **options: Any) -> tuple[Engine, Router]:
    router = Router()
    engine = fresh(llama, on_events=router, **options)
    router.manager = engine.manager
    return engine, router


@pytest.mark.parametrize("write", ["exclusive", "back", "through", None])
def test_an_engine_reports_each_step(llama: Engine, write: Any) -> None:
    host = None if write is None else HostConfig(20, write)
    expected = complete(fresh(llama), PROMPTS, 24, SAMPLED)
    engine, router = engine_of(llama, num_blocks=24, host=host)
    for _ in range(2):
        assert complete(engine, PROMPTS, 24, SAMPLED) == expected
    assert router.num_blocks("GPU") > 0
    assert engine.manager.stats().evicted_blocks > 0
    if write is not None:
        assert engine.close(timeout_s=1000.0)
        assert "CPU stored" in router.checker.num_events
    assert engine.manager.take_events() is None, "an event was not reported"


def test_a_reset_is_reported_at_once(llama: Engine) -> None:
    engine, router = engine_of(llama)
    complete(engine, PROMPTS[:2], 8)
    engine.reset_cache()
    assert router.checker.num_events["cleared"] == 1
    assert router.num_blocks("GPU") == 0


def test_nodes_report_each_step(llama: Engine) -> None:
    routers = Router(), Router()
    cluster = Cluster(llama, prefill={"on_events": routers[0]}, decode={"on_events": routers[1]})
    routers[0].manager, routers[1].manager = cluster.p.manager, cluster.d.manager
    cluster.complete(PROMPTS, 24, SAMPLED)
    assert all(router.num_blocks("GPU") > 0 for router in routers)
    assert cluster.front.close()
