"""Paged attention for ragged rows of query tokens: prefill chunks and decode tokens in one step."""

from functools import partial
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from .checks import check_block_tables, check_int32, check_pools, check_queries
from .online_softmax import (
    V_FACTOR,
    AttentionOptions,
    SoftmaxState,
    attend_chunk,
    check_options,
    empty_state,
    finish,
    load_chunk,
    merge,
)
from .paged_decode import decode

CHUNK_TOKENS = 256
TILE_TOKENS = 64  # query tokens of one row that read a chunk of KV together


@overload
def paged_extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: Literal[False] = False,
) -> Float[Array, "tokens q_heads head_dim"]: ...
@overload
def paged_extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: Literal[True],
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]: ...
def paged_extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """Causal attention of each row's last `q_lengths[b]` tokens over that row's KV blocks.

    The queries of all rows lie in one array, row `b` at `q_starts[b]`:

        q          | row 0 ........ | row 1 | padding | row 2 ... | padding |
        q_starts   0                ^       .         ^
        position   kv_lengths[b] - q_lengths[b]  ...  kv_lengths[b] - 1      (within row b)

    Token `p` of row `b` lies in the pools at

        [block_tables[b, p // block_size], kv_head, p % block_size, :]

    and query head `i` reads KV head `i // (q_heads // kv_heads)`. The KV of the queries themselves
    must be in the pools already. A row of one query costs what it costs in `paged_decode`, and
    gives the same result. Memory beyond a row's `kv_lengths` is never used: it may hold NaN, and
    the table entries for it may be anything.

    Args:
        q: Queries, bfloat16, float16 or float32; accumulation is in float32.
        k_blocks: Pool of keys.
        v_blocks: Pool of values, of the same shape and dtype.
        block_tables: Ids of the blocks of each row. An id outside the pool cannot be refused while
            tracing: it is moved to the nearest block in the pool, so that row's result is wrong.
        kv_lengths: KV tokens of each row, its queries included. A row longer than its table gives
            NaN; a query at a negative position (`q_lengths > kv_lengths`) sees nothing.
        q_lengths: Query tokens of each row; 0 marks an inactive row.
        q_starts: Index in `q` of each row's first query. Rows must not overlap and must end within
            `q`, else their outputs are unspecified; inactive rows may start anywhere.
        sm_scale: Factor of the logits, usually `head_dim ** -0.5`. Static.
        soft_cap: Turns logits `x` into `soft_cap * tanh(x / soft_cap)`. Static.
        window: Number of latest positions that a query sees, its own included. Blocks wholly
            before the windows are not read. Static.
        sinks: One logit per query head, neither scaled nor capped, added to the denominator only.
        return_lse: Also return the log of the denominator. Static.

    Returns:
        The output in the dtype of `q`, exactly 0 for tokens of no row; with `return_lse` also the
        natural log of the softmax denominator in float32, sinks included, -inf where a token sees
        nothing.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    check_pools(k_blocks, v_blocks)
    check_queries(q, k_blocks, "tokens")
    check_block_tables(block_tables)
    for name, array in (
        ("kv_lengths", kv_lengths),
        ("q_lengths", q_lengths),
        ("q_starts", q_starts),
    ):
        check_int32(name, array, (block_tables.shape[0],), "batch of block_tables")
    options = check_options(sm_scale, soft_cap, window, sinks, q.shape[1])
    out, lse = _extend(
        q, k_blocks, v_blocks, block_tables, kv_lengths, q_lengths, q_starts, sinks, options
    )
    return (out, lse) if return_lse else out


@partial(jax.jit, static_argnums=8)
def _extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """`paged_extend` without its checks: tiles of long rows one by one, single tokens together."""
    num_tokens, q_heads, _ = q.shape
    if num_tokens == 0 or block_tables.shape[0] == 0:
        return jnp.zeros_like(q), jnp.full((num_tokens, q_heads), -jnp.inf, jnp.float32)
    tile_tokens = min(TILE_TOKENS, num_tokens)
    # Padding at the end: the last tile of a row may reach past the last token.
    padding = (0, tile_tokens)
    q_padded = jnp.pad(q, (padding, (0, 0), (0, 0)))
    out = jnp.zeros_like(q_padded)
    lse = jnp.full(q_padded.shape[:2], -jnp.inf, jnp.float32)

    num_tiles = jnp.where(q_lengths > 1, (q_lengths + tile_tokens - 1) // tile_tokens, 0)
    ends = jnp.cumsum(num_tiles)

    def tile(t: Array, outputs: tuple[Array, Array]) -> tuple[Array, Array]:
        row = jnp.searchsorted(ends, t, side="right")
        offset = (t - (ends[row] - num_tiles[row])) * tile_tokens  # of the tile, within the row
        start = q_starts[row] + offset
        position = kv_lengths[row] - q_lengths[row] + offset + jnp.arange(tile_tokens)
        live = jnp.arange(tile_tokens) < q_lengths[row] - offset
        queries = lax.dynamic_slice_in_dim(q_padded, start, tile_tokens)
        tile_out, tile_lse = _attend_tile(
            queries,
            jnp.where(live, position, -1),
            (k_blocks, v_blocks),
            block_tables[row],
            kv_lengths[row],
            sinks,
            options,
        )
        # The tile may reach into the next row, whose outputs may be there already.
        out, lse = outputs
        old_out = lax.dynamic_slice_in_dim(out, start, tile_tokens)
        old_lse = lax.dynamic_slice_in_dim(lse, start, tile_tokens)
        new_out = jnp.where(live[:, None, None], tile_out, old_out)
        new_lse = jnp.where(live[:, None], tile_lse, old_lse)
        return (
            lax.dynamic_update_slice_in_dim(out, new_out, start, 0),
            lax.dynamic_update_slice_in_dim(lse, new_lse, start, 0),
        )

    out, lse = lax.fori_loop(0, ends[-1], tile, (out, lse))
    out, lse = out[:num_tokens], lse[:num_tokens]

    single = q_lengths == 1
    queries = q.at[jnp.where(single, q_starts, 0)].get(mode="clip")
    lengths = jnp.where(single, kv_lengths, 0)
    row_out, row_lse = decode(queries, k_blocks, v_blocks, block_tables, lengths, sinks, options)
    target = jnp.where(single, q_starts, num_tokens)  # out of range: dropped
    return (
        out.at[target].set(row_out, mode="drop"),
        lse.at[target].set(row_lse, mode="drop"),
    )


def _attend_tile(
    q: Float[Array, "tile q_heads head_dim"],
    positions: Int32[Array, " tile"],
    pools: tuple[Array, Array],
    block_table: Int32[Array, " width"],
    kv_length: Int32[Array, ""],
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
) -> tuple[Float[Array, "tile q_heads head_dim"], Float[Array, "tile q_heads"]]:
    """Attention of consecutive tokens of one row; position -1 (after the others) sees nothing.

    The queries that share a KV head, `tile * group` of them, are the rows of one matrix:

        q [tile, kv_heads, group, head_dim]  ->  [kv_heads, tile * group, head_dim]
    """
    k_blocks, v_blocks = pools
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
        first_visible = jnp.maximum(positions - options.window + 1, 0)
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
        k = load_chunk(k_blocks, ids, options.sm_scale)
        v = load_chunk(v_blocks, ids, V_FACTOR)
        return merge(state, attend_chunk(queries, k, v, visible, written, options))

    shape = (1, kv_heads, tile * group)
    num_chunks = (last + chunk_tokens) // chunk_tokens
    state = lax.fori_loop(first // chunk_tokens, num_chunks, step, empty_state(shape, head_dim))
    state = jax.tree.map(lambda x: x.reshape(kv_heads, tile, group, *x.shape[3:]), state)
    out, lse = finish(state, None if sinks is None else sinks.reshape(kv_heads, 1, group))
    out = jnp.where(fits, out, jnp.nan).swapaxes(0, 1).reshape(q.shape)
    lse = jnp.where(fits, lse, jnp.nan).swapaxes(0, 1).reshape(tile, q_heads)
    return out.astype(q.dtype), lse
