"""What the end of each kind of copy does to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .host_tier import HostRun
from .lease import Lease
from .operations import Effect
from .tokens import Int32Array

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

    def fenced(self) -> None:
        """See Effect."""
        self._tiers.let_go(self.runs)


@dataclass(frozen=True, slots=True)
class Loads:
    """What is copied from the host into a lease.

    Attributes:
        runs: the copies that are read, held.
        sources: host blocks, as bytes of int32: those of runs, and of the tail.
        tokens: in the blocks of runs, as bytes of int32.
        tail: a host block with the first tokens of one more block, and how many; or None.
    """

    runs: list[HostRun]
    sources: bytes
    tokens: bytes
    tail: tuple[int, int] | None


class Promotion(Effect):
    """Blocks are copied from the host into those of a lease, which publishes what has arrived.

    Attributes:
        lease: who waits for them; None if it was released, and then `orphans` are its blocks.
    """

    def __init__(self, tiers: Tiers, lease: Lease, loads: Loads) -> None:
        """Take over what was reserved for a lease."""
        self.lease: Lease | None = lease
        self.loads = loads
        self.runs = loads.runs
        self.orphans: Int32Array | None = None
        self._tiers = tiers
        self._num_good = 0
        self._tail_tokens = 0

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        self._num_good = leading(ok)
        if self.loads.tail is not None and self._num_good == len(ok):
            self._num_good -= 1
            self._tail_tokens = self.loads.tail[1]

    def fenced(self) -> None:
        """See Effect. Not sooner, because the lease computes into what has not arrived."""
        tiers = self._tiers
        if self.lease is not None:
            tiers.promoted(self, self._num_good, self._tail_tokens)
        if self.orphans is not None:
            tiers.manager.recycle(self.orphans)
        for run in list(self.runs):
            # What was on its way and has not arrived is nowhere.
            if run.leaving and run.node is not None and not run.node.device_blocks:
                tiers.tree.remove(run.node)
        tiers.let_go(self.runs)
        tiers.host.pool.recycle(np.array(self.own_host_blocks(), np.int32))

    def own_device_blocks(self) -> list[int]:
        """See Effect."""
        return [] if self.orphans is None else [int(block) for block in self.orphans]

    def own_host_blocks(self) -> list[int]:
        """See Effect."""
        return [] if self.loads.tail is None else [self.loads.tail[0]]


class Stored(Effect):
    """Blocks are copied from the host to storage; the host keeps them until that has ended."""

    def __init__(self, tiers: Tiers, runs: Sequence[HostRun]) -> None:
        """Hold valid runs."""
        self._tiers = tiers
        self.runs = tiers.host.hold(runs)
        for run in runs:
            run.storing = True

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        place = 0
        for run in self.runs:
            after = place + run.num_blocks
            run.storing, run.stored = False, all(ok[place:after])
            place = after
        self._tiers.stored_blocks += sum(ok)

    def fenced(self) -> None:
        """See Effect."""
        self._tiers.let_go(self.runs)
        self._tiers.let_go_of_stored()
