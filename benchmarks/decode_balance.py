"""Predict how evenly decode uses an H200 for batches of mixed lengths; no GPU is needed.

::

    python benchmarks/decode_balance.py

The model is one of memory bandwidth. Each thread block reads the tiles that the work list gives it.
All share the bandwidth, and none reads faster than its instructions let it. The constants are those
of a copy that was measured on an H200, and cycles that were counted in the machine code of the
kernel. The prediction of a batch is its share of that copy's bandwidth; none of it was measured.

`latent_decode` is limited by the tensor cores where many heads share a latent, so its prediction is
the share of their rate. The thread blocks of a share read its latents together, so memory counts
them once.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.kernels.latent_attention import config as latent
from radixkv.kernels.paged_decode.config import choose_config
from radixkv.kernels.paged_decode.work_list import build_work_list

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


def main() -> None:
    """Print the table."""
    print("| Decode: batch x length | 8 KV heads | 4 KV heads | Latents, 128 heads |")
    print("| --- | ---: | ---: | ---: |")
    for name, lengths in BATCHES.items():
        shares = [predicted(lengths, kv_heads) for kv_heads in (8, 4)]
        shares.append(predicted_latent(lengths))
        print(f"| {name} | {' | '.join(f'{share:.2f}' for share in shares)} |")


if __name__ == "__main__":
    main()
