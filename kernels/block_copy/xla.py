"""The jnp backend of the block copies; the scatter drops inactive entries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def copy(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    sources: Int32[Array, " n"],
    destinations: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "blocks kv_heads block_size head_dim"]:
    """`copy_blocks` without its checks."""
    active = _active_mask(blocks, sources, count) & _active_mask(blocks, destinations, count)
    return _write(blocks, _read(blocks, sources), destinations, active)


def gather(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "n kv_heads block_size head_dim"]:
    """`gather_blocks` without its checks."""
    active = _active_mask(blocks, ids, count)[:, None, None, None]
    return jnp.where(active, _read(blocks, ids), jnp.zeros((), blocks.dtype))


def scatter(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    staging: Float[Array, "n kv_heads block_size head_dim"],
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "blocks kv_heads block_size head_dim"]:
    """`scatter_blocks` without its checks."""
    return _write(blocks, staging, ids, _active_mask(blocks, ids, count))


def _active_mask(blocks: jax.Array, ids: jax.Array, count: jax.Array) -> Bool[Array, " n"]:
    """Mask of the active entries: those before `count` whose id is in the pool."""
    return (jnp.arange(ids.shape[0]) < count) & (ids >= 0) & (ids < blocks.shape[0])


def _read(blocks: jax.Array, ids: jax.Array) -> jax.Array:
    return blocks.at[jnp.clip(ids, 0, blocks.shape[0] - 1)].get(mode="promise_in_bounds")


def _write(
    blocks: jax.Array, new: jax.Array, ids: jax.Array, active: Bool[Array, " n"]
) -> jax.Array:
    return blocks.at[jnp.where(active, ids, blocks.shape[0])].set(new, mode="drop")
