"""Reading a prompts file: what is accepted, and what each refusal says."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.cli.errors import BadInputError
from radixkv.scheduler.cli.shared.prompts import Sizes, choose_sizes, prompts_failed, read_prompts
from radixkv.scheduler.request import Request


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


def _sizes(
    *lengths: int,
    max_positions: int = 20,
    itemsize: int = 1,
    kv: tuple[int, int, int] = (1, 1, 1),
    **options: Any,
) -> Sizes:
    """Sizes for prompts of some lengths with 4 new tokens each, in blocks of 4 tokens."""
    given = {"block_size": 4, "max_new_tokens": 4, "n": 1, "device_blocks": None}
    arguments = Namespace(**(given | {"token_budget": None} | options))
    layers, heads, dim = kv
    config: Any = SimpleNamespace(
        kv_elements_per_token=2 * layers * heads * dim, max_positions=max_positions
    )
    return choose_sizes(arguments, [[1] * each for each in lengths], cast(Any, config), itemsize)


def test_sizes_are_those_that_the_prompts_need() -> None:
    assert _sizes(3, 16) == Sizes(num_blocks=7, token_budget=19, max_running=2, max_model_len=20)
    assert _sizes(3, 16, n=3) == Sizes(21, 19, 6, 20)
    assert _sizes(*[4] * 200, n=2) == Sizes(800, 512, 256, 8)
    assert _sizes(3, 16, token_budget=1, device_blocks=5) == Sizes(5, 1, 1, 20)
    assert _sizes(3, 16, itemsize=2**30).num_blocks == 5, "room for the longest in any case"
    assert _sizes(*[4] * 9, itemsize=2**26).num_blocks == 8, "4 GiB"


@given(st.lists(st.integers(1, 16), min_size=1, max_size=40), st.integers(1, 300))
def test_all_samples_run_at_once_up_to_the_limits(lengths: list[int], n: int) -> None:
    sizes = _sizes(*lengths, n=n)
    assert sizes.max_running == min(len(lengths) * n, 256)
    assert sizes.token_budget == min(max(sum(lengths), len(lengths) * n), 512)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 4))
def test_a_prompt_needs_the_blocks_of_its_request(length: int, num_new: int, size: int) -> None:
    needed = Request("0", [1] * length, num_new).max_blocks(size)

    def num_blocks(device_blocks: int | None) -> int:
        options: dict[str, Any] = {"max_new_tokens": num_new, "block_size": size}
        sizes = _sizes(length, max_positions=32, device_blocks=device_blocks, **options)
        return sizes.num_blocks

    assert num_blocks(None) == num_blocks(needed) == needed
    if needed > 1:
        with pytest.raises(BadInputError, match=f" need {needed} blocks of {size} tokens, but "):
            num_blocks(needed - 1)


@pytest.mark.parametrize("kv", [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 8), (4, 2, 8)])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_default_cache_has_4_gib(kv: tuple[int, int, int], itemsize: int) -> None:
    per_block = 2 * math.prod(kv) * 2**20 * itemsize
    sizes = _sizes(*[4] * 5000, kv=kv, itemsize=itemsize, block_size=2**20)
    assert sizes.num_blocks == min(5000, 2**32 // per_block)


@pytest.mark.parametrize("others", [0, 1, 4])
def test_prompts_that_failed_are_counted_after_the_first(others: int) -> None:
    failures = {str(number + 3): f"reason {number}" for number in range(others + 1)}
    error = prompts_failed(failures)
    more = f" (and {others} more)" if others else ""
    assert str(error) == f"prompt 3: reason 0{more}" and error.failures == failures


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_positions": 19}, "exceed the 19 positions of the model"),
        ({"device_blocks": 4}, "need 5 blocks of 4 tokens, but the cache has 4"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(options: dict[str, Any], complaint: str) -> None:
    text = f"^prompt 1: 16 prompt tokens and 4 new tokens {complaint}$"
    with pytest.raises(BadInputError, match=text):
        _sizes(3, 16, **options)
