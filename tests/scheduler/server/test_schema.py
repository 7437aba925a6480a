"""Fields of requests: what is refused, and what the others become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.scheduler.request import MAX_STOP_TOKEN_IDS
from radixkv.scheduler.server import schema
from radixkv.scheduler.server.errors import ApiError
from radixkv.scheduler.server.schema import ChatBody, CompletionBody, GenerationBody, parse
from radixkv.scheduler.text import Guided

CHAT = {"model": "m", "messages": []}
COMPLETION = {"model": "m", "prompt": "a"}
ADJUSTMENTS = {
    "min_p": 0.5,
    "repetition_penalty": 2.0,
    "presence_penalty": -1.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
texts = st.text(max_size=20)


def refusal(body: GenerationBody) -> ApiError:
    with pytest.raises(ApiError) as refused:
        body.check()
    assert refused.value.status == 400
    return refused.value


def of(fields: dict[str, Any]) -> GenerationBody:
    kind = CompletionBody if "prompt" in fields else ChatBody
    return parse(json.dumps(fields).encode(), kind)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (base, name)
        for base, kind in ((CHAT, ChatBody), (COMPLETION, CompletionBody))
        for name in schema._UNSUPPORTED
        if name in kind.__struct_fields__
    ],
)
def test_what_is_not_supported_passes_only_if_it_asks_for_nothing(
    base: dict[str, Any], name: str
) -> None:
    neutral = schema._UNSUPPORTED[name]
    for value in (None, *neutral):
        of({**base, name: value}).check()
    for value in ("x", [1], {"a": 1}, 7, True, False, 0, 1):
        is_neutral = any(value == each and type(value) is type(each) for each in neutral)
        if not is_neutral:
            refused = refusal(of({**base, name: value}))
            assert (refused.param, refused.code) == (name, "unsupported_parameter")
            assert refused.message == f"{name} is not supported: got " + json.dumps(
                value, separators=(",", ":")
            )


@pytest.mark.parametrize("length", [77, 78, 79, 200])
def test_a_value_that_is_refused_is_told_in_80_characters(length: int) -> None:
    message = refusal(of({**COMPLETION, "suffix": "x" * length})).message
    shown = message.removeprefix("suffix is not supported: got ")
    assert shown == (f'"{"x" * length}"' if length <= 78 else f'"{"x" * 76}...')


@pytest.mark.parametrize("base", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [None, False, True])
def test_what_needs_and_what_excludes_a_stream(base: dict[str, Any], stream: bool | None) -> None:
    with_options = of({**base, "stream": stream, "stream_options": {}})
    with_logprobs = of({**base, "stream": stream, "prompt_logprobs": 0})
    fine, wrong, message = (
        (with_options, with_logprobs, "prompt_logprobs excludes stream")
        if stream
        else (with_logprobs, with_options, "stream_options needs stream")
    )
    fine.check()
    refused = refusal(wrong)
    assert (refused.message, refused.param) == (message, message.split()[0])


@given(st.sets(st.sampled_from(sorted(ADJUSTMENTS))))
def test_adjustments_are_those_that_are_given(names: set[str]) -> None:
    given_ones = {name: ADJUSTMENTS[name] for name in names}
    assert of({**COMPLETION, **given_ones, "temperature": 1.0}).adjustments() == given_ones


@settings(max_examples=30)
@given(
    st.lists(texts | st.lists(texts | st.none(), max_size=3), max_size=4),
    texts,
    st.none() | texts,
)
def test_every_text_and_message_costs_what_it_is_long_and_some_more(
    contents: list[Any], role: str, name: str | None
) -> None:
    def cost(text: str | None) -> int:
        return 64 + len(text or "")

    messages = [
        {
            "role": role,
            "name": name,
            "content": content
            if isinstance(content, str)
            else [{"type": "text", "text": part} for part in content],
        }
        for content in contents
    ]
    body = parse(json.dumps({**CHAT, "messages": messages}).encode(), ChatBody)
    total = sum(
        cost(each) if isinstance(each, str) else 64 + sum(map(cost, each)) for each in contents
    )
    total += len(contents) * (len(role) + len(name or ""))
    assert body.num_chars() == total + len("{}")
    given_one = parse(json.dumps({**CHAT, "chat_template_kwargs": {"a": 1}}).encode(), ChatBody)
    assert given_one.num_chars() == len('{"a":1}')
    strings = [each for each in contents if isinstance(each, str)]
    completion = parse(json.dumps({"model": "m", "prompt": [*strings, 5]}).encode(), CompletionBody)
    assert completion.num_chars() == sum(map(cost, strings))
    one = parse(json.dumps({"model": "m", "prompt": "".join(strings)}).encode(), CompletionBody)
    assert one.num_chars() == cost("".join(strings))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], "prompt is empty"),
        *(
            (mixed, "prompt has texts, token ids or lists side by side")
            for mixed in (["a", 1], [1, [1]], ["a", [1]])
        ),
    ],
)
def test_prompts_are_of_one_kind(prompt: Any, prompts: Any) -> None:
    body = CompletionBody(model="m", prompt=prompt)
    if isinstance(prompts, list):
        assert body.prompts() == prompts
    else:
        with pytest.raises(ApiError) as refused:
            body.prompts()
        found = refused.value
        assert (found.status, found.message, found.param) == (400, prompts, "prompt")


@pytest.mark.parametrize("logprobs", [None, False, True])
@pytest.mark.parametrize("top", [None, 0, 1, 20])
def test_top_logprobs_need_logprobs(logprobs: bool | None, top: int | None) -> None:
    body = ChatBody(model="m", messages=[], logprobs=logprobs, top_logprobs=top)
    if top and not logprobs:
        with pytest.raises(ApiError, match=r"^top_logprobs needs logprobs$") as refused:
            body.num_logprobs()
        assert (refused.value.status, refused.value.param) == (400, "top_logprobs")
    else:
        assert body.num_logprobs() == ((top or 0) if logprobs else None)
    assert CompletionBody(model="m", prompt="", logprobs=top).num_logprobs() == top


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "m"}, "prompt"),
        ({**COMPLETION, "n": "b"}, "n"),
        ({**COMPLETION, "stop": [1]}, "stop"),
        ({**COMPLETION, "stream_options": {"x": 1}}, "x"),
        ([], None),
    ],
)
def test_a_refusal_names_the_field(fields: Any, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parse(json.dumps(fields).encode(), CompletionBody)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("more", [0, 1])
def test_an_output_ends_with_one_of_so_many_tokens(more: int) -> None:
    ids = list(range(MAX_STOP_TOKEN_IDS + more))
    fields = {**COMPLETION, "stop_token_ids": ids}
    if not more:
        assert of(fields).stop_token_ids == ids
        return
    with pytest.raises(ApiError) as refused:
        of(fields)
    message = "Expected `array` of length <= 1024 - at `$.stop_token_ids`"
    assert (refused.value.message, refused.value.param) == (message, "stop_token_ids")


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_a_refusal_has_at_most_300_characters_of_the_clients(more: int) -> None:
    name = "x" * (300 - len("Object contains unknown field ``") + more)
    with pytest.raises(ApiError) as refused:
        parse(json.dumps({**COMPLETION, name: 1}).encode(), CompletionBody)
    whole = f"Object contains unknown field `{name}`"
    assert refused.value.message == (f"{whole[:300]}..." if more else whole)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"model": ', "Input data was truncated"),
        (b'{"model": "\xff"}', ""),
        (b'{"metadata": ' + b'{"a": ' * 100_000, "nested too deeply"),
    ],
    ids=["cut off", "no UTF-8", "nested"],
)
def test_what_is_no_json_is_told_why(body: bytes, problem: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(body, CompletionBody)
    found = refused.value
    assert (found.status, found.param) == (400, None)
    assert found.message.startswith(f"the body is not JSON: {problem}")


@given(st.lists(st.tuples(st.none() | texts, texts | st.lists(texts, max_size=3)), max_size=3))
def test_parts_of_a_message_become_lines(drawn: list[tuple[str | None, str | list[str]]]) -> None:
    messages = [
        schema.Message(
            role="user",
            name=name,
            content=content
            if isinstance(content, str)
            else [schema.TextPart("text", part) for part in content],
        )
        for name, content in drawn
    ]
    assert schema.conversation(messages) == [
        {
            "role": "user",
            "content": content if isinstance(content, str) else "\n".join(content),
            **({} if name is None else {"name": name}),
        }
        for name, content in drawn
    ]


@pytest.mark.parametrize("part", [("image_url", None), ("image_url", "a"), ("text", None)])
def test_only_text_may_be_part_of_a_message(part: tuple[str, str | None]) -> None:
    parts = [schema.TextPart("text", "a"), schema.TextPart(*part)]
    with pytest.raises(ApiError) as refused:
        schema.conversation([schema.Message(role="user", content=parts)])
    found = refused.value
    assert (found.status, found.param, found.code) == (400, "messages", "unsupported_parameter")
    assert found.message == f'content of type "{part[0]}" is not supported, only text'


def test_variables_of_the_template_are_the_callers() -> None:
    assert schema.template_variables(None) == {}
    assert schema.template_variables({"a": 1, "name": None}) == {"a": 1, "name": None}
    for name in ("self", "messages"):
        with pytest.raises(ApiError, match=f"^chat_template_kwargs cannot set {name}$") as refused:
            schema.template_variables({"a": 1, name: 1})
        assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured_outputs", {"regex": "a"}),
        ("structured_outputs", {"choice": ["a", "b"]}),
        ("structured_outputs", {"json": {"a": ["b"]}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    ],
)
def test_what_the_text_must_be_has_so_many_bytes(name: str, value: Any, more: int) -> None:
    rest = 2**16 - len(json.dumps(value, separators=(",", ":"))) + more
    text = json.dumps(value).replace('"a"', f'"{"a" * (1 + rest)}"')
    body = of({**CHAT, name: json.loads(text)})
    if not more:
        assert body.guided()
        return
    with pytest.raises(ApiError) as refused:
        body.guided()
    message = f"{name} has 65537 bytes of JSON: the server takes at most 65536"
    assert (refused.value.status, refused.value.message) == (400, message)
    assert refused.value.param == name


@pytest.mark.parametrize("more", [0, 1])
def test_a_grammar_has_so_many_characters(more: int) -> None:
    fields = {**CHAT, "structured_outputs": {"grammar": "a" * (2**13 + more)}}
    if not more:
        assert of(fields).guided()
        return
    with pytest.raises(ApiError) as refused:
        of(fields)
    assert refused.value.message == (
        "Expected `str` of length <= 8192 - at `$.structured_outputs.grammar`"
    )


JSON_SCHEMA = {"name": "a", "schema": {"type": "string"}}
GUIDED: list[tuple[dict[str, Any] | None, dict[str, Any] | None, Any]] = [
    (None, None, None),
    ({"type": "text"}, None, None),
    ({"type": "json_object"}, None, ({"type": "object"}, None, None, None)),
    (
        {"type": "json_schema", "json_schema": JSON_SCHEMA},
        None,
        (JSON_SCHEMA["schema"], *[None] * 3),
    ),
    ({"type": "text"}, {"regex": "a"}, (None, "a", None, None)),
    (None, {"json": {}}, ({}, None, None, None)),
    (None, {"choice": ["a"]}, (None, None, ["a"], None)),
    (None, {"grammar": "g"}, (None, None, None, "g")),
    (None, {"json_object": True}, ({"type": "object"}, None, None, None)),
    (
        None,
        {"json_object": True, "json": {}},
        "structured_outputs takes one of json and json_object",
    ),
    ({"type": "json_object"}, {"regex": "a"}, "response_format excludes structured_outputs"),
    ({"type": "json_schema"}, None, "response_format of type json_schema needs json_schema"),
    (
        {"type": "text", "json_schema": JSON_SCHEMA},
        {"regex": "a"},
        "response_format of type text excludes json_schema",
    ),
    (
        {"type": "json_object", "json_schema": JSON_SCHEMA},
        None,
        "response_format of type json_object excludes json_schema",
    ),
]


@pytest.mark.parametrize(("formatted", "given_one", "expected"), GUIDED)
def test_what_the_text_must_be(formatted: Any, given_one: Any, expected: Any) -> None:
    body = of({**CHAT, "response_format": formatted, "structured_outputs": given_one})
    if isinstance(expected, str):
        with pytest.raises(ApiError) as refused:
            body.guided()
        found = refused.value
        assert (found.status, found.message, found.param) == (400, expected, expected.split()[0])
        return
    assert body.guided() == (None if expected is None else Guided(*expected))
