"""Memory that an engine has registered, in which parts lie while they are moved."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .descriptors import (
    ArraySpec,
    PayloadArray,
    array_bytes,
)
from .transfer_engine import TooLargeError

_ALIGNMENT: Final = 64
_PAGE: Final = 4096


class Slot(NamedTuple):
    """Some of the memory: where it begins, and how long it is."""

    start: int
    num_bytes: int


class StagingPool:
    """One piece of memory, handed out in slots, first fit.

    ::

        ├─ slot ─┤ free ├──── slot ────┤ free                    ┤
                                        a slot: array, gap to 64 bytes, array, ...

    Attributes:
        memory: uint8, its first byte at the start of a page.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate and touch the memory.

        Raises:
            MemoryError: if there is not as much.
        """
        whole = np.zeros(num_bytes + _PAGE, np.uint8)
        first = -whole.ctypes.data % _PAGE
        self.memory: npt.NDArray[np.uint8] = whole[first : first + num_bytes]
        self.memory[:] = 0  # a first write takes long, so not in a transfer
        self._free: list[Slot] = [Slot(0, num_bytes)]  # by start; no two are neighbours

    @property
    def num_free_bytes(self) -> int:
        """Return how much is in no slot."""
        return sum(slot.num_bytes for slot in self._free)

    def allocate(self, num_bytes: int) -> Slot | None:
        """Return a slot, or None if there is none at the moment.

        Raises:
            TooLargeError: if there never will be.
        """
        if num_bytes > len(self.memory):
            raise TooLargeError(num_bytes, len(self.memory))
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for place, (start, free) in enumerate(self._free):
            if free >= num_bytes:
                size = min(size, free)
                rest = [Slot(start + size, free - size)] if free > size else []
                self._free[place : place + 1] = rest
                return Slot(start, size)
        return None

    def free(self, slot: Slot) -> None:
        """Take a slot back."""
        place = bisect_left(self._free, slot)
        before, after = self._free[:place], self._free[place:]
        assert not before or sum(before[-1]) <= slot.start, f"{slot} is free already"
        assert not after or sum(slot) <= after[0].start, f"{slot} is free already"
        start, stop = slot.start, sum(slot)
        if before and sum(before[-1]) == start:
            start = self._free.pop(place - 1).start
            place -= 1
        if after and after[0].start == stop:
            stop = sum(self._free.pop(place))
        insort(self._free, Slot(start, stop - start))

    def write(self, slot: Slot, arrays: Sequence[PayloadArray]) -> None:
        """Copy arrays into a slot."""
        position = slot.start
        for array in arrays:
            source = array_bytes(np.asarray(array))
            self.memory[position : position + len(source)] = source
            position += _aligned(len(source))

    def views(self, slot: Slot, specs: Sequence[ArraySpec]) -> tuple[npt.NDArray[Any], ...]:
        """Return what is in a slot as arrays that cannot be written to, without a copy."""
        found, position = [], slot.start
        for spec in specs:
            view = self.memory[position : position + spec.num_bytes].view(spec.dtype)
            view.flags.writeable = False
            found.append(view.reshape(spec.shape))
            position += _aligned(spec.num_bytes)
        return tuple(found)


def slot_bytes(specs: Sequence[ArraySpec]) -> int:
    """Return how long a slot for arrays is; the same on all nodes."""
    return sum(_aligned(spec.num_bytes) for spec in specs[:-1]) + specs[-1].num_bytes


class Run(NamedTuple):
    """Some arrays of a slot that lie one after the other.

    Attributes:
        start, num_bytes: from the slot's first byte on.
        stop_array: the number of the array that comes after them.
    """

    start: int
    num_bytes: int
    stop_array: int


def cut_slot(specs: Sequence[ArraySpec], num_bytes: int) -> list[Run]:
    """Cut a slot for arrays into runs of so many bytes at least, but for the last."""
    runs: list[Run] = []
    start = position = 0
    for number, spec in enumerate(specs, 1):
        stop = position + spec.num_bytes
        position += _aligned(spec.num_bytes)
        if stop - start >= num_bytes or number == len(specs):
            runs.append(Run(start, stop - start, number))
            start = position
    return runs


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
