"""Limits and launch configuration of the Mosaic kernel of latent attention."""

from dataclasses import dataclass

import jax

from ..mosaic_limits import BLOCK_SIZES, DTYPES
from ..paged_decode.config import MAX_PARTS

LATENT_DIM = 576
VALUE_DIM = 512
"""The latents of DeepSeek-V2, V3, R1 and of Kimi K2; they decide the whole tiling."""

ROWS = 64
"""Query heads of a thread block: the rows of a WGMMA tile."""
TILE_TOKENS = 64
"""Tokens of a pipeline stage."""
STAGES = 2
"""Pipeline stages of 72 KiB, which fill the shared memory beside the queries."""
HALF = VALUE_DIM // 2
"""Columns of the output of each of the two warpgroups."""
COLUMNS = 64
"""Columns that threads move between registers and shared memory at a time."""


@dataclass(frozen=True)
class LatentConfig:
    """Launch configuration."""

    shares: int
    """Number of shares of the batch's KV tiles, each with a thread block per 64 query heads."""


def choose_config(num_rows: int, q_heads: int, num_cores: int) -> LatentConfig:
    """Return the launch configuration for a static shape.

    One thread block fits on a multiprocessor.

    Args:
        num_rows: Number of query tokens.
        q_heads: Number of query heads.
        num_cores: Number of multiprocessors.
    """
    return LatentConfig(max(1, min(num_cores // -(-q_heads // ROWS), MAX_PARTS * num_rows)))


def unsupported(q: jax.Array, latents: jax.Array, value_dim: int, num_rows: int) -> str | None:
    """Reason why the kernel does not support the arguments, or None."""
    block_size, latent_dim = latents.shape[2:]
    if q.dtype.name not in DTYPES:
        return f"mosaic needs q of {' or '.join(DTYPES)}, got {q.dtype.name}"
    if latents.dtype != q.dtype:
        return f"mosaic needs latents of q's dtype {q.dtype.name}, got {latents.dtype.name}"
    if (latent_dim, value_dim) != (LATENT_DIM, VALUE_DIM):
        return (
            f"mosaic needs latents of {LATENT_DIM} and values of {VALUE_DIM} elements, "
            f"got {latent_dim} and {value_dim}"
        )
    if block_size not in BLOCK_SIZES:
        return f"mosaic needs a block_size of 16, 32, 64 or 128, got {block_size}"
    if q.shape[0] == 0 or num_rows == 0:
        return f"mosaic needs at least one token and one row, got {q.shape[0]} and {num_rows}"
    return None
