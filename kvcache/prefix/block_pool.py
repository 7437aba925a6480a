"""Pool of free block ids: a stack, and the position of each id on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import OutOfBlocksError, RecycleError
from ..tokens import Int32Array, SupportsArray, as_count, as_ids

_OUT_OF_RANGE: Final = -1
_FEW: Final = 8  # ids: up to here a loop is faster than numpy


class BlockPool:
    """Free blocks of one tier.

    Ids are ``1 .. num_blocks``. Id 0 is the padding sink of the arrays and is never allocated, so
    a padded row may write there. Allocating and recycling k ids are slice copies: their cost does
    not depend on the number of free blocks.

    ::

        _stack   | free ids ............ | unused |
                 0                 num_free    num_blocks
                        allocate takes <-|-> recycle puts
    """

    def __init__(self, num_blocks: int) -> None:
        """Create a pool with all blocks free.

        Raises:
            CountError: if num_blocks is less than 1.
        """
        self.num_blocks = num_blocks = as_count("num_blocks", num_blocks, minimum=1)
        self._stack = np.empty(num_blocks, np.intp)  # intp: an index without conversion
        # Position of each id on the stack, counted from 1; 0 if it is allocated. The entries of
        # id 0 and of one id past the last are never 0: an id out of range clips to one of them.
        self._place = np.empty(num_blocks + 2, np.int32)
        self.num_free = 0
        self.reset()

    def reset(self) -> None:
        """Make every block free."""
        self._stack[:] = np.arange(self.num_blocks, 0, -1)
        self._place[:] = np.arange(self.num_blocks + 1, -1, -1, dtype=np.int32)
        self._place[-1] = _OUT_OF_RANGE
        self.num_free = self.num_blocks

    def allocate(self, num_blocks: int) -> Int32Array:
        """Allocate num_blocks distinct ids.

        Raises:
            CountError: if num_blocks is negative.
            OutOfBlocksError: if fewer are free. Nothing changes.
        """
        num_blocks = as_count("num_blocks", num_blocks)
        if num_blocks > self.num_free:
            raise OutOfBlocksError(num_blocks, self.num_free)
        ids = np.empty(num_blocks, np.int32)
        self.fill(ids)
        return ids

    def fill(self, ids: Int32Array) -> None:
        """Allocate as many ids as the array holds, into it."""
        num_blocks = len(ids)
        rest = self.num_free - num_blocks
        assert rest >= 0, f"{num_blocks} blocks wanted, {self.num_free} are free"
        if num_blocks == 1:  # the usual case
            ids[0] = block = self._stack.item(rest)
            self._place[block] = 0
        else:
            taken = self._stack[rest : self.num_free]
            self._place[taken] = 0
            ids[:] = taken[::-1]
        self.num_free = rest

    def recycle(self, ids: Sequence[int] | SupportsArray) -> None:
        """Free allocated ids, with the same result as one by one, in any order.

        Raises:
            IdError: if they are not integers within int32.
            RecycleError: if some ids were not allocated or are repeated. Those are refused; the
                others are free.
        """
        ids = as_ids("block id", ids)
        if len(ids) <= _FEW or not self._recycle_at_once(ids.astype(np.intp)):
            self._recycle_one_by_one(ids)

    def _recycle_at_once(self, ids: npt.NDArray[np.intp]) -> bool:
        if np.count_nonzero(self._place.take(ids, mode="clip")):
            return False
        num_free = self.num_free + len(ids)
        places = np.arange(self.num_free + 1, num_free + 1, dtype=np.int32)
        self._place[ids] = places
        if np.count_nonzero(self._place.take(ids) == places) < len(ids):
            self._place[ids] = 0  # a repeated id has only one of its two positions
            return False
        self._stack[self.num_free : num_free] = ids
        self.num_free = num_free
        return True

    def _recycle_one_by_one(self, ids: Int32Array) -> None:
        refused = []
        for block in ids.tolist():
            if 1 <= block <= self.num_blocks and not self._place.item(block):
                self._stack[self.num_free] = block
                self.num_free += 1
                self._place[block] = self.num_free
            else:
                refused.append(block)
        if refused:
            raise RecycleError(refused, len(ids) - len(refused))

    def free_ids(self) -> Int32Array:
        """Return a copy of the free ids. The last one is allocated next."""
        return self._stack[: self.num_free].astype(np.int32)

    def check(self) -> None:
        """Assert that the stack and the positions agree."""
        free = self.free_ids()
        assert 0 <= self.num_free <= self.num_blocks, f"{self.num_free} of {self.num_blocks} free"
        # Every free id is in range and on the stack once.
        assert len(np.unique(free)) == len(free), "a block is on the free stack twice"
        assert ((free >= 1) & (free <= self.num_blocks)).all(), "a free id is out of range"
        # A block is allocated if and only if it is not on the stack.
        assert (self._place[free] == np.arange(1, self.num_free + 1)).all(), (
            "a free block is marked as allocated, or as free elsewhere"
        )
        allocated = self.num_blocks - int(np.count_nonzero(self._place[1:-1]))
        assert allocated + self.num_free == self.num_blocks, (
            f"{allocated} allocated + {self.num_free} free != {self.num_blocks} blocks"
        )
