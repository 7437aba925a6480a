"""Requests and sampling parameters: arguments, state, and errors."""

import dataclasses
import re
from dataclasses import astuple
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kvcache import RadixKVError, TokenError
from radixkv.scheduler import request
from radixkv.scheduler.errors import RequestError
from radixkv.scheduler.request import GREEDY, Request, RequestStatus, SamplingParams
from radixkv.scheduler.step_plan import SchedulerStats


def refused(error: type[RadixKVError], text: str):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def test_a_new_request_waits_and_has_nothing():
    request = Request("a", [1, 2, 3], 4)
    assert request.status is RequestStatus.WAITING and request.finish_reason is None
    assert request.prompt.tolist() == request.tokens.tolist() == [1, 2, 3]
    assert request.prompt.dtype == request.tokens.dtype == np.int32
    assert request.output_tokens == [] and request.num_tokens == request.num_prompt_tokens == 3
    assert request.num_computed == request.num_hit_tokens == request.num_preemptions == 0
    assert request.sampling == GREEDY == SamplingParams()
    assert not request.is_prefilling and request.lease is None


def test_the_prompt_is_copied_and_cannot_be_changed():
    prompt = np.array([1, 2, 3], np.int32)
    request = Request("a", prompt, 4)
    prompt[0] = 9
    assert request.prompt.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        request.prompt[0] = 9


def test_a_prompt_may_be_any_integers():
    wide = np.array([1, 2, 3], np.int64)
    for prompt in ((1, 2, 3), range(1, 4), wide, wide.astype(np.uint8), jnp.array([1, 2, 3])):
        request = Request("a", prompt, 4)
        assert request.prompt.tolist() == [1, 2, 3] and request.prompt.dtype == np.int32
    request = Request("a", wide, 4)
    wide[0] = 9
    assert request.prompt.tolist() == [1, 2, 3]


def test_appended_tokens_follow_the_prompt():
    request = Request("a", [1, 2], 3)
    assert [request.append(token) for token in (7, 8, 9)] == [None, None, "length"]
    assert request.tokens.tolist() == [1, 2, 7, 8, 9]
    assert request.prompt.tolist() == [1, 2] and request.output_tokens == [7, 8, 9]


