"""The engine on tiny models: tokens do not depend on scheduling, and nothing leaks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import pytest

from radixkv.scheduler.engine import Engine, EngineStats
from radixkv.scheduler.policy import Priority
from radixkv.scheduler.request import GREEDY, Request, RequestStatus, SamplingParams
from radixkv.scheduler.step_plan import StepPlan

from .conftest import MAX_RUNNING, assert_nothing_leaked, complete, fresh

ENGINES = [("llama", 4), ("qwen3", 4)]
"""Each engine compiles five programs, of a second or two."""


@pytest.fixture(params=ENGINES, ids=lambda param: "-".join(map(str, param)))
def compiled(engine, request):
    """Return the engine whose programs a test uses."""
    return engine(*request.param)


PREFIX = [(7 * i) % 1000 + 2 for i in range(40)]
PROMPTS = [
    [*PREFIX, 500],
    [*PREFIX, 501, 502],
    PREFIX,
    [*PREFIX[:20], 77],
    [900, 901],
    [*PREFIX, 500],
    [900, 901],
]
"""Shared prefixes, a repeated prompt, and full hits for blocks of 4 and 2."""

SAMPLED = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.4, top_k=40, top_p=0.95, seed=2),
    SamplingParams(temperature=0.7, top_p=0.8, seed=3),
)


# The same tokens


@pytest.mark.parametrize(("family", "block_size"), ENGINES)
def test_greedy_tokens_equal_those_of_transformers(engine, goldens, family, block_size):
    cases = goldens[family]["prompts"]
    prompts, expected = [c["prompt"] for c in cases], [c["tokens"] for c in cases]
    serving = fresh(engine(family, block_size))
    assert complete(serving, prompts, 64) == expected
    # Once more, with prompts and outputs in the cache.
    before = serving.stats().scheduler.hit_tokens
    assert complete(serving, prompts, 64) == expected
    whole_blocks = sum(len(prompt) // block_size * block_size for prompt in prompts)
    whole_hits = sum(len(prompt) % block_size == 0 for prompt in prompts)
    assert serving.stats().scheduler.hit_tokens - before == whole_blocks - whole_hits


@pytest.mark.parametrize("samplings", [(GREEDY,), SAMPLED], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_how_they_are_scheduled(compiled, samplings):
    expected = [
        complete(fresh(compiled), [prompt], 24, [samplings[i % len(samplings)]])[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    assert len(set(map(tuple, expected))) >= 5
    for prefix_cache, token_budget, max_running in product((True, False), (16, 32), (2, 4)):
        engine = fresh(
            compiled,
            prefix_cache=prefix_cache,
            token_budget=token_budget,
            max_running=max_running,
        )
        assert complete(engine, PROMPTS, 24, samplings) == expected
        stats = engine.stats()
        assert bool(stats.scheduler.hit_tokens) == prefix_cache
        prompt_tokens = sum(map(len, PROMPTS))
        assert stats.prefill_tokens_computed + stats.scheduler.hit_tokens == prompt_tokens


@pytest.mark.parametrize("samplings", [(GREEDY,), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [None, Priority()], ids=["fcfs", "priority"])
def test_evictions_and_preemptions_do_not_change_a_token(compiled, samplings, policy):
    expected = complete(fresh(compiled), PROMPTS, 24, samplings)
    num_tokens = 112
    for prefix_cache, token_budget in product((True, False), (16, 32)):
        engine = fresh(
            compiled,
            num_blocks=num_tokens // compiled.manager.block_size,
            prefix_cache=prefix_cache,
            token_budget=token_budget,
            reserve_tokens=0,
            policy=policy,
        )
        assert complete(engine, PROMPTS, 24, samplings) == expected
        stats = engine.stats()
        assert stats.scheduler.preemptions > 0
        assert stats.scheduler.resumed == stats.scheduler.preemptions
        assert bool(stats.cache.evicted_blocks) == prefix_cache


@pytest.mark.slow
def test_block_sizes_and_a_real_small_engine_give_the_same_tokens(engine, model):
    """Use an engine as a user makes it (without `fresh`): larger blocks in a small pool."""
    expected = complete(fresh(engine("llama", 4)), PROMPTS, 24, SAMPLED)
    small = Engine(
        model("llama"),
        block_size=16,
        num_blocks=7,
        token_budget=16,
        max_running=3,
        max_model_len=72,
        reserve_tokens=0,
    )
    assert complete(small, PROMPTS, 24, SAMPLED) == expected
    stats = small.stats()
    assert stats.scheduler.preemptions > 0 and stats.cache.evicted_blocks > 0
    # Decode of 1 and 3 rows, extend of 16 tokens. Those that draw and that send a request may be
    # another engine's.
    assert 3 <= stats.compilations_at_warm_up <= 3 + 3
    assert stats.compilations_after_warm_up == 0


def test_a_namespace_shares_nothing_with_another(engine):
    serving = fresh(engine("llama", 4))
    requests = [Request(name, PREFIX, 4, namespace=name.encode()) for name in ("a", "b")]
    for request in requests:
        serving.add_request(request)
        serving.run()
    assert serving.stats().scheduler.hit_tokens == 0
    assert requests[0].output_tokens == requests[1].output_tokens
    assert_nothing_leaked(serving)


def test_a_stop_token_ends_a_request_and_is_kept(engine):
    serving = fresh(engine("llama", 4))
    (whole,) = complete(serving, [PREFIX], 16)
    stop = whole[5]
    request = Request("a", PREFIX, 16, stop_token_ids=[stop])
    serving.add_request(request)
    assert serving.run() == [request]
    assert request.output_tokens == whole[: whole.index(stop) + 1]
    assert request.finish_reason == "stop"
    assert_nothing_leaked(serving)


# Aborts


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6, 12])
def test_an_abort_leaks_nothing_and_does_not_disturb_the_others(engine, num_steps):
    compiled = engine("llama", 4)
    expected = complete(fresh(compiled), PROMPTS, 24)
    serving = fresh(compiled, num_blocks=28, reserve_tokens=0)
    requests = [Request(str(i), prompt, 24) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        serving.add_request(request)
    for _ in range(num_steps):
        serving.step()
    aborted = [r for r in requests[::2] if serving.abort(r.request_id)]
    assert len(aborted) >= 2
    serving.manager.check()
    serving.run()
    assert_nothing_leaked(serving)
    for request, tokens in zip(requests, expected, strict=True):
        if request in aborted:
            assert request.status is RequestStatus.ABORTED
            assert request.output_tokens == tokens[: len(request.output_tokens)]
        else:
            assert request.output_tokens == tokens
    assert not serving.abort("0") and not serving.abort("no such request")


# Programs and arrays


def test_nothing_is_compiled_after_warm_up(engine):
    """Every shape runs here: 1 to 4 decode rows, and chunks of 1 to 32 tokens."""
    compiled = engine("llama", 4)
    serving = fresh(compiled)
    used = set()
    for count, length in product(range(1, MAX_RUNNING + 1), (1, 9, 17, 40)):
        for i in range(count):
            prompt = [100 + count, 200 + i, *range(300, 300 + length)]
            name, sampling = f"{count} {length} {i}", SAMPLED[i % len(SAMPLED)]
            serving.add_request(Request(name, prompt, 1 + i, sampling=sampling))
        while serving.has_work:
            before = serving.stats()
            serving.step()
            after = serving.stats()
            used.add(program_tokens(after) - program_tokens(before))
    used.discard(0)  # a call that only reads a step in flight
    shapes = compiled._runner._shapes
    assert used == {shape.num_tokens for shape in (*shapes.decode, *shapes.extend)} == {1, 4, 32}
    stats = serving.stats()
    # Those that draw, send a request and copy a block may be another engine's.
    assert 3 <= stats.compilations_at_warm_up <= 3 + 3
    assert stats.compilations_after_warm_up == 0


def program_tokens(stats: EngineStats) -> int:
    decoded = stats.scheduler.decode_tokens
    return stats.prefill_tokens_computed + decoded + stats.padding_tokens


def test_a_late_compilation_would_be_counted(engine):
    serving = fresh(engine("llama", 4))
    run = serving._runner._compute

    def run_and_compile(plan: StepPlan, wrote: Callable[[int], None] | None) -> None:
        jnp.ones(7).at[3].multiply(1.25).block_until_ready()
        run(plan, wrote)

    serving._runner._compute = run_and_compile  # type: ignore[method-assign]
    complete(serving, [[1, 2, 3]], 2)
    assert serving.stats().compilations_after_warm_up > 0


def test_pools_are_donated_to_each_step(engine):
    serving = fresh(engine("llama", 4))
    for number in range(3):
        serving.add_request(Request(str(number), [5, 6, 7], 1))
        before = [*serving._runner.arrays.keys, *serving._runner.arrays.values]
        places = [pool.unsafe_buffer_pointer() for pool in before]
        serving.step()
        after = [*serving._runner.arrays.keys, *serving._runner.arrays.values]
        assert all(pool.is_deleted() for pool in before)
        assert not any(pool.is_deleted() for pool in after)
        assert [pool.unsafe_buffer_pointer() for pool in after] == places


def test_only_the_blocks_of_requests_are_written(engine):
    """Pools start as NaN: finite values were written."""
    serving = fresh(engine("llama", 4), prefix_cache=False)
    complete(serving, [PREFIX[:10]], 3)  # 12 tokens have KV: three whole blocks
    for pool in (*serving._runner.arrays.keys, *serving._runner.arrays.values):
        written = jnp.isfinite(pool[1:]).all(axis=(1, 2, 3))
        untouched = jnp.isnan(pool[1:]).all(axis=(1, 2, 3))
        assert int(written.sum()) == 3 and bool((written | untouched).all())


def test_stats_count_steps_tokens_and_padding(engine):
    serving = fresh(engine("llama", 4))
    reason = "mosaic needs an NVIDIA GPU of compute capability 9.0, got cpu"
    scheduler, manager = serving.scheduler.stats(), serving.manager.stats()
    assert replace(serving.stats(), compilations_at_warm_up=0) == EngineStats(
        "float32", "xla", reason, 1, 0, 0, 0, 0, 0, scheduler, manager
    )
    complete(serving, [list(range(2, 42))], 3)  # 32, 8 in a program of 32, then two decode steps
    stats = serving.stats()
    assert (stats.steps, stats.padding_tokens, stats.prefill_tokens_computed) == (4, 24, 40)
    assert stats.scheduler.decode_tokens == 2
    assert serving.step() == [] and serving.run() == []
    assert serving.stats() == stats


def test_a_request_that_ends_in_a_reset_is_work_until_it_is_returned(engine):
    serving = fresh(engine("llama", 4), max_running=2)
    serving.add_request(Request("last", [1, 2, 3], 1))
    assert serving.step() == []  # its only step is in flight
    serving.reset_cache()
    assert serving.has_work and not serving.scheduler.has_work
    [last] = serving.run()
    assert (last.request_id, last.finish_reason, serving.has_work) == ("last", "length", False)


def test_a_step_says_which_requests_it_may_have_given_tokens(engine):
    serving = fresh(engine("llama", 4), max_running=2)
    requests = [Request(str(i), prompt, 6) for i, prompt in enumerate(PROMPTS[:4])]
    for request in requests:
        serving.add_request(request)
    while serving.has_work:
        before = {request: len(request.output_tokens) for request in requests}
        ended = serving.step()
        grown = {each for each in requests if len(each.output_tokens) > before[each]}
        assert grown <= set(serving.advanced) and set(ended) <= set(serving.advanced)
        assert len(serving.advanced) <= 2
    serving.add_request(Request("reset", [1, 2, 3], 6))
    serving.step()
    assert serving.advanced == []  # two steps may be in flight
    serving.reset_cache()
    [other] = serving.scheduler.waiting
    assert len(other.output_tokens) == 1
    serving.step()
    assert serving.advanced == [other]
    serving.run()
