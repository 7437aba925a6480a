"""Rows of the jnp backend that end at the edge of a chunk or a tile, or a token before or after."""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from radixkv.kernels.online_softmax import AttentionOptions
from radixkv.kernels.paged_extend import xla

from . import oracle
from .planted import planted
from .problems import Heads, assert_close, int32, make_cache, make_queries

CHUNK, TILE = xla.CHUNK_TOKENS, xla.TILE_TOKENS
HEADS, BLOCK_SIZE = Heads(1, 1, 4), 4
AROUND = (-1, 0, 1)

ROWS = [
    *((edge + d, 2) for edge in (CHUNK, 2 * CHUNK) for d in AROUND),
    *((TILE + d, TILE + d) for d in AROUND),
    *((2 * TILE + d, TILE + 1) for d in AROUND),
    (CHUNK + 1, TILE + 1),
]
"""KV length and queries of each row."""

STARTS = [sum(number for _, number in ROWS[row + 1 :]) for row in range(len(ROWS))]
"""First query of each row. The rows lie in reverse, so that a tile which ends in the next row meets
outputs that are written already."""


@cache
def problem(window: int | None) -> tuple[tuple[Any, ...], tuple[np.ndarray, np.ndarray]]:
    """Return the arguments of `extend`, and its results by the oracle."""
    rng = np.random.default_rng(0)
    kv_lengths, q_lengths = ([*each] for each in zip(*ROWS, strict=True))
    blocks = [-(-length // BLOCK_SIZE) for length in kv_lengths]
    made = make_cache(
        rng, kv_lengths, block_size=BLOCK_SIZE, width=max(blocks), num_blocks=sum(blocks),
        heads=HEADS,
    )  # fmt: skip
    q = make_queries(rng, sum(q_lengths), HEADS)
    rows = kv_lengths, q_lengths, STARTS
    expected = oracle.extend(q, *made.for_oracle, *rows, sm_scale=0.3, window=window)
    pools = made.k_blocks, made.v_blocks, made.block_tables
    options = AttentionOptions(0.3, None, window)
    return (q, *pools, *map(int32, rows), None, options), expected


def check(module: ModuleType, window: int | None) -> None:
    """Compare the first and the last tokens of each row alone: many others would hide an error."""
    arguments, expected = problem(window)
    found = [np.asarray(each) for each in module.extend(*arguments)]
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted, "float32")
        for start, (_, number) in zip(STARTS, ROWS, strict=True):
            for token in (start, start + number - 2, start + number - 1):
                assert_close(got[token], wanted[token], "float32")


@pytest.mark.parametrize("window", [None, TILE])
def test_rows_at_edges(window: int | None) -> None:
    check(xla, window)


BUGS = {
    "the last chunk is lost": (
        "(last + chunk_tokens) // chunk_tokens",
        "(last + chunk_tokens - 1) // chunk_tokens",
    ),
    "the first chunk is lost": ("first // chunk_tokens, num", "first // chunk_tokens + 1, num"),
    "every tile is the first": ("row])) * tile_tokens", "row])) // tile_tokens"),
    "the last tile is lost": (
        "(q_lengths + tile_tokens - 1) // tile_tokens",
        "(q_lengths + tile_tokens - 2) // tile_tokens",
    ),
    "a tile writes to the next row": ("valid[:, None, None]", "jnp.full((tile_tokens, 1, 1), 1)"),
    "the last token is not read": ("(key <= last)", "(key < last)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    old, new = BUGS[bug]
    with pytest.raises(AssertionError):
        check(planted(xla, {old: new}), TILE)
