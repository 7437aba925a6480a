"""The jnp backend of the block copies; an entry that does not act is dropped by the scatter."""

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
    acts = _acting(blocks, sources, count) & _acting(blocks, destinations, count)
    return _write(blocks, _read(blocks, sources), destinations, acts)


def gather(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "n kv_heads block_size head_dim"]:
    """`gather_blocks` without its checks."""
    acts = _acting(blocks, ids, count)[:, None, None, None]
    return jnp.where(acts, _read(blocks, ids), jnp.zeros((), blocks.dtype))


def scatter(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    staging: Float[Array, "n kv_heads block_size head_dim"],
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "blocks kv_heads block_size head_dim"]:
    """`scatter_blocks` without its checks."""
    return _write(blocks, staging, ids, _acting(blocks, ids, count))


def _acting(blocks: jax.Array, ids: jax.Array, count: jax.Array) -> Bool[Array, " n"]:
    """Which entries act: those before `count` whose id is in the pool."""
    return (jnp.arange(ids.shape[0]) < count) & (ids >= 0) & (ids < blocks.shape[0])


def _read(blocks: jax.Array, ids: jax.Array) -> jax.Array:
    return blocks.at[jnp.clip(ids, 0, blocks.shape[0] - 1)].get(mode="promise_in_bounds")


def _write(blocks: jax.Array, new: jax.Array, ids: jax.Array, acts: Bool[Array, " n"]) -> jax.Array:
    return blocks.at[jnp.where(acts, ids, blocks.shape[0])].set(new, mode="drop")
