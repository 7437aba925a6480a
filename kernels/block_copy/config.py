"""Limits of the Mosaic kernels of the block copies."""

import jax

LANES = 128
"""Elements of a row, as the Mosaic kernels cut a block."""

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
