"""The asynchronous engine: streams, ends of every kind, slow consumers, failures, several loops."""

from __future__ import annotations

import asyncio
import atexit
import gc
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import HostConfig, RequestTooLargeError
from radixkv.scheduler import (
    AsyncEngine,
    Engine,
    EngineClosedError,
    EngineFailedError,
    GenerationOutput,
    GenerationParams,
    Guided,
    OutputStream,
    PrefixHits,
    RequestError,
    SamplingParams,
    StreamError,
)
from radixkv.scheduler.serving.engine_thread import EngineThread
from radixkv.scheduler.text import TextTokenizer

from ..tokenizers import add_tokenizer
from .conftest import assert_nothing_leaked, complete, fresh, let_copies_end
from .test_engine import PROMPTS

NEW_TOKENS = 16
PARAMS = GenerationParams(max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def served(engine: Callable[[str, int], Engine]) -> tuple[Engine, list[list[int]]]:
    """An engine to take programs from, and what each prompt generates alone."""
    compiled = engine("qwen3", 4)
    return compiled, [complete(fresh(compiled), [prompt], NEW_TOKENS)[0] for prompt in PROMPTS]


class Gate:
    """Lets an engine take a number of steps, and then as many as it wants.

    Attributes:
        leases: number of requests that hold blocks, after each step.
    """

    def __init__(self, engine: Engine) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.leases: list[int] = []
        step = engine.step

        def gated_step() -> list[Any]:
            if not self._is_open:
                self._permits.acquire()
            ended = step()
            self.leases.append(engine.stats().cache.live_leases)
            return ended

        engine.step = gated_step  # type: ignore[method-assign]

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._permits.release(1)


@contextmanager
def held(engine: AsyncEngine) -> Iterator[None]:
    """Let the engine obey all commands of the block together, after it."""
    leave = threading.Event()
    engine.submit_call(lambda _: leave.wait())
    try:
        yield
    finally:
        leave.set()


async def last(stream: OutputStream) -> GenerationOutput:
    outputs = [output async for output in stream]
    return outputs[-1]


async def read_until(stream: OutputStream, num_tokens: int) -> GenerationOutput:
    async for output in stream:
        if len(output.token_ids) >= num_tokens:
            return output
    raise AssertionError("the stream has ended")


# Tokens, and every way to end


async def consume(stream: OutputStream, end: str, num_tokens: int) -> list[GenerationOutput]:
    """Read some tokens, and end the request in some way; return the outputs that were read."""
    outputs = []

    async def read(limit: int) -> None:
        async for output in stream:
            outputs.append(output)
            if len(output.token_ids) >= limit:
                return

    if end == "cancel":
        task = asyncio.create_task(read(NEW_TOKENS + 1))
        while len(outputs) < num_tokens and not task.done():
            await asyncio.sleep(0)  # a turn of the loop
        task.cancel()
        await asyncio.wait([task])
        return outputs
    await read(num_tokens if end != "finish" else NEW_TOKENS + 1)
    if end == "close":
        await stream.aclose()
        assert [output async for output in stream] == []
    if end == "abort":
        stream.abort()
        outputs += [output async for output in stream]
    return outputs  # "drop": nobody has the stream any more


@settings(max_examples=15)
@given(
    ends=st.lists(
        st.tuples(
            st.sampled_from(["finish", "abort", "close", "cancel", "drop"]),
            st.integers(1, NEW_TOKENS + 1),
        ),
        min_size=len(PROMPTS),
        max_size=len(PROMPTS),
    ),
    num_loops=st.integers(1, 3),
    num_blocks=st.sampled_from([28, 40, 160]),
    tiers=st.booleans(),
)
def test_streams_have_the_tokens_of_the_engine(served, ends, num_loops, num_blocks, tiers):
    compiled, alone = served
    options: dict[str, Any] = {"host": HostConfig(64), "preempt": "host"} if tiers else {}
    inner = fresh(compiled, num_blocks=num_blocks, reserve_tokens=0, **options)
    engine = AsyncEngine(inner)

    async def one_loop(first: int) -> dict[int, list[GenerationOutput]]:
        places = range(first, len(PROMPTS), num_loops)
        consumers = [consume(engine.generate(PROMPTS[i], PARAMS), *ends[i]) for i in places]
        return dict(zip(places, await asyncio.gather(*consumers), strict=True))

    with ThreadPoolExecutor(num_loops) as pool:
        parts = list(pool.map(lambda first: asyncio.run(one_loop(first)), range(num_loops)))
    if not tiers:  # with tiers, `close` would end the copies, and what is left could not be seen
        assert asyncio.run(engine.close())
        assert_nothing_leaked(inner)
    else:
        asyncio.run(until_idle(engine))
        assert asyncio.run(engine.call(lambda engine: let_copies_end(engine._runner))) is None
        asyncio.run(engine.call(assert_nothing_leaked))
        assert asyncio.run(engine.close())
    for place, outputs in [item for part in parts for item in part.items()]:
        end, _ = ends[place]
        read: tuple[int, ...] = ()
        for output in outputs:
            read += output.new_token_ids
            assert output.token_ids == read == tuple(alone[place][: len(read)])
            assert output.num_prompt_tokens == len(PROMPTS[place])
        reasons = [output.finish_reason for output in outputs]
        assert not any(reasons[:-1])
        if end == "finish":
            assert reasons[-1] == "length"
        if end == "abort":
            assert reasons[-1] in ("length", "abort")
        assert "length" not in reasons or len(read) == NEW_TOKENS


async def until_idle(engine: AsyncEngine) -> None:
    """Let the engine run out of work: each call waits for the step before it."""
    while await engine.call(lambda engine: engine.has_work):
        pass


def test_a_stop_token_ends_the_output_and_stays_in_it(served):
    compiled, alone = served
    stop = alone[0][4]
    expected = tuple(alone[0][: alone[0].index(stop) + 1])

    async def main() -> None:
        async with AsyncEngine(fresh(compiled), eos_token_ids=[stop]) as engine:
            output = await last(engine.generate(PROMPTS[0], PARAMS))
            assert (output.token_ids, output.finish_reason) == (expected, "stop")
            ignoring = GenerationParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            output = await last(engine.generate(PROMPTS[0], ignoring))
            assert (output.token_ids, output.finish_reason) == (tuple(alone[0]), "length")
            own = GenerationParams(NEW_TOKENS, stop_token_ids=[stop], ignore_eos=True)
            assert (await last(engine.generate(PROMPTS[0], own))).token_ids == expected

    asyncio.run(main())


def test_an_id_may_be_that_of_a_request_that_was_aborted_in_a_step(served):
    compiled, alone = served
    inner = fresh(compiled)
    gate = Gate(inner)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            first = engine.generate(PROMPTS[0], PARAMS, request_id="x")
            gate.allow(6)
            await read_until(first, 3)
            await first.aclose()
            second = engine.generate(PROMPTS[1], PARAMS, request_id="x")
            gate.open()
            outputs = [output async for output in second]
            assert all(output.new_token_ids for output in outputs)
            assert list(outputs[-1].token_ids) == alone[1]

    asyncio.run(main())
    assert_nothing_leaked(inner)


def test_an_id_may_be_that_of_a_request_whose_end_has_not_been_told(served):
    compiled, alone = served
    params = GenerationParams(max_tokens=4)

    async def main(num_steps: int) -> int:
        inner = fresh(compiled)
        gate = Gate(inner)
        async with AsyncEngine(inner) as engine:
            first = engine.generate(PROMPTS[0], params, request_id="x")
            gate.allow(num_steps)
            while len(gate.leases) < num_steps:
                await asyncio.sleep(0)  # a turn of the loop
            engine.submit_call(lambda engine: engine.reset_cache())
            second = engine.generate(PROMPTS[1], params, request_id="x")
            gate.open()
            output = await asyncio.wait_for(last(first), 60)
            assert list(output.token_ids) == alone[0][:4]
            try:
                output = await asyncio.wait_for(last(second), 60)
            except RequestError as error:
                assert str(error) == "request 'x' is already active"
                return 0
            assert list(output.token_ids) == alone[1][:4]
            return 1

    counted = fresh(compiled)
    gate = Gate(counted)
    gate.open()
    assert complete(counted, [PROMPTS[0]], 4) == [alone[0][:4]]
    assert {asyncio.run(main(num_steps)) for num_steps in range(1, len(gate.leases))} == {0, 1}


def test_outputs_report_the_hits_of_each_tier(served):
    compiled, _ = served

    async def main() -> None:
        async with AsyncEngine(fresh(compiled, host=HostConfig(64))) as engine:
            first = await last(engine.generate(PROMPTS[0], PARAMS))
            again = await last(engine.generate(PROMPTS[0], PARAMS))
            await engine.call(lambda engine: engine.manager.evict(engine.manager.num_blocks))
            await until_idle(engine)
            assert first.hits == PrefixHits(0, 0, 0)
            assert again.hits == PrefixHits(40, 0, 0)
            assert again.request_id != first.request_id

    asyncio.run(main())


# Text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Text for the first 340 tokens of the model; others have none."""
    directory = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(directory)
    return TextTokenizer(directory)


def test_text_comes_with_the_tokens(served, tokenizer):
    async def main() -> None:
        async with AsyncEngine(fresh(served[0]), tokenizer) as engine:
            text = "".join([output.new_text async for output in engine.generate("the cache")])
            prompt = tokenizer.encode("the cache")
            output = await last(engine.generate(prompt))
            assert output.text == text == tokenizer.decode(output.token_ids)
            assert len(output.token_ids) == 256
            assert len(text) > 20
            messages = [{"role": "user", "content": "the cache"}]
            chat = engine.tokenizer.encode_chat(messages) if engine.tokenizer else []
            output = await last(engine.generate(chat, PARAMS))
            assert output.num_prompt_tokens == len(chat)

    asyncio.run(main())


@settings(max_examples=8)
@given(data=st.data())
def test_a_stop_string_ends_the_text_and_the_request(served, tokenizer, data):
    inner = fresh(served[0])

    async def main() -> None:
        async with AsyncEngine(inner, tokenizer) as engine:
            long = await last(engine.generate("the cache", GenerationParams(max_tokens=96)))
            start = data.draw(st.integers(0, len(long.text) - 1))
            stop = long.text[start : start + data.draw(st.integers(1, 4))]
            if "\N{REPLACEMENT CHARACTER}" in stop:
                return
            params = GenerationParams(max_tokens=96, stop=stop)
            output = await last(engine.generate("the cache", params))
            assert output.text == long.text[: long.text.index(stop)]
            assert output.finish_reason == "stop"
            used = output.token_ids
            assert used == long.token_ids[: len(used)]
            assert stop in tokenizer.decode(used)
            assert stop not in tokenizer.decode(used[:-1])

    asyncio.run(main())
    assert_nothing_leaked(inner)


def test_a_stop_string_aborts_what_the_engine_computes(served, tokenizer):
    inner = fresh(served[0])
    [tokens] = complete(fresh(served[0]), [tokenizer.encode("the cache")], 64)
    text = tokenizer.decode(tokens)
    stop = next(each for each in text if each.isalpha())
    gate = Gate(inner)

    async def main() -> None:
        engine = AsyncEngine(inner, tokenizer)
        stream = engine.generate("the cache", GenerationParams(max_tokens=300, stop=[stop, "zzz"]))
        reader = asyncio.create_task(last(stream))
        while not reader.done():
            gate.allow(1)
            await engine.call(lambda engine: None)
        gate.open()
        assert (await reader).finish_reason == "stop"
        await engine.close()

    asyncio.run(main())
    assert inner.stats().steps < 100
    assert_nothing_leaked(inner)


def test_text_needs_a_tokenizer(served):
    async def main() -> None:
        async with AsyncEngine(fresh(served[0])) as engine:
            text = r"^request 'a': prompt is text, but the engine has no tokenizer$"
            with pytest.raises(RequestError, match=text):
                engine.generate("the cache", request_id="a")
            text = r"^request 'a': stop is \('x',\), but the engine has no tokenizer$"
            with pytest.raises(RequestError, match=text):
                engine.generate([1], GenerationParams(stop="x"), request_id="a")
            output = await last(engine.generate([1], PARAMS))
            assert (output.text, output.new_text) == ("", "")

    asyncio.run(main())


@pytest.mark.parametrize("stop", ["", [""], ["a", 1], b"a", None, 3])
def test_stop_strings_that_are_none(stop):
    text = rf"^stop must be strings that are not empty, got {re.escape(repr(stop))}$"
    with pytest.raises(RequestError, match=text):
        GenerationParams(stop=stop)


# Blocks are free within a step


async def close_stream(stream: OutputStream) -> None:
    await stream.aclose()


async def cancel_task(stream: OutputStream) -> None:
    task = asyncio.create_task(stream.__anext__())
    await asyncio.sleep(0)  # it waits
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.has_ended  # otherwise the next line would wait for ever
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def abort_stream(stream: OutputStream) -> None:
    stream.abort()


@pytest.mark.parametrize("end", [close_stream, cancel_task, abort_stream])
def test_who_goes_away_frees_the_blocks_within_a_step(served, end):
    compiled, _ = served
    inner = fresh(compiled)
    gate = Gate(inner)

    async def main() -> None:
        engine = AsyncEngine(inner)
        stream = engine.generate(PROMPTS[0], GenerationParams(max_tokens=200))
        gate.allow(3)  # two for the prompt, and one that reads its token
        await read_until(stream, 1)
        await end(stream)
        number = engine._thread.call(lambda _: len(gate.leases))  # of steps, when it has obeyed
        gate.allow(1)
        after = await asyncio.wrap_future(number)
        assert gate.leases[:3] == [1, 1, 1]
        gate.open()
        await engine.close()
        assert 0 in gate.leases[after - 1 : after + 1]
        assert_nothing_leaked(inner)

    asyncio.run(main())


def test_an_abort_is_an_event(served):
    compiled, alone = served
    inner = fresh(compiled)
    gate = Gate(inner)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            with held(engine):
                waiting = engine.generate(PROMPTS[1], PARAMS)
                waiting.abort()
            output = await last(waiting)
            assert (output.token_ids, output.finish_reason) == ((), "abort")
            running = engine.generate(PROMPTS[0], PARAMS)
            gate.allow(4)
            output = await read_until(running, 1)
            running.abort()
            gate.open()
            output = await last(running)
            assert output.finish_reason == "abort"
            assert 0 < len(output.token_ids) < NEW_TOKENS
            assert output.token_ids == tuple(alone[0][: len(output.token_ids)])
            running.abort()  # nothing happens

    asyncio.run(main())


@pytest.mark.parametrize("has_wake_up", [False, True])
def test_a_closed_event_loop_frees_its_requests(served, has_wake_up):
    inner = fresh(served[0])
    gate = Gate(inner)
    engine = AsyncEngine(inner)
    streams = []

    async def leave() -> None:
        streams.append(engine.generate(PROMPTS[0], GenerationParams(max_tokens=200)))
        gate.allow(3)
        await read_until(streams[0], 1)

    asyncio.run(leave())
    streams[0]._consumer.is_posted = has_wake_up  # which the loop did not come to
    gate.open()
    asyncio.run(engine.close())  # waits for all that is active
    assert streams[0]._consumer.deliveries[0].finish_reason == "abort"
    assert_nothing_leaked(inner)


# Slow consumers


def test_the_outputs_of_a_slow_consumer_coalesce(served):
    compiled, alone = served

    async def main() -> None:
        async with AsyncEngine(fresh(compiled)) as engine:
            slow = engine.generate(PROMPTS[0], PARAMS)
            first = await anext(slow)
            # Admitted after it, with as many tokens: when it has ended, so has the slow one's.
            await last(engine.generate(PROMPTS[1], PARAMS))
            rest = [output async for output in slow]
            assert len(rest) <= 1
            outputs = [first, *rest]
            assert outputs[-1].token_ids == tuple(alone[0])
            assert outputs[-1].finish_reason == "length"

    asyncio.run(main())


def test_a_busy_event_loop_has_one_wake_up_for_each_stream(served):
    compiled, alone = served
    inner = fresh(compiled)
    gate = Gate(inner)

    async def main() -> None:
        engine = AsyncEngine(inner)
        streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS[:2]]
        readers = [asyncio.create_task(last(stream)) for stream in streams]
        await asyncio.sleep(0)  # both wait
        loop, posted = asyncio.get_running_loop(), []
        post = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: posted.append(post(*call))  # type: ignore
        gate.open()
        with ThreadPoolExecutor(1) as pool:  # the loop is busy until the engine is done
            pool.submit(asyncio.run, engine.close()).result()
        del loop.call_soon_threadsafe
        assert 1 <= len(posted) <= 2
        for reader, expected in zip(readers, alone, strict=False):
            assert (await reader).token_ids == tuple(expected)

    asyncio.run(main())


