"""LRU index of the file backend: sizes by key within a byte budget, without I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final, NamedTuple

from ..interface import StoredValue

STAMP_EVERY_NS: Final = 60 * 10**9
"""Minimum time between two writes of a value's use time: each costs as much as opening the file."""


class ScannedValue(NamedTuple):
    """A file found at the start; its checksum is not verified yet."""

    used_ns: int
    key: bytes
    num_bytes: int


class _Value(NamedTuple):
    num_bytes: int
    stamp_after_ns: int  # time from which its next use is written to the file
    is_new: bool = False  # its file has the time of its write, not of a use in order


_NONE: Final = _Value(0, 0)


class LruIndex:
    """Thread-safe sizes by key in LRU order, within a budget of bytes.

    Bytes are reserved before a value is written, so that the budget also holds during the write::

        reserve ── evict until it fits ── write ── commit
                                            └───── give_back
    """

    def __init__(self, max_bytes: int, clock_ns: Callable[[], int]) -> None:
        """Create an empty index. Its use times follow clock_ns but never go back."""
        self.max_bytes = max_bytes
        self._clock_ns = clock_ns
        self._lock = Lock()  # never held during I/O
        self._values: OrderedDict[bytes, _Value] = OrderedDict()  # coldest first
        self._removing: dict[bytes, int] = {}  # bytes of keys that were taken
        self._used_bytes = 0  # includes values being written or removed
        self._stamp_ns = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all values, including those being written or removed."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it exists, all at one moment."""
        with self._lock:
            return [key in self._values for key in keys]

    def sizes(self) -> list[StoredValue]:
        """Return all keys and their bytes, coldest first."""
        with self._lock:
            return [StoredValue(key, value.num_bytes) for key, value in self._values.items()]

    def fill(self, found: Iterable[ScannedValue]) -> None:
        """Add the values found at the start, in the order of their use times."""
        with self._lock:
            for used_ns, key, num_bytes in sorted(found):
                self._values[key] = _Value(num_bytes, used_ns + STAMP_EVERY_NS)
                self._used_bytes += num_bytes
                self._stamp_ns = used_ns

    def next_stamp_ns(self) -> int:
        """Return a time later than all before it, even if the clock goes back."""
        with self._lock:
            return self._tick()

    def use(self, key: bytes, *, in_order: bool = False, is_due: bool = False) -> int | None:
        """Make key the most recently used.

        Args:
            key: key that was used.
            in_order: whether it is used after other keys in an order to preserve. Its use time is
                then due if its file still has the time of its write.
            is_due: whether its use time is due, whenever it was written last.

        Returns:
            None if key is missing; its use time in ns if you should write it to the file; else 0.
        """
        with self._lock:
            value = self._values.get(key)
            if value is None:
                return None
            self._values.move_to_end(key)
            is_due = is_due or (in_order and value.is_new)
            now_ns = self._clock_ns()
            # A much longer time until the next stamp means that the clock went back.
            if not is_due and 0 < value.stamp_after_ns - now_ns < 2 * STAMP_EVERY_NS:
                return 0
            stamp_ns = self._tick()
            self._values[key] = _Value(value.num_bytes, now_ns + STAMP_EVERY_NS)
            return stamp_ns

    def coldest_over_budget(self) -> bytes | None:
        """Return the key to evict next; None if everything fits or nothing is left."""
        with self._lock:
            if self._used_bytes <= self.max_bytes or not self._values:
                return None
            return next(iter(self._values))

    def fits(self) -> bool:
        """Return whether all values and reservations are within the budget."""
        return self._used_bytes <= self.max_bytes

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are about to be written."""
        with self._lock:
            self._used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Stop counting bytes that were not written."""
        with self._lock:
            self._used_bytes -= num_bytes

    def commit(self, key: bytes, num_bytes: int) -> None:
        """Make reserved bytes the value of key, in place of its previous value."""
        with self._lock:
            self._used_bytes -= self._values.pop(key, _NONE).num_bytes
            self._values[key] = _Value(num_bytes, self._stamp_ns + STAMP_EVERY_NS, is_new=True)

    def take(self, key: bytes) -> int | None:
        """Hide a key and return its bytes, which stay counted until `removed`."""
        with self._lock:
            if key not in self._values:
                return None
            num_bytes = self._removing[key] = self._values[key].num_bytes
            del self._values[key]
            return num_bytes

    def removed(self, key: bytes) -> None:
        """Stop counting the bytes of a key that was taken; no effect on others."""
        with self._lock:
            self._used_bytes -= self._removing.pop(key, 0)

    def put_back(self, key: bytes) -> None:
        """Undo `take`, if the key was not `removed`: it is the coldest, of unknown use time."""
        with self._lock:
            num_bytes = self._removing.get(key)
            if num_bytes is not None:
                self._values[key] = _Value(num_bytes, 0)
                self._values.move_to_end(key, last=False)
                del self._removing[key]

    def forget(self, key: bytes) -> None:
        """Drop a key and its bytes, if it exists."""
        with self._lock:
            self._used_bytes -= self._values.pop(key, _NONE).num_bytes

    def check(self) -> None:
        """Assert that the byte counts agree; call it while no thread writes."""
        with self._lock:
            total = sum(value.num_bytes for value in self._values.values())
            assert self._used_bytes == total, f"{self._used_bytes} bytes used, {total} in values"
            assert total <= self.max_bytes, f"{total} bytes, of {self.max_bytes} allowed"

    def _tick(self) -> int:
        self._stamp_ns = max(self._clock_ns(), self._stamp_ns + 1)
        return self._stamp_ns
