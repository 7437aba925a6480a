"""The completions of `radixkv generate`, whose texts may end before their requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.scheduler.cli.shared.completions import Completions
from radixkv.scheduler.request import Request, RequestStatus
from radixkv.scheduler.text import Detokenizer

from ...tokenizers import words

WORDS = ["the", "cache"]
NUM_TOKENS = 4


@functools.cache
def tokenizer() -> Any:
    encoder = words()
    return SimpleNamespace(encode=encoder.encode, detokenizer=lambda: Detokenizer(encoder))


class Engine:
    """Appends a token to some requests in each step; an abort takes effect steps later."""

    def __init__(self, texts: list[list[str]]) -> None:
        ids = [tokenizer().encode(" ".join(text)).ids for text in texts]
        self.requests = {
            Request(str(number), [1], NUM_TOKENS): each for number, each in enumerate(ids)
        }
        self.advanced: list[Request] = []
        self.aborted: list[str] = []
        self.chosen: list[int] = []
        self.ends: Callable[[], None] | None = None

    def step(self) -> list[Request]:
        requests = list(self.requests)
        self.advanced = []
        for number in self.chosen:
            request = requests[number]
            tokens = self.requests[request]
            if len(request.output_tokens) < NUM_TOKENS:
                request.append(tokens[len(request.output_tokens)])
                self.advanced.append(request)
                if len(request.output_tokens) == NUM_TOKENS:
                    request.status, request.finish_reason = RequestStatus.FINISHED, "length"
        if self.ends is not None:
            self.ends()
        return []

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True


@settings(max_examples=30)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(WORDS), min_size=NUM_TOKENS, max_size=NUM_TOKENS),
        min_size=1,
        max_size=3,
    ),
    stop=st.sampled_from([(), ("cache",), ("the the",)]),
    data=st.data(),
)
def test_a_text_ends_before_a_stop_string_and_its_request_is_aborted_once(
    texts: list[list[str]], stop: tuple[str, ...], data: st.DataObject
) -> None:
    engine = Engine(texts)
    completions = Completions(list(engine.requests), tokenizer(), stop)
    assert completions.has_stop == bool(stop)
    assert list(completions) == list(engine.requests) and len(completions) == len(texts)
    numbers = list(range(len(texts)))
    while any(len(each.output_tokens) < NUM_TOKENS for each in engine.requests):
        engine.chosen = data.draw(st.sets(st.sampled_from(numbers), min_size=1).map(sorted))
        completions.step(engine)
        for request, text in zip(engine.requests, texts, strict=True):
            so_far = " ".join(text[: len(request.output_tokens)])
            is_stopped = any(each in so_far for each in stop)
            is_over = len(request.output_tokens) == NUM_TOKENS
            assert completions.is_complete(request) == (is_stopped or is_over)
    for output, text in zip(completions.outputs(), texts, strict=True):
        whole = " ".join(text)
        places = [whole.find(each) for each in stop if each in whole]
        assert output.text == (whole[: places[0]] if places else whole)
        assert output.finish_reason == ("stop" if places else "length")
        # A text that ends with its last token has nothing left to abort.
        is_short = len(output.token_ids) < NUM_TOKENS
        assert engine.aborted.count(output.request_id) == (bool(places) and is_short)


@given(is_stopped=st.booleans(), fails_later=st.booleans(), stop=st.sampled_from([(), ("cache",)]))
def test_a_request_that_fails_before_its_text_is_complete_has_failed(
    is_stopped: bool, fails_later: bool, stop: tuple[str, ...]
) -> None:
    """Also if it fails in the step that brings its last tokens."""
    engine = Engine([["the", "cache" if is_stopped else "the", "the"]])
    [request] = engine.requests
    completions = Completions([request], tokenizer(), stop)

    def fail() -> None:
        request.status, request.finish_reason = RequestStatus.ABORTED, "abort"

    engine.chosen = [0]
    completions.step(engine)
    engine.ends = None if fails_later else fail
    completions.step(engine)
    fail()
    is_complete = is_stopped and bool(stop)
    reasons = {"0": "its node is lost", "9": "of another"}
    left = {"9": "of another"} if is_complete else reasons
    assert completions.failures(reasons) == left
    assert completions.is_complete(request) == is_complete
    [output] = completions.outputs()
    assert output.finish_reason == ("stop" if is_complete else "abort")


def test_a_request_that_has_not_ended_is_an_abort() -> None:
    engine = Engine([["the"] * NUM_TOKENS])
    completions = Completions(list(engine.requests), None, ())
    engine.chosen = [0]
    completions.step(engine)
    [output] = completions.outputs()
    assert (output.finish_reason, output.request_id, output.text) == ("abort", "0", "")
    assert len(output.token_ids) == 1
