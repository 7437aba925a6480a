"""Metrics of a tiny engine: values against its counts, times on a clock of the test, and ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families as parse

from radixkv.kvcache import HostConfig
from radixkv.scheduler import (
    AsyncEngine,
    ConfigError,
    Engine,
    EngineClosedError,
    EngineFailedError,
    GenerationOutput,
    GenerationParams,
    OutputStream,
    Request,
    RequestError,
)
from radixkv.scheduler.metrics import CONTENT_TYPE, EngineMetrics
from radixkv.scheduler.text import TextTokenizer

from ..tokenizers import add_tokenizer
from .conftest import fresh, let_copies_end
from .test_async_engine import Gate, held, until_idle
from .test_engine import PROMPTS

NEW_TOKENS = 8
PARAMS = GenerationParams(max_tokens=NEW_TOKENS)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scrapes wait for an engine on a slow machine, unless a test says for how long."""
    defaults: Any = EngineMetrics.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "timeout_s", 600.0)


@pytest.fixture(scope="module")
def compiled(engine: Callable[[str, int], Engine]) -> Engine:
    """An engine to take programs from."""
    return engine("qwen3", 4)


def samples_of(text: bytes) -> Samples:
    """Samples by name, without the prefix, and labels, without the model's."""
    samples: Samples = {}
    for family in parse(text.decode()):
        for each in family.samples:
            labels = tuple(sorted((k, v) for k, v in each.labels.items() if k != "model_name"))
            name = each.name.removeprefix("radixkv:")
            assert name != each.name
            assert (name, labels) not in samples, "a sample stands there twice"
            samples[name, labels] = each.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def by_label(samples: Samples, name: str, *labels: str) -> dict[Any, float]:
    """Values of a metric by the values of some labels, which are all that it has."""
    found = {}
    for (each, pairs), number in samples.items():
        if each == name:
            of = dict(pairs)
            assert of.keys() == set(labels)
            found[of[labels[0]] if len(labels) == 1 else tuple(of[x] for x in labels)] = number
    return found


async def scrape(metrics: EngineMetrics) -> Samples:
    return samples_of(await metrics.scrape())


async def last(stream: OutputStream) -> GenerationOutput:
    return [output async for output in stream][-1]


def assert_counts_are_those_of_the_engine(samples: Samples, engine: Engine) -> None:
    stats, now = engine.stats(), lambda *args, **labels: value(samples, *args, **labels)
    counts, cache = stats.scheduler, stats.cache
    hits = {
        "device": counts.hit_tokens,
        "host": counts.host_hit_tokens,
        "storage": counts.storage_hit_tokens,
    }
    assert by_label(samples, "prompt_tokens_cached_by_source_total", "source") == hits
    assert now("prefix_cache_hits_total") == counts.hit_tokens
    assert now("num_preemptions_total") == counts.preemptions
    assert now("recomputed_tokens_total") == counts.recomputed_tokens
    assert now("engine_steps_total") == stats.steps
    assert now("padding_tokens_total") == stats.padding_tokens
    assert now("compilations_after_warm_up_total") == stats.compilations_after_warm_up == 0
    assert now("num_requests_running") == len(engine.scheduler.running)
    assert now("num_requests_waiting") == len(engine.scheduler.waiting)
    used = cache.num_blocks - cache.free_blocks - cache.idle_blocks
    assert now("kv_cache_usage_perc") == pytest.approx(used / cache.num_blocks)
    blocks = by_label(samples, "kv_blocks", "tier", "state")
    device = {state: number for (tier, state), number in blocks.items() if tier == "device"}
    assert sum(device.values()) == cache.num_blocks
    assert (device["free"], device["idle"]) == (cache.free_blocks, cache.idle_blocks)
    assert device["private"] == cache.private_blocks
    evicted = by_label(samples, "kv_evicted_blocks_total", "tier")
    hit_blocks = by_label(samples, "kv_hit_blocks_total", "tier")
    assert (evicted["device"], hit_blocks["device"]) == (cache.evicted_blocks, cache.hit_blocks)
    if (tiers := cache.tiers) is not None:
        host = {state: number for (tier, state), number in blocks.items() if tier == "host"}
        assert sum(host.values()) == tiers.host_blocks
        assert (host["free"], host["cached"]) == (tiers.host_free_blocks, tiers.host_cached_blocks)
        assert evicted["host"] == tiers.dropped_blocks
        assert hit_blocks["host"] == tiers.promoted_blocks
        assert hit_blocks["storage"] == tiers.fetched_blocks
        assert now("kv_demoted_blocks_total") == tiers.demoted_blocks
        assert now("kv_stored_blocks_total") == tiers.stored_blocks
        assert now("kv_open_operations") == tiers.open_operations
        assert now("kv_quarantined_operations") == tiers.quarantined_operations
        assert now("parked_requests") == tiers.parked
        assert now("external_prefix_cache_hits_total") == hits["host"] + hits["storage"]
        queries = now("prefix_cache_queries_total") - hits["device"]
        assert now("external_prefix_cache_queries_total") == queries
        assert stats.copies is not None
        copied = by_label(samples, "kv_copied_bytes_total", "direction")
        assert copied == stats.copies.copied_bytes
        operations = by_label(samples, "kv_operations_total", "direction", "result")
        assert {": ".join(key): n for key, n in operations.items()} == stats.copies.operations
        assert by_label(samples, "kv_copy_errors_total", "error") == stats.copies.errors
        assert now("kv_skipped_blocks_total") == stats.copies.dropped_blocks
    else:
        absent = {"kv_open_operations", "parked_requests", "external_prefix_cache_hits_total"}
        assert absent.isdisjoint(name for name, _ in samples)
        assert {tier for tier, _ in blocks} == set(evicted) == set(hit_blocks) == {"device"}


