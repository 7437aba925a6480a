"""The HTTP server: outputs, limits, refusals, clients that go away, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

import radixkv
from radixkv.scheduler import (
    AsyncEngine,
    Engine,
    EngineClosedError,
    GenerationParams,
    SamplingParams,
)
from radixkv.scheduler.models import make_tiny_checkpoint
from radixkv.scheduler.server import ServedModel, ServerLimits, generation, make_app, serve
from radixkv.scheduler.server.limits import cut_off_stalls
from radixkv.scheduler.server.run import bind
from radixkv.scheduler.text.output_text import OutputText

from ..ports import reserved_port
from ..tokenizers import add_tokenizer
from .conftest import assert_nothing_leaked, fresh
from .test_async_engine import Gate, held

SIZES: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 96,
    "max_model_len": 128,
    "max_running": 4,
    "token_budget": 32,
}
PROMPTS = ["the cache holds", "the cache holds the keys and the values", "naïve 🙂"]
MESSAGES = [{"role": "system", "content": "naïve"}, {"role": "user", "content": "the cache"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
PATIENT = ServerLimits(head_s=600.0, stall_s=600.0, keep_alive_s=600.0)
"""Limits for connections on a slow machine, where a client that behaves may stop for seconds."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> radixkv.LLM:
    directory = tmp_path_factory.mktemp("server")
    make_tiny_checkpoint(directory, "qwen3", overrides={"vocab_size": 340})
    add_tokenizer(directory)
    return radixkv.LLM(directory, **SIZES)


class StepGate(Gate):
    """A gate that lets the engine take one step at a time until something holds.

    However slow the event loop is, it runs between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._begun = self._allowed = 0
        step = engine.step

        def counted_step() -> list[Any]:
            self._begun += 1
            return step()

        engine.step = counted_step  # type: ignore[method-assign]

    async def step_until(self, holds: Callable[[], object]) -> None:
        while not holds():
            if self._begun > self._allowed:  # the engine waits for it
                self._allowed += 1
                self.allow(1)
            await asyncio.sleep(0)  # a turn of the loop


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        asyncio.run(main())

    return run


class Answer:
    """What an application sends to a client.

    Attributes:
        gone: set it, and the client goes away.
        reads: clear it, and the client does not read.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.parts = 0
        self.is_complete = False
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {key.decode(): value.decode() for key, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.parts += 1
            self.is_complete = not message.get("more_body", False)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of all events; the last one must be the mark of the end."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, nothing = self.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Served:
    """An application over a fresh engine."""

    def __init__(self, engine: Engine, serving: AsyncEngine, **options: Any) -> None:
        self.engine = engine
        self.serving = serving
        self.app = make_app(ServedModel("tiny", serving, 128, created=7), **options)

    async def ask(
        self,
        method: str,
        path: str,
        body: list[bytes] | None = None,
        *,
        headers: dict[str, str] | None = None,
        answer: Answer | None = None,
        stalls: bool = False,
    ) -> Answer:
        """Send a request, and return when the application has."""
        answer = answer or Answer()
        parts = list(body or [b""])

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": stalls or bool(parts)}
            await answer.gone.wait()
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
            "server": ("localhost", 80),
            "client": ("localhost", 1),
        }
        await self.app(scope, receive, answer.send)
        return answer

    async def post(self, path: str, *, answer: Answer | None = None, **fields: Any) -> Answer:
        fields = {"model": "tiny", **fields}
        return await self.ask("POST", path, [json.dumps(fields).encode()], answer=answer)

    async def live_leases(self) -> int:
        stats = await self.serving.call(lambda engine: engine.stats())
        return stats.cache.live_leases


@asynccontextmanager
async def served(
    llm: radixkv.LLM, prepare: Callable[[Engine], object] = lambda _: None, **options: Any
) -> AsyncIterator[Served]:
    sizes: dict[str, Any] = {"token_budget": 32, "max_running": 4}
    engine = fresh(llm.engine, **sizes)
    prepare(engine)
    async with AsyncEngine(engine, llm.tokenizer, eos_token_ids=(1,)) as serving:
        yield Served(engine, serving, **options)
    assert_nothing_leaked(engine)


