"""The work list of `paged_decode`, built on the device: equal shares of the KV tiles that rows see.

All tiles stand in one line, row by row and KV head by KV head, and the line is cut into as many
equal shares as there are thread blocks. A row without a tile counts as one, because its result
is stored, too. Rows of 5, 1, 9 and 0 tiles, one KV head, four thread blocks::

    pair          |    0    |1|        2        |3|      (row, KV head)
    tiles         |- - - - -|-|- - - - - - - - -|.|
    thread block  |0      :      1:      2:      3|
    parts          0       1 2     3       4     6       pair + thread block: no two are equal

A *part* is the attention of one thread block for one pair. Its index is the pair plus the thread
block, so the parts of a pair follow each other. Some indices have no part, such as 5.

Source: equal shares of a line of tiles as in Stream-K (arXiv 2301.03598); FlashInfer's plan and
FlashMLA's tile scheduler divide a batch for attention in this way, on the host.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from .config import SMALLEST_SHARE


class Row(NamedTuple):
    """What a row sees: scalars in the kernel, arrays of all rows in the work list."""

    fits: Any
    """Whether the row fits its block table; otherwise it sees nothing and the result is NaN."""
    length: Any
    first_visible: Any
    """First position in the window."""
    first_tile: Any
    """Tile `i` of a row starts at position `i * tile_tokens`."""
    num_tiles: Any

    @classmethod
    def of(cls, length: Any, *, tile_tokens: int, window: int | None, capacity: int) -> "Row":
        """Cut the visible tokens of a row of `length` tokens into tiles."""
        fits = length <= capacity
        length = jnp.where(fits, jnp.maximum(length, 0), 0)
        first_visible = jnp.zeros_like(length)
        if window is not None:
            first_visible = jnp.maximum(length - window, 0)
        tile = jnp.full_like(length, tile_tokens)
        first_tile = lax.div(first_visible, tile)
        end = lax.div(length + (tile_tokens - 1), tile)
        return cls(fits, length, first_visible, first_tile, end - first_tile)


class Position(NamedTuple):
    """A place in the share of a thread block, where a work tile begins."""

    pair: Any
    """Row times KV heads, plus KV head."""
    tile: Any
    """Tile of the row, counted from the first that it sees."""
    left: Any
    """Number of tiles in the rest of the share; a row without a tile counts as one."""
    before: Any
    """Number of tiles of the share that were read."""

    def after(self, num_tiles: Any) -> "Position":
        """The place after the work tile here, which has `num_tiles` tiles of its row."""
        return Position(
            self.pair + 1,
            jnp.zeros_like(self.tile),
            self.left - jnp.maximum(num_tiles, 1),
            self.before + num_tiles,
        )


class WorkList(NamedTuple):
    """The share of each thread block, and the parts of each pair."""

    shares: Int32[Array, "programs 3"]
    """`Position` without `before`; nothing is left for a thread block without a share."""
    parts: Int32[Array, "pairs 2"]
    """Index of the first part, and number of parts."""

    def split_pairs(self) -> tuple[Int32[Array, " programs"], Int32[Array, "programs 2"]]:
        """The pairs of several parts, for a kernel that stores all others without a merge.

        Few pairs are split, so there the index of a part is the thread block plus the first one of
        the pair: less than twice the number of thread blocks.

        Returns:
            By the second thread block of a split pair: the pair; index of its first part, and
            number of parts. Otherwise the number of pairs; zeros.
        """
        pair, tile, _ = self.shares.T
        index, number = self.parts.at[pair].get(mode="clip").T
        first = index - pair
        program = jnp.arange(pair.size, dtype=jnp.int32)
        second = (tile > 0) & (program == first + 1)
        parts = jnp.stack([2 * first, number], axis=1)
        return jnp.where(second, pair, len(self.parts)), jnp.where(second[:, None], parts, 0)


def build_work_list(
    lengths: Int32[Array, " batch"],
    *,
    kv_heads: int,
    programs: int,
    tile_tokens: int,
    window: int | None,
    capacity: int,
) -> WorkList:
    """Divide the tiles of all rows among `programs` thread blocks, to within one tile.

    Args:
        lengths: As in `paged_decode`.
        kv_heads: Number of KV heads.
        programs: Number of thread blocks; some get nothing if there is too little work for
            `SMALLEST_SHARE` tiles each.
        tile_tokens: Number of KV tokens of a tile.
        window: As in `paged_decode`.
        capacity: Capacity of a block table in tokens.
    """
    batch = lengths.shape[0]
    rows = Row.of(lengths, tile_tokens=tile_tokens, window=window, capacity=capacity)
    tiles = jnp.maximum(rows.num_tiles, 1)
    ends = jnp.cumsum(tiles, dtype=jnp.int32) * kv_heads
    total = ends[-1]
    working = jnp.clip(total // SMALLEST_SHARE, 1, programs)
    size, larger = total // working, total % working  # the first `larger` shares have one more
    program = jnp.arange(programs, dtype=jnp.int32)
    begin = jnp.minimum(program * size + jnp.minimum(program, larger), total)

    # One comparison of all with all is one launch; `searchsorted` would be a loop on the host.
    row = jnp.sum(ends[None, :] <= begin[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, batch - 1)
    within = begin - (ends - tiles * kv_heads)[row]
    pair = row * kv_heads + within // tiles[row]
    tile = within % tiles[row]
    shares = jnp.stack([pair, tile, jnp.diff(begin, append=total)], axis=1)

    def program_of(place: Array) -> Array:
        of_larger = larger * (size + 1)
        smaller = larger + (place - of_larger) // size
        return jnp.where(place < of_larger, place // (size + 1), smaller)

    heads = jnp.arange(kv_heads, dtype=jnp.int32)
    first = (ends - tiles * kv_heads)[:, None] + heads * tiles[:, None]
    first, last = first.reshape(-1), (first + tiles[:, None] - 1).reshape(-1)
    pairs = jnp.arange(batch * kv_heads, dtype=jnp.int32)
    parts = jnp.stack([pairs + program_of(first), program_of(last) - program_of(first) + 1], axis=1)
    return WorkList(shares, parts)