def assert_prompts_count_once(samples: Samples, engine: Engine) -> None:
    """A resumption computes the last generated token, which the engine counts with the prompts."""
    number, prompts = value(samples, "prompt_tokens_total"), sum(map(len, PROMPTS))
    assert prompts <= number <= prompts + engine.stats().scheduler.resumed
    assert value(samples, "prefix_cache_queries_total") == number


def assert_monotone(before: Samples, after: Samples) -> None:
    """No counter, sum or bucket falls, and no series goes away."""
    for key, number in before.items():
        name = key[0]
        if name.endswith(("_total", "_count", "_sum", "_bucket")):
            assert after[key] >= number, key


def histogram(samples: Samples, name: str) -> tuple[float, float]:
    """Count and sum, after a look at the buckets."""
    buckets = by_label(samples, f"{name}_bucket", "le")
    assert list(buckets.values()) == sorted(buckets.values())
    assert list(map(float, buckets)) == sorted(map(float, buckets))
    assert buckets["+Inf"] == value(samples, f"{name}_count")
    return value(samples, f"{name}_count"), value(samples, f"{name}_sum")


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    aborted=st.sets(st.integers(0, len(PROMPTS) - 1)),
    num_blocks=st.sampled_from([28, 160]),
    tiers=st.booleans(),
    depth=st.sampled_from([1, 2]),
)
def test_values_are_those_of_the_run(compiled, lengths, aborted, num_blocks, tiers, depth):
    options: dict[str, Any] = {"host": HostConfig(64), "preempt": "host"} if tiers else {}
    inner = fresh(compiled, num_blocks=num_blocks, reserve_tokens=0, depth=depth, **options)

    async def main() -> tuple[Samples, list[GenerationOutput]]:
        engine = AsyncEngine(inner)
        metrics = EngineMetrics(engine)
        empty = await scrape(metrics)
        assert_counts_are_those_of_the_engine(empty, inner)
        streams = [
            engine.generate(prompt, GenerationParams(max_tokens=length))
            for prompt, length in zip(PROMPTS, lengths, strict=True)
        ]
        for place in aborted:
            streams[place].abort()
        before = empty
        reading = asyncio.gather(*map(last, streams))
        while not reading.done():
            now = await scrape(metrics)
            assert_monotone(before, now)
            before = now
        outputs = await reading
        await until_idle(engine)  # a step of an aborted request may be in flight
        await engine.call(lambda engine: let_copies_end(engine._runner))
        samples = await scrape(metrics)
        assert_monotone(before, samples)
        assert_counts_are_those_of_the_engine(samples, inner)
        await engine.call(lambda engine: engine.reset_cache())
        after = await scrape(metrics)
        assert_monotone(samples, after)
        assert_counts_are_those_of_the_engine(after, inner)
        await engine.close()
        return samples, outputs

    samples, outputs = asyncio.run(main())
    reasons: list[Any] = [output.finish_reason for output in outputs]
    ended = by_label(samples, "request_success_total", "finished_reason")
    assert ended == {
        reason: reasons.count(reason) for reason in ("stop", "length", "abort", "error", "refused")
    }
    tokens = [len(output.token_ids) for output in outputs]
    assert value(samples, "generation_tokens_total") == sum(tokens)
    begun = histogram(samples, "time_to_first_token_seconds")[0]
    assert begun == sum(number > 0 for number in tokens)
    gaps, _ = histogram(samples, "inter_token_latency_seconds")
    assert gaps == sum(tokens) - begun
    finished = [output for output in outputs if output.finish_reason == "length"]
    for name in (
        "e2e_request_latency_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        assert histogram(samples, name)[0] == len(finished)
    assert histogram(samples, "request_prompt_tokens") == (
        len(finished),
        sum(output.num_prompt_tokens for output in finished),
    )
    assert histogram(samples, "request_generation_tokens") == (
        len(finished),
        sum(len(output.token_ids) for output in finished),
    )
    per_token, _ = histogram(samples, "request_time_per_output_token_seconds")
    assert per_token == sum(len(output.token_ids) > 1 for output in finished)
    if len(finished) == len(outputs):
        assert_prompts_count_once(samples, inner)
        assert histogram(samples, "request_queue_time_seconds")[0] == len(outputs)


def test_a_prompt_counts_once_though_its_request_is_preempted(compiled):
    inner = fresh(compiled, num_blocks=28, reserve_tokens=0)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            metrics = EngineMetrics(engine)
            params = GenerationParams(max_tokens=40)
            with held(engine):
                streams = [engine.generate(each, params) for each in PROMPTS]
            await asyncio.gather(*map(last, streams))
            await until_idle(engine)
            samples = await scrape(metrics)
        assert value(samples, "num_preemptions_total") > 0
        assert value(samples, "recomputed_tokens_total") > 0
        assert_prompts_count_once(samples, inner)
        assert_counts_are_those_of_the_engine(samples, inner)

    asyncio.run(main())


def test_hits_on_the_host_count_as_such(compiled):
    inner = fresh(compiled, host=HostConfig(64))

    def evict(engine: Engine) -> None:
        engine.manager.evict(engine.manager.num_blocks)
        let_copies_end(engine._runner)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            metrics = EngineMetrics(engine)
            await last(engine.generate(PROMPTS[0], PARAMS))
            await engine.call(evict)
            output = await last(engine.generate(PROMPTS[0], PARAMS))
            await engine.call(lambda engine: let_copies_end(engine._runner))
            samples = await scrape(metrics)
        assert output.hits.host > 0
        hits = by_label(samples, "prompt_tokens_cached_by_source_total", "source")
        assert hits == {"device": 0, "host": output.hits.host, "storage": 0}
        assert value(samples, "external_prefix_cache_hits_total") == output.hits.host
        copied = by_label(samples, "kv_copied_bytes_total", "direction")
        assert copied["device to host"] > 0
        assert copied["host to device"] > 0
        assert_counts_are_those_of_the_engine(samples, inner)

    asyncio.run(main())


# Times


class Clock:
    """Stands still between the steps that a test lets an engine take."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_times_are_those_of_the_clock(compiled):
    inner, clock = fresh(compiled), Clock()
    may_step, stepped = threading.Semaphore(0), threading.Semaphore(0)
    step, durations = inner.step, itertools.chain([100.0], itertools.cycle([1.0]))

    def slow_step() -> list[Request]:
        may_step.acquire()
        clock.now_s += next(durations)
        ended = step()
        stepped.release()
        return ended

    inner.step = slow_step  # type: ignore[method-assign]

    async def main() -> Samples:
        engine = AsyncEngine(inner)
        metrics = EngineMetrics(engine, clock=clock)
        waiting = [engine.generate(PROMPTS[0], GenerationParams(max_tokens=4))]
        # The engine waits in its first step, before the clock moves.
        while len(inner.scheduler.waiting) == 0:
            await asyncio.sleep(0)
        may_step.release(1000)
        outputs = await asyncio.gather(*map(last, waiting))
        assert [len(output.token_ids) for output in outputs] == [4]
        samples = await scrape(metrics)
        await engine.close()
        return samples

    samples = asyncio.run(main())
    # 41 tokens in steps of at most 32: two for the prompt, and one that reads its token.
    assert histogram(samples, "request_queue_time_seconds") == (1, 0.0)
    first = histogram(samples, "time_to_first_token_seconds")
    assert first == histogram(samples, "request_prefill_time_seconds") == (1, 102.0)
    assert histogram(samples, "inter_token_latency_seconds") == (3, 3.0)
    assert histogram(samples, "request_time_per_output_token_seconds") == (1, 1.0)
    assert histogram(samples, "request_decode_time_seconds") == (1, 3.0)
    assert histogram(samples, "e2e_request_latency_seconds") == (1, 105.0)
    assert histogram(samples, "request_inference_time_seconds") == (1, 105.0)
    buckets = by_label(samples, "inter_token_latency_seconds_bucket", "le")
    assert (buckets["0.75"], buckets["1.0"]) == (0, 3)  # bounds are inclusive


# Ends


def test_a_stop_string_counts_as_a_stop(compiled, tmp_path):
    add_tokenizer(tmp_path)
    tokenizer, inner = TextTokenizer(tmp_path), fresh(compiled)
    gate = Gate(inner)

    async def main() -> None:
        async with AsyncEngine(inner, tokenizer) as engine:

            async def complete(**params: Any) -> GenerationOutput:
                """Let the engine take no step before the tokens of the last one are read."""
                reader = asyncio.create_task(
                    last(engine.generate("the cache", GenerationParams(**params)))
                )
                while not reader.done():
                    gate.allow(1)
                    await engine.call(lambda engine: None)
                return await reader

            metrics = EngineMetrics(engine)
            long = await complete(max_tokens=64)
            stop = next(each for each in long.text if each.isalpha())
            assert (await complete(max_tokens=300, stop=stop)).finish_reason == "stop"
            gate.open()
            await engine.call(lambda engine: None)  # after the consumer's command to end it
            samples = await scrape(metrics)
            ended = by_label(samples, "request_success_total", "finished_reason")
            assert (ended["length"], ended["stop"], ended["abort"]) == (1, 1, 0)
            assert histogram(samples, "e2e_request_latency_seconds")[0] == 2

    asyncio.run(main())


def test_a_refused_request_is_counted_and_leaves_nothing(compiled):
    async def main() -> None:
        async with AsyncEngine(fresh(compiled)) as engine:
            metrics = EngineMetrics(engine)
            with pytest.raises(RequestError):
                await last(engine.generate([10**6], PARAMS))
            samples = await scrape(metrics)
            assert value(samples, "request_success_total", finished_reason="refused") == 1
            assert metrics._recorder._times == {}

    asyncio.run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_a_closed_engine_shows_its_last_counts(compiled, drain):
    inner = fresh(compiled)

    async def main() -> None:
        engine = AsyncEngine(inner)
        metrics = EngineMetrics(engine)
        assert value(await scrape(metrics), "engine_up") == 1
        stream = engine.generate(PROMPTS[0], PARAMS)
        closing = asyncio.create_task(engine.close(drain=drain))
        await asyncio.sleep(0)  # it refuses from now on
        with pytest.raises(EngineClosedError):
            engine.submit_call(lambda engine: None)
        await scrape(metrics)  # by the steps that drain it, or by the end
        await closing
        output = await last(stream)
        for _ in range(2):
            samples = await scrape(metrics)
            assert metrics._recorder._asked is None  # answered, not given up
            assert value(samples, "engine_up") == 0
            assert value(samples, "snapshot_age_seconds") > 0
            assert value(samples, "generation_tokens_total") == len(output.token_ids)
            ended = by_label(samples, "request_success_total", "finished_reason")
            assert ended[output.finish_reason] == sum(ended.values()) == 1
            assert_counts_are_those_of_the_engine(samples, inner)
        assert samples_of(metrics.exposition()).keys() == samples.keys()
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
            EngineMetrics(engine)

    asyncio.run(main())


def test_a_step_answers_while_a_closed_engine_drains(compiled):
    inner, may_step = fresh(compiled), threading.Semaphore(0)
    step = inner.step

    def gated_step() -> list[Request]:
        may_step.acquire()
        return step()

    inner.step = gated_step  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(inner)
        metrics = EngineMetrics(engine, timeout_s=60.0)
        stream = engine.generate(PROMPTS[0], PARAMS)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)  # it refuses calls from now on
        scraping = asyncio.create_task(scrape(metrics))
        await asyncio.sleep(0)  # it has asked
        may_step.release()
        samples = await scraping
        assert metrics._recorder._asked is None
        assert value(samples, "engine_up") == 1
        assert value(samples, "num_requests_running") == 1
        may_step.release(1000)
        assert (await last(stream)).finish_reason == "length"
        await closing

    asyncio.run(main())


@pytest.mark.parametrize("stats_fail", [False, True])
def test_a_failed_engine_shows_its_last_counts(compiled, stats_fail):
    inner = fresh(compiled)
    step, stats = inner.step, inner.stats
    broken = ZeroDivisionError("no device")

    def fail() -> Any:
        raise broken

    def step_twice() -> list[Request]:
        if inner.stats().steps < 2:
            return step()
        if stats_fail:
            inner.stats = fail  # type: ignore[method-assign]
        return fail()

    inner.step = step_twice  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(inner)
        metrics = EngineMetrics(engine)
        assert value(await scrape(metrics), "engine_steps_total") == 0
        with pytest.raises(EngineFailedError):
            await last(engine.generate(PROMPTS[0], PARAMS))
        samples = await scrape(metrics)
        assert metrics._recorder._asked is None  # answered, not given up
        assert value(samples, "engine_up") == 0
        assert value(samples, "engine_steps_total") == (0 if stats_fail else stats().steps)
        if not stats_fail:
            assert value(samples, "request_success_total", finished_reason="error") == 1
        assert metrics._recorder._times == {}
        with pytest.raises(EngineFailedError):
            EngineMetrics(engine)

    asyncio.run(main())


# A busy engine


def test_a_busy_engine_shows_the_counts_before(compiled):
    inner, may_step, is_in_step = fresh(compiled), threading.Event(), threading.Event()
    step = inner.step

    def long_step() -> list[Request]:
        is_in_step.set()
        may_step.wait()
        return step()

    inner.step = long_step  # type: ignore[method-assign]
    clock = Clock()

    async def main() -> None:
        engine = AsyncEngine(inner)
        metrics = EngineMetrics(engine, timeout_s=0.01, clock=clock)
        stream = engine.generate(PROMPTS[0], PARAMS)
        is_in_step.wait()
        clock.now_s = 7.0
        samples = await scrape(metrics)  # nothing was read yet: no values, and no wait for ever
        assert [name for name, _ in samples] == ["engine_up"]
        assert samples_of(metrics.exposition()) == samples
        may_step.set()
        assert (await last(stream)).finish_reason == "length"
        metrics._timeout_s = 60.0
        before = await scrape(metrics)
        assert value(before, "snapshot_age_seconds") == 0
        metrics._timeout_s = 0.01
        may_step.clear()
        is_in_step.clear()
        stream = engine.generate(PROMPTS[0], PARAMS)
        is_in_step.wait()
        clock.now_s = 12.0
        age = "snapshot_age_seconds", ()
        assert await scrape(metrics) == before | {age: 5.0}
        assert metrics._recorder.ask() is metrics._recorder.ask()  # all wait for one
        may_step.set()
        await last(stream)
        metrics._timeout_s = 60.0
        after = await scrape(metrics)
        assert after[age] == 0
        assert_monotone(before, after)
        assert value(after, "generation_tokens_total") == 2 * NEW_TOKENS
        await engine.close()

    asyncio.run(main())


def test_many_threads_scrape_at_once(compiled):
    async def main() -> None:
        async with AsyncEngine(fresh(compiled)) as engine:
            metrics = EngineMetrics(engine)
            registry = CollectorRegistry()
            registry.register(metrics)
            loop = asyncio.get_running_loop()
            streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
            scrapes: list[Any] = [loop.run_in_executor(None, metrics.exposition) for _ in "abcd"]
            scrapes += [metrics.scrape() for _ in "abcd"]
            read = await asyncio.gather(*scrapes)
            await asyncio.gather(*map(last, streams))
            final = await scrape(metrics)
            for text in read:
                assert_monotone(samples_of(text), final)
            name = "radixkv:generation_tokens_total"
            total = await asyncio.to_thread(registry.get_sample_value, name, {"model_name": ""})
            assert total == len(PROMPTS) * NEW_TOKENS

    asyncio.run(main())


def test_requests_from_before_are_not_timed(compiled):
    inner = fresh(compiled)
    gate = Gate(inner)

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            early = engine.generate(PROMPTS[0], PARAMS)
            gate.allow(3)  # two for the prompt, and one that reads its token
            await anext(early)
            metrics = EngineMetrics(engine)
            gate.open()
            await last(early)
            samples = await scrape(metrics)
            assert value(samples, "generation_tokens_total") == 0
            assert value(samples, "prompt_tokens_total") == len(PROMPTS[0])  # the engine's count

    asyncio.run(main())


# Namespaces, formats, an engine without a thread


def test_only_named_namespaces_have_a_label(compiled):
    names = {b"a": "team a", b"b": "team b"}

    async def main() -> None:
        async with AsyncEngine(fresh(compiled)) as engine:
            metrics, plain = EngineMetrics(engine, namespaces=names), EngineMetrics(engine)
            empty = await scrape(metrics)
            for namespace in (b"a", b"a", b"", b"c"):
                await last(engine.generate(PROMPTS[0], PARAMS, namespace=namespace))
            samples = await scrape(metrics)
            assert empty.keys() - {("snapshot_age_seconds", ())} <= samples.keys()
            assert not any(name.startswith("namespace_") for name, _ in await scrape(plain))
        requests = {"team a": 2, "team b": 0, "other": 2}
        assert by_label(samples, "namespace_requests_total", "namespace") == requests
        prompts = by_label(samples, "namespace_prompt_tokens_total", "namespace")
        assert prompts == {name: number * len(PROMPTS[0]) for name, number in requests.items()}
        tokens = by_label(samples, "namespace_generation_tokens_total", "namespace")
        assert tokens == {name: number * NEW_TOKENS for name, number in requests.items()}
        name = "namespace_prompt_tokens_cached_by_source_total"
        hits = by_label(samples, name, "namespace", "source")
        assert {key for key, number in hits.items() if number} == {("team a", "device")}
        assert hits["team a", "device"] == value(samples, "prefix_cache_hits_total") > 0

    asyncio.run(main())


def test_the_model_is_a_label_of_every_sample(compiled):
    metrics = EngineMetrics(fresh(compiled), model_name='a "model"\n')
    samples = [each for family in parse(metrics.exposition().decode()) for each in family.samples]
    assert {each.labels["model_name"] for each in samples} == {'a "model"\n'}
    assert CONTENT_TYPE == CONTENT_TYPE_PLAIN_0_0_4


def test_an_engine_of_your_own_loop_is_read_on_update(compiled):
    inner = fresh(compiled)
    metrics = EngineMetrics(inner)
    inner.add_request(Request("a", PROMPTS[0], NEW_TOKENS))
    inner.step()
    assert value(samples_of(metrics.exposition()), "num_requests_running") == 0
    metrics.update()
    samples = samples_of(metrics.exposition())
    assert value(samples, "num_requests_running") == 1
    assert value(samples, "engine_up") == 1
    inner.run()
    metrics.update()
    samples = asyncio.run(scrape(metrics))
    assert_counts_are_those_of_the_engine(samples, inner)
    names = {name for name, _ in samples}
    assert names.isdisjoint({"generation_tokens_total", "request_success_total"})
    assert not any(name.endswith("_bucket") for name in names)


def test_options_that_cannot_be(compiled):
    inner = fresh(compiled)
    names: Mapping[bytes, str] = {str(i).encode(): str(i) for i in range(101)}

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            text = r"^namespaces must be at most 100, got 101: each adds time series$"
            with pytest.raises(ConfigError, match=text):
                EngineMetrics(engine, namespaces=names)
            EngineMetrics(engine, namespaces=dict(list(names.items())[:100]))
            for timeout_s in (0.0, -1.0, float("nan")):
                with pytest.raises(
                    ConfigError, match=rf"^timeout_s must be above 0, got {timeout_s}$"
                ):
                    EngineMetrics(engine, timeout_s=timeout_s)
            text = r"^an AsyncEngine is read by each scrape: update is for an Engine$"
            with pytest.raises(ConfigError, match=text):
                EngineMetrics(engine).update()
        with pytest.raises(ConfigError, match=r"^counts by namespace need an AsyncEngine$"):
            EngineMetrics(inner, namespaces={b"a": "a"})

    asyncio.run(main())


def test_a_scrape_that_is_cancelled_leaves_the_others(compiled):
    inner, may_step = fresh(compiled), threading.Event()
    is_in_step, step = threading.Event(), inner.step

    def long_step() -> list[Request]:
        is_in_step.set()
        may_step.wait()
        return step()

    inner.step = long_step  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(inner)
        metrics = EngineMetrics(engine, timeout_s=60.0)
        stream = engine.generate(PROMPTS[0], PARAMS)
        is_in_step.wait()
        first, second = (asyncio.create_task(metrics.scrape()) for _ in "ab")
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        asked: Future[Any] = metrics._recorder.ask()
        assert not asked.cancelled()
        may_step.set()
        assert value(samples_of(await second), "engine_steps_total") >= 1
        await last(stream)
        await engine.close()

    asyncio.run(main())
