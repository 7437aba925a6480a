"""Min-p, penalties and min_tokens in an engine: the tokens of a loop without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import HostConfig
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.request import GREEDY, Request, SamplingParams

from .conftest import SIZES, assert_nothing_leaked, complete, fresh, let_copies_end

NEW_TOKENS = 16
PREFIX = [5, 9, 5, 7, 301, 9, 44, 5]
PROMPTS = [PREFIX, [*PREFIX, 12], [8] * 13, [3], [*PREFIX, 12, 12, 301], [77, 5]]
SAMPLINGS = [
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(temperature=1.1, seed=4, presence_penalty=1.5, min_p=0.2),
    GREEDY,
    SamplingParams(frequency_penalty=-1.0, presence_penalty=-0.5, min_tokens=9),
    SamplingParams(temperature=0.9, seed=2, min_p=0.9),
    SamplingParams(temperature=0.9, seed=7),
]


@pytest.fixture(scope="module")
def served(engine: Callable[[str, int], Engine]) -> tuple[Engine, list[list[int]]]:
    """An engine to take programs from, and what each prompt generates alone, step by step."""
    compiled = engine("qwen3", 4)
    alone = []
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        [tokens] = complete(fresh(compiled, depth=1), [prompt], NEW_TOKENS, [sampling])
        alone.append(tokens)
    return compiled, alone


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_the_chosen_tokens_follow_from_the_logits(served, index, monkeypatch):
    """Every token is the one that the reference would choose, of the logits of the model."""
    from ..scheduler.engine.test_adjustments import reference

    serving, sampling, prompt = fresh(served[0], depth=1), SAMPLINGS[index], PROMPTS[index]
    request = Request("a", prompt, NEW_TOKENS, sampling=sampling)
    serving.add_request(request)
    while serving.has_work:
        before = list(request.output_tokens)
        serving.step()
        logits = np.asarray(serving._runner._programs.logits)[0]
        exact = reference(logits, sampling, prompt, before, None)
        if sampling.temperature == 0:
            assert request.output_tokens[-1] == exact.argmax()
        else:
            key = jax.random.fold_in(jax.random.key(sampling.seed), len(prompt) + len(before))
            noise = np.asarray(jax.random.gumbel(key, exact.shape))
            assert request.output_tokens[-1] == (exact / sampling.temperature + noise).argmax()
    assert len(request.output_tokens) == NEW_TOKENS
    if sampling.has_penalties:
        plain = SamplingParams(sampling.temperature, seed=sampling.seed, min_p=sampling.min_p)
        assert complete(fresh(served[0]), [prompt], NEW_TOKENS, [plain])[0] != served[1][index]


@settings(max_examples=10)
@given(
    depth=st.integers(1, 3),
    num_tokens=st.sampled_from([80, 160, 640]),
    tiers=st.sampled_from([None, "recompute", "host"]),
    order=st.permutations(range(len(PROMPTS))),
    resets=st.sets(st.integers(1, 30), max_size=2),
    events=st.dictionaries(st.integers(1, 40), st.integers(0, len(PROMPTS) - 1), max_size=2),
)
def test_tokens_do_not_depend_on_the_schedule(
    served, depth, num_tokens, tiers, order, resets, events
):
    """Nor on the depth, preemptions, parking, hits, other requests, and the slots they had."""
    compiled, alone = served
    options: dict[str, Any] = {} if tiers is None else {"host": HostConfig(64), "preempt": tiers}
    serving = fresh(compiled, num_blocks=num_tokens // 4, depth=depth, reserve_tokens=0, **options)
    requests = {}
    for name in ("a", "b"):  # the second time, prompts are hit, and slots are used again
        for index in order:
            made = Request(f"{name}{index}", PROMPTS[index], NEW_TOKENS, sampling=SAMPLINGS[index])
            requests[made] = alone[index]
            serving.add_request(made)
    number = 0
    while serving.has_work:
        serving.step()
        number += 1
        if number in events:
            serving.abort(f"a{events[number]}")
        if number in resets:
            serving.reset_cache()
    let_copies_end(serving._runner)
    assert_nothing_leaked(serving)
    for made, tokens in requests.items():
        if made.finish_reason == "abort":
            tokens = tokens[: len(made.output_tokens)]
        assert made.output_tokens == tokens, made


@pytest.mark.parametrize("num_continued", [1, 4, NEW_TOKENS - 1])
def test_a_request_that_continues_another_generates_the_rest(served, num_continued):
    serving, continued = fresh(served[0]), []
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        begun = [*prompt, *served[1][index][:num_continued]]
        sampling = replace(sampling, num_continued=num_continued)
        made = Request(str(index), begun, NEW_TOKENS - num_continued, sampling=sampling)
        continued.append(made)
        serving.add_request(made)
    serving.run()
    for made, tokens in zip(continued, served[1], strict=True):
        assert made.output_tokens == tokens[num_continued:], made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 6])
def test_no_stop_token_comes_before_min_tokens(served, min_tokens, temperature):
    """The token that stops is one that comes without a limit, after five others."""
    plain = SamplingParams(temperature, seed=3)
    [free] = complete(fresh(served[0]), [[3]], NEW_TOKENS, [plain])
    stop = next(token for place, token in enumerate(free) if free.index(token) == place >= 4)
    place = free.index(stop)
    least = min_tokens + place - 4
    sampling = SamplingParams(temperature, seed=3, min_tokens=least)
    request = Request("a", [3], NEW_TOKENS, sampling=sampling, stop_token_ids=[stop])
    serving = fresh(served[0])
    serving.add_request(request)
    serving.run()
    assert stop not in request.output_tokens[:least]
    if least <= place:
        assert request.output_tokens == free[: place + 1]
        assert request.finish_reason == "stop"
    else:
        assert request.output_tokens[:place] == free[:place]
        assert request.output_tokens[place] != stop
    # One that continues it counts the tokens of both.
    begun, rest = request.output_tokens[:2], request.output_tokens[2:]
    sampling = replace(sampling, num_continued=2)
    request = Request("b", [3, *begun], NEW_TOKENS - 2, sampling=sampling, stop_token_ids=[stop])
    serving.add_request(request)
    serving.run()
    assert request.output_tokens == rest


def test_nothing_is_compiled_or_allocated_for_who_asks_for_nothing(model):
    plain = Engine(model("qwen3"), block_size=4, **SIZES)
    ready = Engine(model("qwen3"), block_size=4, **SIZES, warm_up_sampling=True)
    for serving in (plain, ready):
        complete(serving, PROMPTS[:2], 8, [GREEDY, SamplingParams(1.0, top_k=4, top_p=0.9)])
        assert serving._runner._adjustments._counts is None
        assert serving.stats().compilations_after_warm_up == 0
    assert not plain._runner._adjustments._programs
    complete(ready, PROMPTS, 8, SAMPLINGS)
    assert ready.stats().compilations_after_warm_up == 0
    assert complete(plain, PROMPTS, 8, SAMPLINGS) == complete(ready, PROMPTS, 8, SAMPLINGS)