# Failures


def test_a_failure_reaches_everybody_who_waits(served):
    inner = fresh(served[0])
    gate = Gate(inner)
    error = ValueError("the device is lost")

    def fail(engine: Engine) -> None:
        def step() -> list[Any]:
            raise error

        engine.step = step  # type: ignore[method-assign]

    text = r"^the engine has failed: ValueError\('the device is lost'\)$"

    async def main() -> None:
        engine = AsyncEngine(inner)
        running = engine.generate(PROMPTS[0], PARAMS)
        gate.allow(4)
        await read_until(running, 1)
        waiting: list[Awaitable[Any]] = [
            asyncio.create_task(last(stream))
            for stream in (running, engine.generate(PROMPTS[1], PARAMS))
        ]
        await asyncio.sleep(0)
        in_other_thread = ThreadPoolExecutor(1)
        future = in_other_thread.submit(
            lambda: asyncio.run(read_all(engine.generate(PROMPTS[2], PARAMS)))
        )
        waiting.append(asyncio.wrap_future(future))
        failing = engine._thread.call(fail)
        gate.open()
        await asyncio.wrap_future(failing)
        for each in waiting:
            with pytest.raises(EngineFailedError, match=text) as caught:
                await each
            assert caught.value.__cause__ is error
        in_other_thread.shutdown()
        with pytest.raises(EngineFailedError, match=text) as caught:
            engine.generate(PROMPTS[0], PARAMS)
        assert caught.value.__cause__ is error
        with pytest.raises(EngineFailedError, match=text):
            await engine.call(Engine.stats)
        assert await engine.close()

    asyncio.run(main())


