"""The work list of ragged extend attention, built on the device: which tile reads which KV.

A *tile* is `tile_tokens` consecutive tokens of `q`, some of one row, starting at a multiple of 8
(what a tile copy can address), with all query heads that share one KV head:

    q              0       8       16      24      32      40
    rows           |000000000000|1111111111111111111|.......      (row 1 starts at 13)
    tiles of 16    |---------------|                              slots 0..12 live, row 0
                           |---------------|                      slots 5..15 live, row 1
                                           |---------------|      slots 0..8 live, row 1

A tile holds tokens of one row only; its other slots are computed and thrown away. It reads KV from
the first position that its first live token sees to the position of its last one, in *steps* of
`block_kv` tokens (window 5 steps wide, drawn for one tile):

    step      0    1    2    3    4    5    6
                   |~~~~|----|----|----|~~~~|
             begin ^    ^              ^    ^ end          ~ masked: some token sees not all of it
                   full_begin   full_end                  - every live token sees all of it

Rows of one token are no tiles: `attend_single_tokens` leaves them to a decode kernel.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

ALIGNMENT = 8
"""Tokens: a tile starts at a multiple of it, the height of a tile of shared memory."""


class WorkItem(NamedTuple):
    """One tile, or one int32 array per field for a list of them."""

    row: Int32[Array, "*items"]
    """Row of the block tables."""
    first: Int32[Array, "*items"]
    """Token of `q` in slot 0, a multiple of `ALIGNMENT`."""
    live_begin: Int32[Array, "*items"]
    live_end: Int32[Array, "*items"]
    """Slots of the row's tokens: [live_begin, live_end)."""
    position: Int32[Array, "*items"]
    """Position within its row of slot 0; may be negative."""
    kv_begin: Int32[Array, "*items"]
    kv_end: Int32[Array, "*items"]
    """Positions of KV that may be used: before lies what the window has passed, behind nothing."""
    begin: Int32[Array, "*items"]
    full_begin: Int32[Array, "*items"]
    full_end: Int32[Array, "*items"]
    end: Int32[Array, "*items"]
    """Steps, see above; begin == end where nothing is seen."""
    fits: Int32[Array, "*items"]
    """0 where the row is longer than its table: the result is NaN."""


class WorkList(NamedTuple):
    """All tiles of a call, longest first."""

    items: Int32[Array, "items fields"]
    """A `WorkItem` per row; those behind `num_items` mean nothing."""
    num_items: Int32[Array, " 1"]
    item_of_token: Int32[Array, " tokens"]
    """Which item holds a token of `q`; -1 for a token of no row."""


