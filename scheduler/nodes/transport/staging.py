"""Staging memory: one registered piece of memory, and the slots of parts in transfer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .descriptors import ArraySpec, PayloadArray, array_bytes
from .transfer_engine import TooLargeError

_ALIGNMENT: Final = 64
_PAGE: Final = 4096


class Slot(NamedTuple):
    """A range of the memory: its first byte and its length."""

    start: int
    num_bytes: int


class StagingPool:
    """One piece of memory, allocated in slots by first fit.

    ::

        ├─ slot ─┤ free ├──── slot ────┤ free                    ┤
                                        a slot: array, gap to 64 bytes, array, ...

    Attributes:
        memory: uint8 array, aligned to a page.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate and touch the memory.

        Raises:
            MemoryError: if the memory is not available.
        """
        whole = np.zeros(num_bytes + _PAGE, np.uint8)
        first = -whole.ctypes.data % _PAGE
        self.memory: npt.NDArray[np.uint8] = whole[first : first + num_bytes]
        self.memory[:] = 0  # the first write to a page is slow: do it now
        self._free: list[Slot] = [Slot(0, num_bytes)]  # by start; no two are neighbours

    @property
    def num_free_bytes(self) -> int:
        """Number of bytes outside all slots."""
        return sum(slot.num_bytes for slot in self._free)

    def allocate(self, num_bytes: int) -> Slot | None:
        """Return a slot; None if there is no room at the moment.

        Raises:
            TooLargeError: if there will never be room.
        """
        if num_bytes > len(self.memory):
            raise TooLargeError(num_bytes, len(self.memory))
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for place, (start, free) in enumerate(self._free):
            if free >= num_bytes:
                size = min(size, free)
                slot = Slot(start, size)
                rest = [Slot(start + size, free - size)] if free > size else []
                self._free[place : place + 1] = rest
                return slot
        return None

    def free(self, slot: Slot) -> None:
        """Recycle a slot."""
        place = bisect_left(self._free, slot)
        before, after = self._free[:place], self._free[place:]
        assert not before or sum(before[-1]) <= slot.start, f"{slot} is free already"
        assert not after or sum(slot) <= after[0].start, f"{slot} is free already"
        first, last, start, stop = place, place, slot.start, sum(slot)
        if before and sum(before[-1]) == start:
            first, start = place - 1, before[-1].start
        if after and after[0].start == stop:
            last, stop = place + 1, sum(after[0])
        self._free[first:last] = [Slot(start, stop - start)]

    def write(self, slot: Slot, arrays: Sequence[PayloadArray]) -> None:
        """Copy arrays into a slot."""
        position = slot.start
        for array in arrays:
            source = array_bytes(np.asarray(array))
            self.memory[position : position + len(source)] = source
            position += _aligned(len(source))

    def views(self, slot: Slot, specs: Sequence[ArraySpec]) -> tuple[npt.NDArray[Any], ...]:
        """Return the content of a slot as read-only arrays, without a copy."""
        found, position = [], slot.start
        for spec in specs:
            view = self.memory[position : position + spec.num_bytes].view(spec.dtype)
            view.flags.writeable = False
            found.append(view.reshape(spec.shape))
            position += _aligned(spec.num_bytes)
        return tuple(found)


def slot_bytes(specs: Sequence[ArraySpec]) -> int:
    """Size of a slot for arrays; the same on all nodes."""
    return sum(_aligned(spec.num_bytes) for spec in specs[:-1]) + specs[-1].num_bytes


class Segment(NamedTuple):
    """Consecutive arrays of a slot.

    Attributes:
        start, num_bytes: byte range in the slot.
        stop_array: index after the last array.
    """

    start: int
    num_bytes: int
    stop_array: int


def split_slot(specs: Sequence[ArraySpec], num_bytes: int) -> list[Segment]:
    """Split a slot for arrays into segments of at least num_bytes, except the last."""
    segments: list[Segment] = []
    start = position = 0
    for number, spec in enumerate(specs, 1):
        stop = position + spec.num_bytes
        position += _aligned(spec.num_bytes)
        if stop - start >= num_bytes or number == len(specs):
            segments.append(Segment(start, stop - start, number))
            start = position
    return segments


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
