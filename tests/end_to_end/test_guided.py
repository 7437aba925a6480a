"""Guided outputs: they are what was asked for, whatever the schedule, and others do not notice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import radixkv
from radixkv.scheduler import Engine, GenerationParams, Guided, RequestError, SamplingParams
from radixkv.scheduler.gateway.gateway import Gateway
from radixkv.scheduler.models import MissingExtraError, make_tiny_checkpoint
from radixkv.scheduler.text import TextTokenizer
from radixkv.scheduler.text.guided import _LOGGER, TokenGuide

from ..tokenizers import add_tokenizer
from .conftest import assert_nothing_leaked, fresh

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["the cache", "naïve"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # which a random model would write for ever
}
CHOICE = ["the keys", "the values", "🙂", 'a "word"']
GUIDES = [
    Guided(json=SCHEMA),
    Guided(regex=r"(the|a) cache( holds){1,3}!"),
    None,
    Guided(choice=CHOICE),
    Guided(grammar='start: "<" inner ">"\ninner: /[ab]{2,4}/ | start'),
    Guided(json='{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}'),
    None,
]


def is_valid(index: int, text: str) -> bool:
    match index:
        case 0:
            value = json.loads(text)
            assert set(value) == {"name", "size"} and isinstance(value["size"], int)
            return value["name"] in ("the cache", "naïve")
        case 1:
            return re.fullmatch(r"(the|a) cache( holds){1,3}!", text) is not None
        case 3:
            return text in CHOICE
        case 4:
            return re.fullmatch(r"(<+)[ab]{2,4}(>+)", text) is not None
        case 5:
            return all(isinstance(each, bool) for each in json.loads(text))
    return True


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guided")
    make_tiny_checkpoint(directory, "qwen3", overrides={"vocab_size": 350})  # 340 have text
    add_tokenizer(directory)
    return directory


SIZES: dict[str, Any] = {"block_size": 4, "max_model_len": 128, "max_running": 4}


@pytest.fixture(scope="module")
def compiled(directory: Path) -> tuple[radixkv.LLM, Engine, list[str]]:
    """A model, its engine, and what each guide gives alone, with one step in flight."""
    llm = radixkv.LLM(directory, **SIZES, num_blocks=96, token_budget=32)
    engine = llm.engine
    alone = []
    for index in range(len(GUIDES)):
        llm.engine = fresh(engine, depth=1)
        alone += [output.text for output in llm.generate([prompt_of(index)], params_of(index))]
    return llm, engine, alone


def prompt_of(index: int) -> str:
    return "the cache holds the" if index % 2 else f"naïve {index}"


def params_of(index: int) -> GenerationParams:
    sampling = SamplingParams(temperature=1.3 * (index % 3 != 1), seed=index)
    return GenerationParams(48, sampling, guided=GUIDES[index], ignore_eos=GUIDES[index] is None)


@settings(max_examples=8)
@given(
    depth=st.integers(1, 3),
    num_tokens=st.sampled_from([128, 200, 384]),
    order=st.permutations(range(len(GUIDES))),
)
def test_outputs_are_valid_whatever_the_schedule(compiled, depth, num_tokens, order):
    llm, engine, alone = compiled
    llm.engine = fresh(engine, num_blocks=num_tokens // 4, depth=depth, reserve_tokens=0)
    order = [*order, *order]
    outputs = llm.generate([prompt_of(index) for index in order], [params_of(i) for i in order])
    for index, output in zip(order, outputs, strict=True):
        assert output.text == alone[index]
        if output.finish_reason == "stop":
            assert is_valid(index, output.text), output.text
    assert_nothing_leaked(llm.engine)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**20))
def test_draws_stay_inside_what_is_asked_for(compiled, seed):
    llm, engine, _ = compiled
    llm.engine = fresh(engine)
    sampling = SamplingParams(temperature=2.0, seed=seed, min_tokens=3, repetition_penalty=1.1)
    indices = [index for index, guide in enumerate(GUIDES) if guide is not None]
    params = [GenerationParams(100, sampling, guided=GUIDES[i], n=2) for i in indices]
    outputs = llm.generate(["the"] * len(params), params)
    for index, output in zip(indices, outputs, strict=True):
        for sample in output.samples:
            if sample.finish_reason == "stop":
                assert is_valid(index, sample.text), sample.text
    assert any(sample.finish_reason == "stop" for each in outputs for sample in each.samples)


class GivenUp:
    """A matcher whose library gives up after some tokens, as with a grammar that gets too large."""

    def __init__(self, matcher: Any, num_left: int) -> None:
        self._matcher = matcher
        self._num_left = num_left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> GivenUp:
        return GivenUp(self._matcher.deep_copy(), self._num_left)

    def consume_token(self, token: int) -> bool:
        self._num_left -= 1
        return self._num_left >= 0 and self._matcher.consume_token(token)

    def is_error(self) -> bool:
        return self._num_left < 0 or self._matcher.is_error()

    def get_error(self) -> str:
        return "Too many items in the row\n<state>"


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_an_output_whose_grammar_is_given_up_has_not_stopped(
    compiled, monkeypatch, caplog, num_tokens, ignore_eos
):
    """Its text is no JSON of the schema, and "stop" would say that it is."""
    llm, engine, _ = compiled
    llm.engine = fresh(engine)
    make: Any = TokenGuide.__init__

    def make_failing(guide: TokenGuide, matcher: Any, ends: Any) -> None:
        make(guide, GivenUp(matcher, num_tokens), ends)

    with monkeypatch.context() as patch:
        patch.setattr(TokenGuide, "__init__", make_failing)
        params = GenerationParams(48, guided=GUIDES[0], ignore_eos=ignore_eos)
        (output,) = llm.generate(["the"], params)
    assert output.finish_reason == "abort"
    # One more had been chosen when the library gave up, and one ends the output.
    assert len(output.token_ids) == num_tokens + 2
    assert caplog.messages[-1] == "a guided output ends early: Too many items in the row"
    assert_nothing_leaked(llm.engine)


def test_the_mask_is_computed_while_the_device_computes_the_step(compiled):
    """The next step is dispatched before the token is read, and its choice after."""
    llm, engine, _ = compiled
    llm.engine = fresh(engine, depth=2)
    calls: list[str] = []
    runner = llm.engine._runner
    run, read, adjust = runner._programs.run, runner.read, runner._adjustments.adjust
    with pytest.MonkeyPatch.context() as patch:
        for name, where, function in (
            ("run", runner._programs, run),
            ("read", runner, read),
            ("adjust", runner._adjustments, adjust),
        ):

            def call(*args: Any, _name: str = name, _function: Any = function, **more: Any) -> Any:
                calls.append(_name)
                return _function(*args, **more)

            patch.setattr(where, name, call)
        llm.generate(["the"], GenerationParams(3, guided=GUIDES[0]))
    assert calls == ["run", "adjust", *["run", "read", "adjust"] * 2, "read"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "guided takes exactly one of json, regex, choice and grammar, got none"),
        (
            {"json": {}, "regex": "a"},
            "guided takes exactly one of json, regex, choice and grammar, got json and regex",
        ),
        ({"json": 5}, "guided json is of the wrong type: got 5"),
        ({"regex": b"a"}, "guided regex is of the wrong type: got b'a'"),
        ({"choice": []}, "guided choice is of the wrong type: got []"),
        ({"choice": "ab"}, "guided choice is of the wrong type: got 'ab'"),
        ({"choice": ["a", 1]}, "guided choice is of the wrong type: got ['a', 1]"),
    ],
)
def test_what_says_nothing_is_refused(fields, text):
    with pytest.raises(RequestError) as refused:
        Guided(**fields)
    assert str(refused.value) == text


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("guided", "text"),
    [
        (Guided(json="{"), "guided json is not a JSON schema: Expecting property name"),
        (Guided(json={"type": "strange"}), "guided output is refused: Invalid type: strange"),
        (Guided(regex="a("), "guided output is refused: at 1(8): invalid regex"),
        (Guided(grammar="start: x"), 'guided output is refused: at 1(8): unknown name: "x"'),
        (
            Guided(grammar="start: T\nT: " + " & ".join(f"/(.*{x}.*){{20}}/" for x in "abcde")),
            "guided output is refused: lexer error: too many expressions constructed",
        ),
        (Guided(json="[" * 10**5), "guided json is not a JSON schema: maximum recursion depth"),
        (Guided(json=nested(10**5)), "guided json is not a JSON schema: maximum recursion depth"),
        *(
            (guided, "guided output is not Unicode text: 'utf-8' codec can't encode")
            for guided in [
                Guided(regex="\ud800"),
                Guided(choice=["a", "\udfff"]),
                Guided(grammar='start: "\ud800"'),
            ]
        ),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused(compiled, guided, text):
    with pytest.raises(RequestError, match=f"^{re.escape(text)}"):
        compiled[0].generate(["the"], GenerationParams(4, guided=guided))
    assert not compiled[0].engine.has_work


CHAINS = """
import json, sys, threading
from radixkv.scheduler.text import Guided, TextTokenizer
tokenizer = TextTokenizer(sys.argv[1])
tokenizer.guide(Guided(regex="a"), {1})
before = threading.stack_size()
definitions = {f"{i:x}": {"$ref": f"#/$defs/{i + 1:x}"} for i in range(2000)} | {"7d0": {}}
rules = [f"r{i:x}:r{i + 1:x}" for i in range(4500)] + ['r1194:"a"', "start:r0"]
for guided in (
    Guided(json={"$defs": definitions, "$ref": "#/$defs/0"}),
    Guided(grammar="\\n".join(rules)),
    Guided(grammar="\\n".join(rules).upper().replace("START:R0", "start: R0")),
):
    tokenizer.guide(guided, {1})
