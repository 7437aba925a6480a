"""The recorder: measures requests on the engine's thread, and reads the engine's counts there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ..engine import Engine, EngineStats
from ..request import Request
from ..serving import EndReason
from .histogram import (
    INTER_TOKEN_S,
    REQUEST_S,
    TIME_TO_FIRST_TOKEN_S,
    TOKENS,
    Histogram,
    HistogramState,
)

END_REASONS: Final[tuple[EndReason, ...]] = ("stop", "length", "abort", "error", "refused")

HISTOGRAMS: Final[Mapping[str, Sequence[float]]] = {
    "time_to_first_token_seconds": TIME_TO_FIRST_TOKEN_S,
    "inter_token_latency_seconds": INTER_TOKEN_S,
    "request_time_per_output_token_seconds": INTER_TOKEN_S,
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_inference_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
}
"""Bounds of the buckets of each histogram, by its name."""

OTHER_NAMESPACES: Final = "other"
"""Label of the namespaces that have no name."""


@dataclass(frozen=True)
class Snapshot:
    """What a scrape shows, as it was between two steps.

    Attributes:
        read_s: when it was read, on the recorder's clock.
        stats: the engine's counts.
        block_size: tokens per block.
        num_running, num_waiting: requests with and without blocks.
        num_generated: tokens generated; None if the engine tells nothing, then the next are empty.
        ended: number of ended requests, by reason.
        histograms: by name.
        namespaces: counts by (label of the namespace, what is counted).
    """

    read_s: float
    stats: EngineStats
    block_size: int
    num_running: int
    num_waiting: int
    num_generated: int | None
    ended: Mapping[EndReason, int]
    histograms: Mapping[str, HistogramState]
    namespaces: Mapping[tuple[str, str], int]


class _Times:
    """When a request reached each stage, in seconds; None before it."""

    __slots__ = ("arrival_s", "begun_s", "first_token_s", "last_token_s", "num_tokens")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.begun_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.num_tokens = 0


class Recorder:
    """An `EngineObserver` that fills histograms, and reads the engine between two steps.

    Only `request_submitted`, `ask` and `last` may be used by other threads than the engine's.

    Attributes:
        last: the latest snapshot; None before the first.
        has_ended: whether the engine has ended, so that `last` is final.
    """

    def __init__(
        self, clock: Callable[[], float], namespaces: Mapping[bytes, str], *, is_told: bool
    ) -> None:
        """Begin without observations.

        Args:
            clock: seconds.
            namespaces: labels by namespace; none for no counts by namespace.
            is_told: whether the methods of `EngineObserver` will be called.
        """
        self.last: Snapshot | None = None
        self.has_ended = False
        self._clock = clock
        self._is_told = is_told
        self._namespace_labels = namespaces
        self._times: dict[Request, _Times] = {}
        self._step_s = clock()
        self._num_generated = 0
        # Every series is there before its first event.
        told = HISTOGRAMS if is_told else {}
        self._ended = dict.fromkeys(END_REASONS if is_told else (), 0)
        self._histograms = {name: Histogram(bounds) for name, bounds in told.items()}
        labels = dict.fromkeys((*namespaces.values(), OTHER_NAMESPACES)) if namespaces else ()
        self._namespaces: Counter[tuple[str, str]] = Counter()
        for label in labels:
            for kind in ("requests", "prompt", "device", "host", "storage", "generation"):
                self._namespaces[label, kind] = 0
        self._lock = threading.Lock()  # of the next
        self._asked: Future[Snapshot | None] | None = None

    # Snapshots

    def ask(self) -> Future[Snapshot | None]:
        """Return the next snapshot, one for all that ask before it is read.

        The engine's thread reads it after a step, or when it ends. The caller lets it call `answer`
        if there is no step.
        """
        with self._lock:
            if self.has_ended:
                done: Future[Snapshot | None] = Future()
                done.set_result(self.last)
                return done
            if self._asked is None:
                self._asked = Future()
            return self._asked

    def answer(self, engine: Engine) -> None:
        """Read a snapshot if somebody has asked for one."""
        if self._asked is not None:
            self.read(engine)

    def read(self, engine: Engine) -> None:
        """Read a snapshot, and give it to those who have asked."""
        self._read(engine)
        self._give()

    def _read(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        self.last = Snapshot(
            read_s=self._clock(),
            stats=engine.stats(),
            block_size=engine.manager.block_size,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_generated=self._num_generated if self._is_told else None,
            ended=dict(self._ended),
            histograms={name: each.state() for name, each in self._histograms.items()},
            namespaces=dict(self._namespaces),
        )

    def _give(self, *, is_final: bool = False) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
            self.has_ended = is_final
        if asked is not None:
            asked.set_result(self.last)

    # EngineObserver

    def request_submitted(self, request: Request) -> None:
        """See `EngineObserver`."""
        self._times[request] = _Times(self._clock())

    def step_begins(self) -> None:
        """See `EngineObserver`."""
        self._step_s = self._clock()

    def step_ended(self, engine: Engine, running: Sequence[Request]) -> None:
        """See `EngineObserver`."""
        now_s = self._clock()
        for request in running:
            times = self._times.get(request)
            if times is not None:
                self._look(request, times, now_s)
        self.answer(engine)

    def request_ended(self, request: Request, reason: EndReason) -> None:
        """See `EngineObserver`."""
        times = self._times.pop(request, None)
        if times is None:
            return  # it began before this observer
        now_s = self._clock()
        self._look(request, times, now_s)
        self._ended[reason] += 1
        if reason not in ("stop", "length"):
            return
        first_s, begun_s, num_tokens = times.first_token_s, times.begun_s, times.num_tokens
        assert first_s is not None and begun_s is not None, f"{request!r} ended without a token"
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe(now_s - times.arrival_s)
        histograms["request_inference_time_seconds"].observe(times.last_token_s - begun_s)
        histograms["request_prefill_time_seconds"].observe(first_s - begun_s)
        decode_s = times.last_token_s - first_s
        histograms["request_decode_time_seconds"].observe(decode_s)
        if num_tokens > 1:
            per_token_s = decode_s / (num_tokens - 1)
            histograms["request_time_per_output_token_seconds"].observe(per_token_s)
        histograms["request_prompt_tokens"].observe(request.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(num_tokens)

    def engine_ended(self, engine: Engine) -> None:
        """See `EngineObserver`."""
        with suppress(Exception):  # a failure may have left anything: the last snapshot stays
            self._read(engine)
        self._give(is_final=True)

    def _look(self, request: Request, times: _Times, now_s: float) -> None:
        """Count what has happened to a request since the last look."""
        if times.begun_s is None:
            if not request.has_begun:
                return
            times.begun_s = self._step_s
            wait_s = self._step_s - times.arrival_s
            self._histograms["request_queue_time_seconds"].observe(wait_s)
            if self._namespace_labels:
                self._count_prompt(request)
        num_new = len(request.output_tokens) - times.num_tokens
        if num_new == 0:
            return
        self._num_generated += num_new
        if self._namespace_labels:
            self._namespaces[self._namespace_of(request), "generation"] += num_new
        num_gaps = num_new
        if times.first_token_s is None:
            times.first_token_s = times.last_token_s = now_s
            wait_s = now_s - times.arrival_s
            self._histograms["time_to_first_token_seconds"].observe(wait_s)
            num_gaps -= 1
        if num_gaps:
            gap_s = (now_s - times.last_token_s) / num_gaps
            self._histograms["inter_token_latency_seconds"].observe(gap_s, num_gaps)
        times.last_token_s = now_s
        times.num_tokens += num_new

    def _namespace_of(self, request: Request) -> str:
        return self._namespace_labels.get(request.namespace, OTHER_NAMESPACES)

    def _count_prompt(self, request: Request) -> None:
        counts, label = self._namespaces, self._namespace_of(request)
        counts[label, "requests"] += 1
        counts[label, "prompt"] += request.num_prompt_tokens
        counts[label, "device"] += request.num_hit_tokens
        counts[label, "host"] += request.num_host_hit_tokens
        counts[label, "storage"] += request.num_storage_hit_tokens
