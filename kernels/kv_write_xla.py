"""The jnp backend of `kv_write`: one scatter for each pool."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def write(
    k_new: Float[Array, "tokens kv_heads head_dim"],
    v_new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
) -> tuple[
    Float[Array, "blocks kv_heads block_size head_dim"],
    Float[Array, "blocks kv_heads block_size head_dim"],
]:
    """`kv_write` without its checks."""
    num_blocks, _, block_size, _ = k_blocks.shape
    # A negative index would count from the end; one past the end is dropped.
    block = jnp.where(slots < 0, num_blocks, slots // block_size)
    offset = slots % block_size

    def write_one(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[block, :, offset].set(new.astype(pool.dtype), mode="drop")

    return write_one(k_blocks, k_new), write_one(v_blocks, v_new)
