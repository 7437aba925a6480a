"""Penalties, log probabilities and guided outputs over HTTP: what `LLM` gives."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from radixkv.scheduler import GenerationOutput, GenerationParams, Guided, SamplingParams
from radixkv.scheduler.text import TextTokenizer

from .test_server import CHAT, COMPLETIONS, MESSAGES, PROMPTS, llm, served, texts

__all__ = ["llm"]  # a fixture

ADJUSTMENTS: dict[str, Any] = {
    "min_p": 0.05,
    "repetition_penalty": 1.4,
    "presence_penalty": -0.5,
    "frequency_penalty": 1,
    "min_tokens": 12,
}


def ask(llm: Any, path: str, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the whole response and the chunks of the stream."""
    what = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPTS[0]}
    fields = {"max_tokens": 12, "temperature": 0, **what, **fields}

    async def main() -> tuple[Any, list[Any]]:
        async with served(llm) as server:
            whole = await server.post(path, **fields)
            assert whole.status == 200, whole.body
            if "prompt_logprobs" in fields:
                return whole.json(), []
            return whole.json(), (await server.post(path, **fields, stream=True)).events()

    return asyncio.run(main())


def expected(llm: Any, path: str, params: GenerationParams) -> GenerationOutput:
    [output] = llm.chat(MESSAGES, params) if path == CHAT else llm.generate(PROMPTS[0], params)
    return output


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_adjustments(llm, path):
    sampling = SamplingParams(temperature=0.9, seed=5, **ADJUSTMENTS)
    output = expected(llm, path, GenerationParams(16, sampling))
    whole, events = ask(llm, path, max_tokens=16, temperature=0.9, seed=5, **ADJUSTMENTS)
    [choice] = whole["choices"]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == output.text
    assert texts(events) == output.text
    plain, _ = ask(llm, path, max_tokens=16, temperature=0.9, seed=5)
    assert plain["choices"] != whole["choices"] and choice["logprobs"] is None


def test_logprobs_of_completions(llm):
    output = expected(llm, COMPLETIONS, GenerationParams(12, logprobs=2, prompt_logprobs=1))
    whole, events = ask(llm, COMPLETIONS, logprobs=2)
    written, parts = whole["choices"][0]["logprobs"], [e["choices"][0]["logprobs"] for e in events]
    for name in ("tokens", "text_offset"):
        assert [each for part in parts for each in part[name]] == written[name]
    streamed = [each for part in parts for each in part["token_logprobs"]]
    assert streamed == pytest.approx(written["token_logprobs"], abs=1e-4)
    names = [llm.tokenizer.name(token) for token in output.token_ids]
    assert written["tokens"] == names
    assert written["text_offset"] == [sum(map(len, names[:i])) for i in range(len(names))]
    assert output.logprobs is not None and output.prompt_logprobs is not None
    exact = [record.logprob for record in output.logprobs]
    assert streamed == pytest.approx(exact, abs=1e-4)
    for top, record in zip(written["top_logprobs"], output.logprobs, strict=True):
        assert set(top) == {llm.tokenizer.name(t) for t in (record.token_id, *dict(record.top))}
    whole, _ = ask(llm, COMPLETIONS, prompt_logprobs=1)
    first, *others = whole["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == output.num_prompt_tokens - 1
    for given, found in zip(others, output.prompt_logprobs[1:], strict=True):
        assert found is not None
        record = found
        entry = given[str(record.token_id)]
        assert (entry["rank"], entry["decoded_token"]) == (
            record.rank,
            llm.tokenizer.name(record.token_id),
        )
        assert entry["logprob"] == pytest.approx(record.logprob, abs=1e-4)
        assert set(given) == {str(token) for token in (record.token_id, *dict(record.top))}


def test_logprobs_of_chats(llm):
    output = expected(llm, CHAT, GenerationParams(12, logprobs=3))
    whole, events = ask(llm, CHAT, logprobs=True, top_logprobs=3)
    content = whole["choices"][0]["logprobs"]["content"]
    parts = [event["choices"][0]["logprobs"] for event in events]
    streamed = [entry for part in parts if part for entry in part["content"]]
    assert [each["token"] for each in streamed] == [each["token"] for each in content]
    assert output.logprobs is not None and len(streamed) == len(output.token_ids)
    for entry, record in zip(content, output.logprobs, strict=True):
        name = llm.tokenizer.name(record.token_id)
        assert (entry["token"], bytes(entry["bytes"]).decode()) == (name, name)
        assert entry["logprob"] == pytest.approx(record.logprob, abs=1e-4)
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == llm.tokenizer.name(record.top[0][0])
    whole, _ = ask(llm, CHAT, logprobs=True)
    assert [entry["top_logprobs"] for entry in whole["choices"][0]["logprobs"]["content"]] == [
        [] for _ in output.token_ids
    ]
    whole, _ = ask(llm, CHAT, prompt_logprobs=0)
    assert len(whole["prompt_logprobs"]) == output.num_prompt_tokens


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 22, 333]}},
    "required": ["size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "guided"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "size", "schema": SCHEMA, "strict": True},
                }
            },
            Guided(json=SCHEMA),
        ),
        ({"response_format": {"type": "json_object"}}, Guided(json={"type": "object"})),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Guided(json=SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Guided(json={"type": "object"})),
        ({"structured_outputs": {"regex": "(ab){2,3}"}}, Guided(regex="(ab){2,3}")),
        ({"structured_outputs": {"choice": ["the keys", "a"]}}, Guided(choice=["the keys", "a"])),
        ({"structured_outputs": {"grammar": 'start: "the" "a"'}}, Guided(grammar='start: "thea"')),
    ],
)
def test_guided_outputs(llm, path, fields, guided):
    output = expected(llm, path, GenerationParams(40, guided=guided))
    whole, events = ask(llm, path, max_tokens=40, **fields)
    [choice] = whole["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert text == texts(events) == output.text
    if guided == Guided(json=SCHEMA):
        assert json.loads(text)["size"] in (1, 22, 333)


def test_a_grammar_is_compiled_once_for_all_prompts_and_not_on_the_event_loop(llm, monkeypatch):
    guide, threads = TextTokenizer.guide, []

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return guide(*given)

    monkeypatch.setattr(TextTokenizer, "guide", watched)
    fields = {"prompt": [PROMPTS[0]] * 3, "n": 2, "temperature": 1, "seed": 3}
    whole, _ = ask(llm, COMPLETIONS, structured_outputs={"regex": "(ab|ba){3}"}, **fields)
    drawn = [choice["text"] for choice in whole["choices"]]
    assert len(drawn) == 6
    assert all(re.fullmatch("(ab|ba){3}", text) for text in drawn)
    assert len(threads) == 2 and threading.main_thread() not in threads  # `ask` asks twice
