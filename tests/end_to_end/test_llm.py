"""`radixkv.LLM`: a checkpoint with a tokenizer, text in and text out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import re
import signal
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import radixkv
from radixkv.kvcache import TokenError
from radixkv.scheduler import (
    AsyncEngine,
    ConfigError,
    EngineClosedError,
    GenerationParams,
    Guided,
    RequestError,
    SamplingParams,
)
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.models import CheckpointFileError, make_tiny_checkpoint
from radixkv.scheduler.models.checkpoint import tensor_shapes
from radixkv.scheduler.models.config import load_config
from radixkv.scheduler.serving import llm as llm_module
from radixkv.scheduler.serving.outputs import Completion
from radixkv.scheduler.text import ChatTemplateError, ModelNotFoundError

from ..profiles import scaled
from ..tokenizers import add_tokenizer, byte_level
from .conftest import assert_nothing_leaked, complete, fresh

SIZES: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 96,
    "max_model_len": 128,
    "max_running": 4,
    "token_budget": 32,
}
PARAMS = GenerationParams(max_tokens=24)
PROMPTS = ["the cache holds", "the cache holds the keys", "naïve 🙂"]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llm")
    make_tiny_checkpoint(directory, "qwen3", overrides={"vocab_size": 340})
    add_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def compiled(model_directory: Path) -> radixkv.LLM:
    return radixkv.LLM(model_directory, **SIZES)


@pytest.fixture
def llm(compiled: radixkv.LLM, monkeypatch: pytest.MonkeyPatch) -> radixkv.LLM:
    monkeypatch.setattr(compiled, "_is_served", False)
    options: dict[str, Any] = {"token_budget": 32, "max_running": 4}
    monkeypatch.setattr(compiled, "engine", fresh(compiled.engine, **options))
    return compiled


def test_text_in_and_text_out(llm):
    tokenizer = byte_level()
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    expected = complete(fresh(llm.engine, token_budget=32, max_running=4), prompts, 24)
    ends = [tokens.index(1) + 1 if 1 in tokens else 24 for tokens in expected]
    outputs = llm.generate(PROMPTS, PARAMS)
    for output, prompt, tokens, end in zip(outputs, prompts, expected, ends, strict=True):
        assert output.token_ids == tuple(tokens[:end])
        assert output.text == output.new_text == tokenizer.decode(tokens[:end])
        assert output.num_prompt_tokens == len(prompt)
        assert output.finish_reason == ("stop" if tokens[end - 1] == 1 else "length")
    assert_nothing_leaked(llm.engine)
    [again] = llm.generate(PROMPTS[1], PARAMS)
    assert (again.text, again.hits.device > 0) == (outputs[1].text, True)
    assert llm.generate([prompts[2]], PARAMS)[0].text == outputs[2].text
    assert llm.generate([], PARAMS) == []


def test_parameters_may_differ_by_prompt(llm):
    draws = GenerationParams(12, SamplingParams(temperature=1.2, seed=5), ignore_eos=True)
    both = llm.generate([PROMPTS[0], PROMPTS[0]], [PARAMS, draws])
    [greedy], [drawn] = llm.generate(PROMPTS[0], PARAMS), llm.generate(PROMPTS[0], draws)
    assert [output.text for output in both] == [greedy.text, drawn.text]
    assert len(drawn.token_ids) == 12
    with pytest.raises(RequestError, match=r"^got params for 1 of 2 prompts$"):
        llm.generate(PROMPTS[:2], [PARAMS])


def test_stop_strings_end_some_of_the_outputs(llm):
    params = GenerationParams(max_tokens=48, ignore_eos=True)
    plain = llm.generate(PROMPTS, params)
    text = plain[0].text
    stop = next(text[i : i + 2] for i in range(8, len(text)) if "�" not in text[i : i + 2])
    stopping = GenerationParams(max_tokens=48, ignore_eos=True, stop=stop)
    first, second, third = llm.generate(PROMPTS, [stopping, params, params])
    assert (first.text, first.finish_reason) == (text[: text.index(stop)], "stop")
    assert first.token_ids == plain[0].token_ids[: len(first.token_ids)]
    assert len(first.token_ids) < 48
    assert [second.text, third.text] == [plain[1].text, plain[2].text]
    assert_nothing_leaked(llm.engine)


def test_samples(llm):
    sampling = SamplingParams(temperature=1.5, seed=5)
    params = GenerationParams(max_tokens=12, sampling=sampling, n=3)
    [output, greedy] = llm.generate(PROMPTS[:2], [params, PARAMS])
    assert greedy.others == () and greedy.samples == (greedy,)
    assert [each.index for each in output.samples] == [0, 1, 2]
    assert len({each.request_id for each in output.samples}) == 1
    assert output.request_id != greedy.request_id
    for index, each in enumerate(output.samples):
        seed = replace(sampling, seed=5 + index)
        [alone] = llm.generate(PROMPTS[0], replace(params, sampling=seed, n=1))
        assert (each.text, each.token_ids) == (alone.text, alone.token_ids)
    assert len({each.text for each in output.samples}) == 3
    assert_nothing_leaked(llm.engine)


def test_chats(llm):
    tokenizer = byte_level()
    chat = [{"role": "user", "content": "the cache"}]
    text = "<s><|user|>the cache</s><|assistant|>"
    [expected] = llm.generate([tokenizer.encode(text).ids], PARAMS)
    [shouted] = llm.generate([tokenizer.encode(f"{text}!").ids], PARAMS)
    assert [output.text for output in llm.chat(chat, PARAMS)] == [expected.text]
    both = llm.chat([chat, chat], PARAMS, shout=True)
    assert [output.text for output in both] == [shouted.text] * 2
    with pytest.raises(ChatTemplateError, match=r"unknown role robot$"):
        llm.chat([{"role": "robot", "content": "x"}], PARAMS)
    with pytest.raises(RequestError, match=r"^messages must be dictionaries with role and content"):
        llm.chat("the cache")
    assert llm.chat([]) == []


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ([400], RequestError, "token 400 at position 0 is outside the vocabulary of 340"),
        ([2] * 120, RequestError, "120 prompt tokens and 24 new ones are more than max_model_len"),
        ([], RequestError, "has an empty prompt"),
        ("", RequestError, "has an empty prompt"),
        (7, TokenError, "tokens must be an int32 array or a list, got 7"),
        ("\ud83d", RequestError, "the prompt is not text: "),
    ],
)
def test_a_bad_prompt_is_refused_with_all_of_its_call(llm, bad, error, text):
    with pytest.raises(error, match=re.escape(text)):
        llm.generate([PROMPTS[0], bad, PROMPTS[1]], PARAMS)
    assert_nothing_leaked(llm.engine)
    assert llm.engine.stats().steps == 0
    assert len(llm.generate(PROMPTS, PARAMS)) == 3


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [(Engine, "add_request", 2), (Engine, "step", 1), (Engine, "step", 6), (Completion, "take", 2)],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_ends_the_requests(llm, monkeypatch, owner, name, number, error):
    method, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*given: Any) -> Any:
        if next(calls) == number:
            raise error
        return method(*given)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(owner, name, interrupted)
        llm.generate(PROMPTS, PARAMS)
    scheduler = llm.engine.scheduler
    assert not (scheduler.waiting or scheduler.running)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert "abort" not in [output.finish_reason for output in outputs]
    assert_nothing_leaked(llm.engine)


def assert_goes_on(llm: radixkv.LLM) -> None:
    """A call was interrupted; the next ones complete all they get, and leave no block in use."""
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS)
        assert "abort" not in [output.finish_reason for output in outputs]
        assert_nothing_leaked(llm.engine)


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("guided", [None, Guided(regex="[a-z ]{30}")])
def test_a_wait_that_is_interrupted_loses_no_step(llm, monkeypatch, number, depth, guided):
    """With any number of steps in flight: the error comes when the tokens are there."""
    options: dict[str, Any] = {"token_budget": 32, "max_running": 4, "depth": depth}
    monkeypatch.setattr(llm, "engine", fresh(llm.engine, **options))
    runner, waits = llm.engine._runner, itertools.count(1)

    class Tokens:
        def __init__(self, tokens: Any) -> None:
            self._tokens = tokens

        def __array__(self, *given: Any, **named: Any) -> Any:
            tokens = self._tokens.__array__(*given, **named)
            if next(waits) == number:
                raise KeyboardInterrupt
            return tokens

    class Results(deque[Any]):
        def append(self, results: Any) -> None:
            super().append(results._replace(tokens=Tokens(results.tokens)))

    runner._results = Results()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [PARAMS, replace(PARAMS, guided=guided), PARAMS])
    if number % 2:
        llm.engine.reset_cache()
    assert_goes_on(llm)


@scaled(30)
@given(number=st.integers(1, 12_000))
def test_a_ctrl_c_at_any_line_ends_the_requests(compiled, number):
    """A signal before the line with a number of all that the library executes in a call."""
    folder, lines = str(Path(str(radixkv.__file__)).parent), itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line" and next(lines) == number:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = fresh(compiled.engine, token_budget=32, max_running=4)
    with patch.object(compiled, "engine", engine):
        try:
            sys.settrace(trace)
            compiled.generate(PROMPTS, PARAMS)
            assert next(lines) <= number, "the ctrl-C is lost"
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, before)
        assert_goes_on(compiled)


def test_serving(llm):
    [expected] = llm.generate(PROMPTS[0], PARAMS)

    async def main() -> None:
        async with llm.serve() as engine:
            text = r"^the engine is served by an AsyncEngine$"
            with pytest.raises(EngineClosedError, match=text):
                llm.generate(PROMPTS[0], PARAMS)
            with pytest.raises(EngineClosedError, match=text):
                llm.serve()
            stream = engine.generate(PROMPTS[0], PARAMS)
            assert "".join([output.new_text async for output in stream]) == expected.text

    asyncio.run(main())


@pytest.mark.parametrize("method", ["generate", "serve"])
def test_an_engine_that_cannot_be_served_stays_the_models(llm, method):
    no_thread = RuntimeError("can't start new thread")
    with (
        patch.object(AsyncEngine, "__init__", side_effect=no_thread),
        pytest.raises(RuntimeError, match=r"^can't start new thread$"),
    ):
        llm.serve()
    if method == "generate":
        assert llm.generate(PROMPTS[0], PARAMS)[0].text
    else:
        assert asyncio.run(llm.serve().close())
    with patch.object(llm.engine, "close") as close:
        llm.close()
    assert close.call_count == (method == "generate"), "nobody closes the engine"


def test_no_output_that_a_request_may_ask_for_waits_for_a_compilation(model_directory):
    llm = radixkv.LLM(model_directory, **SIZES)
    params = [
        GenerationParams(max_tokens=4, sampling=sampling, logprobs=logprobs, guided=guided)
        for sampling, logprobs, guided in (
            (SamplingParams(1.0, min_p=0.1, top_k=4), None, None),
            (SamplingParams(presence_penalty=1.0, min_tokens=2), None, None),
            (SamplingParams(1.0, repetition_penalty=1.5), 2, None),
            (SamplingParams(), 20, Guided(choice=["yes", "no"])),
        )
    ]
    for each in params:
        llm.generate(PROMPTS[:1], each)
    llm.generate(PROMPTS[:1] * len(params), params)
    assert llm.engine.stats().compilations_after_warm_up == 0


def test_sizes_are_said_in_a_line(llm, model_directory, caplog):
    assert repr(llm) == f"LLM({str(model_directory)!r}: {llm.sizes})"
    assert "\n" not in repr(llm)
    assert llm.sizes.num_blocks == 96
    # The sizes are chosen, and said, before the engine checks them.
    with (
        caplog.at_level(logging.INFO, "radixkv.scheduler.serving"),
        pytest.raises(ConfigError, match=r"^max_running must be at most token_budget 32, got 64$"),
    ):
        radixkv.LLM(model_directory, **SIZES | {"max_running": 64})
    [record] = caplog.records
    assert record.getMessage().startswith(f"{model_directory}: ")
    assert " of weights and 96 blocks of 4 tokens take " in record.getMessage()


def test_a_name_on_the_hub_has_its_revision(monkeypatch):
    asked: list[Any] = []

    def locate(*given: Any) -> Path:
        asked.append(given)
        raise ModelNotFoundError("owner/name", "no network")

    monkeypatch.setattr(llm_module, "locate_model", locate)
    with pytest.raises(ModelNotFoundError, match=r"^owner/name: no network$"):
        radixkv.LLM("owner/name", revision="v1")
    assert asked == [("owner/name", "v1")]


def test_the_memory_of_tied_weights_counts_once(llm, model_directory):
    tensors = tensor_shapes(load_config(model_directory)).values()
    assert llm.sizes.used_bytes == 4 * sum(math.prod(shape) for shape in tensors)


def test_an_idle_engine_of_a_group_looks_for_lost_processes(llm, monkeypatch):
    has_looked = threading.Event()

    def step() -> list[Any]:
        has_looked.set()
        return []

    monkeypatch.setattr(llm, "_poll_s", 0.001)
    monkeypatch.setattr(llm.engine, "step", step)
    served = llm.serve()
    assert has_looked.wait(60)
    assert asyncio.run(served.close())


def test_models_that_cannot_be_loaded(tmp_path, model_directory):
    with pytest.raises(ModelNotFoundError, match=r"^\./nothing: no such directory, and not the"):
        radixkv.LLM("./nothing")
    with pytest.raises(CheckpointFileError):
        radixkv.LLM(tmp_path)
    with pytest.raises(ConfigError, match=r"^memory_fraction must be above 0"):
        radixkv.LLM(model_directory, memory_fraction=2.0)
    with pytest.raises(ConfigError, match=r"^max_model_len must be at most the 16 tokens of 4 "):
        radixkv.LLM(model_directory, **SIZES | {"num_blocks": 4})


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(llm, monkeypatch):
    [expected] = llm.generate([[5, 6, 7]], PARAMS)
    monkeypatch.setattr(llm, "tokenizer", None)
    [output] = llm.generate([[5, 6, 7]], PARAMS)
    assert (output.token_ids, output.text) == (expected.token_ids, "")
    with pytest.raises(RequestError, match=r": prompt is text, but the engine has no tokenizer$"):
        llm.generate("the cache")
    with pytest.raises(RequestError, match=r" has no tokenizer, which a chat needs$"):
        llm.chat([{"role": "user", "content": "x"}])


def test_min_tokens_hold_for_stop_strings(llm):
    [plain] = llm.generate(PROMPTS[0], GenerationParams(max_tokens=24, ignore_eos=True))
    stop = next(letter for letter in plain.text[::-1] if letter != "�")
    sampling = SamplingParams(min_tokens=24)
    params = GenerationParams(max_tokens=24, sampling=sampling, stop=stop, ignore_eos=True)
    [output] = llm.generate(PROMPTS[0], params)
    assert (output.text, output.finish_reason) == (plain.text, "length")
    with pytest.raises(RequestError, match=r"^min_tokens must be at most max_tokens 4, got 5$"):
        GenerationParams(max_tokens=4, sampling=SamplingParams(min_tokens=5))
