"""Sizes of `paged_extend`, and limits and launch configuration of its Mosaic kernel."""

from dataclasses import dataclass

import jax

from ..mosaic_limits import unsupported_attention
from ..paged_decode.config import WGMMA_ROWS

CHUNK_TOKENS = 256
"""KV tokens of a step of the jnp backend."""
TILE_TOKENS = 64
"""Query tokens of a tile of the jnp backend, which read each chunk of KV together."""

# Not measured on a GPU. Logits go through memory: larger tiles read KV less often, but a short row
# fills less of its tile.
BATCHED_CHUNK_TOKENS = 512
"""KV tokens of a work item of the XLA backend on GPUs."""
BATCHED_TILE_ROWS = 256
"""Matrix rows of a tile of the XLA backend on GPUs: tokens times queries that share a KV head."""

ALIGNMENT = 8
"""Tokens. A tile starts at a multiple of it, the height of a swizzle tile of shared memory."""
COLUMNS = 64
"""Columns that the producer has in registers at a time, at most; it has few."""
ROWS = 64
"""Matrix rows of a consumer warpgroup, the height of WGMMA."""
WARPGROUPS = 2
"""Number of consumer warpgroups; one more is the producer."""
TILE_ROWS = WARPGROUPS * ROWS
"""Matrix rows of a work tile: tokens times query heads that share a KV head."""
SMALLEST_SHARE = 2
"""KV steps of a thread block, of which the first waits for its memory and the second does not."""
TOLERANCE = 16
"""A thread block may have a 16th more than a fair share, if fewer tiles are divided then."""


@dataclass(frozen=True)
class ExtendConfig:
    """Launch configuration."""

    programs: int
    """Number of thread blocks; each works through its share of the work tiles."""
    block_kv: int
    """KV tokens of a pipeline stage: a multiple of 64, and a multiple or divisor of block_size."""
    stages: int
    """Number of pipeline stages of K and of V, at least 2."""
    overlap: bool = False
    """Whether each consumer starts the logits of the next step before the softmax of this one, in
    64 more registers per thread with a `block_kv` of 128. Otherwise the consumers alternate between
    the tensor cores and the softmax (ping-pong)."""


def choose_config(head_dim: int, num_cores: int) -> ExtendConfig:
    """Return the launch configuration for a static shape; it fills shared memory and registers.

    ::

        head_dim   block_kv  stages   shared memory (Q, K, V, output)
              64        128       4   16 + 64 + 64 + 16 KiB
              80        128       2   20 + 40 + 40 + 20 KiB
              96        128       2   24 + 48 + 48 + 24 KiB
             112        128       2   28 + 56 + 56 + 28 KiB
             128        128       2   32 + 64 + 64 + 32 KiB
             192         64       2   48 + 48 + 48 + 16 KiB, the output in three parts
             256         64       2   64 + 64 + 64 + 16 KiB, the output in four parts

    Quantised tiles take another 16 or 32 KiB; with a head_dim of 128 the output is then stored in
    two parts. No register spills (ptxas 13.5, JAX 0.10.2 and 0.12.0.1), even with a head_dim of
    256, where the output takes 128 registers per thread. The exception: 16 bytes with a head_dim of
    128, blocks of 16, all options and 3 or 5 heads of a tile, in JAX 0.11.2.
    """
    if head_dim <= 64:
        return ExtendConfig(num_cores, block_kv=128, stages=4)
    if head_dim <= 128:
        return ExtendConfig(num_cores, block_kv=128, stages=2)
    return ExtendConfig(num_cores, block_kv=64, stages=2)


def tile_heads_of(group: int) -> int:
    """Query heads of a work tile, for a group that shares a KV head.

    A tile has at least `ALIGNMENT` tokens and hence at most 16 heads. A larger group is divided
    evenly among tiles that read the same KV, from the L2 cache; each has 128 rows to multiply it
    with, so the arithmetic per byte of shared memory stays the same::

        group       1 .. 16    20    24    32    40    48    64    17 (a prime)
        heads         group    10    12    16    10    16    16     1
    """
    most = TILE_ROWS // ALIGNMENT
    return max(heads for heads in range(1, most + 1) if group % heads == 0)


def tile_tokens_of(heads: int) -> int:
    """Tokens of a work tile of this number of query heads."""
    return TILE_ROWS // heads // ALIGNMENT * ALIGNMENT


def unsupported(q: jax.Array | jax.ShapeDtypeStruct, k_blocks: jax.Array, batch: int) -> str | None:
    """Reason why the kernel does not support the arguments, or None."""
    if (shared := unsupported_attention(q, k_blocks)) is not None:
        return shared
    tokens, q_heads, kv_heads = q.shape[0], q.shape[1], k_blocks.shape[1]
    if q_heads // kv_heads > WGMMA_ROWS:  # single tokens are those of `paged_decode`
        return (
            f"mosaic needs at most {WGMMA_ROWS} query heads per KV head, got {q_heads // kv_heads}"
        )
    if tokens == 0 or batch == 0:
        return f"mosaic needs at least one token and one row, got {tokens} and {batch}"
    return None
