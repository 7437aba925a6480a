"""What the end of each kind of copy does to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .host_tier import HostRun
from .operations import Effect

if TYPE_CHECKING:
    from .tiers import Tiers


def leading(ok: Sequence[bool]) -> int:
    """Count the results before the first bad one."""
    for place, good in enumerate(ok):
        if not good:
            return place
    return len(ok)


class Landing(Effect):
    """Blocks are copied to the host: a run that has been written can be matched, and stored."""

    def __init__(self, tiers: Tiers, runs: Sequence[HostRun]) -> None:
        """Hold some landing runs, in the order of the operation's blocks."""
        self._tiers = tiers
        self.runs = tiers.host.hold(runs)

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        arrived = []
        place = 0
        for run in list(self.runs):
            after = place + run.num_blocks
            arrived += self._tiers.arrived(run, leading(ok[place:after]))
            place = after
        self._tiers.store([run for run in arrived if run.node is not None])
        self._tiers.settle_parked()

    def fenced(self) -> None:
        """See Effect."""
        self._tiers.let_go(self.runs)


class Stored(Effect):
    """Blocks are copied from the host to storage; the host keeps them until that has ended."""

    def __init__(self, tiers: Tiers, runs: Sequence[HostRun]) -> None:
        """Hold valid runs."""
        self._tiers = tiers
        self.runs = tiers.host.hold(runs)

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        place = 0
        for run in self.runs:
            after = place + run.num_blocks
            run.stored = all(ok[place:after])
            place = after
        self._tiers.stored_blocks += sum(ok)

    def fenced(self) -> None:
        """See Effect."""
        self._tiers.let_go(self.runs)
        self._tiers.settle_parked()
