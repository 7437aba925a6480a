"""The endpoints that generate: from the body of a request to its last byte."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from ...kvcache import RadixKVError
from ..request import SamplingParams
from ..serving import AsyncEngine, GenerationOutput, GenerationParams
from ..text import TextTokenizer
from .errors import ApiError, as_api_error
from .limits import BodyReader, RequestCount, ServerLimits, cut_off_stalls
from .replies import ChatReply, CompletionReply, Reply, TokenNames, usage
from .schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    conversation,
    parse,
    template_variables,
)
from .streams import merge

_DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat may use all that the engine can."""

_NUM_SHORT_CHARS: Final = 2048
"""Characters of prompts that the event loop makes tokens of itself: some 0.1 ms of it."""


@dataclass(frozen=True)
class ServedModel:
    """A model that is served.

    Attributes:
        name: its name for clients.
        engine: the engine.
        max_model_len: limit of prompt and output together, in tokens.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    engine: AsyncEngine
    max_model_len: int
    created: int

    def check_name(self, name: str | None) -> None:
        """Refuse another name.

        Raises:
            ApiError: with both names.
        """
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer.

        Raises:
            ApiError: if there is none.
        """
        if self.engine.tokenizer is None:
            raise ApiError(400, f"the model {self.name!r} has no tokenizer: send token ids")
        return self.engine.tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            ApiError: if there is no tokenizer, or the text is longer than any that fits the model.
        """
        tokenizer = self.tokenizer()
        self._check_chars(tokenizer, len(text), "prompt")
        return tokenizer.encode(text)

    def encode_chat(
        self, messages: list[Message], variables: Mapping[str, Any] | None
    ) -> list[int]:
        """Return the tokens of a conversation.

        Raises:
            ApiError: see `encode`; also for messages and variables that are not supported.
        """
        tokenizer, turns = self.tokenizer(), conversation(messages)
        # A template may write anything of a message, and of the variables.
        text = tokenizer.render_chat(turns, **template_variables(variables))
        self._check_chars(tokenizer, len(text), "messages")
        return tokenizer.encode(text, add_special_tokens=False)

    def _check_chars(self, tokenizer: TextTokenizer, num_chars: int, param: str) -> None:
        """Refuse a text before the work of making tokens of it."""
        if num_chars > self.max_model_len * tokenizer.max_token_chars:
            length = f"the prompt has {num_chars} characters"
            if param == "messages":
                length = f"the messages have {num_chars} characters with the chat template"
            raise ApiError(
                400,
                f"{length}: the model takes at most {self.max_model_len} tokens, of up to "
                f"{tokenizer.max_token_chars} characters each",
                param=param,
                code="context_length_exceeded",
            )


class GenerationEndpoint:
    """An ASGI application: /v1/completions or /v1/chat/completions.

    A response begins with the first output, so that whatever the engine refuses has its status. A
    client that goes away cancels its request, whose blocks are then free within a step.
    """

    def __init__(
        self,
        kind: type[CompletionBody] | type[ChatBody],
        model: ServedModel,
        limits: ServerLimits,
        count: RequestCount,
        bodies: BodyReader,
    ) -> None:
        self._kind = kind
        self._model = model
        self._limits = limits
        self._count = count
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        try:
            body = parse(await self._bodies.read(Request(scope, receive)), self._kind)
            body.check()
            self._model.check_name(body.model)
            num_prompts = len(body.prompts()) if isinstance(body, CompletionBody) else 1
            with self._count.admit(num_prompts, body.n or 1):
                await _until_disconnect(receive, self._respond(body, send))
        except ClientDisconnect:
            pass
        except RadixKVError as error:
            raise as_api_error(error) from error

    async def _respond(self, body: CompletionBody | ChatBody, send: Send) -> None:
        # Tokenizers work without the GIL; a long prompt must not hold up the other streams. A short
        # one takes less time than handing it to another thread.
        if body.num_chars() <= _NUM_SHORT_CHARS:
            prompts = self._encode(body)
        else:
            prompts = await asyncio.to_thread(self._encode, body)
        num_records = 0
        if body.prompt_logprobs is not None:
            num_records = sum(map(len, prompts)) * (body.prompt_logprobs + 1)
        with self._count.admit_records(num_records):
            await self._generate(body, prompts, send)

    async def _generate(
        self, body: CompletionBody | ChatBody, prompts: list[list[int]], send: Send
    ) -> None:
        params = [self._params(body, len(prompt)) for prompt in prompts]
        engine, guided = self._model.engine, body.guided()
        guide = None if guided is None else await asyncio.to_thread(engine.make_guide, guided)
        num_samples = body.n or 1
        kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
        request_id = f"{kind}-{secrets.token_hex(16)}"
        head = {"id": request_id, "created": int(time.time()), "model": self._model.name}
        has_token_ids = bool(body.return_token_ids)
        names = TokenNames(engine.tokenizer)
        reply: Reply
        if isinstance(body, ChatBody):
            reply = ChatReply(
                head, prompts[0], names, has_token_ids=has_token_ids, num_choices=num_samples
            )
        else:
            by_choice = [prompt for prompt in prompts for _ in range(num_samples)]
            reply = CompletionReply(head, by_choice, names, has_token_ids=has_token_ids)
        streams = [
            engine.generate(prompt, each, request_id=f"{request_id}-{index}", guide=guide)
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        async with aclosing(merge(streams, num_samples)) as outputs:
            if body.stream:
                events = self._events(body, reply, outputs, len(prompts) * num_samples)
                await self._send(send, b"text/event-stream; charset=utf-8", events)
                return
            last = {index: output async for index, output in outputs}
        response = reply.whole([last[index] for index in range(len(prompts) * num_samples)])
        response["usage"] = usage(last.values())
        await self._send(send, b"application/json", _one(msgspec.json.encode(response)))

    def _encode(self, body: CompletionBody | ChatBody) -> list[list[int]]:
        if isinstance(body, ChatBody):
            return [self._model.encode_chat(body.messages, body.chat_template_kwargs)]
        return [
            self._model.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]

    def _params(self, body: CompletionBody | ChatBody, num_prompt_tokens: int) -> GenerationParams:
        """Return the parameters of one prompt; defaults are OpenAI's."""
        limit, room = body.max_tokens, self._model.max_model_len - num_prompt_tokens
        if isinstance(body, ChatBody):
            limit = body.max_completion_tokens or limit
        if room < (limit or 1):
            more = "no room for an output" if limit is None else f"{limit} new ones are too many"
            raise ApiError(
                400,
                f"the prompt has {num_prompt_tokens} tokens, and {more}: the model takes at most "
                f"{self._model.max_model_len} together",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code="context_length_exceeded",
            )
        if limit is None:
            is_chat = isinstance(body, ChatBody)
            most = self._model.engine.max_new_tokens if is_chat else _DEFAULT_COMPLETION_TOKENS
            limit = min(room, most)
        return GenerationParams(
            max_tokens=limit,
            sampling=SamplingParams(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=0 if body.top_k in (None, -1) else body.top_k,
                top_p=1.0 if body.top_p is None else body.top_p,
                seed=secrets.randbits(32) if body.seed in (None, -1) else body.seed % 2**32,
                **body.adjustments(),
            ),
            stop=() if body.stop is None else body.stop,
            stop_token_ids=body.stop_token_ids or (),
            ignore_eos=body.ignore_eos,
            n=body.n or 1,
            logprobs=body.num_logprobs(),
            prompt_logprobs=body.prompt_logprobs,
        )

    async def _events(
        self,
        body: GenerationBody,
        reply: Reply,
        outputs: AsyncIterator[tuple[int, GenerationOutput]],
        num_choices: int,
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events, those of an output together."""
        options = body.stream_options
        has_usage = options is not None and options.include_usage
        is_continuous = options is not None and options.continuous_usage_stats
        last: dict[int, GenerationOutput] = {}
        held = b""  # the end of the last choice, which goes out with what follows at once
        num_left = num_choices
        try:
            async for index, output in outputs:
                # The first output is sent even without text, so that the response begins with it.
                is_first = not last
                chunks = reply.opening() if is_first else []
                last[index] = output
                is_empty = not (output.new_text or output.finish_reason)
                if is_first or not is_empty or body.return_token_ids or output.logprobs:
                    chunks.append(reply.chunk(index, output))
                if is_continuous:
                    chunks = [{**chunk, "usage": usage(last.values())} for chunk in chunks]
                elif has_usage:
                    chunks = [{**chunk, "usage": None} for chunk in chunks]
                events = b"".join(map(_event, chunks))
                num_left -= output.finish_reason is not None
                if not num_left:
                    held = events
                elif events:
                    yield events
        except RadixKVError as error:
            if not last:
                raise
            held += _event(as_api_error(error).body())
        else:
            if has_usage:
                held += _event({**reply.last(), "usage": usage(last.values())})
        yield held + b"data: [DONE]\n\n"

    async def _send(self, send: Send, media_type: bytes, parts: AsyncIterator[bytes]) -> None:
        """Send a response; its head goes out with the first part.

        Raises:
            ClientDisconnect: if the client does not read what was sent.
        """
        headers = [(b"content-type", media_type), (b"cache-control", b"no-store")]
        is_started = False
        async with cut_off_stalls(send, self._limits.stall_s) as send_part:
            async for part in parts:
                if not is_started:
                    is_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send_part({"type": "http.response.body", "body": part, "more_body": True})
            await send_part({"type": "http.response.body", "body": b"", "more_body": False})


async def _one(part: bytes) -> AsyncIterator[bytes]:
    yield part


def _event(data: object) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run until the work is done, or the client goes away, which cancels it."""
    tasks: Sequence[asyncio.Task[None]] = (
        asyncio.create_task(work),
        asyncio.create_task(_disconnected(receive)),
    )
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
