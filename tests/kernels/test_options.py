"""Every option of paged attention at once, in each program of XLA, against the float64 oracle.

The slow tests have rows of every length; here each option and argument must reach its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels.batched_attention import BatchSizes
from radixkv.kernels.online_softmax import AttentionOptions
from radixkv.kernels.paged_decode.batched import decode as decode_batched
from radixkv.kernels.paged_decode.xla import decode as decode_xla
from radixkv.kernels.paged_extend.batched import extend as extend_batched
from radixkv.kernels.paged_extend.xla import extend as extend_xla

from . import oracle
from .problems import Heads, assert_close, int32, make_cache, make_queries

HEADS: Final = Heads(kv_heads=2, group=3, head_dim=8)  # a group is not as large as their number
BLOCK_SIZE: Final = 4
SM_SCALE: Final = 0.3
SINKS: Final = jnp.arange(HEADS.q_heads, dtype=jnp.float32) - 2.0
ROWS: Final = [(300, 3), (70, 65), (0, 0), (9, 9), (1, 1), (260, 1), (114, 33)]
"""KV tokens and queries: of several chunks and tiles, of one query, and of none."""

SMALL: Final = BatchSizes(32, 2**16, 2**19)
"""Sizes for which these rows need several steps."""

EXTEND: Final[dict[str, Callable[..., Any]]] = {
    "xla": extend_xla,
    "batched": partial(extend_batched, sizes=SMALL, tile_rows=48),
}
DECODE: Final[dict[str, Callable[..., Any]]] = {
    "xla": decode_xla,
    "batched": partial(decode_batched, sizes=SMALL),
}
SOFT_CAP: Final = 1.5
WINDOW: Final = 60  # over the edges of the chunks of rows of 300 and 513 tokens


def check(kernel: Callable[..., Any], rows: list[tuple[int, int]], *, ragged: bool) -> None:
    """Compare a kernel with the oracle, with int8 pools and every option.

    The queries of ragged rows lie in reverse order, with a token of no row between two.
    """
    rng = np.random.default_rng(0)
    kv_lengths, q_lengths = [kv for kv, _ in rows], [n for _, n in rows]
    blocks = [-(-length // BLOCK_SIZE) for length in kv_lengths]
    cache = make_cache(
        rng, kv_lengths, block_size=BLOCK_SIZE, width=max(blocks), num_blocks=sum(blocks) + 3,
        heads=HEADS, dtype="int8",
    )  # fmt: skip
    starts = [sum(q_lengths[row + 1 :]) + len(rows) - row for row in range(len(rows))]
    num_tokens = sum(q_lengths) + len(rows) + 1
    if not ragged:
        starts, num_tokens = [*range(len(rows))], len(rows)
    q = make_queries(rng, num_tokens, HEADS)
    place = (int32(q_lengths), int32(starts)) if ragged else ()
    options = AttentionOptions(SM_SCALE, SOFT_CAP, WINDOW)
    out, lse = kernel(
        q, cache.k_blocks, cache.v_blocks, cache.block_tables, int32(kv_lengths), *place, SINKS,
        options, tuple(cache.scales.values()),
    )  # fmt: skip
    expected = oracle.extend(
        q, *cache.for_oracle, kv_lengths, q_lengths, starts, sinks=SINKS,
        **options._asdict(),
    )  # fmt: skip
    assert_close(out, expected[0], "float32")
    assert_close(lse, expected[1], "float32")


@pytest.mark.parametrize("program", EXTEND)
def test_extend(program: str) -> None:
    check(EXTEND[program], ROWS, ragged=True)


@pytest.mark.parametrize("program", DECODE)
def test_decode(program: str) -> None:
    lengths = [0, 1, 59, 60, 61, 511, 512, 513, 260]
    check(DECODE[program], [(length, min(length, 1)) for length in lengths], ragged=False)
