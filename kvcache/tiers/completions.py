"""What the end of each kind of copy does to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .host_tier import HostRun
from .operations import Effect

if TYPE_CHECKING:
    from .api import Tiers


def leading(ok: Sequence[bool]) -> int:
    """Count the results before the first bad one."""
    for place, good in enumerate(ok):
        if not good:
            return place
    return len(ok)


class Landing(Effect):
    """Blocks are copied to the host: a run that has been written can be matched, and stored.

    What was not written is held until nobody can write it any more.
    """

    def __init__(
        self, tiers: Tiers, runs: Sequence[HostRun], order: Sequence[HostRun] = ()
    ) -> None:
        """Hold some landing runs, in the order of the operation's blocks.

        Args:
            tiers: where they land.
            runs: they.
            order: they and others, in the order in which they are to be dropped when they have
                landed; so what was evicted together is in one order, copied or not.
        """
        self._tiers = tiers
        self._order = order
        self.runs = tiers.host.hold(runs)

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        tiers, runs = self._tiers, self.runs
        arrived = []
        place = 0
        for run in list(runs):
            after = place + run.num_blocks
            arrived += tiers.arrived(run, leading(ok[place:after]))
            place = after
        tiers.store([run for run in arrived if run.node is not None])
        self.runs = tiers.host.hold([run for run in runs if run.landing])
        tiers.let_go(runs)
        tiers.let_go(tiers.host.hold([run for run in self._order if run.is_idle]))
        tiers.settle_parked()

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
        ends = [run.node for run in self.runs if run.node is not None]
        self._tiers.uses.stored(ends, sum(ok))

    def fenced(self) -> None:
        """See Effect."""
        self._tiers.let_go(self.runs)
        self._tiers.settle_parked()
