"""A check that a replay makes on itself; one that fails makes the command fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked and whether it held.

    Attributes:
        name: the claim.
        ok: whether it held; True for one that was skipped.
        detail: the numbers: what was compared, or the first difference.
        skipped: the trace gave no occasion to check it.
    """

    name: str
    ok: bool
    detail: str
    skipped: bool = False

    @property
    def verdict(self) -> str:
        """PASS, FAIL or SKIP."""
        return "SKIP" if self.skipped else "PASS" if self.ok else "FAIL"
