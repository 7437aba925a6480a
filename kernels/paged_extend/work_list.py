"""The work list of ragged extend attention, built on the device: which query tile reads which KV.

A *query tile* is `tile_tokens` consecutive tokens of `q` with all query heads that share one KV
head. Its first token is a multiple of 8, because a TMA copy into shared memory starts there::

    q              0       8       16      24      32      40
    rows           |000000000000|1111111111111111111|.......      (row 1 starts at 13)
    tiles of 16    |---------------|                              tokens 0..12 valid, row 0
                           |---------------|                      tokens 5..15 valid, row 1
                                           |---------------|      tokens 0..8 valid, row 1

A tile serves one row; the results of its other tokens are discarded. It reads KV from the first
position that its first valid token sees to the position of its last valid token, in *KV steps* of
`block_kv` tokens. One tile with a window of 5 steps::

    step      0    1    2    3    4    5    6
                   |~~~~|----|----|----|~~~~|
        step_begin ^    ^              ^    ^ step_end        ~ masked: some token sees only a part
              full_begin               full_end               - full: every valid token sees all

A row of one query token has a tile of its own here. The backends of XLA leave such rows out, and
pass them to their decode kernels (`attend_single_tokens`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .config import ALIGNMENT


class WorkItem(NamedTuple):
    """One query tile, or one int32 array per field for a list of tiles."""

    row: Int32[Array, "*items"]
    """Row of the block tables."""
    first_token: Int32[Array, "*items"]
    """First token of the tile in `q`, a multiple of `ALIGNMENT`."""
    valid_begin: Int32[Array, "*items"]
    valid_end: Int32[Array, "*items"]
    """The row's tokens within the tile: [valid_begin, valid_end)."""
    position: Int32[Array, "*items"]
    """Position of the tile's first token within the row; may be negative."""
    kv_begin: Int32[Array, "*items"]
    kv_end: Int32[Array, "*items"]
    """Readable KV positions: [kv_begin, kv_end). Earlier blocks may be recycled (window)."""
    step_begin: Int32[Array, "*items"]
    full_begin: Int32[Array, "*items"]
    full_end: Int32[Array, "*items"]
    step_end: Int32[Array, "*items"]
    """KV steps, see the diagram; step_begin == step_end if the tile sees nothing."""
    fits: Int32[Array, "*items"]
    """0 if the row is longer than its block table: the result is NaN."""


class WorkList(NamedTuple):
    """All query tiles of a call, longest first."""

    items: Int32[Array, "items fields"]
    """One `WorkItem` per row; entries from `num_items` on are undefined."""
    num_items: Int32[Array, " 1"]
    item_of_token: Int32[Array, " tokens"]
    """Index of the item that computes each token of `q`; -1 for a token of no row."""


def max_items(num_tokens: int, batch: int, tile_tokens: int) -> int:
    """Upper bound of the number of tiles; each row may start up to 7 tokens into its first tile."""
    return (num_tokens + min(batch, num_tokens) * (tile_tokens + ALIGNMENT - 2)) // tile_tokens


