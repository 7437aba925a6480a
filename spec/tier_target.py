"""The manager with tiers under test, behind its adapter."""

from __future__ import annotations

from typing import Any

from .target import Target
from .tier_adapter import TierSnapshot


class TierTarget(Target):
    """Calls the adapter of a manager with tiers, and turns what it raises into a finding."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `TierManager`."""
        return self._call(method, *arguments)

    def tier_snapshot(self) -> TierSnapshot:
        """Return all that the manager keeps below the device."""
        shot: TierSnapshot = self._expect(
            "tier_snapshot", self._call("tier_snapshot"), TierSnapshot,
            "a radixkv.spec.tier_adapter.TierSnapshot",
        )  # fmt: skip
        return shot
