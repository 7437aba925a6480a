"""Write the keys and values of new tokens into the pools."""

from jaxtyping import Array, Float, Int32

from . import kv_write_xla
from .checks import check_float, check_int32, check_pools, check_scales, check_shape


def kv_write(
    k_new: Float[Array, "tokens kv_heads head_dim"],
    v_new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
) -> tuple[
    Float[Array, "blocks kv_heads block_size head_dim"],
    Float[Array, "blocks kv_heads block_size head_dim"],
]:
    """Return the pools with token `t` written to slot `slots[t]`; in place if they are donated.

    XLA's CPU backend has no bfloat16 scatter: there, bfloat16 pools are converted and copied whole.

    A slot is a token's place in the pools, the same for every head:

        slot = block * block_size + offset   ->   pool[block, :, offset, :]

    Args:
        k_new: Keys; cast to the pools' dtype.
        v_new: Values, of the same shape; cast to the pools' dtype.
        slots: Where each token goes. A negative slot, or one past the pools, skips its token.
            Among tokens with one slot an unspecified one wins.
        k_blocks: Pool of keys.
        v_blocks: Pool of values, of the same shape and dtype.

    Raises:
        KernelArgumentError: A shape or dtype is wrong; raised while tracing.
    """
    check_pools(k_blocks, v_blocks)
    check_scales(k_blocks, None, None)
    _, kv_heads, _, head_dim = k_blocks.shape
    axes = "tokens, kv_heads, head_dim"
    check_shape("k_new", k_new, (None, kv_heads, head_dim), axes)
    check_shape("v_new", v_new, k_new.shape, axes)
    check_float("k_new", k_new)
    check_float("v_new", v_new)
    check_int32("slots", slots, k_new.shape[:1], "tokens")
    return kv_write_xla.write(k_new, v_new, slots, k_blocks, v_blocks)
