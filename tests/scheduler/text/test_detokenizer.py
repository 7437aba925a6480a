"""Text of tokens that come one after another, and stop strings in it."""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from radixkv.scheduler.text import Detokenizer
from radixkv.scheduler.text.output_text import OutputText
from radixkv.scheduler.text.stop_strings import StopStrings

from ...tokenizers import SPECIAL, TEXTS, byte_fallback, byte_level, words

MAKERS = {make.__name__: functools.cache(make) for make in (byte_level, byte_fallback, words)}
ADDED = ("<think>", "</think>", "é🙂")
"""Added tokens that are not special, as those of Qwen 3: they have text."""


@functools.cache
def with_added(kind: str) -> Tokenizer:
    """Return a tokenizer of a kind whose vocabulary ends with `ADDED`."""
    tokenizer = Tokenizer.from_str(MAKERS[kind]().to_str())
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in ADDED])
    return tokenizer


def ids(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Count negative tokens from the end of the vocabulary."""
    return [token if token >= 0 else tokenizer.get_vocab_size() + token for token in tokens]


@functools.cache
def with_mark(kind: str) -> tuple[Tokenizer, int]:
    """Return the same with one more token, which is no text of another."""
    tokenizer = Tokenizer.from_str(with_added(kind).to_str())
    tokenizer.add_tokens([AddedToken(MARK, special=False, normalized=False)])
    return tokenizer, tokenizer.get_vocab()[MARK]


MARK = "\ue000"


def decoded(kind: str, tokens: list[int]) -> str:
    """Return the text of all tokens, decoded at once with a mark between the parts of long runs."""
    tokenizer, mark = with_mark(kind)
    marked: list[int] = []
    run = b""
    for token in tokens:
        name = tokenizer.id_to_token(token) if token < mark else None
        if name in (None, *SPECIAL):
            continue
        marked.append(token)
        run = run + bytes([int(name[3:5], 16)]) if name.startswith("<0x") else b""
        if len(run) == 16:
            reader = codecs.getincrementaldecoder("utf-8")("replace")
            reader.decode(run)
            run, _ = reader.getstate()  # an unfinished character
            marked.insert(len(marked) - len(run), mark)
    return tokenizer.decode(marked).replace(MARK, "")


def chunks_of(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [tokens[a:b] for a, b in pairwise(places)]


# About half of all bytes make no valid text, and some tokens are special, added or unknown.
TOKENS = st.lists(st.one_of(st.integers(0, 400), st.integers(-len(ADDED), -1)), max_size=30)
TEXT = st.text(st.sampled_from("the cache naïve 漢字🙂\n �"), max_size=20)


@pytest.mark.parametrize("kind", MAKERS)
@given(tokens=TOKENS, text=TEXT, cuts=st.lists(st.integers(0, 1000), max_size=20))
@example(tokens=[-3, -2, -1], text="", cuts=[1, 2])
def test_increments_are_the_decoding_of_all(kind, tokens, text, cuts):
    tokenizer = with_added(kind)
    tokens = ids(tokenizer, tokens) + tokenizer.encode(text).ids
    detokenizer = Detokenizer(tokenizer)
    before = ""
    for number, chunk in enumerate(chunks_of(tokens, cuts)):
        detokenizer.push(chunk)
        assert detokenizer.text.startswith(before)
        before = detokenizer.text
        so_far = [t for part in chunks_of(tokens, cuts)[: number + 1] for t in part]
        shown = detokenizer.text + detokenizer.pending
        assert decoded(kind, so_far).startswith(shown)
        assert not detokenizer.pending.endswith("�")
    detokenizer.finish()
    assert detokenizer.text == decoded(kind, tokens)
    assert detokenizer.text.startswith(before)
    assert detokenizer.pending == ""


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.num_decoded += len(tokens)
        return self._tokenizer.decode(tokens, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def byte_tokens(kind: str) -> list[str]:
    """Return the name of the token of each byte; letters that have a token are no bytes."""
    if kind == "byte_fallback":
        return [chr(byte) if chr(byte) in "abc" else f"<0x{byte:02X}>" for byte in range(256)]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    places = dict(zip(printable, printable, strict=True))
    places |= {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(places[byte]) for byte in range(256)]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from(
                [b"\n", b" ", b"a", "é".encode(), "🙂".encode(), "�".encode(), b"\xe2", b"\xff"]
            ),
            st.integers(1, 40),
        ),
        max_size=5,
    ),
    cuts=st.lists(st.integers(0, 1000), max_size=5),
)
@example(runs=[(b"\n", 200)], cuts=[])
@example(runs=[("�".encode(), 100)], cuts=[])
@example(runs=[(b" ", 20), (b"\xff", 1)], cuts=[])
def test_a_run_without_end_has_text_and_takes_no_longer_for_each_token(kind, runs, cuts):
    tokenizer, vocabulary = with_added(kind), with_added(kind).get_vocab()
    names = byte_tokens(kind)
    written = b"".join(unit * number for unit, number in runs)
    tokens = [vocabulary[names[byte]] for byte in written]
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    for number, token in enumerate(tokens, start=1):
        counting.num_decoded = 0
        detokenizer.push([token])
        assert counting.num_decoded <= 60
        assert len(decoded(kind, tokens[:number])) - len(detokenizer.text) <= 16
    in_chunks = Detokenizer(tokenizer)
    for chunk in chunks_of(tokens, cuts):
        in_chunks.push(chunk)
    for each in (detokenizer, in_chunks):
        each.finish()
        assert each.text == decoded(kind, tokens)
    with contextlib.suppress(UnicodeDecodeError):
        text = written.decode()
        assert detokenizer.text == tokenizer.decode(tokens)
        assert kind == "byte_fallback" or detokenizer.text == text


LETTERS = ("ð", "Ł", "ļ", "Ģ", "!")
"""How this tokenizer writes the four bytes of a rocket, and one more."""


def test_a_character_is_never_given_in_halves():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    alphabet = tokenizer.get_vocab()
    seen = []
    for letter in LETTERS:
        detokenizer.push([alphabet[letter]])
        seen.append(detokenizer.text + detokenizer.pending)
    assert seen == ["", "", "", "🚀", "🚀!"]


def test_byte_tokens_wait_for_the_end_of_their_run():
    tokenizer = byte_fallback()
    detokenizer = Detokenizer(tokenizer)
    seen = []
    for token in ("▁the", "<0x0A>", "<0xFF>", "a"):
        detokenizer.push([tokenizer.get_vocab()[token]])
        seen.append((detokenizer.text, detokenizer.pending))
    assert seen == [("the", ""), ("the", "\n"), ("the", ""), ("the��a", "")]


def test_special_and_unknown_tokens_have_no_text():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push([0, 1, 100_000])
    detokenizer.finish()
    assert detokenizer.text == ""


def test_a_long_text_is_decoded_piece_by_piece():
    tokenizer = byte_level()
    tokens = tokenizer.encode(" ".join(TEXTS * 10)).ids
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    for token in tokens:
        detokenizer.push([token])
    assert detokenizer.text == tokenizer.decode(tokens)
    assert counting.num_decoded < 12 * len(tokens)


# Stop strings


@given(
    parts=st.lists(st.text("ab", max_size=3), max_size=12),
    strings=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    pending=st.text("ab", max_size=3),
)
@example(parts=["a", "b", "b"], strings=["bb"], pending="")
@example(parts=["", "ab"], strings=["ab"], pending="bbb")
def test_stop_strings_are_found_as_soon_as_they_are_there(parts, strings, pending):
    stops = StopStrings(strings)
    assert bool(stops) == bool(strings)
    text = ""
    for part in parts:
        text += part
        whole = text + pending
        places = [whole.find(string) for string in strings if string in whole]
        found = stops.find(text, pending)
        assert found == (min(places) if places else None)
        if places:
            return
        held = stops.count_held(text)
        ends = [n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in strings)]
        assert held == max(ends, default=0)


class CountingText(str):
    """A text that counts the characters of its parts that are taken."""

    __slots__ = ()
    num_taken = 0

    def __getitem__(self, part: Any) -> str:
        taken = super().__getitem__(part)
        CountingText.num_taken += len(taken)
        return taken


def test_a_long_text_is_searched_piece_by_piece():
    stops = StopStrings(["abab", "bb"])
    CountingText.num_taken = 0
    text = CountingText("ab" + 500 * "ac")
    for length in range(1, len(text) + 1):
        so_far = CountingText(str(text)[:length])
        assert stops.find(so_far) is None
        stops.count_held(so_far)
    assert CountingText.num_taken < 20 * len(text)


# The text of an output


@pytest.mark.parametrize("kind", MAKERS)
@given(
    tokens=TOKENS,
    text=TEXT,
    strings=st.lists(st.text("the \n", min_size=1, max_size=4), max_size=2),
    cuts=st.lists(st.integers(0, 1000), max_size=20),
)
def test_the_text_ends_before_the_first_stop_string(kind, tokens, text, strings, cuts):
    tokenizer = with_added(kind)
    tokens = tokenizer.encode(text).ids + ids(tokenizer, tokens)
    expected, num_used = decoded(kind, tokens), None
    for number in range(1, len(tokens) + 1):
        so_far = decoded(kind, tokens[:number]).rstrip("�")
        places = [so_far.find(string) for string in strings if string in so_far]
        if places:
            expected, num_used = so_far[: min(places)], number
            break
    output = OutputText(Detokenizer(tokenizer), strings)
    num_pushed, before = 0, ""
    for chunk in chunks_of(tokens, cuts) or [[]]:
        is_end = num_pushed + len(chunk) == len(tokens)
        used = output.push(chunk, is_end=is_end)
        assert output.text.startswith(before) and expected.startswith(output.text)
        before = output.text
        if used is not None:
            assert num_used == num_pushed + used
            assert output.text == expected
            return
        num_pushed += len(chunk)
    assert (num_used, output.text) == (None, expected)


@pytest.mark.parametrize(
    ("min_tokens", "text", "used"),
    [
        (0, "", 1),
        (1, "the cache", 3),
        (2, "the cache", 3),
        (3, "the cache the cache", 5),
        (5, "the cache the cache the", None),
    ],
)
def test_no_stop_string_ends_in_the_first_tokens(min_tokens, text, used):
    tokenizer = words()
    for strings in (["the"], ["the", "nothing that is there"]):
        output = OutputText(Detokenizer(tokenizer), strings, min_tokens)
        tokens = tokenizer.encode("the cache the cache the").ids
        assert len(tokens) == 5
        assert output.push(tokens, is_end=True) == used
        assert output.text.rstrip() == text


@given(
    text=st.text("ab\n", min_size=1, max_size=8),
    stop=st.text("ab\n", min_size=1, max_size=3),
    min_tokens=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 8), max_size=4),
)
@example(text="\naa", stop="\n", min_tokens=1, cuts=[])
@example(text="\n", stop="\n", min_tokens=1, cuts=[])
def test_first_tokens_may_be_bytes_whose_text_is_not_final(text, stop, min_tokens, cuts):
    tokenizer = byte_fallback()  # each character is a token, and a newline is a byte
    names = [{"\n": "<0x0A>"}.get(character, character) for character in text]
    tokens = [tokenizer.get_vocab()[name] for name in names]
    ends = range(max(min_tokens + 1, len(stop)), len(text) + 1)
    used = next((end for end in ends if text.endswith(stop, 0, end)), None)
    expected = text if used is None else text[: used - len(stop)]
    output = OutputText(Detokenizer(tokenizer), [stop], min_tokens)
    num_before = 0
    for chunk in chunks_of(tokens, cuts):
        num_before += len(chunk)
        found = output.push(chunk, is_end=num_before == len(tokens))
        if found is not None:
            assert num_before - len(chunk) + found == used
            break
    else:
        assert used is None
    assert output.text == expected


def test_a_stop_string_may_end_with_what_is_no_character():
    tokenizer = byte_fallback()
    output = OutputText(Detokenizer(tokenizer), ["a�"])
    tokens = [tokenizer.get_vocab()[name] for name in ("▁the", "a", "<0xFF>")]
    assert output.push(tokens, is_end=False) is None
    assert output.text == "the"
    assert output.push([], is_end=True) == 0
    assert output.text == "the"


@pytest.mark.parametrize(("min_tokens", "used", "text"), [(1, 2, "a"), (2, None, "a�")])
def test_first_tokens_may_end_with_what_is_no_character(min_tokens, used, text):
    tokenizer = byte_fallback()
    output = OutputText(Detokenizer(tokenizer), ["�"], min_tokens)
    tokens = [tokenizer.get_vocab()[name] for name in ("a", "<0xFF>")]
    assert output.push(tokens, is_end=True) == used
    assert output.text == text


def test_a_special_token_that_the_normalizer_renames_has_text():
    entries = json.loads(words().to_str())  # as in converted Llama checkpoints
    entries["added_tokens"] = [{**each, "normalized": True} for each in entries["added_tokens"]]
    entries["normalizer"] = {"type": "Prepend", "prepend": "▁"}
    tokenizer = Tokenizer.from_str(json.dumps(entries))
    assert (tokenizer.id_to_token(1), tokenizer.decode([4, 1])) == ("▁</s>", "the </s>")
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push([4])
    detokenizer.push([1])
    assert detokenizer.text == "the </s>"
