"""Block tables of all leases, as one int32 matrix that a batch indexes at once."""

from __future__ import annotations

import numpy as np

from ..tokens import Int32Array

_FIRST_ROWS = 64
_FIRST_WIDTH = 64


class BlockTables:
    """Matrix with a row of block ids per lease.

    ::

        ids[row]  | shared: pinned in the tree | private to the lease | zeros |
                  0                                          num_blocks[row]

    Rows and columns grow by doubling, which replaces `ids`: read it again after each call. Entries
    past a row's blocks are 0, the padding sink. Do not write to the arrays.

    Attributes:
        ids: int32 ``[rows, width]``, block ids.
        num_blocks: int32 ``[rows]``, number of blocks of each row.
        num_tokens: int32 ``[rows]``, number of tokens that each row has room for.
        live: bool ``[rows]``, whether a lease owns the row.
    """

    def __init__(self) -> None:
        self.ids = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32)
        self.num_blocks = np.zeros(_FIRST_ROWS, np.int32)
        self.num_tokens = np.zeros(_FIRST_ROWS, np.int32)
        self.live = np.zeros(_FIRST_ROWS, np.bool_)
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))

    def take_row(self) -> int:
        """Allocate an empty row."""
        if not self._free_rows:
            rows = len(self.live)
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.num_blocks = np.concatenate([self.num_blocks, np.zeros_like(self.num_blocks)])
            self.num_tokens = np.concatenate([self.num_tokens, np.zeros_like(self.num_tokens)])
            self.live = np.concatenate([self.live, np.zeros_like(self.live)])
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self.live[row] = True
        return row

    def give_row(self, row: int) -> None:
        """Empty a row and free it."""
        self.ids[row, : self.num_blocks.item(row)] = 0
        self.num_blocks[row] = 0
        self.num_tokens[row] = 0
        self.live[row] = False
        self._free_rows.append(row)

    def widen(self, width: int) -> None:
        """Ensure that rows can hold width blocks."""
        if width > self.ids.shape[1]:
            wider = np.zeros((len(self.live), 1 << (width - 1).bit_length()), np.int32)
            wider[self.live, : self.ids.shape[1]] = self.ids[self.live]
            self.ids = wider

    def rows_are_live(self, rows: Int32Array) -> bool:
        """Return whether every entry of rows is a live row."""
        if len(rows) == 0:
            return True
        in_range = int(rows.min()) >= 0 and int(rows.max()) < len(self.live)
        return in_range and bool(self.live[rows].all())

    def check(self) -> None:
        """Assert that rows, counts and padding agree."""
        columns = np.arange(self.ids.shape[1])
        # A row holds the padding sink past its blocks, and only there.
        assert ((self.ids == 0) == (columns >= self.num_blocks[:, None])).all(), (
            "a block table has a hole, or entries past its end"
        )
        # A row is live if and only if it is not free, and an unused row holds nothing.
        assert sorted(self._free_rows) == np.flatnonzero(~self.live).tolist(), (
            "live rows and free rows disagree"
        )
        assert not self.num_tokens[~self.live].any(), "a free row has tokens"
        assert not self.num_blocks[~self.live].any(), "a free row has blocks"
