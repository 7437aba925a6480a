"""Sizes and limits of the Mosaic kernels of the block copies."""

import jax

LANES = 128
"""Elements of a row, as the Mosaic kernels cut a block."""

MAX_ROWS = 256
"""Maximum rows of a TMA box."""

# Not measured on a GPU yet. Two programs of 64 KiB fit an SM; six of their eight chunks are in
# flight: 96 KiB, four times what 3.35 TB/s over 132 SMs needs at a latency of 1 us.
CHUNK_BYTES = 16 * 1024
STAGES = 4
PROGRAMS_PER_CORE = 2

POOLS_PER_LAUNCH = 16
"""The kernel has separate copy instructions for each pool; compile time grows faster than that."""

Pools = tuple[jax.Array, ...]


def unsupported(pools: Pools, ids: jax.Array) -> str | None:
    """Reason why the kernels do not support the arguments, or None."""
    _, kv_heads, block_size, head_dim = pools[0].shape
    elements = kv_heads * block_size * head_dim
    if elements % LANES:
        return (
            f"mosaic needs kv_heads * block_size * head_dim to be a multiple of {LANES}, "
            f"got {elements}"
        )
    if ids.shape[0] == 0:
        return "mosaic needs at least one id, got 0"
    return None