def test_the_tokens_of_a_request_are_a_read_only_view():
    request = Request("a", [1, 2], 3)
    request.append(7)
    with pytest.raises(ValueError, match="read-only"):
        request.tokens[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        request.tokens[1:][-1] = 9
    assert np.shares_memory(request.tokens, request.prompt), "a view, not a copy"
    assert request.tokens.tolist() == [1, 2, 7]


def test_a_stop_token_ends_it_even_at_the_limit():
    assert Request("a", [1], 5, stop_token_ids=[4, 6]).append(6) == "stop"
    assert Request("a", [1], 1, stop_token_ids=(6,)).append(6) == "stop"
    assert Request("a", [6], 1, stop_token_ids=(6,)).append(7) == "length"


@pytest.mark.parametrize("stop", [[True], {False, 3}, [2, np.True_]])
def test_a_truth_value_is_no_token_that_stops_it(stop):
    with refused(RequestError, f"request 'a': stop_token_ids must be token ids, got {stop!r}"):
        Request("a", [1], 5, stop_token_ids=stop)


@pytest.mark.parametrize("has_failed", [None, False, True])
@pytest.mark.parametrize("token", [5, 6])
@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_it_ends_for_the_first_reason_of_failure_stop_and_limit(has_failed, token, max_new_tokens):
    guide = None if has_failed is None else Mock(has_failed=has_failed)
    request = Request("a", [1], max_new_tokens, stop_token_ids=[6], guide=guide)
    reasons = {"abort": bool(has_failed), "stop": token == 6, "length": max_new_tokens == 1}
    assert request.append(token) == next((each for each, holds in reasons.items() if holds), None)
    assert request.output_tokens == [token] and request.tokens.tolist() == [1, token]


@pytest.mark.parametrize(
    ("prompt", "namespace", "is_same"),
    [([1, 2], b"a", True), ([1, 3], b"a", False), ([1], b"a", False), ([1, 2], b"", False)],
)
def test_a_sample_has_the_prompt_and_the_namespace_of_the_first(prompt, namespace, is_same):
    first = Request("a", [1, 2], 3, namespace=b"a")
    if is_same:
        assert Request("b", prompt, 3, namespace=namespace, sample_of=first).sample_of is first
    else:
        with refused(
            RequestError, "request 'b' is a sample of 'a', which has another prompt or namespace"
        ):
            Request("b", prompt, 3, namespace=namespace, sample_of=first)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_alone_is_one(name):
    assert dataclasses.replace(GREEDY, **{name: 0.5}).has_penalties  # type: ignore[arg-type]
    assert not GREEDY.has_penalties


def test_the_tokens_that_stop_it_are_those_that_come_late():
    assert Request("a", [1], 2, stop_token_ids=[4, 6]).late_token_ids == {4, 6}
    assert Request("a", [1], 2).late_token_ids == frozenset()


@pytest.mark.parametrize(("prompt", "new", "tokens"), [(1, 1, 1), (5, 1, 5), (5, 3, 7)])
def test_the_last_token_generated_needs_no_kv(prompt, new, tokens):
    assert Request("a", [0] * prompt, new).max_kv_tokens == tokens


def test_it_prefills_until_what_it_was_admitted_with_is_computed():
    request = Request("a", [1, 2, 3], 4)
    request.num_prefill_tokens = 3
    for computed, prefilling in ((0, True), (2, True), (3, False)):
        request.num_computed = computed
        assert request.is_prefilling == prefilling


def test_repr_names_it_and_says_how_far_it_is():
    request = Request("a", [1, 2], 3)
    request.append(7)
    assert repr(request) == "Request('a', waiting, 2 prompt and 1 of 3 output tokens)"


def test_an_empty_prompt_is_refused():
    with refused(RequestError, "request 'a' has an empty prompt"):
        Request("a", [], 1)


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(limit):
    with refused(RequestError, f"request 'a': max_new_tokens must be at least 1, got {limit}"):
        Request("a", [1], limit)


@pytest.mark.parametrize("limit", [1.0, True, None, "2"])
def test_a_limit_that_is_no_integer_is_refused(limit: Any):
    text = f"request 'a': max_new_tokens must be an integer, got {limit!r}"
    with refused(RequestError, text):
        Request("a", [1], limit)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"request_id": 5}, "request_id must be a str, got 5"),
        ({"namespace": "tenant"}, "request 'a': namespace must be bytes, got 'tenant'"),
        ({"namespace": None}, "request 'a': namespace must be bytes, got None"),
        ({"priority": "high"}, "request 'a': priority must be an integer, got 'high'"),
        ({"sampling": {}}, "request 'a': sampling must be SamplingParams, got {}"),
        ({"stop_token_ids": 5}, "request 'a': stop_token_ids must be token ids, got 5"),
        (
            {"stop_token_ids": ["</s>"]},
            "request 'a': stop_token_ids must be token ids, got ['</s>']",
        ),
        (
            {"max_new_tokens": 2**31 - 1},
            "request 'a': 1 prompt tokens and 2147483647 new ones are more than 2147483647",
        ),
    ],
)
def test_what_would_stop_the_scheduler_later_is_refused_at_once(argument: Any, text: str):
    with refused(RequestError, text):
        Request(**{"request_id": "a", "prompt": [1], "max_new_tokens": 2, **argument})


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"temperature": "x"}, "temperature must be a number, got 'x'"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"min_p": "0"}, "min_p must be a number, got '0'"),
        ({"presence_penalty": None}, "presence_penalty must be a number, got None"),
        ({"min_tokens": 1.0}, "min_tokens must be an integer, got 1.0"),
        ({"num_continued": 1.0}, "num_continued must be an integer, got 1.0"),
    ],
)
def test_sampling_by_what_is_no_number_is_refused(argument: Any, text: str):
    with refused(RequestError, text):
        SamplingParams(**argument)


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_become_those_of_python(number: Any) -> None:
    """A sum of a uint8 is one, and nodes send numbers of Python alone."""
    sampling: list[Any] = [np.float32(0.5), number(3), np.float64(0.5), number(4)]
    sampling += [np.float16(0.25), np.float32(2), number(1), np.float32(-1), number(2), number(1)]
    request = Request(
        *("a", [1] * 300, number(200)),
        priority=number(1),
        stop_token_ids=[number(7)],
        logprobs=number(2),
        prompt_logprobs=number(3),
        sampling=SamplingParams(*sampling),
    )
    assert request.max_kv_tokens == 499
    given = [request.max_new_tokens, request.priority, *request.stop_token_ids, request.logprobs]
    given += [request.prompt_logprobs, *astuple(request.sampling)]
    assert given == [200, 1, 7, 2, 3, 0.5, 3, 0.5, 4, 0.25, 2, 1, -1, 2, 1]
    assert {type(each) for each in given} == {int, float}


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (np.zeros(3), "tokens must be int32, got float64"),
        (np.zeros((1, 3), np.int32), "tokens must have one dimension, got shape (1, 3)"),
        ([1, 2**31], "token 1 is 2147483648, outside int32"),
        (["a"], "token 0 must be an integer, got 'a'"),
    ],
)
def test_a_prompt_of_another_kind_is_refused(prompt: Any, text):
    with refused(TokenError, text):
        Request("a", prompt, 1)


