"""The copies of an engine's tiers: when they may be closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.scheduler.engine.tier_copies import TierCopies


class FakeDriver:
    """Needs some waits until it has ended its operations, and its touches of stored blocks."""

    def __init__(self, tiers: Any, touches: int) -> None:
        self.tiers, self.touches = tiers, touches
        self.left: list[tuple[int, int]] = []

    @property
    def is_touching(self) -> bool:
        return self.touches > 0

    def wait(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self.tiers.num_open_operations = max(self.tiers.num_open_operations - 1, 0)
        self.touches -= 1

    def close(self, timeout_s: float) -> bool:
        self.left.append((self.tiers.num_open_operations, max(self.touches, 0)))
        return timeout_s > 0


@pytest.mark.parametrize("operations", [0, 1, 3])
@pytest.mark.parametrize("touches", [0, 1, 3])
def test_a_close_waits_for_operations_and_touches(
    operations: int, touches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: Any = TierCopies.__new__(TierCopies)
    copies._tiers = SimpleNamespace(num_open_operations=operations)
    copies._driver = driver = FakeDriver(copies._tiers, touches)
    for name in ("collect", "dispatch"):
        monkeypatch.setattr(TierCopies, name, lambda *_: None)
    assert copies.close(None, timeout_s=600.0)
    assert driver.left == [(0, 0)]
    copies._tiers.num_open_operations = 2
    assert not copies.close(None, timeout_s=0.0)
    assert driver.left[1:] == [(2, 0)]
