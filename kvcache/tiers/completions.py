"""What the end of each kind of copy does to the cache."""

from __future__ import annotations

from collections.abc import Sequence

from ..prefix.node import Node
from .host_tier import HostRun
from .operations import Effect, OpKind
from .state import TierState


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
        self, tiers: TierState, runs: Sequence[HostRun], order: Sequence[HostRun] = ()
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
            arrived += take_in(tiers, run, leading(ok[place:after]))
            place = after
        store(tiers, [run for run in arrived if run.node is not None])
        self.runs = tiers.host.hold([run for run in runs if run.landing])
        tiers.let_go(runs)
        tiers.let_go(tiers.host.hold([run for run in self._order if run.is_idle]))
        tiers.settle_parked()

    def fenced(self) -> None:
        """See Effect."""
        self._tiers.let_go(self.runs)


class Stored(Effect):
    """Blocks are copied from the host to storage; the host keeps them until that has ended."""

    def __init__(self, tiers: TierState, runs: Sequence[HostRun]) -> None:
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


def take_in(tiers: TierState, run: HostRun, num_good: int) -> list[HostRun]:
    """Take in that of a landing run num_good blocks have been written; return what is valid."""
    node = run.node
    if node is None:
        return []
    if 0 < num_good < run.num_blocks:
        upper = tiers.tree.split(node, num_good).host
        assert upper is not None, "half of a copy is missing"
        return [*take_in(tiers, upper, num_good), *take_in(tiers, run, 0)]
    if num_good:
        tiers.tree.version += 1
        tiers.host.settle(run)
        return [run]
    if node.device_blocks:
        tiers.host.drop(run)
    else:
        tiers.tree.remove(node)
    return []


def store(tiers: TierState, runs: Sequence[HostRun]) -> None:
    """Write copies that have just arrived on the host to storage, if there is one."""
    tree = tiers.tree
    if tree.keys is None or not runs:
        return
    blocks = b"".join([run.blocks for run in runs])
    keys: list[bytes] = []
    parents: list[Node] = []
    for run in runs:
        node = run.node
        assert node is not None and node.parent is not None, "a dropped copy is stored"
        keys += tree.keys.each(tree.path(node))
        parents.append(node.parent)
    tiers.uses.note(parents)  # what they follow must not make room for them
    tiers.submit(OpKind.HOST_TO_STORAGE, Stored(tiers, runs), sources=blocks, keys=keys)
