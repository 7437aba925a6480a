"""The manager with tiers under test, behind its adapter."""

from __future__ import annotations

from typing import Any, Final

from .cache_target import Target
from .tiers import TierSnapshot

LOOKS: Final = frozenset(
    ("available", "block_table", "snapshot", "tier_snapshot", "check", "refusal", "keys",
     "tier_match", "loading", "ready", "promoted", "parked", "prefetched", "asking",
     "take_cancelled", "match")
)  # fmt: skip
"""The methods after which all blocks are where they were, and nothing new is to be taken."""


class TierTarget(Target):
    """Calls the adapter of a manager with tiers, and turns what it raises into a finding.

    Attributes:
        has_acted: whether a method was called that may have moved blocks; whoever looks clears it.
        may_have_decided: whether one was called that may have decided on operations, since the last
            `take`.
    """

    has_acted = may_have_decided = True

    def _call(self, method: str, *arguments: Any) -> Any:
        if method not in LOOKS:
            self.has_acted, self.may_have_decided = True, method != "take"
        return super()._call(method, *arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `TierManager`."""
        return self._call(method, *arguments)

    def tier_snapshot(self) -> TierSnapshot:
        """Return all that the manager keeps below the device."""
        shot: TierSnapshot = self._expect(
            "tier_snapshot", self._call("tier_snapshot"), TierSnapshot,
            "a radixkv.spec.adapters.tiers.TierSnapshot",
        )  # fmt: skip
        return shot