INF = float("inf")
FACTORS = "at least 1e-6 and at most 1e6"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        *(
            ("temperature", value, f"temperature must be 0, or {FACTORS}, got {value}")
            for value in (-0.5, 1e-40, 9e-7, 1.1e6, 1e39, 10**400, INF, float("nan"))
        ),
        ("top_k", -1, "top_k must be at least 0 and below 2**31, got -1"),
        ("top_k", 2**31, "top_k must be at least 0 and below 2**31, got 2147483648"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0"),
        ("top_p", 1.5, "top_p must be above 0 and at most 1, got 1.5"),
        ("top_p", float("nan"), "top_p must be above 0 and at most 1, got nan"),
        ("seed", -1, "seed must be at least 0 and below 2**32, got -1"),
        ("seed", 2**32, "seed must be at least 0 and below 2**32, got 4294967296"),
        ("min_p", -0.1, "min_p must be at least 0 and at most 1, got -0.1"),
        ("min_p", 1.1, "min_p must be at least 0 and at most 1, got 1.1"),
        ("min_p", float("nan"), "min_p must be at least 0 and at most 1, got nan"),
        *(
            ("repetition_penalty", value, f"repetition_penalty must be {FACTORS}, got {value}")
            for value in (-1, 0.0, 1e-40, 9e-7, 1.1e6, 1e39, 10**400, INF, float("nan"))
        ),
        *(
            (name, value, f"{name} must be at least -2 and at most 2, got {value}")
            for name in ("presence_penalty", "frequency_penalty")
            for value in (-2.5, 2.1, -INF, INF, float("nan"))
        ),
        ("min_tokens", -1, "min_tokens must be at least 0 and below 2**31, got -1"),
        ("min_tokens", 2**31, "min_tokens must be at least 0 and below 2**31, got 2147483648"),
        ("num_continued", -1, "num_continued must be at least 0 and below 2**31, got -1"),
        (
            "num_continued",
            2**31,
            "num_continued must be at least 0 and below 2**31, got 2147483648",
        ),
    ],
)
def test_sampling_values_out_of_range_are_refused(field, value, text):
    with refused(RequestError, text):
        SamplingParams(**{field: value})


def test_a_request_continues_fewer_tokens_than_it_has():
    Request("a", [1, 2, 3], 1, sampling=SamplingParams(num_continued=2))
    with refused(
        RequestError,
        "request 'a': num_continued must be less than the 3 prompt tokens, got 3",
    ):
        Request("a", [1, 2, 3], 1, sampling=SamplingParams(num_continued=3))


def test_sampling_values_at_the_ends_of_their_ranges_are_accepted():
    SamplingParams(temperature=0.0, top_k=0, top_p=1e-9, seed=0)
    SamplingParams(temperature=1e6, top_k=2**31 - 1, top_p=1.0, seed=2**32 - 1)
    SamplingParams(min_p=1.0, presence_penalty=2, frequency_penalty=-2, min_tokens=2**31 - 1)
    SamplingParams(temperature=1e-6, repetition_penalty=1e-6, frequency_penalty=2)
    SamplingParams(repetition_penalty=1e6, presence_penalty=-2)


def test_prompt_and_output_may_have_as_many_tokens_as_int32_has_positions(monkeypatch):
    assert request.MAX_TOKENS == 2**31 - 1
    monkeypatch.setattr(request, "MAX_TOKENS", 10)
    assert Request("a", [1] * 4, 6).max_kv_tokens == 9
    text = r"^request 'a': 4 prompt tokens and 7 new ones are more than 10$"
    with pytest.raises(RequestError, match=text):
        Request("a", [1] * 4, 7)


def test_hits_end_before_the_first_token_without_a_record():
    asks = Request("a", [1, 2, 3], 1, prompt_logprobs=0)
    found = []
    for _ in range(3):
        found.append(asks.max_hit_tokens)
        asks.prompt_records.append(None)
    assert found == [0, 1, None]
    assert Request("b", [1, 2, 3], 1).max_hit_tokens is None


def test_prompt_tokens_are_counted_once():
    stats = SchedulerStats(
        hit_tokens=1,
        host_hit_tokens=2,
        storage_hit_tokens=4,
        received_tokens=8,
        prefill_tokens=64,
        recomputed_tokens=16,
        resumed_hit_tokens=128,
        decode_tokens=256,
    )
    assert stats.prompt_tokens == 1 + 2 + 4 + 8 + 64 - 16
