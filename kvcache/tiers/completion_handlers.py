"""Completion handlers of copies to the host and to storage: publish, store and release blocks."""

from __future__ import annotations

from collections.abc import Sequence

from ..prefix.node import Node
from .host_tier import HostRun, TieredNode
from .operations import CompletionHandler, OpKind
from .state import TierState


def leading(ok: Sequence[bool | None]) -> int:
    """Count the results before the first failure."""
    for place, good in enumerate(ok):
        if not good:
            return place
    return len(ok)


class OffloadCompletion(CompletionHandler):
    """Handler of a copy to the host: runs that were written become valid, and are stored.

    Blocks that were not written stay quarantined until the fence.
    """

    def __init__(
        self, state: TierState, runs: Sequence[HostRun], order: Sequence[HostRun] = ()
    ) -> None:
        """Hold the runs of a copy.

        Args:
            state: the tiers.
            runs: the in-flight runs, in the order of the operation's blocks.
            order: all runs evicted together, copied or not, in the order in which the host should
                drop them.
        """
        self._state = state
        self._order = order
        self.runs = state.host.hold(runs)

    def on_result(self, ok: Sequence[bool | None]) -> None:
        """See CompletionHandler."""
        state, runs = self._state, self.runs
        arrived = []
        place = 0
        for run in list(runs):
            after = place + run.num_blocks
            arrived += complete_run(state, run, leading(ok[place:after]))
            place = after
        store_runs(state, [run for run in arrived if run.node is not None])
        self.runs = state.host.hold([run for run in runs if run.in_flight])
        state.release_hold(runs)
        state.release_hold(state.host.hold([run for run in self._order if run.is_idle]))
        state.release_saved()

    def on_fence(self) -> None:
        """See CompletionHandler."""
        self._state.release_hold(self.runs)


class StoreCompletion(CompletionHandler):
    """Handler of a copy from the host to storage; the host keeps the blocks until it ends."""

    def __init__(self, state: TierState, runs: Sequence[HostRun]) -> None:
        """Hold valid runs."""
        self._state = state
        self.runs = state.host.hold(runs)
        copies = [(run.node, run.blocks) for run in runs if run.node is not None]
        # The nodes may be gone when the copy ends.
        self._to_report = [] if state.events is None else state.events.storing(copies)

    def on_result(self, ok: Sequence[bool | None]) -> None:
        """See CompletionHandler."""
        if self._state.events is not None:
            self._state.events.stored(self._to_report, ok)
        place = 0
        for run in self.runs:
            after = place + run.num_blocks
            run.stored = all(ok[place:after])
            place = after
        num_stored = sum(map(bool, ok))
        self._state.stored_blocks += num_stored
        ends = [run.node for run in self.runs if run.node is not None]
        self._state.recency.record_store(ends, num_stored)

    def on_fence(self) -> None:
        """See CompletionHandler."""
        self._state.release_hold(self.runs)
        self._state.release_saved()


def complete_run(state: TierState, run: HostRun, num_good: int) -> list[HostRun]:
    """Make the first num_good blocks of an in-flight run valid and drop the others.

    Returns:
        The valid part of the run: one run, or none.
    """
    node = run.node
    if node is None:
        return []
    if 0 < num_good < run.num_blocks:
        upper = state.tree.split(node, num_good).host
        assert upper is not None, "half of a copy is missing"
        return [*complete_run(state, upper, num_good), *complete_run(state, run, 0)]
    if num_good:
        state.tree.version += 1
        state.host.mark_valid(run)
        return [run]
    if node.device_blocks:
        state.host.drop(run)
    else:
        state.tree.remove(node)
    return []


def store_runs(state: TierState, runs: Sequence[HostRun]) -> None:
    """Queue a copy of valid host runs to storage, if there is storage."""
    tree = state.tree
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
    # Storage must not evict the blocks before these to make room for them.
    state.recency.record_use(parents)
    state.submit(OpKind.HOST_TO_STORAGE, StoreCompletion(state, runs), sources=blocks, keys=keys)


def store_again(state: TierState) -> None:
    """Queue a copy of every valid host run to storage, which has none of them.

    Each is an operation of its own, and leaves the host free to drop it as soon as that one ends.
    """
    for node in state.tree.nodes():
        assert isinstance(node, TieredNode), "a bare node"
        run = node.host
        if run is not None:
            run.stored = False
            if run.is_valid:
                store_runs(state, [run])
