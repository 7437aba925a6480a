"""The law of two exclusive tiers, as two lists of blocks in order of last use."""

from __future__ import annotations

from collections.abc import Sequence

from .ghost import Tag


class _Lru:
    """So many blocks; the one that was used longest ago goes, the last of a path first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.last_use: dict[Tag, tuple[int, int]] = {}
        self.num_evicted = 0

    def use(self, path: Sequence[Tag], now: int) -> int:
        hit = next((i for i, tag in enumerate(path) if tag not in self.last_use), len(path))
        self.last_use.update((tag, (now, -depth)) for depth, tag in enumerate(path))
        while len(self.last_use) > self.size:
            del self.last_use[min(self.last_use, key=lambda tag: self.last_use[tag])]
            self.num_evicted += 1
        return hit


class TwoTierLaw:
    """What requests hit that come one after the other, in g blocks and in g + h blocks."""

    def __init__(self, device: int, host: int) -> None:
        self._device, self._both = _Lru(device), _Lru(device + host)
        self._now = self._on_device = self._in_both = 0

    def use(self, path: Sequence[Tag]) -> None:
        """A request of some whole blocks comes and ends."""
        self._now += 1
        self._on_device = self._device.use(path, self._now)
        self._in_both = self._both.use(path, self._now)

    def wanted(self) -> tuple[int, int, int, int]:
        """What the last one hits on the device and on the host; all that was demoted, dropped."""
        on_host = self._in_both - self._on_device
        return self._on_device, on_host, self._device.num_evicted, self._both.num_evicted
