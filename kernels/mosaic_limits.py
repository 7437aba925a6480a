"""Shapes and dtypes that both Mosaic attention kernels support; their configs add limits."""

import jax

from .argument_checks import is_quantised

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")


def unsupported_attention(q: jax.Array | jax.ShapeDtypeStruct, k_blocks: jax.Array) -> str | None:
    """Reason why the kernels do not support the shapes and dtypes, or None."""
    head_dim, block_size = q.shape[2], k_blocks.shape[2]
    if q.dtype.name not in DTYPES:
        return f"mosaic needs q of {' or '.join(DTYPES)}, got {q.dtype.name}"
    if k_blocks.dtype != q.dtype and not is_quantised(k_blocks):
        return f"mosaic needs pools of q's dtype {q.dtype.name}, got {k_blocks.dtype.name}"
    if head_dim not in HEAD_DIMS:
        *some, last = HEAD_DIMS
        return f"mosaic needs a head_dim of {', '.join(map(str, some))} or {last}, got {head_dim}"
    if block_size not in BLOCK_SIZES:
        return f"mosaic needs a block_size of 16, 32, 64 or 128, got {block_size}"
    if is_quantised(k_blocks) and head_dim not in (64, 128):
        # With 256, the conversion does not fit beside the output of decode, which takes half the
        # registers, and the quantised and the dequantised tiles of extend do not fit into shared
        # memory.
        return f"mosaic needs a head_dim of 64 or 128 for quantised pools, got {head_dim}"
    return None