async def read_all(stream: OutputStream) -> list[GenerationOutput]:
    return [output async for output in stream]


def test_a_failure_reaches_calls_that_wait(served):
    engine = AsyncEngine(fresh(served[0]))
    entered, leave = threading.Event(), threading.Event()

    def exit_thread(inner: Engine) -> None:
        entered.set()
        leave.wait()
        raise SystemExit

    first = engine._thread.call(exit_thread)
    entered.wait()
    second, third = engine._thread.call(Engine.stats), engine._thread.call(Engine.stats)
    stream = engine.generate(PROMPTS[0], PARAMS)  # behind them
    assert third.cancel()
    leave.set()
    for call in (first, second):
        with pytest.raises(EngineFailedError, match=r"^the engine has failed: SystemExit\(\)$"):
            call.result()
    with pytest.raises(EngineFailedError, match=r"^the engine has failed: SystemExit\(\)$"):
        asyncio.run(last(stream))
    assert asyncio.run(engine.close())


def test_an_error_of_a_call_is_its_callers(served):
    async def main() -> None:
        async with AsyncEngine(fresh(served[0])) as engine:
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda engine: 1 // 0)
            assert (await engine.call(Engine.stats)).steps == 0

    asyncio.run(main())


def test_refusals_are_raised_by_the_stream_and_harm_no_other(served):
    compiled, alone = served

    async def main() -> None:
        async with AsyncEngine(fresh(compiled, num_blocks=20)) as engine:
            with held(engine):
                good = engine.generate(PROMPTS[0], PARAMS, request_id="same")
                same = engine.generate(PROMPTS[1], PARAMS, request_id="same")
            with pytest.raises(RequestError, match=r"^request 'same' is already active$"):
                await last(same)
            with pytest.raises(RequestError, match="outside the vocabulary of 1024"):
                await last(engine.generate([5000], PARAMS))
            with pytest.raises(RequestTooLargeError):
                await last(engine.generate(PROMPTS[0], GenerationParams(max_tokens=300)))
            refused = engine.generate([5000], PARAMS)
            with pytest.raises(RequestError):
                await anext(refused)
            assert [output async for output in refused] == []
            with pytest.raises(RequestError, match="max_new_tokens must be at least 1, got 0"):
                engine.generate([1], GenerationParams(max_tokens=0))
            assert (await last(good)).token_ids == tuple(alone[0])

    asyncio.run(main())


