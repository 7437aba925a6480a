"""The jnp backend of `paged_decode`: a loop over (row, chunk of KV) work items."""

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
    merge_into_rows,
)
from .config import CHUNK_TOKENS, STEP_BYTES


@partial(jax.jit, static_argnums=6)
def decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None = None,
) -> tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"]]:
    """`paged_decode` without its checks.

    Work items are (row, chunk of its KV), numbered row by row::

        lengths (in chunks)   3      0   2    1
        item                  0 1 2      3 4  5
        row                   0 0 0      2 2  3
        chunk                 0 1 2      0 1  0

    Each loop step takes the next items of any rows, so the cost of ragged rows is their length.
    """
    batch, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_blocks.shape
    width = block_tables.shape[1]
    group = q_heads // kv_heads
    k_scales, v_scales = scales or (None, None)
    if batch == 0:
        return q, jnp.zeros((0, q_heads), jnp.float32)
    blocks_per_chunk = min(max(1, CHUNK_TOKENS // block_size), width)
    chunk_tokens = blocks_per_chunk * block_size
    max_chunks = -(-width // blocks_per_chunk)
    chunk_bytes = 4 * chunk_tokens * kv_heads * head_dim
    num_items = min(max(1, STEP_BYTES // chunk_bytes), batch * max_chunks)

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
        k = load_chunk(k_blocks, ids, options.sm_scale, k_scales)
        v = load_chunk(v_blocks, ids, V_FACTOR, v_scales)
        part = attend_chunk(queries[row], k, v, visible[:, None], visible, options)
        return merge_into_rows(state, part, owner)

    num_steps = (ends[-1] + num_items - 1) // num_items
    state = empty_state((batch, kv_heads, group), head_dim)
    read = (q, k_blocks, v_blocks, block_tables, lengths, *(scales or ()))
    state = lax.fori_loop(0, num_steps, step, vary_like(state, *read))
    out, lse = finalize(state, None if sinks is None else sinks.reshape(kv_heads, group))
    out = jnp.where(fits[:, None, None, None], out, jnp.nan)
    lse = jnp.where(fits[:, None, None], lse, jnp.nan)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, q_heads)
