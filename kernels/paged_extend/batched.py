"""The XLA backend of `paged_extend` on GPUs: few large operations over the visible blocks."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ..batched_attention import BatchSizes, Pools, Tiles, attend_tiles
from ..online_softmax import AttentionOptions
from ..paged_decode.batched import SIZES as DECODE_SIZES
from ..paged_decode.batched import decode
from .config import BATCHED_CHUNK_TOKENS, BATCHED_TILE_ROWS
from .work_list import attend_single_tokens

SIZES = DECODE_SIZES._replace(chunk_tokens=BATCHED_CHUNK_TOKENS)


@partial(jax.jit, static_argnums=(8, 10, 11))
def extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None = None,
    sizes: BatchSizes = SIZES,
    tile_rows: int = BATCHED_TILE_ROWS,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """`paged_extend` without its checks.

    Each row of several tokens is cut into tiles; rows of one token are those of `decode`::

        tokens of rows   150                1    70
        tiles of 64      0..63 64..127 ..149    0..63 ..69
    """
    num_tokens, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_blocks.shape
    batch, width = block_tables.shape
    out, lse = jnp.zeros_like(q), jnp.full((num_tokens, q_heads), -jnp.inf, jnp.float32)
    if num_tokens == 0 or batch == 0:
        return out, lse
    group = q_heads // kv_heads
    tile_tokens = min(max(1, tile_rows // group), num_tokens)
    most_tiles = num_tokens // tile_tokens + batch  # each row may have one that is not full

    number = jnp.where(q_lengths > 1, (q_lengths + tile_tokens - 1) // tile_tokens, 0)
    ends = jnp.cumsum(number, dtype=jnp.int32)
    tile = jnp.arange(most_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    used, row = row < batch, jnp.minimum(row, batch - 1)
    offset = (tile - (ends - number)[row])[:, None] * tile_tokens + jnp.arange(tile_tokens)
    valid = used[:, None] & (offset < q_lengths[row, None])
    fits = (kv_lengths <= width * block_size)[row, None]
    position = (kv_lengths - q_lengths)[row, None] + offset
    start = q_starts[row, None]
    token = jnp.where(valid & (start >= 0), start + offset, num_tokens)
    queries = q.at[token].get(mode="clip")
    tiles = Tiles(
        queries.reshape(most_tiles, tile_tokens, kv_heads, group, head_dim),
        jnp.where(valid & fits, position, -1),
        row,
    )
    pools = Pools(k_blocks, v_blocks, block_tables, scales)
    tile_out, tile_lse = attend_tiles(tiles, pools, sinks, options, sizes)
    tile_out = jnp.where(fits[..., None, None], tile_out, jnp.nan).astype(q.dtype)
    tile_lse = jnp.where(fits[..., None], tile_lse, jnp.nan)
    # No token is in two tiles; those of no row are dropped.
    out = out.at[token].set(tile_out, mode="drop")
    lse = lse.at[token].set(tile_lse, mode="drop")

    def decode_rows(queries: Array, lengths: Array) -> tuple[Array, Array]:
        read = k_blocks, v_blocks, block_tables
        attended: tuple[Array, Array] = decode(queries, *read, lengths, sinks, options, scales)
        return attended

    rows = kv_lengths, q_lengths, q_starts
    out, row_lse = attend_single_tokens(decode_rows, q, *rows, out, lse)
    assert row_lse is not None
    return out, row_lse