assert threading.stack_size() == before
"""


def test_a_chain_of_references_does_not_overflow_the_stack(directory):
    done = subprocess.run([sys.executable, "-c", CHAINS, directory], capture_output=True)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_a_grammar_that_would_need_too_large_a_stack_is_refused(directory):
    guided = Guided(regex="a" * 2**20)
    with pytest.raises(RequestError) as refused:
        TextTokenizer(directory).guide(guided, {1})
    assert str(refused.value) == (
        f"guided output is refused: its grammar has {len(guided.compile())} characters, more than "
        "1048576"
    )


def test_a_choice_may_have_any_character(directory):
    tokenizer = TextTokenizer(directory)
    every = "".join(map(chr, [*range(1, 0x180), 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF]))
    assert tokenizer.guide(Guided(choice=[every, *every]), {1})


UNKNOWN = (-1, 340, 350, 2**31, 2**32)
"""No tokens of the tokenizer; checkpoints name such as end tokens."""


def test_end_tokens_that_the_tokenizer_lacks_are_left_out(directory):
    guide = TextTokenizer(directory).guide(Guided(choice=["ab"]), {1, *UNKNOWN})
    words = np.zeros(11, np.int32)
    guide.allow(TextTokenizer(directory).encode("ab"), words)
    assert words.tolist() == [2, *[0] * 10]


def test_what_guides_need(compiled, directory, monkeypatch):
    tokenizer = TextTokenizer(directory)
    with pytest.raises(RequestError, match=r"^guided output needs an end token, and the tokenizer"):
        tokenizer.guide(Guided(regex="a"), ())
    with pytest.raises(RequestError, match=r"^guided output needs an end token, and the tokenizer"):
        tokenizer.guide(Guided(regex="a"), UNKNOWN)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"'llguidance': pip install 'radixkv\[guided\]'$"):
        tokenizer.guide(Guided(regex="a"), {1})
    params, unused = GenerationParams(4, guided=Guided(regex="a")), None
    with pytest.raises(RequestError, match=r"^request 'a': it is guided, but the engine has no"):
        params.make_requests("a", [1], None, {1})
    monkeypatch.undo()
    [request] = params.make_requests("a", [1], tokenizer, {1})
    gateway: Any = unused
    with pytest.raises(RequestError, match=r"^request 'a': nodes do not guide outputs$"):
        Gateway.add_request(gateway, request, 0.0)


def test_an_output_that_cannot_go_on_ends(directory):
    """Whatever the reason, only an end token may follow."""
    guide = TextTokenizer(directory).guide(Guided(regex="ab"), {1})
    words = np.full(11, -1, np.int32)
    guide.allow([5, 6, 7, 8], words)  # of which none is in the grammar
    assert [bit for bit in range(352) if words[bit // 32] >> (bit % 32) & 1] == [1]


def test_an_end_token_without_a_bit_is_left_out(directory):
    guide = TextTokenizer(directory).guide(Guided(regex="ab"), {1})
    guide._end_token_ids = [1, 352]
    words = np.zeros(11, np.int32)
    guide.allow([5, 6, 7, 8], words)
    assert words.tolist() == [2, *[0] * 10]


@settings(max_examples=40)
@given(
    written=st.sampled_from(["the keys", "the", "thx"]),
    after=st.lists(st.integers(0, 339), max_size=6),
    ends=st.booleans(),
    cuts=st.sets(st.integers(0, 20)),
)
def test_a_warning_says_once_that_an_output_ends_early(directory, written, after, ends, cuts):
    """There is none of what comes after the end, which a request may ask for."""
    tokenizer = TextTokenizer(directory)
    guide = tokenizer.guide(Guided(choice=["the keys"]), {1})
    tokens = [*tokenizer.encode(written), *[1] * ends, *after]
    words = np.zeros(11, np.int32)
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LOGGER, "warning", lambda text, *args: messages.append(text % args))
        for stop in sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)}):
            guide.allow(tokens[:stop], words)
    ends_in_time = written == "the keys" and ends
    if ends_in_time:
        assert not guide.has_failed
        assert words.tolist() == [2, *[0] * 10]
    assert len(messages) <= (not ends_in_time)
    if written == "thx":
        assert guide.has_failed
        text = 'a guided output ends early: Parser Error: token "x" doesn\'t satisfy the grammar'
        assert [message[: len(text)] for message in messages] == [text]


def test_a_copy_of_a_guide_is_at_its_beginning_whatever_the_other_does(directory):
    tokenizer = TextTokenizer(directory)
    first = tokenizer.guide(Guided(choice=["ab", "cd"]), {1})
    second = first.copy()
    at_first, later = np.zeros(11, np.int32), np.zeros(11, np.int32)
    first.allow([], at_first)
    first.allow(tokenizer.encode("a"), later)
    assert at_first.any() and later.any() and later.tolist() != at_first.tolist()
    second.allow([], later)
    assert later.tolist() == at_first.tolist()
