"""Spans of requests: one each, with the stages it went through, in the trace of who asked."""

from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import StatusCode

from radixkv.kvcache import HostConfig
from radixkv.kvcache.tiers import state
from radixkv.scheduler import AsyncEngine, Engine, EngineClosedError, GenerationParams, Request
from radixkv.scheduler.engine import make_storage_namespace
from radixkv.scheduler.tracing import EngineTracer, TraceContext, make_otlp_provider

from ..collector import Collector
from .conftest import fresh
from .test_engine import PROMPTS
from .test_engine_tiers import LONG_S, files
from .test_observer import read_all

STAGES = ("queued", "fetch", "load", "prefill", "decode")


@pytest.fixture(scope="module")
def compiled(engine: Callable[[str, int], Engine]) -> Engine:
    return engine("qwen3", 4)


class Spans:
    """A provider of spans that stay in memory.

    Attributes:
        provider: the provider.
        tracer: of the client, on the same provider.
    """

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._memory = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = self.provider.get_tracer("client")

    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._memory.get_finished_spans()

    def requests(self) -> list[ReadableSpan]:
        return [span for span in self.ended() if span.name == "llm_request"]

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """Return the children of a span, by their begin."""
        assert parent.context is not None
        found = [
            span
            for span in self.ended()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]
        return sorted(found, key=lambda span: (span.start_time, STAGES.index(span.name)))


def clock() -> Callable[[], int]:
    ticks = itertools.count(1)
    return lambda: next(ticks) * 10**9


def attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes[name]


