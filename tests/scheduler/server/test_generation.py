"""What a body asks of the engine, without one."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.scheduler.errors import RequestError
from radixkv.scheduler.request import SamplingParams, TokenLogprob
from radixkv.scheduler.server.errors import ApiError
from radixkv.scheduler.server.generation import GenerationEndpoint, ServedModel
from radixkv.scheduler.server.limits import RequestCount
from radixkv.scheduler.server.replies import ChatReply, CompletionReply, TokenNames, usage
from radixkv.scheduler.server.schema import ChatBody, CompletionBody, Message, StreamOptions
from radixkv.scheduler.serving.outputs import GenerationOutput, PrefixHits

MAX_LEN = 40
CHARS = 3


class Tokenizer:
    """A token per character, of which the vocabulary has some of up to three."""

    max_token_chars = CHARS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def render_chat(self, turns: list[dict[str, str]], **variables: str) -> str:
        return "".join(text for turn in (*turns, variables) for text in turn.values())


MAX_NEW = 30


def model(tokenizer: Any = None) -> ServedModel:
    engine: Any = SimpleNamespace(tokenizer=tokenizer, max_new_tokens=MAX_NEW)
    return ServedModel("m", engine, MAX_LEN, 7)


def endpoint(tokenizer: Any = None) -> Any:
    unused: Any = None
    return GenerationEndpoint(CompletionBody, model(tokenizer), unused, unused, unused)


def body(is_chat: bool, **fields: Any) -> Any:
    if is_chat:
        return ChatBody(model="m", messages=[], **fields)
    return CompletionBody(model="m", prompt="", **fields)


@pytest.mark.parametrize("number", [None, 0, 3])
def test_log_probabilities_of_prompts_are_counted_until_the_end(
    number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, found = RequestCount(1), list[int]()
    unused: Any = None
    made = GenerationEndpoint(CompletionBody, model(Tokenizer()), unused, count, unused)

    async def generate(*_: object) -> None:
        found.append(count.num_records)

    monkeypatch.setattr(made, "_generate", generate)
    given = CompletionBody(model="m", prompt=["ab", "c"], prompt_logprobs=number)
    asyncio.run(made._respond(given, unused))
    num_tokens = 3 + 2
    assert found == [0 if number is None else num_tokens * (number + 1)]
    assert count.num_records == 0


limits = st.none() | st.integers(1, MAX_LEN + 1)


@given(st.booleans(), st.integers(1, MAX_LEN + 1), limits, limits)
def test_an_output_has_the_room_that_is_left(
    is_chat: bool, num_prompt: int, limit: int | None, chat_limit: int | None
) -> None:
    asked = body(is_chat, max_tokens=limit)
    if is_chat:
        asked.max_completion_tokens = chat_limit
        limit = limit if chat_limit is None else chat_limit
    room = MAX_LEN - num_prompt
    if room >= (limit or 1):
        least = min(room, MAX_NEW if is_chat else 16)
        assert endpoint()._params(asked, num_prompt).max_tokens == (limit or least)
        return
    with pytest.raises(ApiError) as refused:
        endpoint()._params(asked, num_prompt)
    more = f"{limit} new ones are too many" if limit else "no room for an output"
    error = refused.value
    assert error.message == (
        f"the prompt has {num_prompt} tokens, and {more}: the model takes at most {MAX_LEN} "
        "together"
    )
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == ("messages" if is_chat else "prompt")


FIELDS: dict[str, Any] = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    "top_k": st.integers(-1, 5),
    "top_p": st.sampled_from([0.5, 1.0]),
    "seed": st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2**32),
    "stop": st.sampled_from(["a", ["a", "b"], []]),
    "stop_token_ids": st.lists(st.integers(0, 9), max_size=2),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 3),
    "prompt_logprobs": st.integers(0, 3),
    "min_p": st.sampled_from([0.0, 0.5]),
    "min_tokens": st.integers(0, 2),
}


@given(st.booleans(), st.fixed_dictionaries({}, optional=FIELDS), st.none() | st.integers(0, 3))
def test_every_field_reaches_the_engine_and_the_others_have_openais_defaults(
    is_chat: bool, fields: dict[str, Any], logprobs: int | None
) -> None:
    asked = body(is_chat, max_tokens=9, **fields)
    if is_chat:
        asked.logprobs, asked.top_logprobs = logprobs is not None, logprobs
    else:
        asked.logprobs = logprobs
    params = endpoint()._params(asked, 1)
    chosen = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": params.sampling.seed} | {
        name: fields[name] for name in fields.keys() & SamplingParams.__dataclass_fields__.keys()
    }
    chosen["top_k"] = max(chosen["top_k"], 0)  # -1 stands for all, too
    is_drawn = chosen["seed"] == -1
    chosen["seed"] = params.sampling.seed if is_drawn else chosen["seed"] % 2**32
    assert params.sampling == SamplingParams(**chosen)
    stop = fields.get("stop", ())
    assert params.stop == ((stop,) if isinstance(stop, str) else tuple(stop))
    assert tuple(params.stop_token_ids) == tuple(fields.get("stop_token_ids", ()))
    assert params.ignore_eos == fields.get("ignore_eos", False)
    assert (params.n, params.logprobs) == (fields.get("n", 1), logprobs)
    assert params.prompt_logprobs == fields.get("prompt_logprobs")


def test_seeds_are_drawn_from_all_there_are() -> None:
    for seed in (None, -1):
        drawn = [endpoint()._params(body(False, seed=seed), 1) for _ in range(64)]
        seeds = {each.sampling.seed for each in drawn}
        assert len(seeds) > 60 and max(seeds) >= 2**30


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_text_that_cannot_fit_is_refused_before_it_is_made_tokens_of(more: int) -> None:
    length = MAX_LEN * CHARS + more
    served = model(Tokenizer())

    def chat_of(num_role: int, num_name: int, num_content: int, num_variable: int) -> list[int]:
        message = Message(role="a" * num_role, name="a" * num_name, content="a" * num_content)
        return served.encode_chat([message], {"x": "a" * num_variable})

    asked: list[tuple[str, str, Callable[[], list[int]]]] = [
        (f"prompt has {length} characters", "prompt", lambda: served.encode("a" * length))
    ]
    for place in range(4):  # a template may write any of these
        sizes = [1] * 4
        sizes[place] = length - 3
        what = f"messages have {length} characters with the chat template"
        asked.append((what, "messages", partial(chat_of, *sizes)))
    for what, param, encode in asked:
        if more <= 0:
            assert encode() == [0] * (param == "prompt") + [97] * length
            continue
        with pytest.raises(ApiError) as refused:
            encode()
        error = refused.value
        assert error.message == (
            f"the {what}: the model takes at most {MAX_LEN} tokens, of up to {CHARS} characters "
            "each"
        )
        assert (error.status, error.param, error.code) == (400, param, "context_length_exceeded")


def test_prompts_are_made_tokens_of_unless_they_are_tokens() -> None:
    encode = endpoint(Tokenizer())._encode
    asked: list[tuple[Any, Any]] = [
        ("ab", [[0, 97, 98]]),
        (["a", "b"], [[0, 97], [0, 98]]),
        ([[1], [2]], [[1], [2]]),
    ]
    for prompt, tokens in asked:
        assert encode(CompletionBody(model="m", prompt=prompt)) == tokens
    messages = [Message(role="b", content="a")]
    assert encode(ChatBody(model="m", messages=messages)) == [[98, 97]]


def test_another_model_and_texts_without_a_tokenizer_are_refused() -> None:
    for name in (None, "m"):
        model().check_name(name)
    for name in ("", "other"):
        with pytest.raises(ApiError) as refused:
            model().check_name(name)
        error = refused.value
        assert error.message == f"the model {name!r} does not exist; this server has 'm'"
        assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    served = model()
    for encode in (lambda: served.encode("a"), lambda: served.encode_chat([], None)):
        with pytest.raises(ApiError, match=r"^the model 'm' has no tokenizer: send token ids$"):
            encode()


def told(tokens: list[tuple[int, bool]], taken: int, end: int, index: int) -> GenerationOutput:
    """The output of a sample after some tokens, of which only some have text."""
    texts = [chr(97 + token) if has_text else "" for token, has_text in tokens]
    return GenerationOutput(
        request_id="r",
        index=index,
        num_prompt_tokens=2,
        text="".join(texts[:end]),
        new_text="".join(texts[taken:end]),
        token_ids=tuple(token for token, _ in tokens[:end]),
        new_token_ids=tuple(token for token, _ in tokens[taken:end]),
        finish_reason="length" if end == len(tokens) else None,
        hits=PrefixHits(),
        logprobs=tuple(TokenLogprob(token, -1.0, 1, ()) for token, _ in tokens[:end]),
    )


PAIRS = [(False, False), (False, True), (True, False), (True, True)]

sampled = st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=1, max_size=5)


@pytest.mark.parametrize("options", [None, *itertools.starmap(StreamOptions, PAIRS)])
@settings(max_examples=20)
@given(st.data(), st.lists(sampled, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_the_events_of_a_stream_lose_nothing_and_end_with_the_usage_that_is_asked_for(
    options: StreamOptions | None,
    data: st.DataObject,
    samples: list[list[tuple[int, bool]]],
    is_chat: bool,
    fails: bool,
) -> None:
    """Also of tokens without text, such as a part of a character; one that fails ends so, too."""
    has_ids, has_logprobs = data.draw(st.booleans()), data.draw(st.booleans())
    taken = [0] * len(samples)
    outputs: list[GenerationOutput] = []
    while rest := [index for index, each in enumerate(samples) if taken[index] < len(each)]:
        index = data.draw(st.sampled_from(rest))
        end = data.draw(st.integers(taken[index] + 1, len(samples[index])))
        output = told(samples[index], taken[index], end, index)
        outputs.append(output if has_logprobs else replace(output, logprobs=None))
        taken[index] = end
    if fails:
        outputs.pop()

    async def generated() -> AsyncIterator[tuple[int, GenerationOutput]]:
        for output in outputs:
            yield output.index, output
        if fails:
            raise RequestError("too large")

    asked = body(is_chat, stream=True, stream_options=options, return_token_ids=has_ids)
    names, reply = TokenNames(None), cast(Any, None)
    if is_chat:
        reply = ChatReply({}, (7,), names, has_token_ids=has_ids, num_choices=len(samples))
    else:
        reply = CompletionReply({}, [(7,)] * len(samples), names, has_token_ids=has_ids)
    found: list[bytes] = []

    async def read() -> None:
        async for part in endpoint()._events(asked, reply, generated(), len(samples)):
            found.append(part)

    if fails and not outputs:
        with pytest.raises(RequestError, match=r"^too large$"):
            asyncio.run(read())
        assert not found, "so that the response can have a status"
        return
    asyncio.run(read())
    assert all(found), "nothing is sent without an event"
    *events, done, nothing = b"".join(found).decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(each.removeprefix("data: ")) for each in events]
    last = {output.index: output for output in outputs}
    has_usage = options is not None and options.include_usage
    is_continuous = options is not None and options.continuous_usage_stats
    if fails:
        assert chunks.pop()["error"]["message"] == "too large"
    elif has_usage:
        final = chunks.pop()
        assert (final["choices"], final["usage"]) == ([], usage(last.values()))
    assert all(chunk["choices"] for chunk in chunks), "only the last one may have none"
    for chunk in chunks:
        assert ("usage" in chunk) == (has_usage or is_continuous)
        assert (chunk.get("usage") is not None) == is_continuous
    if is_continuous and not fails:
        assert chunks[-1]["usage"] == usage(last.values())
    for index, output in last.items():
        choices = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        texts = [each["delta"].get("content") if is_chat else each["text"] for each in choices]
        assert "".join(text or "" for text in texts) == output.text
        ids = [token for each in choices for token in each.get("token_ids", ())]
        assert tuple(ids) == (output.token_ids if has_ids else ())
        name = "content" if is_chat else "tokens"
        records = [one for each in choices if each["logprobs"] for one in each["logprobs"][name]]
        assert len(records) == (len(output.token_ids) if has_logprobs else 0)
        assert [each["finish_reason"] for each in choices if each["finish_reason"]] == (
            ["length"] if output.finish_reason else []
        )
    if not fails:  # the usage and the mark follow the end of the last choice at once
        assert b'"finish_reason":"length"' in found[-1]
