"""Subjects with JAX: the engine over the smallest model, and the driver that copies its blocks."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from threading import Thread
from typing import Any, Final
from unittest.mock import patch

import jax
import numpy as np

from radixkv.kvcache import HostConfig, Operation
from radixkv.kvcache.copies.background_writer import BackgroundWriter
from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler import Request
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.models import load_model, make_tiny_checkpoint
from radixkv.scheduler.request import SamplingParams

from ..end_to_end.conftest import fresh
from ..kvcache.driving import Bench
from .measure import Operations
from .subjects import BLOCK, KEY, Subject, fill
from .unthreaded import Unthreaded

SIZES: Final[dict[str, Any]] = {"token_budget": 8, "max_running": 1}
NUM_BLOCKS: Final = 10_000
MAX_MODEL_LEN: Final = 32
VOCABULARY: Final = 64
SMALLEST: Final = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
}


@cache
def smallest_engine() -> Engine:
    """An engine whose programs all others here use; it has pools of ten thousand blocks."""
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_checkpoint(directory, "qwen3", overrides=SMALLEST)
        model = load_model(directory)
    sizes = SIZES | {"num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN}
    return Engine(model, block_size=BLOCK, **sizes)


def new_engine(num_blocks: int, **options: Any) -> Engine:
    """An engine without threads of its own."""
    smallest = smallest_engine()  # which has threads to compile
    with patch.object(Thread, "start"):
        engine = fresh(smallest, num_blocks=num_blocks, **SIZES, **options)
    if engine._runner._tiers is not None:
        forget_threads(engine._runner._tiers._driver._writer)
    return engine


def forget_threads(writer: BackgroundWriter) -> None:
    """Close a writer whose threads were never started."""
    writer._threads = []
    atexit.unregister(writer.close)


def write_staged(writer: BackgroundWriter) -> None:
    """Do what a writer's thread would do now."""
    writer._closed = True  # so that the thread's loop ends
    writer._work()
    writer._closed = False


def prompt_of(number: int, num_tokens: int = 10) -> np.ndarray:
    """A prompt that few other numbers have."""
    return ((np.arange(num_tokens) + 1) * (number % 61 + 2) % VOCABULARY).astype(np.int32)


def settle(engine: Engine) -> None:
    """Let the device and the threads end what they do."""
    jax.block_until_ready((engine._runner.arrays.keys, engine._runner._batch.state))
    if engine._runner._tiers is not None:
        write_staged(engine._runner._tiers._driver._writer)


def engine_calls(engine: Engine) -> Operations:
    """A request from its arrival to its end, one that is aborted, and a reset."""
    prompt = prompt_of(0)
    yield "add_request", lambda: engine.add_request(Request("mine", prompt, 3))
    yield "add_request", lambda: engine.add_request(Request("gone", prompt, 3))
    yield "abort waiting", lambda: engine.abort("gone")
    for step in range(6):
        settle(engine)
        yield f"step {step}", engine.step
    assert not engine.has_work
    engine.add_request(Request("gone", prompt_of(1), 3))
    settle(engine)
    yield "step of a hit", engine.step
    settle(engine)
    yield "abort running", lambda: engine.abort("gone")
    for _ in range(2):
        settle(engine)
        yield "step after an abort", engine.step
    yield "step without work", engine.step
    yield "has_work", lambda: engine.has_work
    yield "stats", engine.stats
    yield "repr", lambda: repr(engine)


def idle_engine(num_idle: int) -> Operations:
    """An engine with idle blocks, and a host tier to which it writes through."""
    engine = new_engine(num_idle + 20, host=HostConfig(40, "through"))
    fill(engine.manager, num_idle)
    tiers = engine.manager.tiers
    assert tiers is not None
    while taken := tiers.take_operations():  # what is idle was copied long ago
        for each in taken:
            tiers.complete(each.id, [True] * each.num_blocks)
    yield from engine_calls(engine)


def engine_after_requests(num_ended: int) -> Operations:
    """An engine that has served requests."""
    engine = new_engine(40)
    serve(engine, num_ended)
    engine.reset_cache()
    yield from engine_calls(engine)


def serve(engine: Engine, num_requests: int, first: int = 0) -> None:
    """Serve requests, one of which is aborted while it runs, and one while it waits."""
    for number in range(first, first + num_requests):
        sampling = SamplingParams(temperature=float(number % 2), seed=number)
        request = Request(f"r{number}", prompt_of(number), 3, sampling=sampling)
        engine.add_request(request)
    if num_requests > 2:
        engine.abort(f"r{first + num_requests - 1}")
        engine.step()
        engine.abort(f"r{first}")
    while engine.has_work:
        engine.step()
        settle(engine)


