"""The jnp backend of `paged_extend`: a loop over query tiles, and `paged_decode` for the rest."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ..manual_axes import vary_like
from ..online_softmax import (
    V_FACTOR,
    AttentionOptions,
    SoftmaxState,
    attend_chunk,
    empty_state,
    finalize,
    load_chunk,
    merge,
)
from ..paged_decode.xla import decode
from .config import CHUNK_TOKENS, TILE_TOKENS
from .work_list import attend_single_tokens


@partial(jax.jit, static_argnums=8)
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
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """`paged_extend` without its checks."""
    num_tokens, q_heads, _ = q.shape
    if num_tokens == 0 or block_tables.shape[0] == 0:
        return jnp.zeros_like(q), jnp.full((num_tokens, q_heads), -jnp.inf, jnp.float32)
    tile_tokens = min(TILE_TOKENS, num_tokens)
    # The last tile of a row may end after the last token.
    padding = (0, tile_tokens)
    q_padded = jnp.pad(q, (padding, (0, 0), (0, 0)))
    out = jnp.zeros_like(q_padded)
    lse = jnp.full(q_padded.shape[:2], -jnp.inf, jnp.float32)

    num_tiles = jnp.where(q_lengths > 1, (q_lengths + tile_tokens - 1) // tile_tokens, 0)
    ends = jnp.cumsum(num_tiles)

    def tile(t: Array, outputs: tuple[Array, Array]) -> tuple[Array, Array]:
        row = jnp.searchsorted(ends, t, side="right")
        offset = (t - (ends[row] - num_tiles[row])) * tile_tokens  # of the tile in the row
        start = q_starts[row] + offset
        position = kv_lengths[row] - q_lengths[row] + offset + jnp.arange(tile_tokens)
        valid = jnp.arange(tile_tokens) < q_lengths[row] - offset
        queries = lax.dynamic_slice_in_dim(q_padded, start, tile_tokens)
        tile_out, tile_lse = _attend_tile(
            queries,
            jnp.where(valid, position, -1),
            (k_blocks, v_blocks),
            block_tables[row],
            kv_lengths[row],
            sinks,
            options,
            scales,
        )
        # The tile may overlap the next row, whose outputs may be written already.
        out, lse = outputs
        old_out = lax.dynamic_slice_in_dim(out, start, tile_tokens)
        old_lse = lax.dynamic_slice_in_dim(lse, start, tile_tokens)
        new_out = jnp.where(valid[:, None, None], tile_out, old_out)
        new_lse = jnp.where(valid[:, None], tile_lse, old_lse)
        return (
            lax.dynamic_update_slice_in_dim(out, new_out, start, 0),
            lax.dynamic_update_slice_in_dim(lse, new_lse, start, 0),
        )

    read = (q, k_blocks, v_blocks, block_tables, kv_lengths, q_lengths, q_starts, *(scales or ()))
    read += () if sinks is None else (sinks,)
    out, lse = lax.fori_loop(0, ends[-1], tile, vary_like((out, lse), *read))

    def decode_rows(queries: Array, lengths: Array) -> tuple[Array, Array]:
        pools = k_blocks, v_blocks, block_tables
        attended: tuple[Array, Array] = decode(queries, *pools, lengths, sinks, options, scales)
        return attended

    rows = kv_lengths, q_lengths, q_starts
    out, row_lse = attend_single_tokens(decode_rows, q, *rows, out[:num_tokens], lse[:num_tokens])
    assert row_lse is not None
    return out, row_lse


def _attend_tile(
    q: Float[Array, "tile q_heads head_dim"],
    positions: Int32[Array, " tile"],
    pools: tuple[Array, Array],
    block_table: Int32[Array, " width"],
    kv_length: Int32[Array, ""],
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
    scales: tuple[Array, Array] | None,
) -> tuple[Float[Array, "tile q_heads head_dim"], Float[Array, "tile q_heads"]]:
    """Attention of consecutive tokens of one row; tokens at position -1, at the end, see nothing.

    The `tile * group` queries that share a KV head are the rows of one matrix::

        q [tile, kv_heads, group, head_dim]  ->  [kv_heads, tile * group, head_dim]
    """
    k_blocks, v_blocks = pools
    k_scales, v_scales = scales or (None, None)
    tile, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_blocks.shape
    width = block_table.shape[0]
    group = q_heads // kv_heads
    blocks_per_chunk = min(max(1, CHUNK_TOKENS // block_size), width)
    chunk_tokens = blocks_per_chunk * block_size

    fits = kv_length <= width * block_size
    last = jnp.where(fits, positions.max(), -1)
    first_visible = jnp.zeros_like(positions)
    if options.window is not None:
        # A window of 2**31 - 1 before a negative position is no int32.
        first_visible = jnp.maximum(jnp.maximum(positions, -1) - options.window + 1, 0)
    first = first_visible[0]  # positions rise, so the first query's window starts first
    queries = q.astype(jnp.float32).reshape(tile, kv_heads, group, head_dim)
    queries = queries.transpose(1, 0, 2, 3).reshape(1, kv_heads, tile * group, head_dim)

    def step(chunk: Array, state: SoftmaxState) -> SoftmaxState:
        columns = chunk * blocks_per_chunk + jnp.arange(blocks_per_chunk)
        ids = block_table.at[columns].get(mode="clip")[None]
        key = chunk * chunk_tokens + jnp.arange(chunk_tokens)
        visible = (key <= positions[:, None]) & (key >= first_visible[:, None])
        visible = jnp.repeat(visible, group, axis=0)[None]
        written = ((key >= first) & (key <= last))[None]
        k = load_chunk(k_blocks, ids, options.sm_scale, k_scales)
        v = load_chunk(v_blocks, ids, V_FACTOR, v_scales)
        return merge(state, attend_chunk(queries, k, v, visible, written, options))

    shape = (1, kv_heads, tile * group)
    num_chunks = (last + chunk_tokens) // chunk_tokens
    read = (q, positions, *pools, block_table, kv_length, *(scales or ()))
    state = vary_like(empty_state(shape, head_dim), *read)
    state = lax.fori_loop(first // chunk_tokens, num_chunks, step, state)
    state = jax.tree.map(lambda x: x.reshape(kv_heads, tile, group, *x.shape[3:]), state)
    out, lse = finalize(state, None if sinks is None else sinks.reshape(kv_heads, 1, group))
    out = jnp.where(fits, out, jnp.nan).swapaxes(0, 1).reshape(q.shape)
    lse = jnp.where(fits, lse, jnp.nan).swapaxes(0, 1).reshape(tile, q_heads)
    return out.astype(q.dtype), lse
