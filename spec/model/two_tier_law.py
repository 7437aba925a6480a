"""The law of two exclusive tiers, as two lists of blocks in LRU order; and that of storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..rules import tiers as rules
from ..rules.rule import require
from .ghost import Tag
from .tiers.residency import Prefixes


class Lru:
    """A tier of fixed size with LRU eviction; of one path, the last block goes first.

    Attributes:
        blocks: what it holds, in LRU order.
        num_evicted: number of blocks that it has evicted.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[Tag, None] = {}
        self.num_evicted = 0

    def use(self, path: Sequence[Tag]) -> int:
        """Run a request of whole blocks; return how many of its first blocks there were."""
        hit = next((i for i, block in enumerate(path) if block not in self.blocks), len(path))
        for block in reversed(path):
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.size:
            del self.blocks[next(iter(self.blocks))]
            self.num_evicted += 1
        return hit


class TwoTierLaw:
    """Hits of consecutive requests in two LRU tiers, of g and of g + h blocks."""

    def __init__(self, device: int, host: int) -> None:
        self._device, self._both = Lru(device), Lru(device + host)

    def use(self, path: Sequence[Tag]) -> tuple[int, int, int, int]:
        """Run a request of whole blocks.

        Returns:
            Its hits on device and host; total demoted and dropped blocks.
        """
        on_device, in_both = self._device.use(path), self._both.use(path)
        evicted = self._device.num_evicted, self._both.num_evicted
        return on_device, in_both - on_device, *evicted


class StorageLaw:
    """Storage of a fixed number of blocks with LRU eviction.

    Writes and reads use the blocks in order, from the first on; reported uses change that.

    Attributes:
        is_reported: whether all uses are reported at once and in order.
    """

    def __init__(self, size: int, prefixes: Prefixes, *, is_reported: bool) -> None:
        self.is_reported = is_reported
        self._lru, self._prefixes = Lru(size), prefixes

    @property
    def num_forgotten(self) -> int:
        """Number of evicted blocks, all of whose uses were reported."""
        return self._lru.num_evicted * self.is_reported

    def store(self, tags: Iterable[Tag]) -> None:
        """Write some blocks."""
        for tag in tags:
            oldest = next(iter(self._lru.blocks), None)
            self._lru.use([tag])
            if self.is_reported and oldest not in self._lru.blocks:
                lost = sum(oldest in self._prefixes.path[each] for each in self._lru.blocks)
                require(not lost, rules.T32, "storage forgets what {} blocks follow", lost)

    def use(self, tags: Iterable[Tag]) -> None:
        """Use some blocks, if stored."""
        for tag in tags:
            if tag in self._lru.blocks:
                self._lru.use([tag])
