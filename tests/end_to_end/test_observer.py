"""An observer is told of each request once at its begin and once at its end, and of every step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.scheduler import (
    AsyncEngine,
    Engine,
    EngineClosedError,
    GenerationParams,
    Request,
    SchedulerError,
)
from radixkv.scheduler.serving import EndReason, EngineObserver

from .conftest import fresh
from .test_async_engine import held
from .test_engine import PROMPTS


@pytest.fixture(scope="module")
def compiled(engine: Callable[[str, int], Engine]) -> Engine:
    return engine("qwen3", 4)


class Log(EngineObserver):
    """Checks the order of what it is told.

    Attributes:
        tokens: number of tokens of each active request that was seen after a step.
        ended: requests that have ended, with their reasons.
    """

    def __init__(self) -> None:
        self.active: set[Request] = set()
        self.tokens: dict[Request, int] = {}
        self.ended: list[tuple[Request, EndReason]] = []
        self.num_steps = 0
        self.is_in_step = self.has_ended = False
        self.threads: set[threading.Thread] = set()

    def request_submitted(self, request: Request) -> None:
        assert not self.has_ended
        assert request not in self.active
        self.active.add(request)

    def step_begins(self) -> None:
        assert not self.is_in_step
        self.is_in_step = True
        self.threads.add(threading.current_thread())

    def step_ended(self, engine: Engine, running: Sequence[Request]) -> None:
        assert self.is_in_step
        self.is_in_step = False
        self.num_steps += 1
        assert tuple(running) == engine.scheduler.running
        for request in running:
            assert request in self.active
            assert self.tokens.get(request, 0) <= len(request.output_tokens)
            self.tokens[request] = len(request.output_tokens)

    def request_ended(self, request: Request, reason: EndReason) -> None:
        assert not self.has_ended
        self.active.remove(request)
        assert self.tokens.get(request, 0) <= len(request.output_tokens)
        self.ended.append((request, reason))

    def engine_ended(self, engine: Engine) -> None:
        assert not self.has_ended
        self.has_ended = True
        self.threads.add(threading.current_thread())


async def read_all(stream: Any) -> str | None:
    reason = None
    with suppress(SchedulerError):
        async for output in stream:
            reason = output.finish_reason
    return reason


@settings(max_examples=10)
@given(
    kinds=st.lists(
        st.sampled_from(["finish", "abort", "drop", "refuse", "same id"]), min_size=1, max_size=6
    ),
    end=st.sampled_from(["drain", "abort", "fail"]),
    fail_at=st.integers(0, 6),
)
def test_everything_is_told_once(compiled, kinds, end, fail_at):
    inner, logs = fresh(compiled), [Log(), Log()]
    step = inner.step

    def failing_step() -> list[Request]:
        if end == "fail" and logs[0].num_steps >= fail_at:
            raise ZeroDivisionError
        return step()

    inner.step = failing_step  # type: ignore[method-assign]

    async def main() -> tuple[int, list[str | None]]:
        engine = AsyncEngine(inner)
        for log in logs:
            engine.observe(log)
        params, streams, submitted = GenerationParams(max_tokens=5), [], 0
        for place, kind in enumerate(kinds):
            prompt = [10**6] if kind == "refuse" else PROMPTS[place]
            name = "same" if kind == "same id" else f"request {place}"
            try:
                stream = engine.generate(prompt, params, request_id=name)
            except SchedulerError:  # it has failed
                break
            submitted += 1
            if kind == "abort":
                stream.abort()
            if kind != "drop":
                streams.append(stream)
        reasons = [read_all(stream) for stream in streams]
        closing = engine.close(drain=end != "abort")
        read, _ = await asyncio.gather(asyncio.gather(*reasons), closing)
        with pytest.raises(SchedulerError):
            engine.generate(PROMPTS[0], params)
        with pytest.raises(SchedulerError):
            engine.observe(Log())
        return submitted, read

    submitted, read = asyncio.run(main())
    for log in logs:
        assert log.has_ended
        assert log.active == set()
        assert len(log.ended) == submitted
        [thread] = log.threads
        assert thread.name == "radixkv-engine"
        told = [reason for _, reason in log.ended]
        for reason in ("length", "stop"):
            assert told.count(reason) >= read.count(reason)
        if end != "fail":
            assert told.count("error") == 0
            assert read.count("abort") <= told.count("abort")
            assert told.count("refused") >= ("refuse" in kinds)
    assert logs[0].ended == logs[1].ended
    assert logs[0].num_steps == logs[1].num_steps


def test_steps_of_an_idle_engine_are_told_too(compiled):
    log = Log()

    async def main() -> None:
        engine = AsyncEngine(fresh(compiled), poll_s=0.0)
        engine.observe(log)
        while log.num_steps < 3 and not log.has_ended:
            await asyncio.sleep(0)
        await engine.close()

    asyncio.run(main())
    assert log.num_steps >= 3


METHODS = ["step_begins", "step_ended", "request_ended", "engine_ended"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_nobody_waits_for_ever_if_an_observer_raises(compiled, method, at):
    """Two requests end in one step: the call number `at` raises, and all later ones."""
    log, calls = Log(), []

    def fail(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) >= at or method == "engine_ended":
            raise ZeroDivisionError
        told(*arguments)

    told = getattr(log, method)
    setattr(log, method, fail)

    async def main() -> list[str | None]:
        engine = AsyncEngine(fresh(compiled))
        engine.observe(log)
        params = GenerationParams(max_tokens=3, ignore_eos=True)
        with held(engine):
            streams = [engine.generate(prompt, params) for prompt in PROMPTS[:2]]
        called = asyncio.gather(engine.call(lambda _: "called"), return_exceptions=True)
        read = await asyncio.wait_for(asyncio.gather(*map(read_all, streams)), 30)
        await asyncio.wait_for(called, 30)
        with suppress(ZeroDivisionError, SchedulerError):
            await asyncio.wait_for(engine.close(), 30)
        return read

    read = asyncio.run(main())
    assert set(read) <= {"length", None}
    assert read == ["length"] * 2 or method != "engine_ended"
    assert calls


def test_nobody_observes_a_closed_engine(compiled):
    async def main() -> None:
        engine = AsyncEngine(fresh(compiled))
        await engine.close()
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
            engine.observe(Log())

    asyncio.run(main())
