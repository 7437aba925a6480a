"""Reading a prompts file: what is accepted, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.scheduler.cli.errors import BadInputError
from radixkv.scheduler.cli.prompts import read_prompts


def _encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _read(tmp_path: Path, content: str) -> list[list[int]]:
    path = tmp_path / "prompts.json"
    path.write_text(content, encoding="utf-8")
    return read_prompts(path, vocab_size=128, encode=_encode)


def test_ids_and_strings_are_accepted(tmp_path: Path) -> None:
    assert _read(tmp_path, '[[0, 127], "AB", [5]]') == [[0, 127], [65, 66], [5]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[[1, 2", r"prompts\.json: is not JSON: "),
        ("[" * 100_000, r"prompts\.json: is not JSON: "),
        ('{"prompts": []}', r"expected a list of prompts, got {'prompts': \[\]}"),
        ('"text"', r"expected a list of prompts, got 'text'"),
        ("null", r"expected a list of prompts, got None"),
        ("[]", r"prompts\.json: expected at least one prompt, got an empty list"),
        ("[[1], []]", r"prompt 1: expected at least one token, got none"),
        ('[[1], ""]', r"prompt 1: expected at least one token, got none"),
        (r'["\ud800"]', r"prompt 0: is not text: .*surrogates not allowed"),
        ("[[1], 7]", r"prompt 1: expected a list of token ids or a string, got 7"),
        ("[1.5]", r"prompt 0: expected a list of token ids or a string, got 1.5"),
        ("[[1, [2]]]", r"prompt 0: token 1 must be an integer, got \[2\]"),
        ("[[1], [2, true]]", r"prompt 1: token 1 must be an integer, got True"),
        ('[["1"]]', r"prompt 0: token 0 must be an integer, got '1'"),
        ("[[1.0]]", r"prompt 0: token 0 must be an integer, got 1.0"),
        ("[[1], [2], [3, 128]]", r"prompt 2: token 1 must be in the vocabulary, 0 to 127, got 128"),
        ("[[-1]]", r"prompt 0: token 0 must be in the vocabulary, 0 to 127, got -1"),
    ],
)
def test_refusals_name_the_place(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(BadInputError, match=complaint):
        _read(tmp_path, content)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match=r"prompts\.json: is not JSON: .*can't decode"):
        read_prompts(path, vocab_size=128, encode=_encode)
