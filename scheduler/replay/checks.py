"""Checks that a replay makes on its own results, and the checks for leaked blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ...kvcache.manager import CacheManager
from ...kvcache.stats import TierStats


@dataclass(frozen=True, slots=True)
class Check:
    """A claim about the results, and whether it held. A failed check makes the command fail.

    Attributes:
        name: The claim.
        ok: Whether it held; True for a skipped check.
        detail: The numbers compared, or the first difference.
        skipped: The trace never reached the situation that the claim is about.
    """

    name: str
    ok: bool
    detail: str
    skipped: bool = False

    @property
    def verdict(self) -> str:
        """PASS, FAIL or SKIP."""
        return "SKIP" if self.skipped else "PASS" if self.ok else "FAIL"


def check_violations(name: str, violations: list[str], detail: str) -> Check:
    """Fail with the first of the violations, or pass with the detail."""
    if not violations:
        return Check(name, True, detail)
    return Check(name, False, f"{len(violations):,} violations, the first: {violations[0]}")


def check_all_blocks_returned(manager: CacheManager) -> Check:
    """Check that an idle manager keeps its invariants and has every block free or cached."""
    name = "no block is leaked"
    try:
        manager.check()
    except AssertionError as broken:
        return Check(name, False, f"broken invariant: {broken}")
    stats = manager.stats()
    ok = stats.free_blocks + stats.idle_blocks == stats.num_blocks and stats.live_leases == 0
    detail = (
        f"{stats.free_blocks:,} free + {stats.idle_blocks:,} idle of {stats.num_blocks:,} blocks, "
        f"{stats.live_leases} leases"
    )
    return Check(name, ok, detail)


def check_all_host_blocks_returned(tiers: TierStats) -> Check:
    """Check that an idle host tier holds no parked request, no copy and no unaccounted block."""
    unused = tiers.host_free_blocks + tiers.host_cached_blocks
    copies = tiers.open_operations + tiers.quarantined_operations
    ok = unused == tiers.host_blocks and tiers.parked == copies == 0
    detail = (
        f"{unused:,} of {tiers.host_blocks:,} free or cached, {tiers.parked} parked, "
        f"{copies} copies"
    )
    return Check("no host block is leaked", ok, detail)
