"""Log probabilities of output and prompt, beside those of the logits of shorter prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import HostConfig
from radixkv.scheduler import GenerationParams, RequestError
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.engine.logprobs import Logprobs
from radixkv.scheduler.gateway.gateway import Gateway
from radixkv.scheduler.models import Batch
from radixkv.scheduler.models.transformer import compute_logits
from radixkv.scheduler.request import GREEDY, Request, SamplingParams, TokenLogprob

from .cluster import Cluster
from .conftest import SIZES, assert_nothing_leaked, complete, fresh, let_copies_end

NEW_TOKENS = 10
PREFIX = [(7 * i) % 90 + 5 for i in range(34)]
PROMPTS = [PREFIX, [*PREFIX, 12, 301], [8] * 13, [3], PREFIX[:20]]
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.2, seed=4),
    SamplingParams(repetition_penalty=1.8),
    GREEDY,
    GREEDY,
]
NUMBERS: list[tuple[int | None, int | None]] = [(3, 2), (0, 20), (20, None), (5, 5), (None, None)]


def log_softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max()
    return wide - np.log(np.exp(wide).sum())


def record_of(logits: np.ndarray, token: int, num_top: int) -> TokenLogprob:
    exact = log_softmax(logits)
    best = np.argsort(-exact, kind="stable")[:num_top].tolist()
    rank = 1 + int((logits > logits[token]).sum())
    return TokenLogprob(token, exact[token], rank, tuple((each, exact[each]) for each in best))


def assert_same(record: TokenLogprob | None, exact: TokenLogprob) -> None:
    assert record is not None and record.token_id == exact.token_id
    # Rounding may exchange neighbours: compare the values by rank, and the ids by value.
    assert abs(record.rank - exact.rank) <= 1
    assert record.logprob == pytest.approx(exact.logprob, abs=1e-3)
    values = [value for _, value in record.top]
    assert values == pytest.approx([value for _, value in exact.top], abs=1e-3)
    assert values == sorted(values, reverse=True)


@pytest.fixture(scope="module")
def served(engine: Callable[[str, int], Engine]) -> tuple[Engine, list[Any]]:
    """An engine, and of each prompt: its outputs, and the exact records of prompt and output."""
    compiled, alone = engine("llama", 4), []
    for prompt, sampling, (num_output, num_prompt) in zip(PROMPTS, SAMPLINGS, NUMBERS, strict=True):
        serving = fresh(compiled, depth=1)
        request = Request("a", prompt, NEW_TOKENS, sampling=sampling)
        serving.add_request(request)
        logits: list[np.ndarray] = []
        while serving.has_work:
            before = len(request.output_tokens)
            serving.step()
            if len(request.output_tokens) > before:
                logits.append(np.asarray(serving._runner._programs.logits)[0].copy())
        if sampling.has_penalties:  # log probabilities are those before them
            texts = ([*prompt, *request.output_tokens[:end]] for end in range(NEW_TOKENS))
            logits = [logits_after(fresh(compiled), text) for text in texts]
        output = [
            record_of(each, token, num_output or 0)
            for each, token in zip(logits, request.output_tokens, strict=True)
        ]
        of_prompt = [
            record_of(logits_after(serving, prompt[:end]), prompt[end], num_prompt or 0)
            for end in (range(1, len(prompt)) if num_prompt is not None else ())
        ]
        alone.append((request.output_tokens, output, of_prompt))
    return compiled, alone


def logits_after(serving: Engine, prompt: list[int]) -> np.ndarray:
    complete(serving, [prompt], 1)
    return np.asarray(serving._runner._programs.logits)[0].copy()


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 65])
def test_a_step_of_any_size_has_a_record_of_each_token(served, num_tokens):
    """The logits of 32 tokens are computed at a time."""
    model, rng = served[0]._runner.model, np.random.default_rng(num_tokens)
    config, params = model.config, model.params
    x = jnp.asarray(rng.normal(size=(num_tokens, config.hidden_size)), jnp.float32)
    targets = rng.integers(config.vocab_size, size=num_tokens).astype(np.int32)
    places, programs = jnp.arange(num_tokens, dtype=jnp.int32), Logprobs()
    for num_rows in (2, 1):  # steps of as many tokens may have other rows
        row = jnp.zeros(num_rows, jnp.int32)
        batch = Batch(places, places, places, row[:, None], row, row, row, row)
        found = programs.of_targets(targets, model, batch, x).rows(num_tokens)
    all_rows = batch._replace(logit_rows=places)
    logits = np.asarray(compute_logits(config, params.norm, params.lm_head, all_rows, x, mesh=None))
    for place, token in enumerate(targets.tolist()):
        assert_same(found.at(place, token, 3), record_of(logits[place], token, 3))


@settings(max_examples=8)
@given(
    depth=st.integers(1, 3),
    num_tokens=st.sampled_from([96, 160, 640]),
    tiers=st.sampled_from([None, "recompute", "host"]),
    order=st.permutations(range(len(PROMPTS))),
    resets=st.sets(st.integers(1, 20), max_size=2),
)
def test_records_do_not_depend_on_the_schedule(served, depth, num_tokens, tiers, order, resets):
    compiled, alone = served
    options: dict[str, Any] = {} if tiers is None else {"host": HostConfig(64), "preempt": tiers}
    serving = fresh(compiled, num_blocks=num_tokens // 4, depth=depth, reserve_tokens=0, **options)
    requests = {}
    for name in ("a", "b"):
        for index in order:
            num_output, num_prompt = NUMBERS[index]
            made = Request(
                f"{name}{index}",
                PROMPTS[index],
                NEW_TOKENS,
                sampling=SAMPLINGS[index],
                logprobs=num_output,
                prompt_logprobs=num_prompt,
            )
            requests[made] = index
            serving.add_request(made)
    number = 0
    while serving.has_work:
        serving.step()
        number += 1
        if number in resets:
            serving.reset_cache()
    let_copies_end(serving._runner)
    assert_nothing_leaked(serving)
    for made, index in requests.items():
        tokens, output, of_prompt = alone[index]
        assert made.output_tokens == tokens
        assert len(made.output_logprobs) == (0 if made.logprobs is None else NEW_TOKENS)
        for record, exact in zip(made.output_logprobs, output, strict=False):
            assert_same(record, exact)
        if made.prompt_logprobs is None:
            assert made.prompt_records == []
        else:
            assert made.num_hit_tokens == 0 and made.prompt_records[0] is None
            for given, exact in zip(made.prompt_records[1:], of_prompt, strict=True):
                assert_same(given, exact)


def test_the_prompt_is_computed_whole_and_hit_by_others(served):
    serving = fresh(served[0])
    first, records, last = (
        Request(name, PREFIX, 2, prompt_logprobs=number)
        for name, number in (("a", None), ("b", 0), ("c", None))
    )
    for request in (first, records, last):
        serving.add_request(request)
        serving.run()
    assert [each.num_hit_tokens for each in (first, records, last)] == [0, 0, 32]
    assert serving.stats().prefill_tokens_computed == 2 * len(PREFIX) + 2
    assert len(records.prompt_records) == len(PREFIX)


def test_who_asks_for_nothing_compiles_nothing(model):
    serving = Engine(model("llama"), block_size=4, **SIZES)
    complete(serving, [[3, 4, 5]], 4)
    assert not serving._runner._logprobs._programs
    assert serving.stats().compilations_after_warm_up == 0


@pytest.mark.parametrize("number", [-1, 21, 1.0, True, "3"])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_numbers_out_of_range_are_refused(name, number):
    with pytest.raises(RequestError) as refused:
        Request("a", [1], 2, **{name: number})
    text = f"request 'a': {name} must be an integer from 0 to 20, got {number!r}"
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {"prompt_logprobs": 3, "max_new_tokens": 2},
            "nodes send no log probabilities of prompts, got prompt_logprobs 3",
        ),
        (
            {"logprobs": 20, "max_new_tokens": 24967},
            "nodes send the log probabilities of at most 24966 tokens with logprobs 20, got "
            "max_new_tokens 24967",
        ),
        ({"max_new_tokens": 131073}, "nodes take at most 131072 new tokens, got 131073"),
        (
            {"max_new_tokens": 1, "stop_token_ids": range(1025)},
            "nodes take at most 1024 stop tokens, got 1025",
        ),
    ],
)
def test_nodes_refuse_what_they_cannot_send(asked, text):
    with pytest.raises(RequestError) as refused:
        Gateway().add_request(Request("a", [1], **asked), 0.0)
    assert str(refused.value) == f"request 'a': {text}"
    Gateway().add_request(Request("a", [1], 24966, logprobs=20), 0.0)
    Gateway().add_request(Request("a", [1], 131072, stop_token_ids=range(1024)), 0.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_nodes_record_as_one_engine(served, stream, is_lost):
    """Also if the decode node is lost, and another attempt generates the tokens again."""
    compiled, alone = served
    first = fresh(compiled)
    first.add_request(Request("a", [3], 2, logprobs=0))
    first.run()  # compiles the program for all
    cluster = Cluster(compiled, num_decode=2, front={"stream": stream})
    requests = [
        Request(str(index), prompt, NEW_TOKENS, sampling=sampling, logprobs=numbers[0])
        for index, (prompt, sampling, numbers) in enumerate(
            zip(PROMPTS, SAMPLINGS, NUMBERS, strict=True)
        )
    ]
    for request in requests:
        cluster.front.add_request(request)
    has_lost = not is_lost
    while cluster.front.has_work:
        cluster.front.step()
        for request in requests:
            if request.logprobs is not None:
                of_records = [record.token_id for record in request.output_logprobs]
                assert of_records == request.output_tokens
        decoding = cluster.d.scheduler.running
        if not has_lost and any(len(each.output_tokens) > 3 for each in decoding):
            has_lost = True
            cluster.restart_decode()
    assert has_lost and cluster.front.failures == {}
    cluster.assert_nothing_leaked()
    for request, (tokens, output, _) in zip(requests, alone, strict=True):
        assert request.output_tokens == tokens
        number = 0 if request.logprobs is None else NEW_TOKENS
        assert len(request.output_logprobs) == number
        for record, exact in zip(request.output_logprobs, output, strict=False):
            assert_same(record, exact)


def test_outputs_have_the_records_of_their_tokens(served):
    from radixkv.scheduler.serving.outputs import Completion

    serving = fresh(served[0])
    params = GenerationParams(NEW_TOKENS, n=2, logprobs=1, prompt_logprobs=0)
    requests = params.make_requests("a", PREFIX, None, ())
    completions = [Completion(each, None, (), name="a") for each in requests]
    for request in requests:
        serving.add_request(request)
    while serving.has_work:
        serving.step()
        for request, completion in zip(requests, completions, strict=True):
            output = completion.take(len(request.output_tokens), request.finish_reason)
            if output is not None:
                assert output.logprobs is not None
                assert tuple(each.token_id for each in output.logprobs) == output.token_ids
                of_prompt = output.prompt_logprobs
                assert (of_prompt is None) == (request is requests[1])
                assert of_prompt is None or len(of_prompt) == len(PREFIX)