@settings(max_examples=15)
@given(
    kinds=st.lists(st.sampled_from(["finish", "abort", "refuse"]), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    num_blocks=st.sampled_from([28, 160]),
    depth=st.sampled_from([1, 2]),
    tiers=st.booleans(),
)
def test_a_span_and_its_stages_are_those_of_the_request(
    compiled, kinds, lengths, num_blocks, depth, tiers
):
    options: dict[str, Any] = {"host": HostConfig(64), "preempt": "host"} if tiers else {}
    inner = fresh(compiled, num_blocks=num_blocks, reserve_tokens=0, depth=depth, **options)
    spans = Spans()

    async def main() -> tuple[list[str | None], EngineTracer]:
        engine = AsyncEngine(inner)
        tracer = EngineTracer(
            engine, model_name="tiny", tracer_provider=spans.provider, clock_ns=clock()
        )
        streams = []
        for place, kind in enumerate(kinds):
            prompt = [10**6] if kind == "refuse" else PROMPTS[place]
            params = GenerationParams(max_tokens=lengths[place])
            with spans.tracer.start_as_current_span(f"client of {place}"):
                streams.append(engine.generate(prompt, params, request_id=str(place)))
            if kind == "abort":
                streams[-1].abort()
        reasons = await asyncio.gather(*map(read_all, streams))
        await engine.close()
        return reasons, tracer

    reasons, tracer = asyncio.run(main())
    requests = {attribute(span, "gen_ai.request.id"): span for span in spans.requests()}
    assert requests.keys() == {str(place) for place in range(len(kinds))}
    assert not (tracer._traced or tracer._early)
    for place, reason in enumerate(reasons):
        span = requests[str(place)]
        [client] = [each for each in spans.ended() if each.name == f"client of {place}"]
        assert client.context is not None and span.parent is not None
        assert span.parent.span_id == client.context.span_id
        [told] = attribute(span, "gen_ai.response.finish_reasons")
        assert told == (reason or "refused")
        assert (span.status.status_code is StatusCode.ERROR) == (told == "refused")
        assert attribute(span, "gen_ai.response.model") == "tiny"
        assert attribute(span, "gen_ai.request.max_tokens") == lengths[place]
        stages = spans.children(span)
        assert [each.name for each in stages] == sorted(
            {each.name for each in stages}, key=STAGES.index
        )
        # The stages follow each other from the begin of the span to its end.
        bounds = [span.start_time, *(each.end_time for each in stages)]
        assert [each.start_time for each in stages] == bounds[:-1]
        assert bounds[-1] == span.end_time
        if told == "length":
            assert attribute(span, "gen_ai.usage.prompt_tokens") == len(PROMPTS[place])
            assert attribute(span, "gen_ai.usage.completion_tokens") == lengths[place]
            names = {each.name for each in stages}
            assert names - {"load"} == {"queued", "prefill", "decode"}
            seconds = {each.name: (each.end_time - each.start_time) / 1e9 for each in stages}  # type: ignore[operator]
            wait_s = seconds["queued"] + seconds.get("load", 0)
            for name, expected_s in {
                "time_in_queue": wait_s,
                "time_to_first_token": wait_s + seconds["prefill"],
                "time_in_model_prefill": seconds["prefill"],
                "time_in_model_decode": seconds["decode"],
                "time_in_model_inference": seconds["prefill"] + seconds["decode"],
                "e2e": sum(seconds.values()),
            }.items():
                assert attribute(span, f"gen_ai.latency.{name}") == pytest.approx(expected_s)


def test_a_fetch_from_storage_and_a_load_are_stages(compiled, model, tmp_path, monkeypatch):
    monkeypatch.setattr(state, "STORAGE_TIMEOUT_S", LONG_S)
    namespace = make_storage_namespace(model("qwen3"), "tiny", 4)
    found = []
    for _ in range(2):
        spans = Spans()
        with files(tmp_path / "blocks") as storage:
            inner = fresh(
                compiled,
                host=HostConfig(64, "through"),
                storage=storage,
                storage_namespace=namespace,
            )

            async def main(inner: Engine = inner, spans: Spans = spans) -> None:
                engine = AsyncEngine(inner)
                EngineTracer(engine, tracer_provider=spans.provider, clock_ns=clock())
                assert await read_all(engine.generate(PROMPTS[0], GenerationParams(max_tokens=2)))
                assert await engine.close(timeout_s=LONG_S)

            asyncio.run(main())
        [request] = spans.requests()
        found.append((request, {each.name: each for each in spans.children(request)}))
    (first, cold), (second, warm) = found
    assert cold.keys() == {"queued", "fetch", "prefill", "decode"}  # it looked for the blocks
    assert warm.keys() == {"queued", "fetch", "load", "prefill", "decode"}
    assert attribute(first, "radixkv.hit_tokens.storage") == 0
    assert attribute(second, "radixkv.hit_tokens.storage") == 40
    for stages in (cold, warm):
        queued, fetch = stages["queued"], stages["fetch"]
        times = [queued.start_time, fetch.start_time, fetch.end_time, queued.end_time]
        assert times == sorted(filter(None, times))


def test_each_interval_and_latency_lies_between_two_stages():
    """All times are powers of 2, so that each difference tells which two it is of."""
    now_s, spans = 0, Spans()
    engine: Any = SimpleNamespace(observe=lambda _: None)
    tracer = EngineTracer(engine, tracer_provider=spans.provider, clock_ns=lambda: now_s * 10**9)
    request = Request("r", [1], 4)
    changes: list[dict[str, Any]] = [
        {"prefetch": SimpleNamespace(done=False)},  # the step that fetches
        {"lease": SimpleNamespace()},  # the one that gives it blocks, which it loads
        {"has_begun": True},
        {"output_tokens": [7]},
    ]
    now_s = 1
    tracer.request_submitted(request)
    for step, change in enumerate(changes):
        now_s = 2 * 4**step
        tracer.step_begins()
        for name, value in change.items():
            setattr(request, name, value)
        now_s *= 2
        tracer.step_ended(engine, [request])
    now_s = 512
    tracer.request_ended(request, "stop")
    [span] = spans.requests()
    seconds = [
        (each.name, each.start_time // 10**9, each.end_time // 10**9)  # type: ignore[operator]
        for each in spans.children(span)
    ]
    assert seconds == [
        ("queued", 1, 8), ("fetch", 2, 8), ("load", 8, 32), ("prefill", 32, 256),
        ("decode", 256, 512),
    ]  # fmt: skip
    prefix = "gen_ai.latency."
    assert span.attributes is not None
    found = {name: value for name, value in span.attributes.items() if name.startswith(prefix)}
    assert found == {
        f"{prefix}time_in_queue": 32 - 1,
        f"{prefix}time_to_first_token": 256 - 1,
        f"{prefix}e2e": 512 - 1,
        f"{prefix}time_in_model_prefill": 256 - 32,
        f"{prefix}time_in_model_decode": 512 - 256,
        f"{prefix}time_in_model_inference": 512 - 32,
    }


def test_no_stage_begins_before_its_request():
    """One may come during the step that fetches for it and computes it."""
    now_s, spans = 1, Spans()
    engine: Any = SimpleNamespace(observe=lambda _: None)
    tracer = EngineTracer(engine, tracer_provider=spans.provider, clock_ns=lambda: now_s * 10**9)
    request = Request("r", [1], 4)
    tracer.step_begins()
    now_s = 2
    tracer.request_submitted(request)
    request.prefetch = SimpleNamespace(done=True)  # type: ignore[assignment]
    request.lease = SimpleNamespace()  # type: ignore[assignment]
    request.has_begun = True
    request.output_tokens = [7]
    now_s = 3
    tracer.step_ended(engine, [request])
    now_s = 4
    tracer.request_ended(request, "stop")
    [span] = spans.requests()
    seconds = {
        each.name: (each.start_time // 10**9, each.end_time // 10**9)  # type: ignore[operator]
        for each in spans.children(span)
    }
    assert seconds == {"queued": (2, 2), "fetch": (2, 2), "prefill": (2, 3), "decode": (3, 4)}


def test_a_request_that_is_not_sampled_is_forgotten(compiled):
    spans = Spans(ALWAYS_OFF)

    async def main() -> None:
        engine = AsyncEngine(fresh(compiled))
        tracer = EngineTracer(engine, tracer_provider=spans.provider)
        stream = engine.generate(PROMPTS[0], GenerationParams(max_tokens=2))
        assert not (tracer._traced or tracer._early)
        assert await read_all(stream) == "length"
        await engine.close()

    asyncio.run(main())
    assert spans.ended() == ()


def test_a_request_may_be_submitted_while_a_step_ends():
    """Python 3.11 may collect garbage, and change threads, wherever it allocates."""
    engine: Any = SimpleNamespace(observe=lambda _: None)
    tracer = EngineTracer(engine, tracer_provider=Spans().provider)
    requests = [Request(str(place), [1], 1) for place in range(100)]
    for request in requests:
        tracer.request_submitted(request)

    def change_threads(*_: object) -> None:
        tracer.request_submitted(Request("another", [1], 1))

    gc.collect()  # the next tuples are allocated
    thresholds = gc.get_threshold()
    gc.callbacks.append(change_threads)
    gc.set_threshold(1)
    try:
        tracer.step_ended(engine, ())
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(change_threads)
    assert tracer._early.keys() >= set(requests)


def test_the_engine_fails(compiled):
    inner, spans = fresh(compiled), Spans()

    def step() -> list[Any]:
        raise ZeroDivisionError

    inner.step = step  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(inner)
        EngineTracer(engine, tracer_provider=spans.provider)
        await read_all(engine.generate(PROMPTS[0]))
        await engine.close()

    asyncio.run(main())
    [span] = spans.requests()
    assert attribute(span, "gen_ai.response.finish_reasons") == ("error",)
    assert (span.status.status_code, span.status.description) == (
        StatusCode.ERROR,
        "the engine failed",
    )


def test_no_spans_of_a_closed_engine(compiled):
    async def main() -> None:
        engine = AsyncEngine(fresh(compiled))
        await engine.close()
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
            EngineTracer(engine)

    asyncio.run(main())


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())], (TRACE, PARENT)),
        ([(b"traceparent", b"nonsense \xff")], None),
        ([], None),
    ],
)
def test_the_trace_of_a_client_is_read_from_its_headers(headers, expected):
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(trace.get_current_span().get_span_context())

    scope = {"type": "http", "headers": headers}
    asyncio.run(TraceContext(app)(scope, None, None))  # type: ignore[arg-type]
    [context] = seen
    if expected is None:
        assert not context.is_valid
    else:
        assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == expected
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("kind", ["http", "lifespan"])
def test_the_trace_of_a_client_ends_with_its_request_also_after_an_error(kind):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert trace.get_current_span().get_span_context().is_valid == (kind == "http")
        raise ZeroDivisionError

    headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]
    scope: dict[str, Any] = {"type": kind, **({"headers": headers} if kind == "http" else {})}

    async def serve() -> None:
        unused: Any = None
        with pytest.raises(ZeroDivisionError):
            await TraceContext(app)(scope, unused, unused)
        assert not trace.get_current_span().get_span_context().is_valid

    asyncio.run(serve())


@pytest.mark.parametrize(("variable", "service"), [(None, "radixkv"), ("chat", "chat")])
def test_spans_come_to_a_collector(monkeypatch, variable, service):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # seconds
    if variable is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
    with Collector() as collector:
        provider = make_otlp_provider(collector.endpoint)
        provider.get_tracer("test").start_span("one").end()
        provider.shutdown()
    assert [(each.service, each.span.name) for each in collector.spans] == [(service, "one")]


def test_a_missing_library_is_named():
    program = "import sys; sys.modules['opentelemetry'] = None\n"
    program += "from radixkv.scheduler.tracing import EngineTracer"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    message = "radixkv.scheduler.tracing needs OpenTelemetry: pip install 'radixkv[tracing]'"
    assert done.returncode == 1
    assert done.stderr.endswith(f"ImportError: {message}\n")
