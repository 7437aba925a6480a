"""The law of two exclusive tiers, as two lists of blocks in LRU order; and that of storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..rules import tiers as rules
from ..rules.rule import require
from .ghost import Tag


class Lru:
    """A tier of fixed size with LRU eviction; of one path, the last block goes first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.last_use: dict[Tag, tuple[int, int]] = {}
        self.num_evicted = 0

    def use(self, path: Sequence[Tag], now: int) -> int:
        """Run a request of whole blocks; return how many of its first blocks there were."""
        hit = next((i for i, tag in enumerate(path) if tag not in self.last_use), len(path))
        self.last_use.update((tag, (now, -depth)) for depth, tag in enumerate(path))
        while len(self.last_use) > self.size:
            del self.last_use[min(self.last_use, key=lambda tag: self.last_use[tag])]
            self.num_evicted += 1
        return hit


class TwoTierLaw:
    """Hits of consecutive requests in two LRU tiers, of g and of g + h blocks."""

    def __init__(self, device: int, host: int) -> None:
        self._device, self._both = Lru(device), Lru(device + host)
        self._now = self._on_device = self._in_both = 0

    def use(self, path: Sequence[Tag]) -> None:
        """Run a request of whole blocks."""
        self._now += 1
        self._on_device = self._device.use(path, self._now)
        self._in_both = self._both.use(path, self._now)

    def wanted(self) -> tuple[int, int, int, int]:
        """Hits of the last request on device and host; total demoted and dropped blocks."""
        on_host = self._in_both - self._on_device
        return self._on_device, on_host, self._device.num_evicted, self._both.num_evicted


class StorageLaw:
    """Storage of a fixed number of blocks with LRU eviction.

    Writes and reads use the blocks in order, from the first on; reported uses change that.

    Attributes:
        num_forgotten: number of evicted blocks.
    """

    def __init__(self, size: int, *, is_reported: bool) -> None:
        """Make an empty storage; with `is_told`, all uses are reported at once and in order."""
        self._size = size
        self._is_told = is_reported
        self.num_forgotten = 0
        self._keys: dict[bytes, None] = {}  # in LRU order
        self._parent: dict[bytes, bytes] = {}

    def learn(self, chain: Sequence[bytes]) -> None:
        """Enter the keys of a path."""
        self._parent.update(zip(chain[1:], chain, strict=False))

    def store(self, keys: Iterable[bytes]) -> None:
        """Write some blocks."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
            if len(self._keys) > self._size:
                self._forget(next(iter(self._keys)))

    def use(self, keys: Iterable[bytes]) -> None:
        """Use some blocks, if stored."""
        for key in keys:
            if key in self._keys:
                del self._keys[key]
                self._keys[key] = None

    def _forget(self, key: bytes) -> None:
        del self._keys[key]
        if self._is_told:
            self.num_forgotten += 1
            lost = sum(self._follows(each, key) for each in self._keys)
            require(not lost, rules.T32, "storage forgets what {} blocks follow", lost)

    def _follows(self, key: bytes | None, other: bytes) -> bool:
        while key is not None and key != other:
            key = self._parent.get(key)
        return key is not None
