"""A clock for the benchmarks that only moves when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.kvcache import CacheManager
from radixkv.scheduler.bench import cache, decode, evict, step, timing


class Clock:
    """Nanoseconds, of which each reading costs some, and calls what they are told.

    Attributes:
        managers: arguments of each manager that was made.
        calls: number of calls of each function that takes time.
    """

    cost_ns = 7

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 100
        self.managers: list[tuple[int, int]] = []
        self.calls: dict[str, int] = {}
        self._monkeypatch = monkeypatch
        make = CacheManager.__init__

        def init(manager: CacheManager, num_blocks: int, block_size: int) -> None:
            self.managers.append((num_blocks, block_size))
            make(manager, num_blocks, block_size)

        monkeypatch.setattr(CacheManager, "__init__", init)

    def __call__(self) -> int:
        self.now_ns += self.cost_ns
        return self.now_ns

    def takes(self, owner: Any, name: str, duration_ns: Callable[[int], int]) -> None:
        """Let the n-th call of a function of a class or module last as a function of n says."""
        function = getattr(owner, name)
        self.calls[name] = 0

        def call(*arguments: Any) -> Any:
            self.now_ns += duration_ns(self.calls[name])
            self.calls[name] += 1
            return function(*arguments)

        self._monkeypatch.setattr(owner, name, call)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all benchmarks of the manager."""
    made = Clock(monkeypatch)
    for module in (cache, decode, evict, step, timing):
        monkeypatch.setattr(module, "now_ns", made)
    return made
