"""Predict how evenly attention uses an H200 for batches of mixed lengths; no GPU is needed.

::

    python benchmarks/decode_balance.py

The model is one of memory bandwidth. Each thread block reads the tiles that the work list gives it.
All share the bandwidth, and none reads faster than its instructions let it. The constants are those
of a copy that was measured on an H200, and cycles that were counted in the machine code of the
kernel. The prediction of a batch is its share of that copy's bandwidth; none of it was measured.

`latent_decode` is limited by the tensor cores where many heads share a latent, so its prediction is
the share of their rate. The thread blocks of a share read its latents together, so memory counts
them once.

`paged_extend` takes the time of the thread block with the most KV steps, or of the bytes of all KV,
if that is longer. A step takes as long as FlashAttention-3 does for its products without overlap of
products and softmax within a warpgroup.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.kernels.latent_attention import config as latent
from radixkv.kernels.paged_decode.config import choose_config
from radixkv.kernels.paged_decode.work_list import build_work_list
from radixkv.kernels.paged_extend import config as extend
from radixkv.kernels.paged_extend.shares import Piece, Share, build_shares, zigzag
from radixkv.kernels.paged_extend.work_list import WorkItem
from radixkv.kernels.paged_extend.work_list import build_work_list as build_tiles

BYTES_PER_S = 4.3e12
"""Measured: copies on an H200, read and written."""
CORES = 132
TOKEN_BYTES = 2 * 128 * 2
"""K and V of a head_dim of 128 in bfloat16."""
CLOCK = 1.755e9
TILE_SECONDS = 1550 / CLOCK
"""Critical path of a tile in a thread block: cycles of its machine code, at the clock."""
LATENT_PRODUCT_SECONDS = 2176 / CLOCK
"""Tensor cores in a tile of latents: 64 tokens, 64 heads."""
LATENT_TILE_SECONDS = LATENT_PRODUCT_SECONDS + 600 / CLOCK
"""And the softmax between the products."""
SWITCH_SECONDS = 3e-6
"""From one work tile of a thread block to the next: store the output, load the queries."""
FIXED_SECONDS = 3e-6 + 3e-6 + 4e-6
"""Launch; the first latencies; merge."""
SCATTER_SECONDS = 2e-6
"""The merged rows of `latent_decode` are put in place by one more launch."""
Q_HEADS, LATENT_HEADS = 32, 128
EXTEND_FLOPS_PER_S = 575e12
"""FlashAttention-3 with ping-pong alone, on an H100 (arXiv 2407.08608, table 2)."""

BATCHES = {
    "1 x 32k": [32_768],
    "8 x 8k": [8192] * 8,
    "64 x 4k": [4096] * 64,
    "256 x 1k": [1024] * 256,
    "34 x 4k": [4096] * 34,
    "1 x 128k, 63 x 1k": [131_072] + [1024] * 63,
    "8 x 32k, 56 x 1k": [32_768] * 8 + [1024] * 56,
    "1 x 128k, 15 x 2k": [131_072] + [2048] * 15,
    "256 rows, 64k / i": [max(512, 65_536 // (i + 1)) for i in range(256)],
}
"""Lengths of the rows."""


EXTENDS = {
    "8,192 new": [(8192, 0)],
    "2,048 new, 16k cached": [(2048, 16_384)],
    "512 new, 32k cached": [(512, 32_768)],
    "128 new, 32k cached": [(128, 32_768)],
    "8 new, 32k cached": [(8, 32_768)],
    "512 new, and 63 x 1 new, 4k cached": [(512, 0), *[(1, 4095)] * 63],
}
"""New and cached tokens of the rows."""


def seconds(
    lengths: list[int],
    kv_heads: int,
    programs: int,
    tile_tokens: int,
    tile_seconds: float,
    token_bytes: int,
    part_bytes: int,
) -> float:
    """Time from the first to the last byte of `programs` shares of a batch."""
    divide = partial(
        build_work_list, kv_heads=kv_heads, programs=programs, tile_tokens=tile_tokens,
        window=None, capacity=max(lengths),
    )  # fmt: skip
    work = jax.jit(divide)(jnp.asarray(lengths, jnp.int32))
    shares = np.asarray(work.shares)
    shares = shares[shares[:, 2] > 0]
    following = np.vstack((shares[1:], (len(lengths) * kv_heads, 0, 0)))
    tiles = shares[:, 2].astype(np.float64)
    work_tiles = following[:, 0] - shares[:, 0] + (following[:, 1] > 0)
    least = tiles * tile_seconds + work_tiles * SWITCH_SECONDS
    left = tiles * tile_tokens * token_bytes + work_tiles * part_bytes
    fastest = left / least
    taken = 0.0
    while left.size:
        rate = np.minimum(fastest, BYTES_PER_S / left.size)
        step = (left / rate).min()
        taken += step
        left = left - rate * step
        working = left > 1
        left, fastest = left[working], fastest[working]
    return taken


def predicted(lengths: list[int], kv_heads: int) -> float:
    """Share of the bandwidth of a copy with which `paged_decode` reads a batch."""
    config = choose_config(len(lengths), kv_heads, 128, 2, CORES)
    taken = seconds(
        lengths, kv_heads, config.programs, config.tile_tokens, TILE_SECONDS, TOKEN_BYTES,
        (Q_HEADS // kv_heads) * 128 * 4,
    )  # fmt: skip
    read = sum(lengths) * kv_heads * TOKEN_BYTES / BYTES_PER_S
    return read / (taken + FIXED_SECONDS)


def predicted_latent(lengths: list[int]) -> float:
    """Share of the rate of the tensor cores with which `latent_decode` attends for 128 heads."""
    shares = latent.choose_config(len(lengths), LATENT_HEADS, CORES).shares
    taken = seconds(
        lengths, 1, shares, latent.TILE_TOKENS, LATENT_TILE_SECONDS, 2 * latent.LATENT_DIM,
        LATENT_HEADS * latent.VALUE_DIM * 4,
    )  # fmt: skip
    tiles = sum(lengths) / latent.TILE_TOKENS * LATENT_HEADS / latent.ROWS
    products = tiles * LATENT_PRODUCT_SECONDS / CORES
    return products / (taken + FIXED_SECONDS + SCATTER_SECONDS)


class Predicted(NamedTuple):
    """A prediction of `paged_extend`."""

    flops_per_s: float
    bandwidth: float
    """Share of the bandwidth of a copy with which the KV of all rows would be read once."""
    if_whole: float
    """Time if no work tile were divided, as a multiple of the predicted time."""


def predicted_extend(rows: list[tuple[int, int]], kv_heads: int = 8) -> Predicted:
    """What `paged_extend` makes of rows of new and cached tokens, with 32 query heads of 128."""
    group = Q_HEADS // kv_heads
    new, cached = np.array(rows).T
    tokens, block_kv = int(new.sum()), extend.choose_config(128, CORES).block_kv
    starts, lengths = np.cumsum(new) - new, new + cached
    tile_tokens = extend.tile_tokens_of(group)
    divide = partial(
        build_tiles, num_tokens=tokens, padded_tokens=max(-(-tokens // 8) * 8, tile_tokens),
        tile_tokens=tile_tokens, block_kv=block_kv, window=None, max_kv_length=int(lengths.max()),
    )  # fmt: skip
    work = jax.jit(divide)(*(jnp.asarray(each, jnp.int32) for each in (lengths, new, starts)))
    items = WorkItem(*np.asarray(work.items)[: int(work.num_items[0])].T)
    steps = np.repeat(items.step_end - items.step_begin, kv_heads)
    made = jax.jit(partial(build_shares, programs=CORES))(jnp.asarray(steps))
    shares = Share(*np.asarray(made.shares).T)

    step_seconds = 4 * extend.TILE_ROWS * block_kv * 128 * CORES / EXTEND_FLOPS_PER_S

    # The pieces of all thread blocks, by thread block and number.
    by_program = Share(*(field[:, None] for field in shares))
    index, program = np.arange(shares.num_pieces.max()), np.arange(CORES)[:, None]
    named = jax.jit(lambda share: share.piece(index, program, CORES))(by_program)
    pieces = Piece(*(np.asarray(field) for field in named))
    tiles = np.minimum(pieces.tile, steps.size - 1)
    read = np.minimum(pieces.end, steps[tiles]) - pieces.begin
    read = np.where(index < by_program.num_pieces, read, 0).sum(axis=1)
    busiest = (read * step_seconds + shares.num_pieces * SWITCH_SECONDS).max()

    waves = np.arange(-(-steps.size // CORES))[:, None]
    places = np.asarray(zigzag(waves, np.arange(CORES), CORES))
    whole = np.append(steps, np.zeros(places.size, np.int32))[places].sum(axis=0).max()
    whole_seconds = whole * step_seconds + len(waves) * SWITCH_SECONDS
    read_seconds = float(lengths.sum()) * kv_heads * TOKEN_BYTES / BYTES_PER_S
    taken = max(busiest, read_seconds) + FIXED_SECONDS
    pairs = float((new * cached + new * (new + 1) / 2).sum())
    whole_seconds = max(whole_seconds, read_seconds) + FIXED_SECONDS
    return Predicted(4 * Q_HEADS * 128 * pairs / taken, read_seconds / taken, whole_seconds / taken)


def main() -> None:
    """Print the tables."""
    print("| Decode: batch x length | 8 KV heads | 4 KV heads | Latents, 128 heads |")
    print("| --- | ---: | ---: | ---: |")
    for name, lengths in BATCHES.items():
        shares = [predicted(lengths, kv_heads) for kv_heads in (8, 4)]
        shares.append(predicted_latent(lengths))
        print(f"| {name} | {' | '.join(f'{share:.2f}' for share in shares)} |")
    print()
    print("| Extend | TFLOP/s | Share of bandwidth | Time if no tile were divided |")
    print("| --- | ---: | ---: | ---: |")
    for name, rows in EXTENDS.items():
        rate, bandwidth, if_whole = predicted_extend(rows)
        print(f"| {name} | {rate / 1e12:.0f} | {bandwidth:.2f} | {if_whole:.2f} |")


if __name__ == "__main__":
    main()
