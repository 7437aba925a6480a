"""The jnp backend of `kv_write`: one scatter for each pool."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def write(
    k_new: Shaped[Array, "tokens kv_heads head_dim"],
    v_new: Shaped[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    k_blocks: Shaped[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Shaped[Array, "blocks kv_heads block_size head_dim"],
) -> tuple[
    Shaped[Array, "blocks kv_heads block_size head_dim"],
    Shaped[Array, "blocks kv_heads block_size head_dim"],
]:
    """`kv_write` without its checks, for new keys and values in the dtype of the pools."""
    num_blocks, _, block_size, _ = k_blocks.shape
    # A negative index would count from the end; one past the end is dropped.
    block = jnp.where(slots < 0, num_blocks, slots // block_size)
    offset = slots % block_size

    def write_one(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[block, :, offset].set(new, mode="drop")

    return write_one(k_blocks, k_new), write_one(v_blocks, v_new)
