"""How the Mosaic `paged_extend` divides its work tiles among thread blocks, on the device.

The work tiles stand in a list, longest first. Most of them stay whole: every thread block computes
one in each *wave*, so that those of a wave read the same KV at about the same time, from the L2
cache. What would delay a thread block is divided: tiles that are longer than a fair share of all KV
steps, and those of the last waves. They stand in one line, which is cut so that each thread block
has a fair share in the end. Tiles of 20, 3, 3, 3, 3, 2, 2 steps and four thread blocks, whose fair
share is 9::

    tile            0       1   2   3   4      5   6
    steps          20       3   3   3   3      2   2
                divided    |--- wave 0 ---|   |wave 1|    3 + 2 <= 9
    thread block            0   1   2   3      3   2

    thread block   whole       divided
    0              3           tile 0, steps  0 ..  5     9 steps together
    1              3           tile 0, steps  6 .. 11     9
    2              3, 2        tile 0, steps 12 .. 15     9
    3              3, 2        tile 0, steps 16 .. 19     9

A thread block stores the attention of a part of a tile as a *part*; a second kernel merges the
parts of each tile. A thread block shares at most its first and its last tile with others, so there
are less than twice as many parts as thread blocks. Parts of a tile follow each other.

Source: whole tiles, and equal shares of a line of the others, as in Stream-K (arXiv 2301.03598).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from .config import SMALLEST_SHARE, TOLERANCE

TO_THE_END = np.int32(2**30)
"""`Piece.end` of a piece that ends where its tile does."""


class Piece(NamedTuple):
    """KV steps of a work tile, counted from the first one that the tile sees."""

    tile: Any
    """Index in the list of work tiles."""
    begin: Any
    end: Any
    """Steps [begin, end); `end` may be past the end of the tile."""
    part: Any
    """Index of its result among the parts, unless it is the whole tile."""


class Share(NamedTuple):
    """The work of one thread block: scalars in the kernel, arrays of all in `Shares`."""

    num_pieces: Any
    """Number of pieces: first whole tiles, then those of the line."""
    num_whole: Any
    whole_begin: Any
    whole_end: Any
    """The tiles [whole_begin, whole_end) of the list are whole, for all thread blocks."""
    first_tile: Any
    """Tile of the first piece in the line."""
    first_begin: Any
    """Where that piece begins in its tile."""
    last_end: Any
    """Where the last piece of the line ends in its tile."""
    first_part: Any
    last_part: Any
    """Index of the part that the first and the last piece of the line are."""

    def piece(self, index: Any, program: Any, num_programs: int) -> Piece:
        """The piece of this number, of the thread block `program`."""
        in_line = index - self.num_whole
        first = in_line == 0
        whole = in_line < 0
        tile = self.first_tile + in_line
        passes = (self.first_tile < self.whole_begin) & (tile >= self.whole_begin)
        tile += jnp.where(passes, self.whole_end - self.whole_begin, 0)
        end = jnp.where(index == self.num_pieces - 1, self.last_end, TO_THE_END)
        return Piece(
            jnp.where(whole, self.whole_begin + zigzag(index, program, num_programs), tile),
            jnp.where(first, self.first_begin, 0),
            jnp.where(whole, TO_THE_END, end),
            jnp.where(first, self.first_part, self.last_part),
        )


class Shares(NamedTuple):
    """The shares of all thread blocks, and the tiles whose parts must be merged."""

    shares: Int32[Array, "programs fields"]
    """A `Share` per thread block."""
    split: Int32[Array, " programs"]
    """By the second thread block of a divided tile: the tile. Otherwise the number of tiles."""
    parts: Int32[Array, "programs 2"]
    """Index of its first part, and number of parts; otherwise zeros."""


def build_shares(steps: Int32[Array, " tiles"], programs: int) -> Shares:
    """Divide the KV steps of all work tiles among `programs` thread blocks.

    No thread block has more than a fair share and a `TOLERANCE`-th of it, but for one step.

    Args:
        steps: Number of KV steps of each tile, in descending order; 0 for those that do not exist.
            A tile that sees nothing counts as one step, because its result is stored, too.
        programs: Number of thread blocks.
    """
    num_tiles = steps.size
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    program = jnp.arange(programs, dtype=jnp.int32)
    count = jnp.sum(steps > 0, dtype=jnp.int32)
    fair = jnp.maximum(-(-jnp.sum(steps, dtype=jnp.int32) // programs), SMALLEST_SHARE)
    most = fair + fair // TOLERANCE

    # Waves of whole tiles, as long as no thread block gets too much.
    whole_begin = jnp.sum(steps > most, dtype=jnp.int32)
    wave = jnp.arange(-(-num_tiles // programs), dtype=jnp.int32)[:, None]
    of_wave = whole_begin + zigzag(wave, program, programs)
    loads = jnp.cumsum(steps.at[of_wave].get(mode="fill", fill_value=0), axis=0, dtype=jnp.int32)
    num_waves = jnp.sum(loads.max(axis=1) <= most, dtype=jnp.int32)
    load = jnp.where(num_waves > 0, loads[jnp.maximum(num_waves - 1, 0)], 0)
    whole_end = jnp.minimum(whole_begin + num_waves * programs, count)
    num_whole = jnp.sum((wave < num_waves) & (of_wave < count), axis=0, dtype=jnp.int32)

    # The line of all others, cut where the thread blocks have a fair share.
    lengths = jnp.where((tile < whole_begin) | (tile >= whole_end), steps, 0)
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    starts = ends - lengths
    end = jnp.cumsum(jnp.maximum(fair - load, 0), dtype=jnp.int32)
    end = jnp.minimum(end, ends[-1])
    begin = jnp.concatenate([jnp.zeros_like(end[:1]), end[:-1]])
    working = end > begin
    # Comparisons of all with all are one launch; `searchsorted` would be a loop on the host.
    first = jnp.minimum(_count(ends <= begin[:, None]), num_tiles - 1)
    last = jnp.minimum(_count(ends < end[:, None]), num_tiles - 1)
    passed = jnp.where((first < whole_begin) & (last >= whole_end), whole_end - whole_begin, 0)
    num_divided = jnp.where(working, last - first + 1 - passed, 0)

    # Parts are numbered by the rank of their thread block among those with a piece of the line.
    rank = jnp.cumsum(working, dtype=jnp.int32) - working
    first_rank = _count(working & (end <= starts[first][:, None]))
    last_rank = _count(working & (begin < ends[first][:, None])) - 1
    first_begin = begin - starts[first]
    second = working & (first_begin > 0) & (rank == first_rank + 1)
    share = Share(
        num_whole + num_divided,
        num_whole,
        jnp.broadcast_to(whole_begin, program.shape),
        jnp.broadcast_to(whole_end, program.shape),
        first,
        first_begin,
        end - starts[last],
        rank + first_rank,
        2 * rank,
    )
    parts = jnp.stack([2 * first_rank, last_rank - first_rank + 1], axis=1)
    return Shares(
        jnp.stack(share, axis=1),
        jnp.where(second, first, num_tiles),
        jnp.where(second[:, None], parts, 0),
    )


def _count(found: Array) -> Int32[Array, " programs"]:
    """Number of true elements of each row."""
    return jnp.sum(found, axis=1, dtype=jnp.int32)


def zigzag(wave: jax.Array, program: jax.Array, num_programs: int) -> jax.Array:
    """Place of a thread block's tile of a wave among the whole tiles.

    The tiles are sorted by length, longest first. Reversing every other wave balances the load::

        wave 0    0  1  2  3       thread blocks from left to right
        wave 1    7  6  5  4
        wave 2    8  9 10 11
    """
    across = jnp.where(lax.rem(wave, jnp.int32(2)) == 0, program, num_programs - 1 - program)
    return wave * num_programs + across
