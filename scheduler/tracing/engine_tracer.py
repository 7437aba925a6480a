"""`EngineTracer`: a span per request, from the stages that an observer of an engine sees.

The stages of a request follow each other, and a fetch is part of the wait::

    llm_request   |-----------------------------------------------|
      queued      |-----------|                    until it has blocks
        fetch        |------|                      storage to host
      load                    |-----|              host to device
      prefill                       |------|       until its first token
      decode                               |------|
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from ..engine import Engine
from ..request import Request
from ..serving import AsyncEngine, EndReason

_SCOPE: Final = "radixkv"
_FAILURES: Final = {"refused": "the engine refused the request", "error": "the engine failed"}


class EngineTracer:
    """Makes a span for each request of an `AsyncEngine` that is submitted from now on.

    The parent of a span is the current one where `AsyncEngine.generate` is called. The names of the
    span and of its attributes are those of vLLM; the children are ours. They are sent when the
    request has ended. A request whose span is not sampled costs nothing after its submission.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        model_name: str = "",
        tracer_provider: TracerProvider | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Observe an engine from now on.

        Args:
            engine: the engine.
            model_name: attribute ``gen_ai.response.model`` of all spans.
            tracer_provider: default: the global one.
            clock_ns: for tests; nanoseconds since 1970.

        Raises:
            EngineClosedError, EngineFailedError: if the engine is closed or has failed.
        """
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._model_name = model_name
        self._clock_ns = clock_ns
        self._step_ns = clock_ns()
        self._traced: dict[Request, _Stages] = {}
        self._early: dict[Request, _Stages] = {}  # without a first token
        engine.observe(self)

    def request_submitted(self, request: Request) -> None:
        """See `EngineObserver`."""
        now_ns = self._clock_ns()
        span = self._tracer.start_span("llm_request", kind=SpanKind.SERVER, start_time=now_ns)
        if span.is_recording():
            self._traced[request] = self._early[request] = _Stages(span, now_ns)

    def step_begins(self) -> None:
        """See `EngineObserver`."""
        self._step_ns = self._clock_ns()

    def step_ended(self, engine: Engine, running: Sequence[Request]) -> None:
        """See `EngineObserver`."""
        if not self._early:
            return
        now_ns = self._clock_ns()
        # Another thread may add one, but not during this copy: Python 3.11 collects garbage, and
        # may change threads then, where it allocates, and the copy of a pair is an allocation.
        for request in list(self._early):
            stages = self._early[request]
            stages.look(request, self._step_ns, now_ns)
            if stages.first_token_ns is not None:
                del self._early[request]

    def request_ended(self, request: Request, reason: EndReason) -> None:
        """See `EngineObserver`."""
        stages = self._traced.pop(request, None)
        if stages is None:
            return
        now_ns = self._clock_ns()
        if self._early.pop(request, None) is not None:
            stages.look(request, self._step_ns, now_ns)
        span = stages.span
        context = trace.set_span_in_context(span)
        for name, begin_ns, end_ns in stages.intervals(now_ns):
            child = self._tracer.start_span(name, context, start_time=begin_ns)
            child.end(end_ns)
        span.set_attributes(_attributes(request, self._model_name, reason))
        span.set_attributes(stages.latencies(now_ns))
        if (failure := _FAILURES.get(reason)) is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(now_ns)

    def engine_ended(self, engine: Engine) -> None:
        """See `EngineObserver`."""


class _Stages:
    """When a request reached each stage, in nanoseconds since 1970; None before it.

    Attributes:
        span: the span of the request.
        arrival_ns: submission.
        fetch_ns, fetched_ns: begin and end of its first fetch from storage.
        admitted_ns: begin of the step that gave it blocks.
        begun_ns: begin of the step that computes its first token, after the load.
        first_token_ns: end of the step with its first token.
    """

    __slots__ = (
        "admitted_ns",
        "arrival_ns",
        "begun_ns",
        "fetch_ns",
        "fetched_ns",
        "first_token_ns",
        "span",
    )

    def __init__(self, span: Span, arrival_ns: int) -> None:
        self.span = span
        self.arrival_ns = arrival_ns
        self.fetch_ns: int | None = None
        self.fetched_ns: int | None = None
        self.admitted_ns: int | None = None
        self.begun_ns: int | None = None
        self.first_token_ns: int | None = None

    def look(self, request: Request, step_ns: int, now_ns: int) -> None:
        """Note what has happened to the request since the last look.

        Args:
            request: the request.
            step_ns: begin of the last step.
            now_ns: its end.
        """
        if self.admitted_ns is None:
            prefetch = request.prefetch
            if self.fetch_ns is None and prefetch is not None:
                self.fetch_ns = max(step_ns, self.arrival_ns)
            if request.lease is not None or request.has_begun:
                self.admitted_ns = max(step_ns, self.arrival_ns)
            if self.fetch_ns is not None and self.fetched_ns is None:
                if self.admitted_ns is not None:
                    self.fetched_ns = self.admitted_ns
                elif prefetch is None or prefetch.done:
                    self.fetched_ns = now_ns
        if self.begun_ns is None and request.has_begun:
            self.begun_ns = max(step_ns, self.arrival_ns)
        if request.output_tokens:
            self.first_token_ns = now_ns

    def intervals(self, end_ns: int) -> list[tuple[str, int, int]]:
        """Return name, begin and end of each stage; the last one ends with the request."""
        points = [
            ("queued", self.arrival_ns),
            ("load", self.admitted_ns),
            ("prefill", self.begun_ns),
            ("decode", self.first_token_ns),
        ]
        reached = [(name, begin_ns) for name, begin_ns in points if begin_ns is not None]
        ends_ns = [begin_ns for _, begin_ns in reached[1:]] + [end_ns]
        intervals = [
            (name, begin_ns, stage_end_ns)
            for (name, begin_ns), stage_end_ns in zip(reached, ends_ns, strict=True)
            if name != "load" or begin_ns != stage_end_ns
        ]
        if self.fetch_ns is not None:
            intervals.append(("fetch", self.fetch_ns, self.fetched_ns or end_ns))
        return intervals

    def latencies(self, end_ns: int) -> dict[str, AttributeValue]:
        """Return the attributes in seconds, those of the stages that were reached."""
        points = {
            "time_in_queue": (self.arrival_ns, self.begun_ns),
            "time_to_first_token": (self.arrival_ns, self.first_token_ns),
            "e2e": (self.arrival_ns, end_ns),
            "time_in_model_prefill": (self.begun_ns, self.first_token_ns),
            "time_in_model_decode": (self.first_token_ns, end_ns),
            "time_in_model_inference": (self.begun_ns, end_ns),
        }
        return {
            f"gen_ai.latency.{name}": (stop_ns - start_ns) / 1e9
            for name, (start_ns, stop_ns) in points.items()
            if start_ns is not None and stop_ns is not None
        }


def _attributes(request: Request, model_name: str, reason: EndReason) -> dict[str, AttributeValue]:
    """Return what a span says of its request: no token and no text."""
    sampling = request.sampling
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": model_name,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": len(request.output_tokens),
        "gen_ai.response.finish_reasons": (reason,),
        "radixkv.hit_tokens.device": request.num_hit_tokens,
        "radixkv.hit_tokens.host": request.num_host_hit_tokens,
        "radixkv.hit_tokens.storage": request.num_storage_hit_tokens,
        "radixkv.num_preemptions": request.num_preemptions,
    }
