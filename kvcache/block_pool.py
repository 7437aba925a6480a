"""Which block ids are free: a stack of ids and a bit per id."""

from __future__ import annotations

import numpy as np

from .errors import OutOfBlocksError, RecycleError
from .tokens import Int32Array, as_count


class BlockPool:
    """The free blocks of one tier.

    Ids are ``1 .. num_blocks``. Id 0 is the padding sink of the arrays: it is never allocated, so
    that a padded row may write there. Allocating and recycling k ids are slice copies: their cost
    does not depend on how many blocks are free.

    ::

        _stack   | free ids ............ | unused |
                 0                 num_free    num_blocks
                        allocate takes <-|-> recycle puts
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool with all of its blocks free.

        Raises:
            CountError: if num_blocks is less than 1.
        """
        self.num_blocks = as_count("num_blocks", num_blocks, minimum=1)
        self._stack = np.empty(num_blocks, np.int32)
        self._is_allocated = np.empty(num_blocks + 1, np.bool_)
        self._position = np.zeros(num_blocks + 1, np.int32)  # scratch: finds repeated ids
        self.num_free = 0
        self.reset()

    def reset(self) -> None:
        """Make every block free."""
        self._stack[:] = np.arange(self.num_blocks, 0, -1, dtype=np.int32)
        self._is_allocated[:] = False
        self.num_free = self.num_blocks

    def allocate(self, num_blocks: int) -> Int32Array:
        """Take num_blocks distinct free ids, or change nothing.

        Raises:
            CountError: if num_blocks is negative.
            OutOfBlocksError: if fewer are free.
        """
        as_count("num_blocks", num_blocks)
        rest = self.num_free - num_blocks
        if rest < 0:
            raise OutOfBlocksError(num_blocks, self.num_free)
        ids = self._stack[rest : self.num_free][::-1].copy()
        self._is_allocated[ids] = True
        self.num_free = rest
        return ids

    def recycle(self, ids: Int32Array) -> None:
        """Give allocated ids back, all in one go: the same as one by one, in any order.

        Raises:
            RecycleError: if some ids were not allocated or came twice. Those are refused; the
                others are free again.
        """
        if len(ids) == 0:
            return
        if int(ids.min()) < 1 or int(ids.max()) > self.num_blocks:
            valid = (ids >= 1) & (ids <= self.num_blocks)
        else:
            valid = self._is_allocated[ids]
            order = np.arange(len(ids), dtype=np.int32)
            self._position[ids] = order
            if valid.all() and (self._position[ids] == order).all():
                self._push(ids)
                return
        self._recycle_valid(ids, valid)

    def _recycle_valid(self, ids: Int32Array, in_range: np.ndarray) -> None:
        kept, refused = [], []
        for block, inside in zip(ids.tolist(), in_range.tolist(), strict=True):
            if inside and self._is_allocated[block]:
                self._push(np.array([block], np.int32))
                kept.append(block)
            else:
                refused.append(block)
        raise RecycleError(refused, len(kept))

    def _push(self, ids: Int32Array) -> None:
        self._is_allocated[ids] = False
        self._stack[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)

    def free_ids(self) -> Int32Array:
        """Return a copy of the free ids, the next to be allocated last."""
        return self._stack[: self.num_free].copy()

    def check(self) -> None:
        """Assert that the stack and the bits agree."""
        free = self.free_ids()
        assert 0 <= self.num_free <= self.num_blocks, f"{self.num_free} of {self.num_blocks} free"
        # Every free id is in range and on the stack once.
        assert len(np.unique(free)) == len(free), "a block is on the free stack twice"
        assert ((free >= 1) & (free <= self.num_blocks)).all(), "a free id is out of range"
        # A block is allocated if and only if it is not on the stack.
        assert not self._is_allocated[free].any(), "a free block is marked as allocated"
        allocated = int(self._is_allocated.sum())
        assert allocated + self.num_free == self.num_blocks, (
            f"{allocated} allocated + {self.num_free} free != {self.num_blocks} blocks"
        )
