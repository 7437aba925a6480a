"""What has served and ended many requests holds as many objects as after a few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.kvcache.storage import Kind, Status, StorageNamespace
from radixkv.kvcache.storage.operation_table import OperationTable
from radixkv.scheduler import MixedScheduler, Request
from radixkv.scheduler.errors import RequestError
from radixkv.scheduler.gateway.gateway import Gateway, RunAttempt
from radixkv.scheduler.gateway.router import CacheSize
from radixkv.scheduler.handoff import Hits
from radixkv.scheduler.serving.engine_thread import EngineThread

from . import engine_bugs, engine_subjects, node_subjects, transfer_subjects
from .measure import census, growth
from .planting import Bug, bug, planted, planted_source

PER_DRAIN = 10
"""Requests between two drains."""


def prompt(number: int) -> np.ndarray:
    return np.arange(10, dtype=np.int32) + np.int32(100 * number)


def caches(*, resets: bool = False) -> Iterator[object]:
    """Tiers whose requests miss, hit, are parked and are evicted, with or without resets."""
    namespace = StorageNamespace("m", "w", "float32", 2, (0, 1), (0, 1))
    manager = CacheManager(12, 2, host=HostConfig(8, "through"), storage=namespace)
    tiers = manager.tiers
    assert tiers is not None

    def settle() -> None:
        while taken := tiers.take_operations():
            for each in taken:
                tiers.complete(each.id, [True] * each.num_blocks)
        for op_id in tiers.take_cancelled():
            tiers.fence(op_id)

    number = 0
    while True:
        for _ in range(PER_DRAIN):
            number += 1
            tokens = prompt(number % 3 or number)
            tiers.prefetch(tokens)
            settle()
            lease = manager.admit(manager.match(tokens))
            settle()
            manager.begin_step()
            manager.publish(lease, tokens[:9])
            manager.end_step()
            parked = tiers.park(lease, tokens[:9]) if number % 2 else None
            settle()
            tiers.take_used()
            if parked is None:
                manager.release(lease)
            else:
                tiers.unpark(parked)
            settle()
        if resets:
            manager.reset()
            settle()
        yield manager


def recorders() -> Iterator[object]:
    """A manager that records KV events, and never resets: each prompt is new, and is stored."""
    namespace = StorageNamespace("m", "w", "float32", 2, (0, 1), (0, 1))
    host = HostConfig(8, "through")
    manager = CacheManager(12, 2, host=host, storage=namespace, record_events=True)
    assert manager.tiers is not None and manager._events is not None
    manager._events.max_stored = PER_DRAIN
    number = 0
    while True:
        for _ in range(PER_DRAIN):
            number += 1
            lease = manager.admit(manager.match(prompt(number)))
            manager.publish(lease, prompt(number))
            manager.release(lease)
            while taken := manager.tiers.take_operations():
                for each in taken:
                    manager.tiers.complete(each.id, [True] * each.num_blocks)
            manager.tiers.take_used()
            manager.take_events()
        yield manager


def schedulers() -> Iterator[object]:
    """A scheduler whose requests end, are aborted and are preempted."""
    scheduler = MixedScheduler(CacheManager(12, 2), token_budget=8, max_running=3, reserve_tokens=0)
    number = 0
    while True:
        for _ in range(PER_DRAIN):
            number += 1
            scheduler.add(Request(f"r{number}", prompt(number % 3), 6))
            if number % 4 == 0:
                scheduler.abort(f"r{number}")
        while scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.update(plan, [7] * plan.num_chunks)
        scheduler.reset_cache()
        yield scheduler


def gateways() -> Iterator[object]:
    """A gateway whose attempts end, are refused, are lost and are aborted."""
    gateway = Gateway(backoff_s=1.0, request_s=100.0)
    number, now = 0, 0.0
    while True:
        gateway.add_prefill("p0", CacheSize(40, 2))
        gateway.add_decode("d0", CacheSize(40, 2))
        for _ in range(PER_DRAIN):
            number += 1
            gateway.add_request(Request(f"r{number}", prompt(number % 3), 1), now)
            if number % 5 == 0:
                gateway.abort(f"r{number}")
        while gateway.num_open:
            now += 2.0
            gateway.tick(now)
            for action in gateway.take_actions():
                if not isinstance(action, RunAttempt):
                    continue
                if action.key.attempt == 1:
                    gateway.prefill_failed(action.key, "no room", is_busy=True)
                elif action.key.attempt == 2:
                    gateway.prefill_failed(action.key, "lost", is_lost=True)
                else:
                    gateway.started(action.key)
                    gateway.finished(action.key, (7,), Hits(), 0)
            gateway.take_ended()
        gateway.remove_node("p0")
        gateway.remove_node("d0")
        gateway.take_actions()
        yield gateway


def storages() -> Iterator[object]:
    """Storage operations that end, are cancelled, are late and are dropped."""
    table = OperationTable(100, 2)
    blocks = [[memoryview(bytes(60))], [memoryview(bytes(60))]]
    while True:
        for number in range(PER_DRAIN):
            operation = table.submit(Kind.STORE, [bytes(32)] * 2, blocks, deadline=1.0)
            task = table.take()
            assert task is not None
            if number % 3 == 0:
                table.cancel(operation)
            task.results.append(Status.STORED)
            table.report(task, ["Error"])
            quiet = table.submit(Kind.LOOKUP, [bytes(32)], (), deadline=1.0, quiet=True)
            table.claim(quiet)
        table.expire(2.0)
        table.drain()
        yield table


class RefusingEngine:
    """An engine that computes a token of each request per step, and refuses some, or loses them."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.advanced: list[Request] = []
        self.scheduler = SimpleNamespace(running=[])
        self._active: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    def add_request(self, request: Request) -> None:
        if request.request_id.startswith("refused"):
            raise RequestError("too long")
        self._active[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        request = self._active.pop(request_id, None)
        if request is not None:
            request.finish_reason = "abort"
        return request is not None

    def step(self) -> list[Request]:
        self.advanced = [*self._active.values()]
        for request in self.advanced:
            if request.request_id.startswith("lost") and request.output_tokens:
                self.abort(request.request_id)
                self.failures[request.request_id] = "lost"  # as nodes do
            else:
                request.finish_reason = request.append(7)
        ended = [each for each in self.advanced if each.finish_reason is not None]
        for request in ended:
            self._active.pop(request.request_id, None)
        return ended


def fail(_: object) -> None:
    raise RequestError("no")


def engine_threads() -> Iterator[object]:
    """A thread whose requests and calls end, are refused or fail, and are given up or lost."""
    engine: Any = RefusingEngine()
    with patch.object(Thread, "start"), patch("atexit.register"):
        thread = EngineThread(engine, failures=engine.failures)
    number = 0
    while True:
        for _ in range(PER_DRAIN):
            number += 1
            for kinds in (("ended", "lost"), ("ended again", "refused"), ("aborted",)):
                requests = [Request(f"{kind} {number}", prompt(number), 2) for kind in kinds]
                consumer = thread.submit(requests)
            thread.abort(consumer.deliveries[0])
            asked = thread.call(lambda engine: engine.has_work)
            fails = thread.call(fail)
            cancelled = thread.call(lambda engine: engine.has_work)
            assert cancelled.cancel()  # its caller does not wait for the engine
            thread._obey()
            assert asked.result(timeout=0.0)
            assert isinstance(fails.exception(timeout=0.0), RequestError)
            while engine.has_work:
                thread._publish(engine.step())
        yield thread


SUBJECTS: dict[str, Callable[[], Iterator[object]]] = {
    "cache": caches,
    "cache with resets": partial(caches, resets=True),
    "events": recorders,
    "scheduler": schedulers,
    "gateway": gateways,
    "storage": storages,
    "engine thread": engine_threads,
    **engine_subjects.DRAINS,
    **node_subjects.DRAINS,
    **transfer_subjects.DRAINS,
}

BUGS: dict[str, tuple[Bug, ...]] = {
    "cache": (
        bug(
            "when blocks were reported that have left the tree is kept",
            "kvcache.tiers.storage_key_cache",
            (
                "        self.known.pop(node, None)\n        self.reported_at.pop(node, None)\n",
                "        self.known.pop(node, None)\n",
            ),
        ),
        bug(
            "operations that have ended are kept",
            "kvcache.tiers.operations",
            (
                "        _, handler = self._open.pop(op_id)\n",
                "        _, handler = ended = self._open.pop(op_id)\n"
                "        self.__dict__.setdefault('_past', []).append(ended)\n",
            ),
        ),
        bug(
            "leases that have ended are kept",
            "kvcache.manager",
            (
                "        del self._leases[row]\n        lease.row = -1\n",
                "        del self._leases[row]\n        lease.row = -1\n"
                "        self.__dict__.setdefault('_past', []).append(lease)\n",
            ),
        ),
        bug(
            "steps are kept",
            "kvcache.manager",
            (
                "        self._steps_begun += 1\n",
                "        self._steps_begun += 1\n"
                "        self.__dict__.setdefault('_past', set()).add(self._steps_begun)\n",
            ),
        ),
    ),
    "events": (
        bug(
            "blocks in storage are named as long as storage may have them",
            "kvcache.events",
            ("        self._forget_stored([*islice(self._stored, excess)])\n", "        pass\n"),
        ),
        bug(
            "batches that were taken are kept",
            "kvcache.events",
            (
                "        self._next_seq += 1\n",
                "        self._next_seq += 1\n"
                "        self.__dict__.setdefault('_past', []).append(batch)\n",
            ),
        ),
    ),
    "scheduler": (
        bug(
            "names of requests are kept",
            "scheduler.batching.queues",
            (
                "        del self._requests[request.request_id]\n",
                "        del self._requests[request.request_id]\n"
                "        self.__dict__.setdefault('_past', set()).add(request.request_id)\n",
            ),
        ),
        bug(
            "plans are kept",
            "scheduler.batching.batch",
            (
                "        self.in_flight.popleft()\n",
                "        self.__dict__.setdefault('_past', []).append(self.in_flight.popleft())\n",
            ),
        ),
    ),
    "gateway": (
        bug(
            "a refusal is kept per request",
            "scheduler.gateway.gateway",
            ("        self._avoided.pop(name, None)\n", ""),
        ),
        bug(
            "a lost pair is kept per request",
            "scheduler.gateway.gateway",
            ("        self._lost_on.pop(name, None)\n", ""),
        ),
        bug(
            "the route of an attempt is kept",
            "scheduler.gateway.gateway",
            ("        self._routes.pop(key, None)\n", ""),
        ),
        bug(
            "why an aborted request ended is kept",
            "scheduler.gateway.gateway",
            ("        del self.failures[request_id]\n", ""),
        ),
    ),
    "storage": (
        bug(
            "claimed operations are kept",
            "kvcache.storage.operation_table",
            (
                "        operation.quiet = False\n        if not operation.tasks:\n",
                "        operation.quiet = False\n        if operation.tasks:\n",
            ),
        ),
        bug(
            "completions are returned and kept",
            "kvcache.storage.operation_table",
            (
                "        completions, self._completions = self._completions, []\n",
                "        completions = self._completions\n",
            ),
        ),
    ),
    "engine thread": (
        bug(
            "requests that ended with an error are kept",
            "scheduler.serving.engine_thread",
            ("if each.finish_reason or each.error]", "if each.finish_reason]"),
        ),
        bug(
            "calls that were answered are kept",
            "scheduler.serving.engine_thread",
            ("            self._calls.discard(future)\n", "            pass\n"),
        ),
        *(
            bug(
                f"calls that {ended} are kept",
                "scheduler.serving.engine_thread",
                (
                    "        with self._lock:\n            self._calls.discard(future)\n",
                    f"        if {are_forgotten}:\n            self._calls.discard(future)\n",
                ),
            )
            for ended, are_forgotten in (
                ("were cancelled", "not future.cancelled()"),
                ("have failed", "future.cancelled() or not future.exception()"),
            )
        ),
        bug(
            "requests that failed stay active",
            "scheduler.serving.engine_thread",
            ("        del self._active[delivery.request]\n", ""),
        ),
    ),
    **engine_bugs.KEPT,
}


def grown(name: str) -> dict[str, tuple[int, int]]:
    """Return what there is more of after the 20th drain than after the second."""
    drains = SUBJECTS[name]()
    next(drains)
    before = census(next(drains))
    for _ in range(17):
        next(drains)
    return growth(before, census(next(drains)), bound=PER_DRAIN)


@pytest.mark.parametrize("name", SUBJECTS)
def test_nothing_grows_with_what_has_ended(name: str) -> None:
    assert grown(name) == {}


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        pytest.param(name, each, marks=[pytest.mark.slow] if name == "nodes" else [])
        for name, bugs in BUGS.items()
        for each in bugs
    ],
    ids=str,
)
def test_what_is_kept_is_found(name: str, bug: Bug) -> None:
    with planted(bug):
        assert grown(name)


def test_every_bug_fits() -> None:
    for bugs in BUGS.values():
        for each in bugs:
            planted_source(each)