def test_samples_begin_all_or_none(served):
    compiled, alone = served

    async def main() -> None:
        async with AsyncEngine(fresh(compiled)) as engine:
            with held(engine):
                good = engine.generate(PROMPTS[0], PARAMS, request_id="x#1")
                three = engine.generate(PROMPTS[1], replace(PARAMS, n=3), request_id="x")
                added = engine.submit_call(lambda inner: inner.abort("x#0"))
            with pytest.raises(RequestError, match=r"^request 'x#1' is already active$"):
                await last(three)
            assert not await asyncio.wrap_future(added)
            assert (await last(good)).token_ids == tuple(alone[0])

    asyncio.run(main())


def test_a_stream_is_for_one_task_of_one_loop(served):
    inner = fresh(served[0])
    gate = Gate(inner)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            stream = engine.generate(PROMPTS[0], PARAMS, request_id="a")
            reader = asyncio.create_task(last(stream))
            await asyncio.sleep(0)
            text = r"^the stream of request 'a' is in use by another task$"
            with pytest.raises(StreamError, match=text):
                await anext(stream)
            text = r"^the stream of request 'a' belongs to another event loop$"
            with ThreadPoolExecutor(1) as pool, pytest.raises(StreamError, match=text):
                pool.submit(asyncio.run, one(stream)).result()
            gate.open()
            assert (await reader).finish_reason == "length"

    asyncio.run(main())


