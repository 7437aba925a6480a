"""Outputs of a request whose engine may be ahead of the consumer."""

from __future__ import annotations

import functools
from collections import deque
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.request import Request, TokenLogprob
from radixkv.scheduler.server.replies import new_logprobs
from radixkv.scheduler.serving.async_engine import OutputStream
from radixkv.scheduler.serving.outputs import Completion, PrefixHits
from radixkv.scheduler.text import Detokenizer

from ...tokenizers import byte_level, words

WORDS = ["the", "cache", "é"]


@functools.cache
def tokenizer() -> Any:
    return words()


@given(
    text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12),
    stop=st.sampled_from([None, *WORDS, "the cache", "cache t", "e"]),
    cuts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=6),
)
def test_the_parts_of_an_output_are_those_of_its_tokens(
    text: list[str], stop: str | None, cuts: list[tuple[int, int]]
) -> None:
    """Whatever the engine has generated beyond what is taken, and beyond a stop string."""
    tokens = tokenizer().encode(" ".join(text)).ids
    request = Request("a", [1], len(tokens), logprobs=0)
    detokenizing: Any = SimpleNamespace(detokenizer=lambda: Detokenizer(tokenizer()))
    completion = Completion(request, detokenizing, () if stop is None else (stop,), name="a")
    expected, found, _ = " ".join(text).partition(stop or "nothing of this kind")
    ahead = {min(place, len(tokens)): more for place, more in cuts} | {len(tokens): 0}
    new_text, new_tokens = "", list[int]()
    for before, place in pairwise([0, *sorted(ahead)]):
        while len(request.output_tokens) < min(place + ahead[place], len(tokens)):
            number = len(request.output_tokens)
            request.append(tokens[number])
            request.output_logprobs.append(TokenLogprob(tokens[number], -float(number), 1, ()))
        assert before == 0 or completion.take(before, None) is None  # it has been told
        output = completion.take(place, "length" if place == len(tokens) else None)
        assert output is not None and place > before
        new_text, new_tokens = new_text + output.new_text, [*new_tokens, *output.new_token_ids]
        assert (output.text, list(output.token_ids)) == (new_text, new_tokens)
        assert output.logprobs == tuple(request.output_logprobs[: len(new_tokens)])
        records = new_logprobs(output)
        assert records is not None
        assert [each.token_id for each in records] == list(output.new_token_ids)
        if output.finish_reason is not None:
            assert output.finish_reason == ("stop" if found else "length")
            assert (output.text, new_tokens) == (expected, tokens[: len(new_tokens)])
            return
    raise AssertionError("the output has no end")


@pytest.mark.parametrize("stop", [(), ("cache!",)])
def test_text_that_may_change_comes_at_the_end_alone(stop: tuple[str, ...]) -> None:
    """Half a character, and what may be the begin of a stop string."""
    bytes_of_text = byte_level()
    text = "zß🙂 cache"
    tokens = bytes_of_text.encode(text).ids
    detokenizing: Any = SimpleNamespace(detokenizer=lambda: Detokenizer(bytes_of_text))
    request = Request("a", [1], len(tokens))
    completion = Completion(request, detokenizing, stop, name="a")
    told = ""
    for number, token in enumerate(tokens, start=1):
        request.append(token)
        is_end = number == len(tokens)
        output = completion.take(number, "length" if is_end else None)
        assert output is not None
        told += output.new_text
        assert told == output.text and text.startswith(told)
        assert is_end or not (stop and "c" in told)
    assert told == text and len(tokens) > len(text.split())


@pytest.mark.parametrize("asks", [False, True])
def test_an_output_tells_what_its_request_has_so_far(asks: bool) -> None:
    request = Request("a", [1, 2, 3], 5, prompt_logprobs=0 if asks else None)
    completion = Completion(request, None, (), name="b", index=4)
    assert not completion.has_stop and completion.take(0, None) is None
    hits = PrefixHits(1, 2, 4)
    request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens = hits
    records = (None, *(TokenLogprob(token, -1.0, 1, ()) for token in (2, 3)))
    told = []
    for number in range(4):
        if asks and number == 1:  # the prompt has been computed before the first token
            request.prompt_records.extend(records[1:])
        if number:
            request.append(10 + number)
        output = completion.take(number, "length" if number == 3 else None)
        assert (output is None) == (number == 0)
        if output is not None:
            assert (output.request_id, output.index, output.num_prompt_tokens) == ("b", 4, 3)
            assert (output.text, output.new_text, output.hits) == ("", "", hits)
            assert output.new_token_ids == (10 + number,) and output.logprobs is None
            told.append(output.prompt_logprobs)
    assert told == [records if asks else None] * 3
    assert completion.take(3, None) is None
    ended = completion.take(3, "abort")
    assert ended is not None and (ended.finish_reason, ended.new_token_ids) == ("abort", ())
    assert ended.prompt_logprobs == told[0]


def test_samples_of_a_stream_take_turns():
    def sample(index: int) -> Any:
        delivery = SimpleNamespace(error=None, finish_reason=None, num_tokens=1)
        output = SimpleNamespace(finish_reason=None, index=index)
        return delivery, SimpleNamespace(take=lambda *_: output)

    stream: Any = OutputStream.__new__(OutputStream)
    stream._live = deque(map(sample, range(3)))
    assert [stream._take().index for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    stream._live.clear()
