"""`Recorder`: the times of requests by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from radixkv.scheduler.metrics.recorder import Recorder
from radixkv.scheduler.request import Request


class Steps:
    """An engine's requests and steps, as an observer is told of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorder = Recorder(lambda: self.now, {b"n": "n"}, is_told=True)
        scheduler = SimpleNamespace(running=[], waiting=[1, 2])
        manager = SimpleNamespace(block_size=16)
        stats: Any = object
        self.engine = cast(Any, SimpleNamespace(scheduler=scheduler, manager=manager, stats=stats))

    def step(self, begin: float, end: float, request: Request, num_new: int) -> None:
        self.now = begin
        self.recorder.step_begins()
        self.now = end
        request.output_tokens += [7] * num_new
        request.has_begun = True
        self.recorder.step_ended(self.engine, [request])


def test_the_times_of_a_request_are_between_its_stages() -> None:
    steps = Steps()
    request = Request("a", [1, 2, 3], 9, namespace=b"n")
    steps.now = 10.0
    steps.recorder.request_submitted(request)
    steps.step(11.0, 14.0, request, 1)
    steps.step(15.0, 18.0, request, 2)  # two tokens at once
    steps.step(19.0, 24.0, request, 1)
    steps.now = 25.0
    steps.recorder.request_ended(request, "length")
    steps.recorder.read(steps.engine)
    snapshot = steps.recorder.last
    assert snapshot is not None and snapshot.read_s == 25.0
    found = {name: (sum(each.counts), each.total) for name, each in snapshot.histograms.items()}
    assert found == {
        "time_to_first_token_seconds": (1, 4.0),
        "inter_token_latency_seconds": (3, 10.0),
        "request_time_per_output_token_seconds": (1, 10.0 / 3),
        "e2e_request_latency_seconds": (1, 15.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_inference_time_seconds": (1, 13.0),
        "request_prefill_time_seconds": (1, 3.0),
        "request_decode_time_seconds": (1, 10.0),
        "request_prompt_tokens": (1, 3.0),
        "request_generation_tokens": (1, 4.0),
    }
    latencies = snapshot.histograms["inter_token_latency_seconds"]
    assert latencies.counts[latencies.bounds.index(2.5)] == 2, "half of 4 s each"
    assert (snapshot.num_generated, snapshot.num_running, snapshot.num_waiting) == (4, 0, 2)
    assert snapshot.ended == {"stop": 0, "length": 1, "abort": 0, "error": 0, "refused": 0}
    assert snapshot.namespaces["n", "generation"] == 4 and not steps.recorder._times


def test_the_last_snapshot_is_final() -> None:
    steps = Steps()
    asked = steps.recorder.ask()
    assert not asked.done() and steps.recorder.ask() is asked
    steps.recorder.answer(steps.engine)
    assert asked.done() and not steps.recorder.has_ended
    waiting = steps.recorder.ask()
    steps.recorder.engine_ended(steps.engine)
    assert waiting.done() and steps.recorder.has_ended
    assert steps.recorder.ask().result(0) is steps.recorder.last


def test_a_snapshot_is_read_if_somebody_asks_and_stays_as_it_was() -> None:
    steps = Steps()
    requests = [Request(name, [1, 2, 3], 9, namespace=name.encode()) for name in ("n", "x")]
    for request in requests:
        steps.recorder.request_submitted(request)
    steps.step(1.0, 2.0, requests[0], 1)
    assert steps.recorder.last is None, "nobody has asked"
    asked = steps.recorder.ask()
    steps.step(3.0, 4.0, requests[0], 1)
    snapshot = asked.result(0)
    assert snapshot is not None and snapshot is steps.recorder.last
    ended, namespaces = dict(snapshot.ended), dict(snapshot.namespaces)
    totals = {name: each.total for name, each in snapshot.histograms.items()}
    steps.step(5.0, 6.0, requests[1], 1)
    for request in requests:
        steps.recorder.request_ended(request, "stop")
    assert steps.recorder.last is snapshot, "nobody has asked again"
    assert (snapshot.ended, snapshot.namespaces) == (ended, namespaces)
    assert {name: each.total for name, each in snapshot.histograms.items()} == totals
    assert snapshot.num_generated == snapshot.namespaces["n", "generation"] == 2
    assert snapshot.namespaces["n", "requests"] == 1
    steps.recorder.read(steps.engine)
    last = steps.recorder.last
    assert last is not None and {label for label, _ in last.namespaces} == {"n", "other"}
    assert (last.namespaces["n", "generation"], last.namespaces["other", "generation"]) == (2, 1)