async def one(stream: OutputStream) -> GenerationOutput:
    return await anext(stream)


# Closing


def test_closing_drains_or_aborts(served):
    compiled, alone = served

    async def main(drain: bool) -> GenerationOutput:
        inner = fresh(compiled)
        gate = Gate(inner)
        engine = AsyncEngine(inner)
        stream = engine.generate(PROMPTS[0], PARAMS)
        gate.allow(4)
        await read_until(stream, 1)
        closing = asyncio.create_task(engine.close(drain=drain))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
            engine.generate(PROMPTS[0], PARAMS)
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
            await engine.call(Engine.stats)
        gate.open()
        assert await closing
        assert await engine.close()  # again
        assert_nothing_leaked(inner)
        return await last(stream)

    drained = asyncio.run(main(drain=True))
    assert (drained.token_ids, drained.finish_reason) == (tuple(alone[0]), "length")
    aborted = asyncio.run(main(drain=False))
    assert aborted.finish_reason == "abort"


def test_a_second_close_aborts_what_the_first_one_waits_for(served):
    inner = fresh(served[0])
    gate = Gate(inner)

    async def main() -> None:
        engine = AsyncEngine(inner)
        stream = engine.generate(PROMPTS[0], GenerationParams(max_tokens=200))
        draining = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        aborting = asyncio.create_task(engine.close(drain=False))
        await asyncio.sleep(0)
        gate.open()
        assert await draining and await aborting
        assert (await last(stream)).finish_reason == "abort"

    asyncio.run(main())


