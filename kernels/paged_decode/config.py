"""Sizes of `paged_decode`, and limits and launch configuration of its Mosaic kernel."""

from dataclasses import dataclass

import jax

from ..mosaic_limits import unsupported_attention

# Both measured on CPU: smaller steps pay for loop overhead, larger ones for cache misses.
CHUNK_TOKENS = 512
"""KV tokens of a work item of the jnp backend; row lengths are rounded up to it."""

STEP_BYTES = 2**21
"""Keys of one loop step of the jnp backend in float32, which should stay in the CPU's cache."""

# Not measured on a GPU. A small step lasts about as long as its launches.
BATCHED_CHUNK_TOKENS = 256
"""KV tokens of a work item of the XLA backend on GPUs; row lengths are rounded up to it."""

BATCHED_SMALL_STEP_BYTES = 2**25
"""Memory of a small step of the XLA backend on GPUs."""

BATCHED_STEP_BYTES = 2**28
"""Memory of a step of the XLA backend on GPUs: keys, values, logits and weights."""

WGMMA_ROWS = 64
"""Rows of a WGMMA tile, to which the queries of a KV head are padded."""

COLUMNS = 64
"""Columns that threads move between registers and shared memory at a time."""

MAX_PARTS = 64
"""Thread blocks per (row, KV head) of a batch, on average. As many suffice for the whole bandwidth,
and more make the merge slower."""

SMALLEST_SHARE = 2
"""KV tiles of a thread block, of which the first waits for its memory and the second does not."""

MERGE_VECTOR = 128
"""Elements of a register array of the merge, at least: one per thread."""

MERGE_VECTORS = 4
"""Most of these arrays that a thread block of the merge makes; fewer of larger ones."""

MERGE_PARTS = 8
"""Parts that the merge reads at a time."""


@dataclass(frozen=True)
class DecodeConfig:
    """Launch configuration."""

    tile_tokens: int
    """KV tokens of a pipeline stage: a multiple of 64, and a multiple or divisor of block_size."""
    stages: int
    """Number of pipeline stages, at least 3."""
    programs: int
    """Number of thread blocks, among which the KV tiles of the batch are divided."""


def blocks_per_sm(head_dim: int) -> int:
    """Thread blocks resident on one multiprocessor, as shared memory allows."""
    return 1 if head_dim > 128 else 2


def choose_config(
    batch: int, kv_heads: int, head_dim: int, itemsize: int, num_cores: int
) -> DecodeConfig:
    """Return the launch configuration for a static shape.

    The tile and the pipeline fill the shared memory, the thread blocks fill the GPU. The lengths
    of the rows decide on the device which of them share a row (`work_list`).

    Args:
        batch: Number of rows.
        kv_heads: Number of KV heads.
        head_dim: Elements of a head.
        itemsize: Bytes of an element of the pools.
        num_cores: Number of multiprocessors.
    """
    tile_tokens = 128 if head_dim == 64 else 64
    stages = 3 if itemsize > 1 else 4
    resident = num_cores * blocks_per_sm(head_dim)
    return DecodeConfig(tile_tokens, stages, min(resident, MAX_PARTS * batch * kv_heads))


def unsupported(q: jax.Array | jax.ShapeDtypeStruct, k_blocks: jax.Array) -> str | None:
    """Reason why the kernel does not support the arguments, or None."""
    if (shared := unsupported_attention(q, k_blocks)) is not None:
        return shared
    batch, q_heads, kv_heads = q.shape[0], q.shape[1], k_blocks.shape[1]
    if q_heads // kv_heads > WGMMA_ROWS:
        return (
            f"mosaic needs at most {WGMMA_ROWS} query heads per KV head, got {q_heads // kv_heads}"
        )
    return None if batch else "mosaic needs at least one row, got none"
