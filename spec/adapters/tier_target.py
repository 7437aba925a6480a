"""Calls the adapter of a cache manager with tiers."""

from __future__ import annotations

from typing import Any, Final

from .cache_target import Target
from .tiers import TierSnapshot

LOOKS: Final = frozenset(
    ("available", "block_table", "snapshot", "tier_snapshot", "check", "refusal", "keys",
     "tier_match", "loading", "ready", "promoted", "parked", "prefetched", "asking",
     "take_cancelled", "match", "size", "kv_events", "replay", "most_told")
)  # fmt: skip
"""Methods that move no block and decide on no operation."""


class TierTarget(Target):
    """Calls the adapter of a manager with tiers; its exceptions become findings.

    Attributes:
        has_acted: whether a method that may move blocks was called; `see` clears it.
        may_have_decided: whether a method that may decide on operations was called since the last
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
        """Return the state of the tiers below the device."""
        wanted = "a radixkv.spec.adapters.tiers.TierSnapshot"
        return self._ask(TierSnapshot, wanted, "tier_snapshot")
