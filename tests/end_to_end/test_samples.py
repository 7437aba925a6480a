"""Several samples of a prompt: each is as if it were alone, and they share its blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import HostConfig, RequestTooLargeError
from radixkv.scheduler import (
    AsyncEngine,
    Engine,
    GenerationOutput,
    GenerationParams,
    Request,
    RequestError,
    SamplingParams,
)
from radixkv.scheduler.text import TextTokenizer

from ..tokenizers import add_tokenizer
from .conftest import MAX_RUNNING, assert_nothing_leaked, complete, fresh, let_copies_end
from .test_engine import PROMPTS

BLOCK_SIZE = 4
NEW_TOKENS = 12
NUM_SAMPLES = 4
SAMPLING = SamplingParams(temperature=1.1, top_k=50, seed=2**32 - 2)  # the third seed is 0
PARAMS = GenerationParams(NEW_TOKENS, SAMPLING, n=NUM_SAMPLES)
SEEDS = (2**32 - 2, 2**32 - 1, 0, 1)


@pytest.fixture(scope="module")
def compiled(engine: Callable[[str, int], Engine]) -> Engine:
    return engine("qwen3", BLOCK_SIZE)


@pytest.fixture(scope="module")
def alone(compiled: Engine) -> list[list[list[int]]]:
    """What a request with each seed generates alone, by prompt."""
    samplings = [replace(SAMPLING, seed=seed) for seed in SEEDS]
    outputs = [
        [complete(fresh(compiled), [prompt], NEW_TOKENS, [each])[0] for each in samplings]
        for prompt in PROMPTS
    ]
    assert all(len(set(map(tuple, samples))) > 1 for samples in outputs)
    return outputs


def requests_of(place: int, params: GenerationParams = PARAMS) -> list[Request]:
    return params.make_requests(f"prompt-{place}", PROMPTS[place], None, ())


@settings(max_examples=30)
@given(data=st.data())
def test_each_sample_is_that_of_a_request_alone(compiled, alone, data):
    tiers = data.draw(st.booleans(), label="tiers")
    options: dict[str, Any] = {"host": HostConfig(64), "preempt": "host"} if tiers else {}
    inner = fresh(
        compiled,
        num_blocks=data.draw(st.sampled_from([26, 40, 160]), label="num_blocks"),
        reserve_tokens=0,
        depth=data.draw(st.sampled_from([1, 2]), label="depth"),
        prefix_cache=tiers or data.draw(st.booleans(), label="prefix_cache"),
        **options,
    )
    places = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=3))
    if data.draw(st.booleans(), label="hit"):
        inner.add_request(Request("before", PROMPTS[places[0]], 1))
        inner.run()
    groups = []
    for number, place in enumerate(places):
        requests = PARAMS.make_requests(f"r{number}", PROMPTS[place], None, ())
        groups.append((place, requests))
        for request in requests:
            inner.add_request(request)
        for _ in range(data.draw(st.integers(0, 3), label="steps")):
            inner.step()
    samples = [(place, i, each) for place, group in groups for i, each in enumerate(group)]
    aborted = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=3), label="aborted")
    for index in aborted:
        inner.step()
        inner.abort(samples[index][2].request_id)
    inner.run()
    let_copies_end(inner._runner)
    for place, index, request in samples:
        expected, found = alone[place][index], request.output_tokens
        assert found == expected[: len(found)]
        assert request.finish_reason == "length" or len(found) < NEW_TOKENS
    inner.run()
    assert_nothing_leaked(inner)
    assert inner.stats().compilations_after_warm_up == 0
    inner.close()


def held_blocks(inner: Engine) -> int:
    cache = inner.stats().cache
    return cache.num_blocks - cache.free_blocks - cache.idle_blocks


@pytest.mark.parametrize("num_tokens", [3, 15, 16, 17, 18, 33])
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_share_the_blocks_of_the_prompt(compiled, num_tokens, depth):
    inner = fresh(compiled, depth=depth)
    prompt = list(range(1, num_tokens + 1))
    requests = PARAMS.make_requests("a", prompt, None, ())
    for request in requests:
        inner.add_request(request)
    while not all(request.output_tokens for request in requests):
        inner.step()
    shared, own = num_tokens // BLOCK_SIZE, 0
    for request in requests:
        assert request.lease is not None and not request.finish_reason
        own += -(-request.lease.num_tokens // BLOCK_SIZE) - shared
    assert held_blocks(inner) == shared + own
    inner.run()
    stats = inner.stats().scheduler
    assert stats.hit_tokens + stats.prefill_tokens == NUM_SAMPLES * num_tokens
    assert stats.admitted == NUM_SAMPLES
    if shared:  # computed once; then its last token alone, for the logits
        assert stats.prefill_tokens == num_tokens + NUM_SAMPLES - 1
    assert_nothing_leaked(inner)


def test_an_abort_frees_the_part_of_the_sample(compiled):
    inner, prompt = fresh(compiled, depth=1), list(range(1, 19))
    requests = replace(PARAMS, max_tokens=50).make_requests("a", prompt, None, ())
    for request in requests:
        inner.add_request(request)
    while not all(request.output_tokens for request in requests):
        inner.step()
    for number, request in enumerate(requests):
        lease = request.lease
        assert lease is not None
        is_last = number == NUM_SAMPLES - 1
        part = lease.num_blocks if is_last else lease.num_blocks - lease.num_shared_blocks
        before = held_blocks(inner)
        assert inner.abort(request.request_id)
        assert held_blocks(inner) == before - part
    assert_nothing_leaked(inner)


# Streams


@contextmanager
def held(inner: Engine, request_id: str) -> Iterator[None]:
    """Let an engine stop when a request whose id begins so has tokens, until the block ends."""
    may_go_on, step = threading.Event(), inner.step

    def held_step() -> Any:
        running = inner.scheduler.running
        if any(each.output_tokens and each.request_id.startswith(request_id) for each in running):
            assert may_go_on.wait(600)
        return step()

    inner.step = held_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        may_go_on.set()


async def by_sample(stream: Any) -> list[list[GenerationOutput]]:
    outputs: dict[int, list[GenerationOutput]] = {}
    async for output in stream:
        assert output.request_id == stream.request_id
        outputs.setdefault(output.index, []).append(output)
    return [outputs[index] for index in sorted(outputs)]


def test_a_stream_has_the_outputs_of_all_samples(compiled, alone):
    inner = fresh(compiled)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            streams = [engine.generate(prompt, PARAMS, request_id=f"p{i}")
                       for i, prompt in enumerate(PROMPTS)]  # fmt: skip
            for place, samples in enumerate(await asyncio.gather(*map(by_sample, streams))):
                assert len(samples) == NUM_SAMPLES
                for outputs, expected in zip(samples, alone[place], strict=True):
                    read: tuple[int, ...] = ()
                    for output in outputs:
                        read += output.new_token_ids
                        assert output.token_ids == read
                        assert output.others == () and output.samples == (output,)
                    assert read == tuple(expected)
                    reasons = [output.finish_reason for output in outputs]
                    assert reasons == [None] * (len(outputs) - 1) + ["length"]

    asyncio.run(main())
    assert_nothing_leaked(inner)


def test_samples_of_a_slow_consumer_take_turns(compiled):
    async def main() -> None:
        async with AsyncEngine(fresh(compiled)) as engine:
            stream = engine.generate(PROMPTS[0], PARAMS)
            first = await anext(stream)
            while await engine.call(lambda engine: engine.has_work):
                pass
            rest = [output async for output in stream]
            last = [first.index, *[output.index for output in rest[-NUM_SAMPLES:]]]
            assert sorted(last[-NUM_SAMPLES:]) == list(range(NUM_SAMPLES))
            assert len(rest) <= 2 * NUM_SAMPLES  # what was there at once comes as one

    asyncio.run(main())


@pytest.mark.parametrize("end", ["abort", "close", "drop"])
def test_the_end_of_a_stream_ends_all_samples(compiled, end):
    inner = fresh(compiled)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            with held(inner, ""):
                stream = engine.generate(PROMPTS[0], replace(PARAMS, max_tokens=200))
                await anext(stream)
                if end == "abort":
                    stream.abort()
                elif end == "close":
                    await stream.aclose()
                else:
                    del stream
            if end == "abort":
                samples = await by_sample(stream)
                assert [each[-1].finish_reason for each in samples] == ["abort"] * NUM_SAMPLES

    asyncio.run(main())
    assert inner.stats().scheduler.decode_tokens < NUM_SAMPLES * 199
    assert_nothing_leaked(inner)


def test_samples_of_a_closed_event_loop_are_aborted(compiled):
    inner = fresh(compiled)
    engine = AsyncEngine(inner)
    streams = []

    async def leave() -> None:
        streams.append(engine.generate(PROMPTS[0], replace(PARAMS, max_tokens=300)))
        await anext(streams[0])

    with held(inner, ""):
        asyncio.run(leave())
    asyncio.run(engine.close())
    reasons = [each.finish_reason for each in streams[0]._consumer.deliveries]
    assert reasons == ["abort"] * NUM_SAMPLES
    assert_nothing_leaked(inner)


def test_all_samples_are_refused_or_none(compiled):
    inner = fresh(compiled, num_blocks=8)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            with pytest.raises(RequestTooLargeError):
                await anext(engine.generate(PROMPTS[0], replace(PARAMS, max_tokens=60)))
            other = engine.generate([1, 2], PARAMS, request_id="a#2")
            await anext(other)  # whose first sample is a#2#0
            with held(inner, "b#2"):
                first = engine.generate(
                    [1, 2], replace(PARAMS, max_tokens=20, n=1), request_id="b#2"
                )
                await anext(first)
                second = engine.generate([1, 2], PARAMS, request_id="b")
            with pytest.raises(RequestError) as caught:
                await anext(second)
            assert str(caught.value) == "request 'b#2' is already active"
            assert (await by_sample(first))[0][-1].finish_reason == "length"

    asyncio.run(main())
    assert_nothing_leaked(inner)


def test_a_stop_string_ends_its_sample_alone(compiled, alone, tmp_path):
    directory = tmp_path
    add_tokenizer(directory)
    tokenizer = TextTokenizer(directory)

    async def texts_of(params: GenerationParams) -> list[tuple[str, str | None]]:
        async with AsyncEngine(fresh(compiled), tokenizer) as engine:
            samples = await by_sample(engine.generate(PROMPTS[0], params))
            return [(outputs[-1].text, outputs[-1].finish_reason) for outputs in samples]

    texts = [text for text, _ in asyncio.run(texts_of(PARAMS))]
    stop = next(
        text[i : i + size]
        for size in range(1, 12)
        for text in texts
        for i in range(1, len(text) - size)
        if any(text[i : i + size] not in other for other in texts)
    )
    assert asyncio.run(texts_of(replace(PARAMS, stop=stop))) == [
        (text.partition(stop)[0], "stop" if stop in text else "length") for text in texts
    ]


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "2", None])
def test_numbers_of_samples_that_are_none(n):
    with pytest.raises(RequestError) as caught:
        GenerationParams(n=n)
    assert str(caught.value) == f"n must be an integer of at least 1, got {n!r}"


def test_one_sample_keeps_the_id_and_the_seed():
    [request] = replace(PARAMS, n=1).make_requests("a", [1], None, ())
    assert (request.request_id, request.sampling) == ("a", SAMPLING)
    samples = requests_of(0)
    assert [each.request_id for each in samples] == [f"prompt-0#{i}" for i in range(NUM_SAMPLES)]
    assert [each.sampling.seed for each in samples] == list(SEEDS)
    assert MAX_RUNNING >= NUM_SAMPLES  # all run at once in the tests above
