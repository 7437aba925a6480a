"""Which values there are, how many bytes they take, and which was used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final, NamedTuple

from ..interface import StoredValue

STAMP_EVERY_NS: Final = 60 * 10**9
"""A use is written down this often per value: it costs as much as opening the file."""


class ScannedValue(NamedTuple):
    """A value as a start finds it; whether it is whole is for the envelope to say."""

    used_ns: int
    key: bytes
    num_bytes: int


class _Value(NamedTuple):
    num_bytes: int
    stamp_after_ns: int  # when its next use is to be written down
    is_new: bool = False  # it has its place by when it was written, not by an order of use


_NONE: Final = _Value(0, 0)


class LruIndex:
    """Sizes by key in the order of use, within a budget of bytes; for several threads.

    Bytes are reserved before a value is written, so that the budget holds while it is::

        reserve ── evict until it fits ── write ── commit
                                            └───── give_back
    """

    def __init__(self, max_bytes: int, clock_ns: Callable[[], int]) -> None:
        """Make an empty index whose order of use follows clock_ns, but never goes back."""
        self.max_bytes = max_bytes
        self._clock_ns = clock_ns
        self._lock = Lock()  # held for no I/O
        self._values: OrderedDict[bytes, _Value] = OrderedDict()  # the least recently used first
        self._used_bytes = 0  # of values, and of those being written or removed
        self._stamp_ns = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of values, and of those being written or removed."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether it is there, all at one moment."""
        with self._lock:
            return [key in self._values for key in keys]

    def sizes(self) -> list[StoredValue]:
        """Return all keys and their bytes, the least recently used first."""
        with self._lock:
            return [StoredValue(key, value.num_bytes) for key, value in self._values.items()]

    def fill(self, found: Iterable[ScannedValue]) -> None:
        """Start with what was found, in the order in which it was used."""
        with self._lock:
            for used_ns, key, num_bytes in sorted(found):
                self._values[key] = _Value(num_bytes, used_ns + STAMP_EVERY_NS)
                self._used_bytes += num_bytes
                self._stamp_ns = used_ns

    def next_stamp_ns(self) -> int:
        """Return a time later than any before it, whatever the clock does."""
        with self._lock:
            return self._tick()

    def use(self, key: bytes, *, in_order: bool = False, is_due: bool = False) -> int | None:
        """Make key the most recently used.

        Args:
            key: which.
            in_order: it is used after others, in an order that is to be kept: that is written down
                if its place was that of its write.
            is_due: it is time to write its use down, whenever that was done last.

        Returns:
            None if it is not there; the time to write down for it, if it is time to do so; else 0.
        """
        with self._lock:
            value = self._values.get(key)
            if value is None:
                return None
            self._values.move_to_end(key)
            is_due = is_due or (in_order and value.is_new)
            now_ns = self._clock_ns()
            # If it is much longer until then, the clock went back.
            if not is_due and 0 < value.stamp_after_ns - now_ns < 2 * STAMP_EVERY_NS:
                return 0
            stamp_ns = self._tick()
            self._values[key] = _Value(value.num_bytes, now_ns + STAMP_EVERY_NS)
            return stamp_ns

    def coldest_over_budget(self) -> bytes | None:
        """Return what to evict next; None if everything fits, or nothing is left."""
        with self._lock:
            if self._used_bytes <= self.max_bytes or not self._values:
                return None
            return next(iter(self._values))

    def fits(self) -> bool:
        """Say whether all that is there or reserved is within the budget."""
        return self._used_bytes <= self.max_bytes

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are about to be written."""
        with self._lock:
            self._used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count bytes no longer: they were not written, or are removed now."""
        with self._lock:
            self._used_bytes -= num_bytes

    def commit(self, key: bytes, num_bytes: int) -> None:
        """Make reserved bytes the value of key, in place of what it had."""
        with self._lock:
            self._used_bytes -= self._values.pop(key, _NONE).num_bytes
            self._values[key] = _Value(num_bytes, self._stamp_ns + STAMP_EVERY_NS, is_new=True)

    def take(self, key: bytes) -> int | None:
        """Hide a key and return its bytes, which stay counted until they are given back."""
        with self._lock:
            value = self._values.pop(key, None)
            return None if value is None else value.num_bytes

    def put_back(self, key: bytes, num_bytes: int) -> None:
        """Undo take: key is the next to be evicted; when it was written down, nobody knows."""
        with self._lock:
            self._values[key] = _Value(num_bytes, 0)
            self._values.move_to_end(key, last=False)

    def forget(self, key: bytes) -> None:
        """Drop a key and its bytes, if it is there."""
        with self._lock:
            self._used_bytes -= self._values.pop(key, _NONE).num_bytes

    def check(self) -> None:
        """Assert that the bytes add up; call it when no thread is writing."""
        with self._lock:
            total = sum(value.num_bytes for value in self._values.values())
            assert self._used_bytes == total, f"{self._used_bytes} bytes used, {total} in values"
            assert total <= self.max_bytes, f"{total} bytes, of {self.max_bytes} allowed"

    def _tick(self) -> int:
        self._stamp_ns = max(self._clock_ns(), self._stamp_ns + 1)
        return self._stamp_ns