def build_work_list(
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    num_tokens: int,
    padded_tokens: int,
    tile_tokens: int,
    block_kv: int,
    window: int | None,
    max_kv_length: int,
) -> WorkList:
    """Cut the rows into query tiles.

    Args:
        kv_lengths: As in `paged_extend`.
        q_lengths: As in `paged_extend`; a row of 0 has no tile.
        q_starts: As in `paged_extend`.
        num_tokens: Number of tokens of `q`.
        padded_tokens: Number of tokens of the padded `q` that tiles are read from; no tile ends
            after it.
        tile_tokens: Number of tokens of a tile, a multiple of `ALIGNMENT`.
        block_kv: Number of KV tokens of a step.
        window: As in `paged_extend`.
        max_kv_length: Capacity of a block table in tokens.
    """
    batch = q_lengths.shape[0]
    base = q_starts // ALIGNMENT * ALIGNMENT
    ends_at = q_starts + q_lengths
    tiles = jnp.where(q_lengths > 0, (ends_at - base + tile_tokens - 1) // tile_tokens, 0)
    tiles_end = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(max_items(num_tokens, batch, tile_tokens), dtype=jnp.int32)
    # Comparisons of all with all are one launch; other ways to search are loops on the host.
    row = jnp.searchsorted(tiles_end, index, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, batch - 1)
    start = base[row] + (index - (tiles_end[row] - tiles[row])) * tile_tokens
    valid_begin = jnp.maximum(jnp.maximum(start, q_starts[row]), 0)
    valid_end = jnp.minimum(jnp.minimum(start + tile_tokens, ends_at[row]), num_tokens)
    # The last tile is moved back if it would end after `padded_tokens`. The tokens that it then
    # shares with the tile before are not valid in it.
    first_token = jnp.clip(start, 0, padded_tokens - tile_tokens)
    kv_length = kv_lengths[row]
    position = kv_length - q_lengths[row] + first_token - q_starts[row]
    valid_begin, valid_end = valid_begin - first_token, valid_end - first_token

    fits = kv_length <= max_kv_length
    last = jnp.where(fits, position + valid_end - 1, -1)  # position of the last valid token
    step_end = jnp.maximum(last + block_kv, 0) // block_kv
    seen_by_all = position + valid_begin + 1
    full_end = jnp.maximum(seen_by_all, 0) // block_kv
    kv_begin = step_begin = full_begin = jnp.zeros_like(step_end)
    if window is not None:
        # A window of 2**31 - 1 before a negative position is no int32.
        kv_begin = jnp.maximum(jnp.maximum(seen_by_all, 0) - window, 0)
        step_begin = jnp.minimum(kv_begin // block_kv, step_end)
        full_begin = jnp.maximum(jnp.maximum(last + 1, 0) - window + block_kv - 1, 0) // block_kv
    full_begin = jnp.clip(full_begin, step_begin, step_end)
    full_end = jnp.clip(full_end, full_begin, step_end)
    items = WorkItem(
        row, first_token, valid_begin, valid_end, position, kv_begin, kv_length,
        step_begin, full_begin, full_end, step_end, fits.astype(jnp.int32),
    )  # fmt: skip

    num_items = jnp.clip(tiles_end[-1], 0, index.size)
    cost = jnp.where(index < num_items, step_end - step_begin, -1)
    order = jnp.argsort(-cost).astype(jnp.int32)  # stable, hence deterministic
    place = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    # Rows may lie in any order: sort their starts, and find the last start before each token.
    starts = jnp.where(q_lengths > 0, q_starts, num_tokens)
    by_start = jnp.argsort(starts)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    nearest = jnp.searchsorted(starts[by_start], token, side="right", method="compare_all")
    nearest = nearest.astype(jnp.int32) - 1
    owner = by_start[jnp.maximum(nearest, 0)]
    in_row = (nearest >= 0) & (token < ends_at[owner]) & (q_lengths[owner] > 0)
    item = tiles_end[owner] - tiles[owner] + (token - base[owner]) // tile_tokens
    item_of_token = jnp.where(in_row, place[jnp.clip(item, 0, index.size - 1)], -1)
    return WorkList(jnp.stack(items, axis=1)[order], num_items[None], item_of_token)


def attend_single_tokens(
    decode: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
    q: Float[Array, "tokens q_heads head_dim"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    out: Float[Array, "tokens q_heads head_dim"],
    lse: Float[Array, "tokens q_heads"] | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """Replace `out` and `lse` of rows of one query token by the results of a decode kernel.

    For the backends of XLA, in which a query tile would take the work of a whole tile for one
    token. One decode serves all of these rows, at the cost of the KV that they read.

    Args:
        decode: Returns output and log-sum-exp for one query and one length per row of the batch.
            The length is 0 for rows that do not have exactly one query.
        q: As in `paged_extend`, like the next three.
        kv_lengths: KV tokens of each row.
        q_lengths: Query tokens of each row.
        q_starts: Index in `q` of each row's first query.
        out: Outputs of the other rows.
        lse: Log-sum-exps of the other rows, or None.
    """
    single = (q_lengths == 1) & (q_starts >= 0)
    queries = q.at[jnp.where(single, q_starts, 0)].get(mode="clip")
    row_out, row_lse = decode(queries, jnp.where(single, kv_lengths, 0))
    token = jnp.where(single, q_starts, q.shape[0])  # out of range: dropped
    out = out.at[token].set(row_out, mode="drop")
    if lse is not None and row_lse is not None:
        lse = lse.at[token].set(row_lse, mode="drop")
    return out, lse
