"""What the Mosaic kernel of `paged_decode` serves, and how a launch of it is tiled."""

from dataclasses import dataclass

import jax

from ..mosaic_limits import attention_obstacle

WGMMA_ROWS = 64
"""Rows of a tile of the tensor cores: what the queries of a KV head are padded to."""

MAX_SPLITS = 64  # so many thread blocks draw all the bandwidth there is, and merging stays small


@dataclass(frozen=True)
class DecodeConfig:
    """How a launch is tiled."""

    tile_tokens: int
    """KV tokens of one slot of the ring: a multiple or a divisor of the block size, and of 64."""
    stages: int
    """Slots of the ring, at least 3."""
    splits: int
    """Thread blocks that share a (row, KV head)."""


def blocks_per_sm(head_dim: int) -> int:
    """Thread blocks that run on one multiprocessor at a time: what shared memory allows."""
    return 1 if head_dim > 128 else 2


def choose_config(
    batch: int, kv_heads: int, head_dim: int, table_tokens: int, itemsize: int, num_cores: int
) -> DecodeConfig:
    """The tiling of a launch, by its static shape; `table_tokens` is the most a row can hold.

    The tile and the ring fill the shared memory. A row is split only while the batch does not
    fill the GPU, and never below two tiles.

    It knows the number of rows, not their lengths. So where the batch fills the GPU and one row is
    far longer than the others, one thread block per KV head reads all of that row, and a launch
    lasts as long as it does: about as long as a launch for that row alone, unsplit. To split by
    lengths takes a list of work made on the device and a second pass that merges the parts: some
    launches more for every batch, also for the usual one that has nothing to merge.
    """
    tile_tokens = 128 if head_dim == 64 else 64
    stages = 3 if itemsize > 1 else 4
    resident = num_cores * blocks_per_sm(head_dim)
    splits = min(resident // (batch * kv_heads), table_tokens // (2 * tile_tokens), MAX_SPLITS)
    return DecodeConfig(tile_tokens, stages, max(1, splits))


def obstacle(q: jax.Array, k_blocks: jax.Array) -> str | None:
    """Why this kernel cannot serve the arguments; None if it can."""
    if (shared := attention_obstacle(q, k_blocks)) is not None:
        return shared
    batch, q_heads, kv_heads = q.shape[0], q.shape[1], k_blocks.shape[1]
    if q_heads // kv_heads > WGMMA_ROWS:
        return (
            f"mosaic needs at most {WGMMA_ROWS} query heads per KV head, got {q_heads // kv_heads}"
        )
    return None if batch else "mosaic needs at least one row, got none"