def max_items(num_tokens: int, batch: int, tile_tokens: int) -> int:
    """Bound of the number of tiles: rows cut anywhere, each starting up to 7 slots early."""
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
    """Cut the rows into tiles.

    Args:
        kv_lengths: As in `paged_extend`.
        q_lengths: As in `paged_extend`; a row of 0 has no tile.
        q_starts: As in `paged_extend`.
        num_tokens: Tokens of `q`.
        padded_tokens: Tokens of the array that tiles are read from; no tile reaches past it.
        tile_tokens: Tokens of a tile, a multiple of `ALIGNMENT`.
        block_kv: KV tokens of a step.
        window: As in `paged_extend`.
        max_kv_length: What a block table can hold.
    """
    batch = q_lengths.shape[0]
    base = q_starts // ALIGNMENT * ALIGNMENT
    ends_at = q_starts + q_lengths
    tiles = jnp.where(q_lengths > 0, (ends_at - base + tile_tokens - 1) // tile_tokens, 0)
    tiles_end = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(max_items(num_tokens, batch, tile_tokens), dtype=jnp.int32)
    row = jnp.searchsorted(tiles_end, index, side="right").astype(jnp.int32)
    row = jnp.minimum(row, batch - 1)
    start = base[row] + (index - (tiles_end[row] - tiles[row])) * tile_tokens
    live_begin = jnp.maximum(jnp.maximum(start, q_starts[row]), 0)
    live_end = jnp.minimum(jnp.minimum(start + tile_tokens, ends_at[row]), num_tokens)
    # The last tile may have to start earlier, over tokens that another tile computes.
    first = jnp.clip(start, 0, padded_tokens - tile_tokens)
    kv_length = kv_lengths[row]
    position = kv_length - q_lengths[row] + first - q_starts[row]
    live_begin, live_end = live_begin - first, live_end - first

    fits = kv_length <= max_kv_length
    last = jnp.where(fits, position + live_end - 1, -1)  # position of the last live token
    end = jnp.maximum(last + block_kv, 0) // block_kv
    seen_by_all = position + live_begin + 1
    full_end = jnp.maximum(seen_by_all, 0) // block_kv
    kv_begin = begin = full_begin = jnp.zeros_like(end)
    if window is not None:
        kv_begin = jnp.maximum(position + live_begin + 1 - window, 0)
        begin = jnp.minimum(kv_begin // block_kv, end)
        full_begin = jnp.maximum(last + 1 - window + block_kv - 1, 0) // block_kv
    full_begin = jnp.clip(full_begin, begin, end)
    full_end = jnp.clip(full_end, full_begin, end)
    items = WorkItem(
        row, first, live_begin, live_end, position, kv_begin, kv_length,
        begin, full_begin, full_end, end, fits.astype(jnp.int32),
    )  # fmt: skip

    num_items = jnp.clip(tiles_end[-1], 0, index.size)
    cost = jnp.where(index < num_items, end - begin, -1)
    order = jnp.argsort(-cost).astype(jnp.int32)  # stable: the order of equals is fixed
    place = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    # Rows may lie in any order: mark where each begins, and look back for the nearest mark.
    marks = jnp.where(q_lengths > 0, q_starts, num_tokens)
    by_start = jnp.argsort(marks)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    nearest = jnp.searchsorted(marks[by_start], token, side="right").astype(jnp.int32) - 1
    owner = by_start[jnp.maximum(nearest, 0)]
    owned = (nearest >= 0) & (token < ends_at[owner]) & (q_lengths[owner] > 0)
    item = tiles_end[owner] - tiles[owner] + (token - base[owner]) // tile_tokens
    item_of_token = jnp.where(owned, place[jnp.clip(item, 0, index.size - 1)], -1)
    return WorkList(jnp.stack(items, axis=1)[order], num_items[None], item_of_token)


def snake(turn: jax.Array, program: jax.Array, num_programs: int) -> jax.Array:
    """Which piece of work a program takes in its turn: pieces fall in cost, so shares are equal.

    turn 0    0  1  2  3       programs from left to right
    turn 1    7  6  5  4
    turn 2    8  9 10 11
    """
    across = jnp.where(turn % 2 == 0, program, num_programs - 1 - program)
    return turn * num_programs + across


def attend_single_tokens(
    decode: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
    q: Float[Array, "tokens q_heads head_dim"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    out: Float[Array, "tokens q_heads head_dim"],
    lse: Float[Array, "tokens q_heads"] | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """`out` and `lse`, replaced for rows of one query by what a decode kernel gives for them.

    All of them in one launch, whose time is that of the KV they read: in tiles each would take a
    whole one for its token, and its KV would be read by one thread block per head.

    Args:
        decode: Makes outputs and log-sum-exps of a query and a length for each row of the batch;
            the length is 0 for rows of more queries or none.
        q: As in `paged_extend`, and so are the next three.
        out: Outputs of the other rows; and so is `lse`.
    """
    single = (q_lengths == 1) & (q_starts >= 0)
    queries = q.at[jnp.where(single, q_starts, 0)].get(mode="clip")
    row_out, row_lse = decode(queries, jnp.where(single, kv_lengths, 0))
    token = jnp.where(single, q_starts, q.shape[0])  # out of range: dropped
    out = out.at[token].set(row_out, mode="drop")
    if lse is not None and row_lse is not None:
        lse = lse.at[token].set(row_lse, mode="drop")
    return out, lse