def texts(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream, of either endpoint."""
    choices = [each for event in events for each in event["choices"] if each["index"] == index]
    return "".join(each.get("text", each.get("delta", {}).get("content") or "") for each in choices)


def test_scopes_that_are_no_requests_are_not_counted(llm):
    async def of_a_server(app: Any, scope: dict[str, Any], messages: list[str]) -> list[str]:
        sent = []

        async def receive() -> dict[str, Any]:
            return {"type": messages.pop(0)}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app({"asgi": {"version": "3.0"}, **scope}, receive, send)
        return sent

    async def main() -> None:
        async with served(llm, api_key="key") as server:
            lifespan = ["lifespan.startup", "lifespan.shutdown"]
            sent = await of_a_server(server.app, {"type": "lifespan"}, [*lifespan])
            assert sent == [f"{each}.complete" for each in lifespan]
            scope = {"type": "websocket", "path": "/v1/models", "headers": [], "subprotocols": []}
            sent = await of_a_server(server.app, scope, ["websocket.connect"])
            assert sent == ["websocket.close"]
            page = (await server.ask("GET", "/metrics")).body.decode()
            assert not re.findall(r"^http_requests_total.*", page, re.MULTILINE)

    asyncio.run(main())


# Outputs


@settings(max_examples=15)
@given(
    prompt=st.sampled_from(PROMPTS),
    max_tokens=st.integers(1, 32),
    sampling=st.sampled_from([{}, {"temperature": 1.2, "seed": 5}, {"top_k": 3, "seed": 9}]),
    stop=st.sampled_from([(), "e", ["th", " k"]]),
    ignore_eos=st.booleans(),
    is_chat=st.booleans(),
)
def test_streams_and_whole_responses_are_what_llm_generates(
    llm, prompt, max_tokens, sampling, stop, ignore_eos, is_chat
):
    given_sampling = SamplingParams(**{"temperature": 1.0 if sampling else 0.0, **sampling})
    params = GenerationParams(max_tokens, given_sampling, stop, ignore_eos=ignore_eos)
    messages = [{"role": "user", "content": prompt}]
    [expected] = llm.chat(messages, params) if is_chat else llm.generate(prompt, params)
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop": stop or None,
        "ignore_eos": ignore_eos,
        "return_token_ids": True,
        **(sampling or {"temperature": 0}),
        **({"messages": messages} if is_chat else {"prompt": prompt}),
    }

    async def test() -> None:
        path = CHAT if is_chat else COMPLETIONS
        async with served(llm) as server:
            whole = (await server.post(path, **fields)).json()
            events = (await server.post(path, stream=True, **fields)).events()
        [choice] = whole["choices"]
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert (text, choice["token_ids"]) == (expected.text, list(expected.token_ids))
        assert texts(events) == expected.text
        chunks = [event["choices"][0] for event in events]
        token_ids = [token for chunk in chunks for token in chunk.get("token_ids") or ()]
        assert token_ids == list(expected.token_ids)
        reasons = [chunk["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(reasons) - 1) + [expected.finish_reason]
        assert choice["finish_reason"] == expected.finish_reason
        tokens = (whole if is_chat else choice)["prompt_token_ids"]
        assert tokens == (events[0] if is_chat else chunks[0])["prompt_token_ids"]
        assert len(tokens) == expected.num_prompt_tokens == whole["usage"]["prompt_tokens"]
        assert len({event["id"] for event in events}) == 1

    asyncio.run(test())


def test_the_fields_of_responses(llm):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            completion = (await server.post(COMPLETIONS, prompt="a", **GREEDY)).json()
            chat = (await server.post(CHAT, messages=MESSAGES, **GREEDY)).json()
            first, *rest = (
                await server.post(CHAT, messages=MESSAGES, stream=True, **GREEDY)
            ).events()
        assert completion["id"].startswith("cmpl-") and chat["id"].startswith("chatcmpl-")
        assert (
            set(completion) == set(chat) == {"id", "object", "created", "model", "choices", "usage"}
        )
        assert (completion["object"], chat["object"]) == ("text_completion", "chat.completion")
        assert set(completion["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
        assert set(chat["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
        assert chat["choices"][0]["message"]["role"] == "assistant"
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"] == [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        assert all(set(event) == set(first) for event in rest)

    test()


@pytest.mark.parametrize("kind", ["texts", "token ids"])
def test_a_list_of_prompts_has_a_choice_for_each(llm, kind):
    params = GenerationParams(24)
    expected = llm.generate(PROMPTS, params)
    prompts: Any = PROMPTS
    if kind == "token ids":
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]

    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            whole = (await server.post(COMPLETIONS, prompt=prompts, **GREEDY)).json()
            events = (
                await server.post(COMPLETIONS, prompt=prompts, stream=True, **GREEDY)
            ).events()
            one = (await server.post(COMPLETIONS, prompt=prompts[1], **GREEDY)).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in whole["choices"]] == [each.text for each in expected]
        assert [texts(events, index) for index in range(3)] == [each.text for each in expected]
        assert one["choices"][0]["text"] == expected[1].text
        assert whole["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in expected)

    test()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_several_samples_are_choices(llm, path):
    sampling = SamplingParams(temperature=1.3, seed=5)
    params = GenerationParams(16, sampling, n=3)
    fields: dict[str, Any] = {"n": 3, "temperature": 1.3, "seed": 5, "max_tokens": 16}
    if path == CHAT:
        messages = [{"role": "user", "content": PROMPTS[1]}]
        fields |= {"messages": messages}
        outputs = llm.chat(messages, params)
    else:
        fields |= {"prompt": PROMPTS}
        outputs = llm.generate(PROMPTS, params)
    expected = [each for output in outputs for each in output.samples]
    places = list(range(len(expected)))

    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            whole = (await server.post(path, return_token_ids=True, **fields)).json()
            options = {"include_usage": True}
            stream = await server.post(path, stream=True, stream_options=options, **fields)
        assert [each["index"] for each in whole["choices"]] == places
        for choice, output in zip(whole["choices"], expected, strict=True):
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert (text, choice["finish_reason"]) == (output.text, output.finish_reason)
            assert choice["token_ids"] == list(output.token_ids)
            if path == COMPLETIONS:
                assert len(choice["prompt_token_ids"]) == output.num_prompt_tokens
        *events, end = stream.events()
        assert [texts(events, index) for index in places] == [each.text for each in expected]
        reasons = {
            choice["index"]: choice["finish_reason"]
            for event in events
            for choice in event["choices"]
            if choice["finish_reason"]
        }
        assert reasons == {index: expected[index].finish_reason for index in places}
        num_new = sum(len(each.token_ids) for each in expected)
        for usage in (whole["usage"], end["usage"]):  # a prompt counts once
            assert usage["prompt_tokens"] == sum(each.num_prompt_tokens for each in outputs)
            assert usage["completion_tokens"] == num_new
            assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]

    test()


@in_loop
async def check_usage(llm: radixkv.LLM, n: int) -> None:
    fields: dict[str, Any] = {"prompt": PROMPTS[1], "n": n, **GREEDY}
    async with served(llm) as server:
        cold = (await server.post(COMPLETIONS, **fields)).json()["usage"]
        warm = (await server.post(COMPLETIONS, **fields)).json()["usage"]
        options: dict[str, Any] = {"include_usage": True}
        last = await server.post(COMPLETIONS, stream=True, stream_options=options, **fields)
        options = {"continuous_usage_stats": True}
        each = await server.post(COMPLETIONS, stream=True, stream_options=options, **fields)
        without = await server.post(COMPLETIONS, stream=True, **fields)
    num_prompt = cold["prompt_tokens"]
    assert cold["prompt_tokens_details"] == {"cached_tokens": 0}
    # All whole blocks before the last token, which is computed again.
    assert warm["prompt_tokens_details"] == {"cached_tokens": (num_prompt - 1) // 4 * 4}
    assert cold["total_tokens"] == num_prompt + cold["completion_tokens"]
    *chunks, end = last.events()
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert (end["choices"], end["usage"]) == ([], warm)
    assert each.events()[-1]["usage"] == warm
    assert all("usage" not in chunk for chunk in without.events())


@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_tokens_and_hits(llm, n):
    """The hits of a prompt are those of its first sample: the others hit what that computes."""
    check_usage(llm, n)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_long_texts_are_tokenized_by_another_thread(llm, monkeypatch, path, more):
    monkeypatch.setattr(generation, "_NUM_SHORT_CHARS", 200)
    threads: set[str] = set()
    encode = ServedModel.encode if path == COMPLETIONS else ServedModel.encode_chat

    def watched(*args: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(*args)

    monkeypatch.setattr(ServedModel, encode.__name__, watched)
    num_others = 64 if path == COMPLETIONS else 64 + len("user{}")
    text = "the cache holds " * 20
    text = text[: 200 - num_others + more]
    messages = [{"role": "user", "content": text}]
    fields: dict[str, Any] = {"prompt": text} if path == COMPLETIONS else {"messages": messages}

    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            assert (await server.post(path, max_tokens=1, **fields)).status == 200

    test()
    assert (threads == {"MainThread"}) == (more <= 0)


def test_defaults_are_those_of_openai(llm):
    @in_loop
    async def test() -> None:
        samplings: list[SamplingParams] = []
        async with served(llm) as server:
            generate = server.serving.generate

            def record(prompt: Any, params: GenerationParams, **options: Any) -> Any:
                samplings.append(params.sampling)
                return generate(prompt, params, **options)

            server.serving.generate = record  # type: ignore[method-assign,assignment]
            fields: dict[str, Any] = {"ignore_eos": True}
            short = (await server.post(COMPLETIONS, prompt="the", **fields)).json()
            [prompt] = [[5] * 120]
            rest = (await server.post(COMPLETIONS, prompt=prompt, **fields)).json()
            chat = (await server.post(CHAT, messages=MESSAGES, **fields)).json()
            both = await server.post(
                CHAT, messages=MESSAGES, max_tokens=9, max_completion_tokens=3, **fields
            )
            assert len({each.seed for each in samplings}) == 4
            await server.post(COMPLETIONS, prompt="the", seed=0, **fields)
            assert samplings[-1].seed == 0
        assert short["usage"]["completion_tokens"] == 16
        assert rest["usage"]["completion_tokens"] == 8
        assert chat["usage"]["total_tokens"] == 128
        assert both.json()["usage"]["completion_tokens"] == 3
        assert {replace(each, seed=0) for each in samplings} == {SamplingParams(temperature=1.0)}

    test()


def test_parts_of_text_and_variables_of_the_template(llm):
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "cache"}]
    expected = llm.chat([{"role": "user", "content": "the\ncache"}], GenerationParams(8))
    loud = llm.chat([{"role": "user", "content": "the"}], GenerationParams(8), shout=True)

    @in_loop
    async def test() -> None:
        fields: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 8}
        async with served(llm) as server:
            first = await server.post(CHAT, messages=[{"role": "user", "content": parts}], **fields)
            message: Any = [{"role": "user", "content": "the", "tool_calls": [], "refusal": None}]
            more: dict[str, Any] = {"chat_template_kwargs": {"shout": True}}
            second = await server.post(CHAT, messages=message, **more, **fields)
        assert first.json()["choices"][0]["message"]["content"] == expected[0].text
        assert second.json()["choices"][0]["message"]["content"] == loud[0].text

    test()


# The other endpoints


def test_models_tokens_and_health(llm):
    assert llm.tokenizer is not None
    tokens, chat = llm.tokenizer.encode("the cache"), llm.tokenizer.encode_chat(MESSAGES)
    card = {
        "id": "tiny",
        "object": "model",
        "created": 7,
        "owned_by": "radixkv",
        "max_model_len": 128,
    }

    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            assert (await server.ask("GET", "/health")).json() == {"status": "ok"}
            models = (await server.ask("GET", "/v1/models")).json()
            assert models == {"object": "list", "data": [card]}
            assert (await server.ask("GET", "/v1/models/tiny")).json() == card
            found = (await server.post("/tokenize", prompt="the cache")).json()
            assert found == {"count": len(tokens), "max_model_len": 128, "tokens": tokens}
            assert (await server.post("/tokenize", messages=MESSAGES)).json()["tokens"] == chat
            text = (await server.post("/detokenize", tokens=tokens)).json()
            assert text == {"prompt": "the cache"}

    test()


def test_health_is_that_of_the_thread_of_the_engine(llm):
    """As long as that does not come to its next step, there is no answer."""

    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            with held(server.serving):
                asked = asyncio.create_task(server.ask("GET", "/health"))
                for _ in range(50):
                    await asyncio.sleep(0)  # a turn of the loop
                assert not asked.done()
            assert (await asked).status == 200

    test()


def test_a_response_begins_with_the_first_token(llm, monkeypatch):
    """Also if the token has no text yet, such as the first byte of a character."""
    gates: list[StepGate] = []

    @in_loop
    async def test() -> None:
        async with served(llm, lambda e: gates.append(StepGate(e))) as server:
            answer = Answer()
            monkeypatch.setattr(OutputText, "push", lambda *_, **__: None)  # no text so far
            fields: dict[str, Any] = {"stream": True, "max_tokens": 8, "ignore_eos": True}
            asked = asyncio.create_task(
                server.post(COMPLETIONS, prompt="the", answer=answer, **fields)
            )
            await gates[0].step_until(lambda: answer.parts)
            assert not answer.is_complete
            gates[0].open()
            await asked
            assert texts(answer.events()) == ""

    test()


# Refusals


def error(message: str, param: str | None = None, code: str | None = None) -> Any:
    fields: dict[str, Any] = {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }
    return {"error": fields}


REFUSED: list[tuple[str, dict[str, Any], int, Any]] = [
    (COMPLETIONS, {}, 400, error("Object missing required field `prompt`", "prompt")),
    (CHAT, {}, 400, error("Object missing required field `messages`", "messages")),
    (
        COMPLETIONS,
        {"model": "other"},
        404,
        error(
            "the model 'other' does not exist; this server has 'tiny'", "model", "model_not_found"
        ),
    ),
    (COMPLETIONS, {"prompt": []}, 400, error("prompt is empty", "prompt")),
    (
        COMPLETIONS,
        {"prompt": [1, "a"]},
        400,
        error("prompt has texts, token ids or lists side by side", "prompt"),
    ),
    (
        COMPLETIONS,
        {"prompt": [[1], [-1]]},
        400,
        error("Expected `int` >= 0 - at `$.prompt[1][0]`", "prompt"),
    ),
    (
        COMPLETIONS,
        {"max_tokens": 0},
        400,
        error("Expected `int` >= 1 - at `$.max_tokens`", "max_tokens"),
    ),
    (
        COMPLETIONS,
        {"max_tokens": True},
        400,
        error("Expected `int | null`, got `bool` - at `$.max_tokens`", "max_tokens"),
    ),
    (COMPLETIONS, {"frob": 1}, 400, error("Object contains unknown field `frob`", "frob")),
    (COMPLETIONS, {"n": 0}, 400, error("Expected `int` >= 1 - at `$.n`", "n")),
    (CHAT, {"n": 129}, 400, error("Expected `int` <= 128 - at `$.n`", "n")),
    (
        COMPLETIONS,
        {"best_of": 2},
        400,
        error("best_of is not supported: got 2", "best_of", "unsupported_parameter"),
    ),
    *(
        (
            COMPLETIONS,
            {field: value},
            400,
            error(f"{field} is not supported: got {shown}", field, "unsupported_parameter"),
        )
        for field, value, shown in (("best_of", True, "true"), ("echo", 0, "0"), ("store", 0, "0"))
    ),
    (
        COMPLETIONS,
        {"logprobs": 21},
        400,
        error("Expected `int` <= 20 - at `$.logprobs`", "logprobs"),
    ),
    (CHAT, {"top_logprobs": 1}, 400, error("top_logprobs needs logprobs", "top_logprobs")),
    (
        COMPLETIONS,
        {"prompt_logprobs": 0, "stream": True},
        400,
        error("prompt_logprobs excludes stream", "prompt_logprobs"),
    ),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f" * 99}}]},
        400,
        error(
            'tools is not supported: got [{"type":"function","function":{"name":"'
            + "f" * 37
            + "...",
            "tools",
            "unsupported_parameter",
        ),
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema"}},
        400,
        error("response_format of type json_schema needs json_schema", "response_format"),
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        400,
        error("response_format excludes structured_outputs", "response_format"),
    ),
    *(
        (
            CHAT,
            {"response_format": {"type": kind, "json_schema": {"name": "a", "schema": {}}}},
            400,
            error(f"response_format of type {kind} excludes json_schema", "response_format"),
        )
        for kind in ("text", "json_object")
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"json_object": True, "json": {}}},
        400,
        error("structured_outputs takes one of json and json_object", "structured_outputs"),
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"whitespace_pattern": " "}},
        400,
        error(
            "Object contains unknown field `whitespace_pattern` - at `$.structured_outputs`",
            "whitespace_pattern",
        ),
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"json": {"type": "strange"}}},
        400,
        error("guided output is refused: Invalid type: strange"),
    ),
    *(
        (path, {name: -3.0}, 400, error(f"{name} must be {limits}, got -3.0"))
        for path in (COMPLETIONS, CHAT)
        for name, limits in (
            ("presence_penalty", "at least -2 and at most 2"),
            ("frequency_penalty", "at least -2 and at most 2"),
            ("repetition_penalty", "at least 1e-6 and at most 1e6"),
            ("temperature", "0, or at least 1e-6 and at most 1e6"),
            ("min_p", "at least 0 and at most 1"),
        )
    ),
    (
        CHAT,
        {"min_tokens": 5, "max_tokens": 4},
        400,
        error("min_tokens must be at most max_tokens 4, got 5"),
    ),
    (
        COMPLETIONS,
        {"stream_options": {"include_usage": True}},
        400,
        error("stream_options needs stream", "stream_options"),
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        error(
            'content of type "image_url" is not supported, only text',
            "messages",
            "unsupported_parameter",
        ),
    ),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "x"}]},
        400,
        error("the chat template failed: TemplateError: unknown role tool", "messages"),
    ),
    (
        CHAT,
        {"chat_template_kwargs": {"messages": []}},
        400,
        error("chat_template_kwargs cannot set messages", "chat_template_kwargs"),
    ),
    (
        COMPLETIONS,
        {"prompt": [5] * 128},
        400,
        error(
            "the prompt has 128 tokens, and no room for an output: the model takes at most 128 "
            "together",
            "prompt",
            "context_length_exceeded",
        ),
    ),
    (
        COMPLETIONS,
        {"prompt": [5] * 120, "max_tokens": 9},
        400,
        error(
            "the prompt has 120 tokens, and 9 new ones are too many: the model takes at most 128 "
            "together",
            "prompt",
            "context_length_exceeded",
        ),
    ),
    (COMPLETIONS, {"top_p": 0}, 400, error("top_p must be above 0 and at most 1, got 0.0")),
    (
        COMPLETIONS,
        {"seed": 2**63},
        400,
        error("Expected `int` <= 9223372036854775807 - at `$.seed`", "seed"),
    ),
    (
        COMPLETIONS,
        {"stop": ["a", ""]},
        400,
        error("stop must be strings that are not empty, got ['a', '']"),
    ),
    (
        COMPLETIONS,
        {"stop": ["a"] * 17},
        400,
        error("Expected `array` of length <= 16 - at `$.stop`", "stop"),
    ),
    (
        CHAT,
        {"stop": ["a", "a" * 257]},
        400,
        error("Expected `str` of length <= 256 - at `$.stop[1]`", "stop"),
    ),
    ("/tokenize", {}, 400, error("expected either prompt or messages", "prompt")),
    (
        "/tokenize",
        {"prompt": "x", "chat_template_kwargs": {}},
        400,
        error("chat_template_kwargs needs messages", "chat_template_kwargs"),
    ),
    (
        "/detokenize",
        {"tokens": [2**31]},
        400,
        error("Expected `int` <= 2147483647 - at `$.tokens[0]`", "tokens"),
    ),
    (
        "/tokenize",
        {"model": "x", "prompt": "a"},
        404,
        error("the model 'x' does not exist; this server has 'tiny'", "model", "model_not_found"),
    ),
]


@pytest.mark.parametrize(("path", "fields", "status", "expected"), REFUSED)
def test_refusals_name_the_field(llm, path, fields, status, expected):
    @in_loop
    async def test() -> None:
        base: dict[str, Any] = {}
        if fields and path == COMPLETIONS:
            base = {"prompt": "a"}
        if fields and path == CHAT:
            base = {"messages": MESSAGES}
        async with served(llm) as server:
            answer = await server.post(path, **{**base, **fields})
            assert (answer.status, answer.json()) == (status, expected)
            assert await server.live_leases() == 0

    test()


def test_what_only_the_engine_can_refuse(llm):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            answer = await server.post(COMPLETIONS, prompt=[5, 340])
            assert answer.status == 400
            message = answer.json()["error"]["message"]
            assert message.endswith("token 340 at position 1 is outside the vocabulary of 340")
            streamed = await server.post(COMPLETIONS, prompt=[[5], [340]], stream=True)
            assert streamed.status in (200, 400)  # by whether the other prompt was first
            if streamed.status == 200:
                error_event = streamed.events()[-1]["error"]["message"]
                assert error_event.endswith("position 0 is outside the vocabulary of 340")

    test()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON: Input data was truncated"),
        (b'{"model": "tiny",', "the body is not JSON: Input data was truncated"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"nonsense", "the body is not JSON: JSON is malformed: invalid character (byte 4)"),
        (b'{"metadata": ' + b'{"a": ' * 100_000, "the body is not JSON: nested too deeply"),
    ],
)
def test_bodies_that_are_not_json(llm, body, message):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            answer = await server.ask("POST", COMPLETIONS, [body])
        assert answer.status == 400
        assert answer.json()["error"]["message"].startswith(message)

    test()


def test_unknown_paths_and_methods(llm):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            nowhere = await server.ask("GET", "/v2/models")
            wrong = await server.ask("GET", COMPLETIONS)
            other = await server.ask("GET", "/v1/models/a/b")
        assert (nowhere.status, wrong.status, other.status) == (404, 405, 404)
        assert nowhere.json() == error("GET /v2/models: Not Found")
        assert wrong.json() == error("GET /v1/completions: Method Not Allowed")
        assert wrong.headers["allow"] == "POST"
        assert other.json()["error"]["code"] == "model_not_found"

    test()


def test_an_engine_without_a_tokenizer_takes_token_ids(llm):
    @in_loop
    async def test() -> None:
        sizes: dict[str, Any] = {"token_budget": 32, "max_running": 4}
        engine = fresh(llm.engine, **sizes)
        async with AsyncEngine(engine) as serving:
            server = Served(engine, serving)
            answer = await server.post(COMPLETIONS, prompt="a")
            tokens = await server.post(COMPLETIONS, prompt=[5, 6], return_token_ids=True)
        assert answer.json() == error("the model 'tiny' has no tokenizer: send token ids")
        assert len(tokens.json()["choices"][0]["token_ids"]) == 16

    test()


# The API key


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic sesame", "sesame"])
def test_the_api_key_is_checked_before_the_body_is_read(llm, header):
    @in_loop
    async def test() -> None:
        async with served(llm, api_key="sesame") as server:
            headers = {} if header is None else {"authorization": header}
            body = [b"x" * 2**23]  # more than is allowed
            answer = await server.ask("POST", COMPLETIONS, body, headers=headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            message = "Incorrect API key provided"
            if not header:
                message = "No API key provided: send it as `Authorization: Bearer KEY`"
            assert answer.json() == error(message, code="invalid_api_key")
            assert (await server.ask("GET", "/health", headers=headers)).status == 200

    test()


def test_the_right_api_key_passes(llm):
    @in_loop
    async def test() -> None:
        async with served(llm, api_key="sesame") as server:
            for header in ("Bearer sesame", "bearer  sesame"):
                found = await server.ask("GET", "/v1/models", headers={"authorization": header})
                assert found.status == 200

    test()


# Limits


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_limit_of_a_body(llm, is_announced, more):
    body = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 1}).encode()
    limit = len(body) - more

    @in_loop
    async def test() -> None:
        limits = ServerLimits(max_body_bytes=limit)
        headers = {"content-length": str(len(body))} if is_announced else {}
        async with served(llm, limits=limits) as server:
            for path in (COMPLETIONS, "/tokenize"):
                answer = await server.ask("POST", path, [body[:9], body[9:]], headers=headers)
                size = f"{len(body)} bytes" if is_announced else f"more than {limit} bytes"
                message = f"the body has {size}; the server takes at most {limit}"
                if more > 0:
                    assert answer.status == 413
                    assert answer.json() == error(message, code="body_too_large")
                elif path == COMPLETIONS:
                    assert answer.status == 200

    test()


def test_a_body_that_does_not_come(llm):
    @in_loop
    async def test() -> None:
        limits = ServerLimits(stall_s=0.01)
        async with served(llm, limits=limits) as server:
            answer = await server.ask("POST", COMPLETIONS, [b"abc"], stalls=True)
        assert answer.status == 408
        assert answer.json() == error("the body did not come within 0.01 s: got 3 bytes")

    test()


def test_the_limit_of_requests_at_a_time(llm):
    gates: list[StepGate] = []

    @in_loop
    async def test() -> None:
        limits = ServerLimits(max_requests=3)
        async with served(llm, lambda e: gates.append(StepGate(e)), limits=limits) as server:
            answers = [Answer(), Answer()]
            fields: dict[str, Any] = {"stream": True, "max_tokens": 64, "ignore_eos": True}
            running = [
                asyncio.create_task(server.post(COMPLETIONS, prompt=prompt, answer=each, **fields))
                for prompt, each in zip((["a", "b"], "c"), answers, strict=True)
            ]
            while len(server.serving._thread._deliveries) < 3:
                await asyncio.sleep(0)
            await gates[0].step_until(lambda: all(answer.parts for answer in answers))
            refused = await server.post(COMPLETIONS, prompt="d")
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"] == {
                "message": "the server has 3 of at most 3 choices at a time, and the request adds "
                "1: try again later",
                "type": "rate_limit_error",
                "param": None,
                "code": "too_many_requests",
            }
            message = "the request asks for 4 choices; the server takes at most 3 at a time"
            too_many = await server.post(COMPLETIONS, prompt=["a"] * 4)
            assert (too_many.status, too_many.json()) == (400, error(message, "prompt"))
            too_many = await server.post(COMPLETIONS, prompt=["a"] * 2, n=2)
            assert (too_many.status, too_many.json()) == (400, error(message, "n"))
            gates[0].open()
            await asyncio.gather(*running)
            assert all(answer.events() for answer in answers)
            again = await server.post(COMPLETIONS, prompt=["d", "e", "f"])
            assert again.status == 200

    test()


# The engine does not wait


def test_steps_do_not_wait_for_the_event_loop(llm):
    """While the loop of the server is blocked, the engine takes all steps of its requests."""
    gates: list[Gate] = []
    idle = threading.Event()

    def prepare(engine: Engine) -> None:
        gates.append(Gate(engine))
        step = engine.step

        def watched() -> list[Any]:
            ended = step()
            if not engine.has_work:  # and the step is counted
                idle.set()
            return ended

        engine.step = watched  # type: ignore[method-assign]

    params = GenerationParams(60, ignore_eos=True)
    expected = [output.text for output in llm.generate(PROMPTS, params)]

    @in_loop
    async def test() -> None:
        fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "stream": True}
        async with served(llm, prepare) as server, listening(server) as (client, _, _):
            [gate] = gates

            async def ask(prompt: str) -> list[str]:
                stream = await client.completions.create(
                    model="tiny", prompt=prompt, extra_body={"ignore_eos": True}, **fields
                )
                return [chunk.choices[0].text async for chunk in stream]

            asked = [asyncio.create_task(ask(prompt)) for prompt in PROMPTS]
            while len(server.serving._thread._deliveries) < len(PROMPTS):
                await asyncio.sleep(0)
            gate.open()
            assert idle.wait(600)  # blocks the loop: nobody reads, writes or wakes up
            num_steps = len(gate.leases)
            texts = await asyncio.gather(*asked)
            assert ["".join(each) for each in texts] == expected
            assert num_steps == len(gate.leases) > 60
            assert all(len(each) <= 3 for each in texts)  # what waited came together

    test()


# Clients that go away


async def check_blocks_are_free_within_a_step(server: Served, gate: Gate) -> None:
    """The requests have been aborted; the engine may still be in a step of theirs."""
    number = asyncio.ensure_future(server.serving.call(lambda _: len(gate.leases)))
    await asyncio.sleep(0)  # so that it is asked
    gate.allow(1)
    after = await number
    gate.open()
    while await server.live_leases():
        pass
    assert 0 in gate.leases[after - 1 : after + 1]


@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["the cache", ["the cache", "a"]])
def test_a_client_that_goes_away_frees_its_blocks_within_a_step(llm, num_parts, stream, prompt):
    gates: list[StepGate] = []

    @in_loop
    async def test() -> None:
        limits = ServerLimits(max_requests=2)
        async with served(llm, lambda e: gates.append(StepGate(e)), limits=limits) as server:
            answer = Answer()
            fields: dict[str, Any] = {
                "prompt": prompt,
                "stream": stream,
                "max_tokens": 64,
                "ignore_eos": True,
            }
            asked = asyncio.create_task(server.post(COMPLETIONS, answer=answer, **fields))
            leases = gates[0].leases
            await gates[0].step_until(lambda: leases and leases[-1])
            if stream:
                await gates[0].step_until(lambda: answer.parts >= num_parts)
            answer.gone.set()
            await asked
            assert not answer.is_complete
            await check_blocks_are_free_within_a_step(server, gates[0])
            again = await server.post(COMPLETIONS, prompt=["a", "b"])  # nothing is counted any more
            assert again.status == 200

    test()


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for nobody: its time jumps to the next timer."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            self._now_s += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s


@settings(max_examples=60)
@given(
    parts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), min_size=1, max_size=8),
    is_raising=st.booleans(),
)
def test_a_part_may_wait_for_its_client_and_no_longer(parts, is_raising):
    """Parts come after gaps of any length. The one that waits too long ends at its deadline."""
    stall_s = 10.5
    sent: list[Any] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(message["waits_s"])
        sent.append(message)

    async def main() -> None:
        loop, expected_s = asyncio.get_running_loop(), 0.0
        try:
            async with cut_off_stalls(send, stall_s) as send_part:
                for gap_s, waits_s in parts:
                    await asyncio.sleep(gap_s)
                    expected_s += gap_s + min(waits_s, stall_s)
                    await send_part({"waits_s": waits_s})
                if is_raising:
                    raise TimeoutError("of another")
        except ClientDisconnect:
            assert max(waits_s for _, waits_s in parts) > stall_s
            assert parts[len(sent)][1] > stall_s
        except TimeoutError as error:
            assert is_raising and str(error) == "of another"
        else:
            assert not is_raising and max(waits_s for _, waits_s in parts) < stall_s
        assert loop.time() == pytest.approx(expected_s)
        assert all(waits_s < stall_s for _, waits_s in parts[: len(sent)])

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


def test_a_client_that_does_not_read_is_cut_off(llm):
    gates: list[Gate] = []

    @in_loop
    async def test() -> None:
        limits = ServerLimits(stall_s=0.01)
        async with served(llm, lambda e: gates.append(Gate(e)), limits=limits) as server:
            answer = Answer()
            answer.reads.clear()
            gates[0].allow(4)
            fields: dict[str, Any] = {"stream": True, "max_tokens": 100, "ignore_eos": True}
            await server.post(COMPLETIONS, prompt="the", answer=answer, **fields)
            assert (answer.status, answer.is_complete) == (200, False)
            await check_blocks_are_free_within_a_step(server, gates[0])

    test()


def test_a_client_that_goes_away_before_its_body(llm):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            for path in (COMPLETIONS, "/tokenize"):
                answer = Answer()
                answer.gone.set()
                await server.ask("POST", path, [b"{"], stalls=True, answer=answer)

    test()


# Failures


def test_a_failure_of_the_engine(llm):
    @in_loop
    async def test() -> None:
        sizes: dict[str, Any] = {"token_budget": 32, "max_running": 4}
        engine = fresh(llm.engine, **sizes)
        gate, answer = StepGate(engine), Answer()
        step = engine.step

        def failing() -> Any:
            if answer.parts:
                raise OSError("a secret of the inside")
            return step()

        engine.step = failing  # type: ignore[method-assign]
        serving = AsyncEngine(engine, llm.tokenizer)
        server = Served(engine, serving)
        fields: dict[str, Any] = {"stream": True, "max_tokens": 64, "ignore_eos": True}
        asked = server.post(COMPLETIONS, prompt="the", answer=answer, **fields)
        await asyncio.gather(asked, gate.step_until(lambda: answer.is_complete))
        failed = {
            "error": {
                "message": "the engine has failed",
                "type": "server_error",
                "param": None,
                "code": "engine_failed",
            }
        }
        assert answer.status == 200 and answer.events()[-1] == failed
        after = await server.post(COMPLETIONS, prompt="the")
        assert (after.status, after.json()) == (500, failed)
        health = await server.ask("GET", "/health")
        assert (health.status, health.json()) == (503, failed)
        await serving.close(drain=False)

    test()


def test_a_bug_says_nothing_of_the_inside(llm, monkeypatch):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            answer = Answer()
            monkeypatch.setattr(server.serving, "generate", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):  # for the log
                await server.post(COMPLETIONS, prompt="the", answer=answer)
        assert answer.status == 500
        assert answer.json()["error"]["message"] == "the server has failed; its log has the cause"

    test()


def test_a_closed_engine(llm):
    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            await server.serving.close()
            for answer in (
                await server.post(COMPLETIONS, prompt="the"),
                await server.ask("GET", "/health"),
            ):
                assert (answer.status, answer.json()["error"]["code"]) == (503, "shutting_down")

    test()


# A real server, and the real client


@asynccontextmanager
async def listening(
    server: Served, **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, asyncio.Task[bool], int]]:
    """Serve on a free port of loopback; yield a client, the server's task, and the port.

    Nobody else gets the port when the server has stopped listening.
    """
    ready, options = asyncio.Event(), {"limits": PATIENT, **options}
    with reserved_port() as port:
        listener = bind("127.0.0.1", port)
        running = asyncio.create_task(
            serve(server.app, server.serving, listener, on_ready=ready.set, **options)
        )
        await ready.wait()
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key="sesame", max_retries=0, timeout=600.0
        ) as client:
            try:
                yield client, running, port
            finally:
                if not running.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert await running


def test_the_client_of_openai(llm):
    params = GenerationParams(24)
    [completed] = llm.generate(PROMPTS[1], params)
    [answered] = llm.chat(MESSAGES, params)
    messages: Any = MESSAGES

    @in_loop
    async def test() -> None:
        async with served(llm, api_key="sesame") as server, listening(server) as (client, *_):
            assert [each.id async for each in client.models.list()] == ["tiny"]
            whole = await client.completions.create(model="tiny", prompt=PROMPTS[1], **GREEDY)
            assert whole.choices[0].text == completed.text
            assert whole.choices[0].finish_reason == completed.finish_reason
            chat = await client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
            assert chat.choices[0].message.content == answered.text
            assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
            assert chat.usage.prompt_tokens_details.cached_tokens == 0
            text = ""
            stream = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
                **GREEDY,
            )
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert text == answered.text
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens == len(answered.token_ids)
            # An answer goes back as it came.
            follow_up: Any = [*MESSAGES, chat.choices[0].message, MESSAGES[1]]
            again = await client.chat.completions.create(
                model="tiny", messages=follow_up, max_completion_tokens=2
            )
            assert again.usage is not None and again.usage.prompt_tokens_details is not None
            assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(model="other", prompt="a")
            several = await client.completions.create(
                model="tiny", prompt=PROMPTS[1], n=2, **GREEDY
            )
            assert [choice.text for choice in several.choices] == [completed.text] * 2
            with pytest.raises(openai.BadRequestError, match="best_of is not supported: got 2"):
                await client.completions.create(model="tiny", prompt="a", best_of=2)
            wrong = client.with_options(api_key="wrong")
            with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
                await wrong.completions.create(model="tiny", prompt="a")

    test()


def test_a_connection_that_closes_frees_its_blocks_within_a_step(llm):
    gates: list[Gate] = []

    @in_loop
    async def test() -> None:
        async with served(llm, lambda e: gates.append(Gate(e))) as server:
            app, has_returned = server.app, asyncio.Event()

            async def watched(scope: Any, receive: Any, send: Any) -> None:
                await app(scope, receive, send)
                has_returned.set()

            server.app = watched  # type: ignore[assignment]
            async with listening(server) as (client, *_):
                gates[0].allow(3)
                stream = await client.completions.create(
                    model="tiny", prompt="the", max_tokens=100, stream=True, temperature=0
                )
                await anext(aiter(stream))
                await stream.close()
                await has_returned.wait()
                await check_blocks_are_free_within_a_step(server, gates[0])

    test()


def test_a_signal_drains_and_closes(llm):
    gates: list[Gate] = []
    [expected] = llm.generate("the", GenerationParams(24))

    @in_loop
    async def test() -> None:
        async with (
            served(llm, lambda e: gates.append(Gate(e))) as server,
            listening(server, drain_timeout_s=600.0) as (client, running, port),
        ):
            gates[0].allow(3)
            stream = await client.completions.create(
                model="tiny", prompt="the", stream=True, **GREEDY
            )
            chunks = aiter(stream)
            text = (await anext(chunks)).choices[0].text
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await writer.wait_closed()
                except ConnectionError:  # refused, or reset if it was not accepted in time
                    break
            assert not running.done()
            gates[0].open()
            async for chunk in chunks:
                text += chunk.choices[0].text
            assert text == expected.text
            assert await running
            with pytest.raises(EngineClosedError):
                server.serving.generate("the")

    test()


def test_requests_that_do_not_end_in_time_are_aborted(llm):
    gates: list[Gate] = []

    @in_loop
    async def test() -> None:
        async with (
            served(llm, lambda e: gates.append(Gate(e))) as server,
            listening(server, drain_timeout_s=0.0) as (client, running, _),
        ):
            gates[0].allow(3)
            stream = await client.completions.create(
                model="tiny",
                prompt="the",
                max_tokens=100,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await anext(aiter(stream))
            os.kill(os.getpid(), signal.SIGTERM)
            while not server.serving._thread._refusal:
                await asyncio.sleep(0)
            gates[0].open()
            assert await running
            await stream.close()

    test()
