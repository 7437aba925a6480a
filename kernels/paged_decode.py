"""Paged attention for one query token per row."""

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
    merge_into_rows,
)

# Both measured on CPU: smaller steps pay for loop overhead, larger ones for cache misses.
CHUNK_TOKENS = 512  # KV tokens of one row in one work item: what a row's length is rounded up to
STEP_TOKENS = 4096  # KV tokens in one loop step: bounds the memory gathered at once


@overload
def paged_decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: Literal[False] = False,
) -> Float[Array, "batch q_heads head_dim"]: ...
@overload
def paged_decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: Literal[True],
) -> tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"]]: ...
def paged_decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "batch q_heads head_dim"]
    | tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"]]
):
    """Attention of one query token per row over that row's KV blocks.

    Token `p` of row `b` lies in the pools at

        [block_tables[b, p // block_size], kv_head, p % block_size, :]

    and query head `i` reads KV head `i // (q_heads // kv_heads)`. The cost follows the sum of the
    lengths (each rounded up to a chunk), not the width of the table. Memory beyond a row's length
    is never used: it may hold NaN, and the table entries for it may be anything.

    Args:
        q: Queries, one token per row, bfloat16, float16 or float32; accumulation is in float32.
        k_blocks: Pool of keys.
        v_blocks: Pool of values, of the same shape and dtype.
        block_tables: Ids of the blocks of each row. An id outside the pool cannot be refused while
            tracing: it is moved to the nearest block in the pool, so that row's result is wrong.
        lengths: KV tokens of each row, the query's own included; 0 marks an inactive row, whose
            output is exactly 0. A row longer than its table gives NaN.
        sm_scale: Factor of the logits, usually `head_dim ** -0.5`. Static.
        soft_cap: Turns logits `x` into `soft_cap * tanh(x / soft_cap)`. Static.
        window: Number of latest positions that the query sees, its own included. Blocks wholly
            before the window are not read. Static.
        sinks: One logit per query head, neither scaled nor capped, added to the denominator only.
        return_lse: Also return the log of the denominator. Static.

    Returns:
        The output in the dtype of `q`; with `return_lse` also the natural log of the softmax
        denominator in float32, sinks included, -inf for inactive rows.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    check_pools(k_blocks, v_blocks)
    check_queries(q, k_blocks, "batch")
    check_block_tables(block_tables)
    check_int32(
        "block_tables", block_tables, (q.shape[0], block_tables.shape[1]), "batch of q, width"
    )
    check_int32("lengths", lengths, (q.shape[0],), "batch of q")
    options = check_options(sm_scale, soft_cap, window, sinks, q.shape[1])
    out, lse = decode(q, k_blocks, v_blocks, block_tables, lengths, sinks, options)
    return (out, lse) if return_lse else out


@partial(jax.jit, static_argnums=6)
def decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
) -> tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"]]:
    """`paged_decode` without its checks.

    Work items are (row, chunk of its KV), numbered row by row:

        lengths (in chunks)   3      0   2    1
        item                  0 1 2      3 4  5
        row                   0 0 0      2 2  3
        chunk                 0 1 2      0 1  0

    Each loop step takes the next items, whichever rows they belong to, so ragged rows cost what
    they hold.
    """
    batch, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_blocks.shape
    width = block_tables.shape[1]
    group = q_heads // kv_heads
    if batch == 0:
        return q, jnp.zeros((0, q_heads), jnp.float32)
    blocks_per_chunk = min(max(1, CHUNK_TOKENS // block_size), width)
    chunk_tokens = blocks_per_chunk * block_size
    max_chunks = -(-width // blocks_per_chunk)
    num_items = min(max(1, STEP_TOKENS // chunk_tokens), batch * max_chunks)

    fits = lengths <= width * block_size
    lengths = jnp.where(fits, lengths, 0)
    first_visible = jnp.zeros_like(lengths)
    if options.window is not None:
        first_visible = jnp.maximum(lengths - options.window, 0)
    first_chunk = first_visible // chunk_tokens
    num_chunks = jnp.maximum((lengths + chunk_tokens - 1) // chunk_tokens - first_chunk, 0)
    ends = jnp.cumsum(num_chunks)
    queries = q.reshape(batch, kv_heads, group, head_dim).astype(jnp.float32)

    def step(i: Array, state: SoftmaxState) -> SoftmaxState:
        item = i * num_items + jnp.arange(num_items, dtype=jnp.int32)
        owner = jnp.searchsorted(ends, item, side="right")  # `batch` for items past the last
        row = jnp.minimum(owner, batch - 1)
        chunk = first_chunk[row] + item - (ends[row] - num_chunks[row])
        columns = chunk[:, None] * blocks_per_chunk + jnp.arange(blocks_per_chunk)
        ids = block_tables.at[row[:, None], columns].get(mode="clip")
        position = chunk[:, None] * chunk_tokens + jnp.arange(chunk_tokens)
        visible = (position >= first_visible[row, None]) & (position < lengths[row, None])
        k = load_chunk(k_blocks, ids, options.sm_scale)
        v = load_chunk(v_blocks, ids, V_FACTOR)
        part = attend_chunk(queries[row], k, v, visible[:, None], visible, options)
        return merge_into_rows(state, part, owner)

    num_steps = (ends[-1] + num_items - 1) // num_items
    state = lax.fori_loop(0, num_steps, step, empty_state((batch, kv_heads, group), head_dim))
    out, lse = finish(state, None if sinks is None else sinks.reshape(kv_heads, group))
    out = jnp.where(fits[:, None, None, None], out, jnp.nan)
    lse = jnp.where(fits[:, None, None], lse, jnp.nan)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, q_heads)
