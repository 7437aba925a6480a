"""The XLA backend of `paged_decode` on GPUs: few large operations over the visible blocks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ..batched_attention import BatchSizes, Pools, Tiles, attend_tiles
from ..online_softmax import AttentionOptions
from .config import BATCHED_CHUNK_TOKENS, BATCHED_SMALL_STEP_BYTES, BATCHED_STEP_BYTES

SIZES = BatchSizes(BATCHED_CHUNK_TOKENS, BATCHED_SMALL_STEP_BYTES, BATCHED_STEP_BYTES)


@partial(jax.jit, static_argnums=(6, 8))
def decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None = None,
    sizes: BatchSizes = SIZES,
) -> tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"]]:
    """`paged_decode` without its checks: each row is a tile of one token."""
    batch, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_blocks.shape
    if batch == 0:
        return q, jnp.zeros((0, q_heads), jnp.float32)
    fits = (lengths <= block_tables.shape[1] * block_size)[:, None]
    tiles = Tiles(
        q.reshape(batch, 1, kv_heads, q_heads // kv_heads, head_dim),
        jnp.where(fits, lengths[:, None] - 1, -1),
        jnp.asarray(np.arange(batch, dtype=np.int32)),  # a constant: XLA launches an iota
    )
    pools = Pools(k_blocks, v_blocks, block_tables, scales)
    out, lse = attend_tiles(tiles, pools, sinks, options, sizes)
    out = jnp.where(fits[..., None], out[:, 0], jnp.nan)
    return out.astype(q.dtype), jnp.where(fits, lse[:, 0], jnp.nan)
