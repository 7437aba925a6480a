"""Parameters of a generation, and the requests that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.errors import RequestError
from radixkv.scheduler.request import SamplingParams
from radixkv.scheduler.serving.params import GenerationParams
from radixkv.scheduler.text.guided import Guided

GUIDED = Guided(regex="a")


class Tokenizer:
    """A token per character; a guide is a list with its copies."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def guide(self, guided: Guided, eos_token_ids: Any) -> Any:
        assert (guided, list(eos_token_ids)) == (GUIDED, [8, 9])
        return Guide()


class Guide:
    def copy(self) -> Any:
        return Guide()


TOKENIZER: Any = Tokenizer()


@given(
    n=st.integers(1, 4),
    seed=st.sampled_from([0, 1, 2**32 - 2, 2**32 - 1]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=2, unique=True),
    is_text=st.booleans(),
    is_guided=st.booleans(),
    logprobs=st.tuples(st.none() | st.integers(0, 20), st.none() | st.integers(0, 20)),
    priority=st.integers(-2, 2),
)
def test_samples_are_requests_with_the_seeds_that_follow(
    n: int,
    seed: int,
    ignore_eos: bool,
    stop_token_ids: list[int],
    is_text: bool,
    is_guided: bool,
    logprobs: tuple[int | None, int | None],
    priority: int,
) -> None:
    sampling = SamplingParams(temperature=0.5, seed=seed)
    params = GenerationParams(
        5,
        sampling,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        n=n,
        logprobs=logprobs[0],
        prompt_logprobs=logprobs[1],
        guided=GUIDED if is_guided else None,
    )
    prompt: Any = "ab" if is_text else [97, 98]
    requests = params.make_requests(
        "r", prompt, TOKENIZER, (8, 9), priority=priority, namespace=b"n"
    )
    names = ["r"] if n == 1 else [f"r#{index}" for index in range(n)]
    assert [each.request_id for each in requests] == names
    assert [each.sampling.seed for each in requests] == [(seed + i) % 2**32 for i in range(n)]
    ends = {*stop_token_ids, *(() if ignore_eos else (8, 9))}
    for index, request in enumerate(requests):
        assert request.tokens.tolist() == [97, 98] and request.max_new_tokens == 5
        assert request.sampling.temperature == 0.5
        assert request.stop_token_ids == ends
        assert request.stop_token_ids is requests[0].stop_token_ids
        assert (request.priority, request.namespace) == (priority, b"n")
        assert request.logprobs == logprobs[0]
        assert request.prompt_logprobs == (None if index else logprobs[1])
        assert request.sample_of is (requests[0] if index else None)
        assert (request.guide is not None) == is_guided
    assert len({id(each.guide) for each in requests}) == (n if is_guided else 1)


@pytest.mark.parametrize(
    ("prompt", "fields", "what"),
    [
        ("a", {}, "prompt is text"),
        ("a", {"stop": "b"}, "prompt is text"),
        ([1], {"stop": "b"}, "stop is ('b',)"),
        ([1], {"stop": ["b"], "guided": GUIDED}, "stop is ('b',)"),
        ([1], {"guided": GUIDED}, "it is guided"),
        ([1], {}, None),
    ],
)
def test_what_needs_a_tokenizer_is_told(prompt: Any, fields: dict[str, Any], what: Any) -> None:
    params = GenerationParams(**fields)
    if what is None:
        assert len(params.make_requests("r", prompt, None, ())) == 1
        return
    with pytest.raises(RequestError) as refused:
        params.make_requests("r", prompt, None, ())
    assert str(refused.value) == f"request 'r': {what}, but the engine has no tokenizer"


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "1", None])
def test_n_is_a_number_of_samples(n: Any) -> None:
    with pytest.raises(RequestError) as refused:
        GenerationParams(n=n)
    assert str(refused.value) == f"n must be an integer of at least 1, got {n!r}"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], b"a", [b"a"], 1, None, {"a"}])
def test_stop_strings_have_text(stop: Any) -> None:
    with pytest.raises(RequestError) as refused:
        GenerationParams(stop=stop)
    assert str(refused.value) == f"stop must be strings that are not empty, got {stop!r}"


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("a", "b"), [], ()])
def test_stop_strings_are_kept_as_a_tuple(stop: Any) -> None:
    assert GenerationParams(stop=stop).stop == ((stop,) if isinstance(stop, str) else tuple(stop))


@given(st.integers(-1, 4), st.integers(0, 4))
def test_an_output_has_room_for_its_fewest_tokens(max_tokens: int, min_tokens: int) -> None:
    sampling = SamplingParams(min_tokens=min_tokens)
    if min_tokens <= max(max_tokens, 0):
        assert GenerationParams(max_tokens, sampling).max_tokens == max_tokens
        return
    with pytest.raises(RequestError) as refused:
        GenerationParams(max_tokens, sampling)
    assert str(refused.value) == (
        f"min_tokens must be at most max_tokens {max_tokens}, got {min_tokens}"
    )
