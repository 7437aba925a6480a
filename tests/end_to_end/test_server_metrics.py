"""`/metrics` of the server: the engine's and those of HTTP, as Prometheus reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from radixkv.scheduler.metrics import CONTENT_TYPE, EngineMetrics

from . import test_server
from .test_server import CHAT, COMPLETIONS, GREEDY, MESSAGES, Answer, Served, in_loop, served

llm = test_server.llm


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scrapes wait for an engine on a slow machine."""
    defaults: Any = EngineMetrics.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "timeout_s", 600.0)


async def scrape(server: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = await server.ask("GET", "/metrics")
    assert (answer.status, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    families = list(parse(answer.body.decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Any, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def count(samples: Any, handler: str, status: str = "2xx", method: str = "POST") -> float:
    labels = {"handler": handler, "status": status, "method": method}
    return samples.get(("http_requests_total", frozenset(labels.items())), 0.0)


def test_counts_of_the_engine_and_of_http(llm):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            before = await scrape(server)
            whole = (await server.post(COMPLETIONS, prompt="the cache", **GREEDY)).json()
            await server.post(CHAT, messages=MESSAGES, stream=True, **GREEDY)
            await server.post(CHAT, messages=MESSAGES, temperature=-1)
            after = await scrape(server)
        model = {"model_name": "tiny"}
        assert value(before, "radixkv:generation_tokens_total", **model) == 0
        assert value(after, "radixkv:engine_up", **model) == 1
        reasons = [
            value(after, "radixkv:request_success_total", finished_reason=reason, **model)
            for reason in ("stop", "length")
        ]
        assert sum(reasons) == 2
        num_tokens = value(after, "radixkv:generation_tokens_total", **model)
        assert num_tokens > whole["usage"]["completion_tokens"]
        assert count(before, COMPLETIONS) == 0
        assert count(after, COMPLETIONS) == count(after, CHAT) == 1
        assert count(after, CHAT, "4xx") == 1
        assert count(after, "/metrics", method="GET") == 1  # the one before
        durations = {"handler": CHAT, "method": "POST"}
        assert value(after, "http_request_duration_seconds_count", **durations) == 2

    test()


@pytest.mark.parametrize(
    ("method", "path", "handler", "label", "status"),
    [
        ("GET", "/v1/models/tiny", "/v1/models/", "GET", "2xx"),
        ("GET", "/v1/models/" + "x" * 99, "/v1/models/", "GET", "4xx"),
        ("GET", "/v2/anything", "none", "GET", "4xx"),
        ("GET", "/", "none", "GET", "4xx"),
        ("BREW", "/health", "/health", "other", "4xx"),
        ("GET", COMPLETIONS, COMPLETIONS, "GET", "4xx"),
    ],
)
def test_clients_cannot_add_labels(llm, method, path, handler, label, status):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            await server.ask(method, path)
            assert count(await scrape(server), handler, status, label) == 1

    test()


def test_a_client_that_goes_away_first_and_a_bug_are_counted(llm, monkeypatch):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            answer = Answer()
            answer.gone.set()
            await server.ask("POST", COMPLETIONS, [b"{"], answer=answer, stalls=True)
            assert answer.status == 0
            with monkeypatch.context() as patch:
                patch.setattr(server.serving, "generate", lambda *_, **__: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    await server.post(COMPLETIONS, prompt="the")
            samples = await scrape(server)
        assert count(samples, COMPLETIONS, "4xx") == count(samples, COMPLETIONS, "5xx") == 1

    test()


def test_metrics_need_no_key_and_outlive_the_engine(llm):
    @in_loop
    async def test() -> None:
        async with served(llm, api_key="sesame") as server:
            assert (await server.ask("GET", "/v1/models")).status == 401
            await server.serving.close()
            samples = await scrape(server)
        assert value(samples, "radixkv:engine_up", model_name="tiny") == 0
        assert count(samples, "/v1/models", "4xx", "GET") == 1

    test()


def test_scrapes_at_once(llm):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            asked = asyncio.create_task(server.post(COMPLETIONS, prompt="the cache", **GREEDY))
            await asyncio.gather(*(scrape(server) for _ in range(20)))
            assert (await asked).status == 200

    test()
