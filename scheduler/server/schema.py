"""Bodies of requests: their fields, their types, and what of OpenAI's interface is not supported.

A field that is not here is refused by name, and so is one that asks for what the server cannot do:
nothing is ignored in silence.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..request import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from ..text import Guided
from .errors import ApiError

T = TypeVar("T")

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]

StopString = Annotated[str, Meta(max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
"""All are searched at each token, on the event loop: a client must not make that slow."""

StopTokens = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
"""Each request has a copy, and with ``min_tokens`` a mask."""

_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "store": (False,),
}
"""Fields whose features are not there, each with the values besides null that do without."""


_MIN_CHARS: Final = 64
"""What a text or message without characters costs, in the time of some."""

MAX_GUIDED_BYTES: Final = 64 << 10
"""Limit of what an output must be, as JSON: a second or so of a thread compiles that much."""

GrammarText = Annotated[str, Meta(max_length=8 << 10)]
"""Terminals of other terminals cost the square of their number, also at a step."""

_ADJUSTMENTS: Final = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)

Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream.

    Attributes:
        include_usage: whether a last chunk has the usage.
        continuous_usage_stats: whether every chunk has the usage so far, as in vLLM.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A schema of `response_format`; `strict` is always so."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the text must be, as in OpenAI's interface."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the text must be, as in vLLM's; one field is given. See `Guided`."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: GrammarText | None = None
    json_object: Literal[True] | None = None


class GenerationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that completions and chats have in common; see `_UNSUPPORTED` for those of type Any.

    Attributes:
        model: name of the model.
        max_tokens: limit of the output in tokens.
        temperature, top_p, top_k: see `SamplingParams`.
        seed: seed of the draws, of which the last 32 bits count; null or -1 draws one, as in vLLM.
        min_p, repetition_penalty, presence_penalty, frequency_penalty, min_tokens: see
            `SamplingParams`.
        prompt_logprobs: see `GenerationParams`.
        response_format, structured_outputs: what the text must be.
        stop: strings that end the output, and are not in it.
        stop_token_ids: tokens that end the output.
        ignore_eos: whether to continue after the model's end tokens.
        n: number of choices for each prompt, at most 128.
        stream, stream_options: whether the output comes as server-sent events.
        return_token_ids: whether the response has the tokens of prompt and output.
        user, metadata: notes of the caller, without effect.
    """

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logit_bias: Any = None
    store: Any = None

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            ApiError: with the name of the field.
        """
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and not any(_is_same(value, each) for each in neutral):
                raise ApiError(
                    400,
                    f"{name} is not supported: got {_short(value)}",
                    param=name,
                    code="unsupported_parameter",
                )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs excludes stream", param="prompt_logprobs")

    def adjustments(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that are given, besides those of every request."""
        given = {name: getattr(self, name) for name in _ADJUSTMENTS}
        return {name: value for name, value in given.items() if value is not None}

    def guided(self) -> Guided | None:
        """Return what the text must be, or None.

        Raises:
            ApiError: if there are two answers, a schema is missing, or it is too large.
            RequestError: see `Guided`.
        """
        formatted, given = self.response_format, self.structured_outputs
        for name, value in (("response_format", formatted), ("structured_outputs", given)):
            size = 0 if value is None else len(msgspec.json.encode(value))
            if size > MAX_GUIDED_BYTES:
                raise ApiError(
                    400,
                    f"{name} has {size} bytes of JSON: the server takes at most {MAX_GUIDED_BYTES}",
                    param=name,
                )
        if formatted is not None and formatted.type != "json_schema" and formatted.json_schema:
            raise ApiError(
                400,
                f"response_format of type {formatted.type} excludes json_schema",
                param="response_format",
            )
        if formatted is None or formatted.type == "text":
            if given is None:
                return None
            if given.json_object and given.json is not None:
                raise ApiError(
                    400,
                    "structured_outputs takes one of json and json_object",
                    param="structured_outputs",
                )
            schema = {"type": "object"} if given.json_object else given.json
            return Guided(schema, given.regex, given.choice, given.grammar)
        if given is not None:
            raise ApiError(
                400, "response_format excludes structured_outputs", param="response_format"
            )
        if formatted.type == "json_object":
            return Guided({"type": "object"})
        if formatted.json_schema is None:
            raise ApiError(
                400,
                "response_format of type json_schema needs json_schema",
                param="response_format",
            )
        return Guided(formatted.json_schema.schema)


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions.

    Attributes:
        prompt: a text, a list of texts, token ids, or a list of lists of token ids.
        logprobs: number of most likely tokens to report for each token of the output.
    """

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: NumLogprobs | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    def num_logprobs(self) -> int | None:
        """Return `GenerationParams.logprobs`."""
        return self.logprobs

    def num_chars(self) -> int:
        """Return how much text there is to make tokens of."""
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return sum(_MIN_CHARS + len(text) for text in texts if isinstance(text, str))

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, at least one.

        Raises:
            ApiError: if there is none, or the list has prompts of several kinds.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(each) for each in self.prompt}
        if len(kinds) != 1:
            problem = "is empty" if not kinds else "has texts, token ids or lists side by side"
            raise ApiError(400, f"prompt {problem}", param="prompt")
        prompts: list[Any] = self.prompt
        return [prompts] if kinds == {int} else prompts


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a conversation; the fields of type None are those of answers of other models."""

    role: str
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[None] | None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions.

    Attributes:
        messages: the conversation.
        max_completion_tokens: limit of the output in tokens; before `max_tokens`.
        chat_template_kwargs: variables of the chat template, such as ``enable_thinking``.
        logprobs, top_logprobs: whether to report the log probabilities of the output, and of how
            many most likely tokens.
    """

    messages: list[Message]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None

    def num_chars(self) -> int:
        """Return how much text there is to make tokens of."""
        variables = msgspec.json.encode(self.chat_template_kwargs or {})
        return sum(map(_num_message_chars, self.messages)) + len(variables)

    def num_logprobs(self) -> int | None:
        """Return `GenerationParams.logprobs`.

        Raises:
            ApiError: for most likely tokens without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def parse(body: bytes, kind: type[T]) -> T:
    """Return the fields of a body.

    Raises:
        ApiError: if it is no JSON, or a field is missing, unknown or of the wrong type.
    """
    is_collecting = gc.isenabled()
    gc.disable()  # it would visit a million small lists again and again
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if len(text) > 300:  # names a field of the client, of any length
            text = f"{text[:300]}..."
        found = re.search(r"(?: - at `\$\.(\w+)|field `(\w+)`)", text)
        param = found and (found[1] or found[2])
        raise ApiError(400, text, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    except RecursionError:  # its text differs by Python's version
        raise ApiError(400, "the body is not JSON: nested too deeply") from None
    finally:
        if is_collecting:
            gc.enable()


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them; parts of text become lines.

    Raises:
        ApiError: for a part that is not text.
    """
    result = []
    for message in messages:
        content = message.content
        if not isinstance(content, str):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise ApiError(
                        400,
                        f"content of type {_short(part.type)} is not supported, only text",
                        param="messages",
                        code="unsupported_parameter",
                    )
            content = "\n".join(part.text or "" for part in content)
        named = {} if message.name is None else {"name": message.name}
        result.append({"role": message.role, "content": content, **named})
    return result


def template_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the variables of the chat template.

    Raises:
        ApiError: for a variable that is not the caller's.
    """
    variables = variables or {}
    for name in ("self", "messages"):
        if name in variables:
            raise ApiError(
                400, f"chat_template_kwargs cannot set {name}", param="chat_template_kwargs"
            )
    return variables


def _num_message_chars(message: Message) -> int:
    num_chars = _MIN_CHARS + len(message.role) + len(message.name or "")
    if isinstance(message.content, str):
        return num_chars + len(message.content)
    return num_chars + sum(_MIN_CHARS + len(part.text or "") for part in message.content)


def _is_same(value: object, neutral: object) -> bool:
    """Compare as JSON does, where 0 is 0.0 and not false."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