def test_leaving_with_an_error_aborts(served):
    inner = fresh(served[0])
    gate = Gate(inner)
    streams = []

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            close = engine._thread.close

            def close_and_go_on(**options: Any) -> None:
                close(**options)
                gate.open()

            engine._thread.close = close_and_go_on  # type: ignore[method-assign]
            streams.append(engine.generate(PROMPTS[0], GenerationParams(max_tokens=300)))
            gate.allow(4)
            await anext(streams[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert streams[0]._consumer.deliveries[0].finish_reason == "abort"
    assert_nothing_leaked(inner)


class Idle:
    """An engine without work.

    Attributes:
        timeouts: what each `close` was given.
    """

    has_work = False

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def add_request(self, request: Any) -> None:
        pass

    def abort(self, request_id: str) -> bool:
        return True

    def close(self, *, timeout_s: float) -> bool:
        self.timeouts.append(timeout_s)
        return True


def test_the_number_of_tokens_is_final_before_a_reason_is_there():
    """A consumer on another thread reads them in the other order."""
    written: list[str] = []

    class Noted(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            written.append(name)
            super().__setattr__(name, value)

    request: Any = SimpleNamespace(output_tokens=[5, 6], finish_reason="stop")
    thread: Any = EngineThread.__new__(EngineThread)
    delivery = Noted(request=request)
    thread._observers, thread._active = (), MagicMock()
    written.clear()
    thread._end(delivery, "stop")
    assert written == ["num_tokens", "finish_reason"]
    assert (delivery.num_tokens, delivery.finish_reason) == (2, "stop")


def test_an_engine_is_closed_with_the_time_of_its_last_caller():
    inner: Any = Idle()

    async def main() -> None:
        engine = AsyncEngine(inner)
        with held(engine):
            closing = [
                asyncio.create_task(engine.close(drain=drain, timeout_s=timeout_s))
                for drain, timeout_s in ((True, 5.0), (False, 7.0))
            ]
            await asyncio.sleep(0)
        assert await asyncio.gather(*closing) == [True, True]

    asyncio.run(main())
    assert inner.timeouts == [7.0]


def test_an_engine_is_closed_though_nobody_waits_for_it_any_more():
    inner: Any = Idle()

    async def main() -> None:
        engine = AsyncEngine(inner)
        with held(engine):
            closing = asyncio.create_task(engine.close(timeout_s=5.0))
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        assert await engine.close(timeout_s=5.0)

    asyncio.run(main())
    assert inner.timeouts == [5.0]


@pytest.mark.parametrize("fails", [False, True])
def test_each_caller_gets_an_error_of_its_own(fails):
    """A traceback grows where an error is raised. A close does not hide what the engine died of."""
    inner: Any = Idle()

    def exit_thread(_: object) -> None:
        raise SystemExit

    async def main() -> None:
        engine = AsyncEngine(inner)
        if fails:
            with pytest.raises(EngineFailedError):
                await engine.call(exit_thread)
        assert await engine.close()
        kind = EngineFailedError if fails else EngineClosedError
        errors = []
        for _ in range(2):
            with pytest.raises(kind) as refused:
                engine.generate([1], PARAMS)
            errors.append(refused.value)
        first, second = errors
        assert first is not second and str(first) == str(second)
        assert first.__cause__ is second.__cause__ is engine.failure

    asyncio.run(main())


def test_a_failure_reaches_everybody_though_an_event_loop_is_closed():
    """The failed engine, which may do anything, is not asked to abort its requests."""
    inner: Any = Idle()
    inner.abort = Mock(side_effect=ZeroDivisionError)
    closed = asyncio.new_event_loop()
    closed.close()

    def exit_thread(_: object) -> None:
        raise SystemExit

    async def main() -> None:
        engine = AsyncEngine(inner)
        with held(engine):
            stream = engine.generate([1], PARAMS)
            stream._consumer.loop = closed
            calls = [engine.submit_call(each) for each in (exit_thread, Engine.stats)]
        for each in calls:
            assert isinstance(each.exception(timeout=60), EngineFailedError)
        assert await engine.close()
        assert isinstance(stream._consumer.deliveries[0].error, EngineFailedError)

    asyncio.run(main())
    assert not inner.abort.called


def test_who_waits_for_the_end_is_told_of_one_that_fails():
    inner: Any = Idle()
    inner.close = Mock(side_effect=OSError("no room"))
    engine, has_ended = AsyncEngine(inner), threading.Event()
    engine.when_ended(has_ended.set)
    with pytest.raises(OSError, match=r"^no room$"):
        asyncio.run(engine.close())
    assert has_ended.wait(60)


def test_guides_end_with_the_end_tokens_of_the_engine():
    inner: Any = Idle()
    tokenizer: Any = Mock()
    engine = AsyncEngine(inner, tokenizer, eos_token_ids=[7, 9])
    guided = Guided(regex="a")
    assert engine.make_guide(guided) is tokenizer.guide.return_value
    tokenizer.guide.assert_called_once_with(guided, {7, 9})
    engine.tokenizer = None
    text = r"^guided output needs a tokenizer, and the engine has none$"
    with pytest.raises(RequestError, match=text):
        engine.make_guide(guided)
    asyncio.run(engine.close())


def test_the_end_of_a_program_aborts_what_runs(served, monkeypatch):
    """And nothing is left to do there, once the engine is closed."""
    kept: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", kept.append)
    inner = fresh(served[0])
    gate = Gate(inner)
    engine = AsyncEngine(inner)
    [at_exit] = kept
    close = engine._thread.close

    def close_and_go_on(**options: Any) -> None:
        close(**options)
        gate.open()

    async def main() -> OutputStream:
        stream = engine.generate(PROMPTS[0], GenerationParams(max_tokens=300))
        gate.allow(4)
        await anext(stream)
        monkeypatch.setattr(atexit, "unregister", kept.remove)
        monkeypatch.setattr(engine._thread, "close", close_and_go_on)
        at_exit()
        return stream

    stream = asyncio.run(main())
    assert stream._consumer.deliveries[0].finish_reason == "abort"
    assert kept == []
    assert_nothing_leaked(inner)


def test_a_request_has_what_its_caller_asks_for():
    inner: Any = Idle()
    guide: Any = Mock(**{"copy.return_value": "a copy"})

    async def main() -> None:
        engine = AsyncEngine(inner, eos_token_ids=[7])
        with held(engine):
            stream = engine.generate(
                [1], PARAMS, request_id="a", priority=3, namespace=b"n", guide=guide
            )
            [delivery] = stream._consumer.deliveries
            request: Any = delivery.request
            assert (request.request_id, request.priority, request.namespace) == ("a", 3, b"n")
            assert (request.guide, request.stop_token_ids) == ("a copy", {7})
            engine._thread.close(drain=True, timeout_s=5.0)

    asyncio.run(main())


def test_an_engine_that_is_dropped_ends_its_thread_but_not_under_a_stream(served):
    compiled, alone = served

    async def main() -> None:
        engine = AsyncEngine(fresh(compiled))
        ended, stream = engine._thread.ended, engine.generate(PROMPTS[0], PARAMS)
        del engine
        gc.collect()
        assert (await last(stream)).token_ids == tuple(alone[0])
        assert not ended.done()
        del stream
        gc.collect()
        assert await asyncio.wrap_future(ended)

    asyncio.run(main())


EXIT = """
from radixkv.scheduler.serving import AsyncEngine

class Idle:
    has_work = False
    def close(self, timeout_s):
        print("closed")
        return True

engine = AsyncEngine(Idle())
"""


def test_a_program_may_end_without_closing_the_engine():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_sampled_tokens_are_those_of_the_engine(served):
    sampling = SamplingParams(temperature=1.1, top_k=50, seed=7)
    [expected] = complete(fresh(served[0]), [PROMPTS[3]], NEW_TOKENS, [sampling])

    async def main() -> None:
        async with AsyncEngine(fresh(served[0])) as engine:
            output = await last(engine.generate(PROMPTS[3], GenerationParams(NEW_TOKENS, sampling)))
            assert output.token_ids == tuple(expected)

    asyncio.run(main())