def engine_drains() -> Iterator[object]:
    """An engine with a host tier and events, whose requests end and are aborted."""
    events: list[object] = []
    engine = new_engine(20, host=HostConfig(10, "through"), on_events=events.append)
    number = 0
    while True:
        serve(engine, 4, number)
        number += 4
        engine.stats()
        engine.reset_cache()
        for _ in range(3):
            settle(engine)
            engine.step()
        assert events
        events.clear()
        yield engine


class IdleBench(Bench):
    """A tier driver without threads, over storage without threads."""

    def __init__(self) -> None:
        self.storage = Unthreaded()
        with patch.object(Thread, "start"):
            super().__init__(storage=self.storage, max_blocks_per_copy=1)
        forget_threads(self.driver._writer)

    def settle(self) -> None:
        """Let the threads do what they can."""
        jax.block_until_ready(self.arrays.keys)
        write_staged(self.driver._writer)
        self.storage.work()

    def operations(self) -> dict[str, Operation]:
        """One operation of each kind, by name."""
        return {
            "to the host": self.operation(OpKind.DEVICE_TO_HOST, [1, 2], [1, 2]),
            "to storage": self.operation(OpKind.HOST_TO_STORAGE, [1], keys=[KEY]),
            "a look-up": self.operation(OpKind.LOOKUP, keys=[KEY]),
            "from storage": self.operation(OpKind.STORAGE_TO_HOST, [], [3], keys=[KEY]),
            "to the device": self.operation(OpKind.HOST_TO_DEVICE, [3], [3]),
            "on the device": self.operation(OpKind.DEVICE_TO_DEVICE, [3], [4]),
        }

    def run(self) -> None:
        """Run an operation of each kind, one that is cancelled, and a touch."""
        for each in self.operations().values():
            self.driver.dispatch([each], self.arrays)
            self.settle()
            [result] = self.driver.poll()
            assert all(result.ok), each
        for each in self.operations().values():
            self.driver.dispatch([each], self.arrays)
            self.driver.cancel([each.id])
            self.settle()
            assert self.driver.poll() == [] and self.driver.fenced() == [each.id]
        late = self.operation(OpKind.DEVICE_TO_HOST, [1, 2], [1, 2], timeout_s=0.0)
        self.driver.dispatch([late], self.arrays)
        self.driver.poll()
        self.driver.touch([KEY])
        self.settle()
        self.driver.poll()
        self.driver.stats()


def driver_calls(num_runs: int) -> Operations:
    """A tier driver after operations of each kind."""
    bench = IdleBench()
    driver = bench.driver
    for _ in range(num_runs):
        bench.run()
    for name, operation in bench.operations().items():
        yield f"dispatch {name}", partial(driver.dispatch, [operation], bench.arrays)
        yield "poll too early", driver.poll
        bench.settle()
        yield f"poll after {name}", driver.poll
        yield "fenced", driver.fenced
    [operation, *_] = bench.operations().values()
    driver.dispatch([operation], bench.arrays)
    yield "cancel", lambda: driver.cancel([operation.id])
    yield "touch", lambda: driver.touch([KEY])
    yield "is_touching", lambda: driver.is_touching
    bench.settle()
    yield "wait", lambda: driver.wait(0.0)
    yield "stats", driver.stats


def open_operations(num_open: int) -> Operations:
    """A tier driver with operations in flight to storage; what looks at them all is not here."""
    bench = IdleBench()
    driver = bench.driver
    many = [bench.operation(OpKind.LOOKUP, keys=[KEY]) for _ in range(num_open)]
    driver.dispatch(many, bench.arrays)
    for name, operation in bench.operations().items():
        yield f"dispatch {name}", partial(driver.dispatch, [operation], bench.arrays)
    yield "cancel", lambda: driver.cancel([many[0].id])
    yield "touch", lambda: driver.touch([KEY])
    yield "stats", driver.stats


def driver_drains() -> Iterator[object]:
    """A tier driver whose operations end, are cancelled and are late."""
    bench = IdleBench()
    while True:
        bench.run()
        bench.storage.memory.calls.clear()
        yield bench.driver


SUBJECTS: Final = (
    Subject("the engine with idle blocks", idle_engine, 100, 9_000, has_jax=True),
    Subject("the engine after requests", engine_after_requests, 3, 40, has_jax=True),
    Subject("the tier driver after operations", driver_calls, 1, 30, has_jax=True),
    Subject("the tier driver with operations", open_operations, 10, 500, has_jax=True),
)
DRAINS: Final = {"engine": engine_drains, "tier driver": driver_drains}
