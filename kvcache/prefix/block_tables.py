"""Block tables of all leases, in one int32 array that a batch indexes at once."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..tokens import Int32Array

_FIRST_ROWS: Final = 64
_FIRST_IDS: Final = 2**12
_KEPT_IDS: Final = 2**18  # 1 MB
_LEAST_ROOM: Final = 16

_Item = TypeVar("_Item", bound=np.generic)


class BlockTables:
    """Row of block ids per lease, each in a segment of one array.

    ::

        a row     | shared: pinned in the tree | private to the lease | zeros |
                  0                                          num_blocks[row]  room

        the array | row 7 | row 0           | left | row 3 | not used yet ... |

    The room of a segment is the least power of two that is greater than the number of blocks of its
    row when that moved there. A row that outgrows its segment moves to a larger one, so it costs at
    most twice its blocks, whatever the other rows hold. When the array is full,
    the rows are packed into a new one of twice their size; also when a released row leaves too
    little in an array of more than 1 MB. Entries past a row's blocks are 0, the padding sink.

    Arrays are replaced when they grow or shrink: read them again after each call, and do not write
    to them.

    Attributes:
        num_blocks: int32 ``[rows]``, number of blocks of each row.
        num_tokens: int32 ``[rows]``, number of tokens that each row has room for.
        versions: int64 ``[rows]``, which changes when a lease takes the row, or published blocks
            replace some of its blocks; not when it grows.
        live: bool ``[rows]``, whether a lease owns the row.
        num_held: number of blocks of all rows.
    """

    def __init__(self) -> None:
        self.num_blocks = np.zeros(_FIRST_ROWS, np.int32)
        self.num_tokens = np.zeros(_FIRST_ROWS, np.int32)
        self.versions = np.zeros(_FIRST_ROWS, np.int64)
        self.live = np.zeros(_FIRST_ROWS, np.bool_)
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))
        self._ids = np.zeros(_FIRST_IDS, np.int32)
        # A free row keeps its segment until the rows are packed. A row without one has no room.
        self._starts = np.zeros(_FIRST_ROWS, np.intp)
        self._rooms = np.zeros(_FIRST_ROWS, np.intp)
        self._end = 0  # of the last segment
        self.num_held = 0

    # Reading

    def row(self, row: int) -> Int32Array:
        """Return the block ids of a live row, in order, as a view."""
        start = self._starts.item(row)
        return self._ids[start : start + self.num_blocks.item(row)]

    def at(self, rows: Int32Array, columns: Int32Array) -> Int32Array:
        """Return the block id at a column of each of some live rows.

        Args:
            rows: int32 ``[n]``.
            columns: int32 ``[n]``, each less than the number of blocks of its row.
        """
        ids: Int32Array = self._ids[self._starts[rows] + columns]
        return ids

    def rows_are_live(self, rows: Int32Array) -> bool:
        """Return whether every entry of rows is a live row."""
        if len(rows) == 0:
            return True
        in_range = int(rows.min()) >= 0 and int(rows.max()) < len(self.live)
        return in_range and bool(self.live[rows].all())

    # Changes

    def take_row(self) -> int:
        """Allocate an empty row."""
        if not self._free_rows:
            rows = len(self.live)
            self.num_blocks = _doubled(self.num_blocks)
            self.num_tokens = _doubled(self.num_tokens)
            self.versions, self.live = _doubled(self.versions), _doubled(self.live)
            self._starts, self._rooms = _doubled(self._starts), _doubled(self._rooms)
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self.versions[row] += 1
        self.live[row] = True
        return row

    def give_row(self, row: int) -> None:
        """Empty a row and free it."""
        ids = self.row(row)
        ids[:] = 0
        self.num_held -= len(ids)
        self.num_blocks[row] = 0
        self.num_tokens[row] = 0
        self.live[row] = False
        self._free_rows.append(row)
        if len(self._ids) > _KEPT_IDS and len(self._ids) > self._most_ids():
            self._pack(0)

    def grow(self, row: int, num_blocks: int) -> Int32Array:
        """Make a row num_blocks long and return it. Write the new ids into it at once."""
        if num_blocks > self._rooms.item(row):
            self._move(row, num_blocks)
        self.num_held += num_blocks - self.num_blocks.item(row)
        self.num_blocks[row] = num_blocks
        start = self._starts.item(row)
        return self._ids[start : start + num_blocks]

    def append(self, rows: Int32Array, ids: Int32Array) -> None:
        """Append a block id to each of some distinct rows.

        Args:
            rows: int32 ``[n]``.
            ids: int32 ``[n]``.
        """
        columns = self.num_blocks[rows]
        is_full = columns == self._rooms[rows]
        if is_full.any():
            for row in rows[is_full].tolist():
                self._move(row, self.num_blocks.item(row) + 1)
        self._ids[self._starts[rows] + columns] = ids
        self.num_held += len(ids)
        self.num_blocks[rows] = columns + 1

    def _move(self, row: int, num_blocks: int) -> None:
        """Move a row to a segment with room for num_blocks."""
        room = max(1 << num_blocks.bit_length(), _LEAST_ROOM)
        if self._end + room > len(self._ids):
            self._pack(room)
        ids, start = self.row(row), self._end
        self._end = start + room
        self._ids[start : start + len(ids)] = ids
        ids[:] = 0
        self._starts[row], self._rooms[row] = start, room

    def _pack(self, room: int) -> None:
        """Move the rows to a new array of twice their size, which has room for one more."""
        rooms = np.left_shift(1, np.frexp(self.num_blocks)[1], dtype=np.intp)  # 1 << bit_length
        rooms = np.where(self.live, np.maximum(rooms, _LEAST_ROOM), 0)
        starts = np.cumsum(rooms) - rooms
        end = int(rooms.sum())
        packed = np.zeros(max(2 * (end + room), _FIRST_IDS), np.int32)
        for row in np.flatnonzero(self.num_blocks).tolist():
            ids, start = self.row(row), starts.item(row)
            packed[start : start + len(ids)] = ids
        self._ids, self._starts, self._rooms, self._end = packed, starts, rooms, end

    def _most_ids(self) -> int:
        """Return the size of an array of which the rows fill too little: four times its least."""
        return 8 * self.num_held + 4 * _LEAST_ROOM * (len(self.live) - len(self._free_rows))

    # Checks

    def check(self) -> None:
        """Assert that rows, segments, counts and padding agree."""
        held = np.zeros(len(self._ids), np.bool_)
        end = 0
        for row in np.lexsort((self._rooms, self._starts)).tolist():
            start, num_blocks = self._starts.item(row), self.num_blocks.item(row)
            held[start : start + num_blocks] = True
            assert num_blocks <= self._rooms[row], "a row is longer than its segment"
            if self._rooms[row]:
                assert start >= end, "two segments overlap"
                end = start + self._rooms.item(row)
        assert end <= self._end <= len(self._ids), "a segment is past the end"
        # A row holds the padding sink past its blocks, and only there.
        assert ((self._ids != 0) == held).all(), "a block table has a hole, or entries past its end"
        # The array follows what the rows hold.
        assert self.num_held == self.num_blocks.sum(), "the number of held blocks is wrong"
        assert len(self._ids) <= max(self._most_ids(), _KEPT_IDS), "the array did not shrink"
        # A row is live if and only if it is not free, and an unused row holds nothing.
        assert sorted(self._free_rows) == np.flatnonzero(~self.live).tolist(), (
            "live rows and free rows disagree"
        )
        assert not self.num_tokens[~self.live].any(), "a free row has tokens"
        assert not self.num_blocks[~self.live].any(), "a free row has blocks"


def _doubled(column: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
    """Return a column with as many zeros after it."""
    return np.concatenate([column, np.zeros_like(column)])
