"""`kv_write`: write the keys and values of new tokens into the pools."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from ..argument_checks import check_float, check_int32, check_pools, check_scales, check_shape
from ..backends import Backend, choose_backend, target_device
from .xla import write as write_xla

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of a quantised number, at which it saturates."""


def kv_write(
    k_new: Float[Array, "tokens kv_heads head_dim"],
    v_new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    k_blocks: Shaped[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Shaped[Array, "blocks kv_heads block_size head_dim"],
    *,
    k_scales: Float[Array, "blocks kv_heads"] | None = None,
    v_scales: Float[Array, "blocks kv_heads"] | None = None,
    backend: Backend | None = None,
) -> tuple[
    Shaped[Array, "blocks kv_heads block_size head_dim"],
    Shaped[Array, "blocks kv_heads block_size head_dim"],
]:
    """Return the pools with token ``t`` written to slot ``slots[t]``; in place if they are donated.

    A slot is the place of a token in the pools, for all heads::

        slot = block * block_size + offset   ->   pool[block, :, offset, :]

    JAX 0.10 has no bfloat16 scatter on CPUs: whole bfloat16 pools are converted and copied there,
    unless the program is compiled with `radixkv.kernels.compiler_options()`, as in an engine.

    Args:
        k_new: Keys. They are cast to the pools' dtype, or divided by their scale, rounded and
            saturated (at 127 for int8, at 448 for float8_e4m3fn).
        v_new: Values, of the same shape, treated like the keys.
        slots: Slot of each token. A token with a negative slot, or one past the pools, is skipped.
            If several tokens have the same slot, its contents are undefined.
        k_blocks: Pool of keys.
        v_blocks: Pool of values, of the same shape and dtype.
        k_scales: Quantisation scales of each (block, head), float32 and positive, for int8 and
            float8_e4m3fn pools and only for them. Choose them before you write a block's first
            token; a later change alters the tokens written before.
        v_scales: The same for the values.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    check_pools(k_blocks, v_blocks)
    check_scales(k_blocks, k_scales, v_scales)
    _, kv_heads, block_size, head_dim = k_blocks.shape
    axes = "tokens, kv_heads, head_dim"
    check_shape("k_new", k_new, (None, kv_heads, head_dim), axes)
    check_shape("v_new", v_new, k_new.shape, axes)
    check_float("k_new", k_new)
    check_float("v_new", v_new)
    check_int32("slots", slots, k_new.shape[:1], "tokens")
    k_stored = _as_stored(k_new, slots // block_size, k_scales, k_blocks.dtype)
    v_stored = _as_stored(v_new, slots // block_size, v_scales, v_blocks.dtype)
    if choose_backend(backend, _unsupported(k_stored)) == "xla":
        return write_xla(k_stored, v_stored, slots, k_blocks, v_blocks)
    from .mosaic import write as write_mosaic  # slow to import

    k_written, v_written = write_mosaic(
        k_stored, v_stored, slots, k_blocks, v_blocks, num_cores=target_device().num_cores
    )
    return k_written, v_written


def _as_stored(
    new: jax.Array, blocks: jax.Array, scales: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """Cast or quantise new keys or values; `blocks` may be anything for skipped tokens."""
    if scales is None:
        return new.astype(dtype)
    factors = scales.at[blocks].get(mode="clip")[..., None]
    limit = LARGEST[dtype.name]
    stored = jnp.clip(new.astype(jnp.float32) / factors, -limit, limit)
    if dtype == jnp.int8:
        stored = jnp.round(stored)
    return stored.astype(dtype)


def _unsupported(new: jax.Array) -> str | None:
    """Reason why the Mosaic kernel does not support these tokens (TMA's limits), or None."""
    num_tokens, kv_heads, head_dim = new.shape
    row_bytes = head_dim * new.dtype.itemsize
    if num_tokens == 0:
        return "mosaic needs at least one token, got 0"
    if max(kv_heads, head_dim) > 256:
        return f"mosaic needs kv_heads and head_dim of at most 256, got {kv_heads} and {head_dim}"
    if row_bytes % 16 or kv_heads * row_bytes % 128:
        return (
            "mosaic needs a multiple of 16 bytes per head and of 128 bytes per token, "
            f"got {row_bytes} and {kv_heads * row_bytes}"
        )
    return None
