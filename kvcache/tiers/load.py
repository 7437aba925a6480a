"""Load: copy host hits and parked blocks of a request to the device (completion)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ids import OpId
from ..prefix.block_tables import BlockTables
from ..prefix.lease import Lease, Match
from ..prefix.node import ITEM_BYTES, Walk
from ..tokens import Int32Array, as_bytes
from .completion_handlers import leading
from .host_tier import HostRun
from .offload import Offloader
from .operations import CompletionHandler, OpKind
from .parked import Parked
from .parking import resume
from .state import TierState


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Blocks to copy into a lease.

    Attributes:
        sources: ids of the blocks to read, as bytes of int32.
        runs: host copies among the sources, held.
        tokens: tokens of the whole blocks, as bytes of int32.
        tail_tokens: number of tokens in one more, partial block, the last of sources; 0 without.
        tail_block: that block if it is on the host; it is recycled when it has been read.
    """

    sources: bytes
    runs: list[HostRun] = field(default_factory=list)
    tokens: bytes = b""
    tail_tokens: int = 0
    tail_block: int | None = None


class LoadCompletion(CompletionHandler):
    """Handler of a copy into the blocks of a lease, which publishes the blocks that arrived.

    Attributes:
        lease: the waiting lease, or the detached one in its place; None without either. Then its
            private blocks are quarantined.
        quarantined: device blocks to recycle at the fence, or None.
        ended_by_reset: whether a reset ended the lease.
    """

    def __init__(self, loader: Loader, lease: Lease, plan: LoadPlan) -> None:
        self.lease: Lease | None = lease
        self.plan = plan
        self.runs = plan.runs
        self.quarantined: Int32Array | None = None
        self.ended_by_reset = False
        self._loader = loader
        self._num_good = 0
        self._tail_tokens = 0

    def on_result(self, ok: Sequence[bool | None]) -> None:
        """See CompletionHandler."""
        self._num_good = leading(ok)
        if self.plan.tail_tokens and self._num_good == len(ok):
            self._num_good -= 1
            self._tail_tokens = self.plan.tail_tokens

    def on_fence(self) -> None:
        """See CompletionHandler. A lease computes into blocks that failed, so it must wait."""
        loader, state = self._loader, self._loader.state
        if self.lease is not None:
            loader.publish_loaded(self, self._num_good, self._tail_tokens)
        loader.release_detached(self)
        if self.quarantined is not None:
            state.device_pool.recycle(self.quarantined)
        for run in list(self.runs):
            # A run that left the host and did not arrive is in no tier.
            if run.promoting and run.node is not None and not run.node.device_blocks:
                state.tree.remove(run.node)
        state.release_hold(self.runs)
        state.host.pool.recycle(np.array(self.owned_host_blocks(), np.int32))

    def owned_device_blocks(self) -> list[int]:
        """See CompletionHandler."""
        return [] if self.quarantined is None else [int(block) for block in self.quarantined]

    def owned_host_blocks(self) -> list[int]:
        """See CompletionHandler."""
        return [] if self.plan.tail_block is None else [self.plan.tail_block]


class Loader:
    """Finds blocks on the host that a request lacks on the device, and loads them.

    Attributes:
        state: the tiers.
        promoted_blocks: number of blocks that were loaded and published.
        loading: handlers of the loads that live or detached leases wait for.
        detached: detached leases: a request ended while its blocks were still loading, and this
            lease waits in its place.
    """

    def __init__(self, state: TierState, offloader: Offloader) -> None:
        self.promoted_blocks = 0
        self.state = state
        self._offloader = offloader
        self.loading: dict[OpId, LoadCompletion] = {}
        self.detached: dict[LoadCompletion, Lease] = {}

    def match(self, match: Match, walk: Walk) -> None:
        """Add to a match the host blocks that follow the device blocks."""
        rest = as_bytes(match._tokens)[walk.num_bytes :]
        match.host_runs, match.num_host_blocks = self.state.tree.host_runs(walk.node, rest)

    def reserve(self, match: Match, parked: Parked | None) -> LoadPlan | None:
        """Hold the host blocks of a match and the tail of a parked request; None without any."""
        state, num_blocks = self.state, match.num_host_blocks
        tail_block, tail_tokens = None, 0
        if parked is not None:
            tail_block, tail_tokens = resume(state, parked, match.num_blocks + num_blocks)
        if num_blocks == tail_tokens == 0:
            return None
        runs = self._cut(match.host_runs, num_blocks)
        sources = b"".join([run.blocks for run in runs])
        if tail_block is not None:
            sources += np.int32(tail_block).tobytes()
        if state.config.write == "exclusive":
            state.tree.version += 1
            for run in runs:
                if not run.holders:
                    state.host.start_promotion(run)  # blocks evicted for them may take their place
        first = match.num_tokens
        tokens = match._tokens[first : first + num_blocks * state.cache.block_size].tobytes()
        return LoadPlan(sources, state.host.hold(runs), tokens, tail_tokens, tail_block)

    def _cut(self, runs: Sequence[HostRun], num_blocks: int) -> list[HostRun]:
        """Cut the runs to num_blocks blocks, by splitting the last one."""
        excess = sum([run.num_blocks for run in runs]) - num_blocks
        if excess == 0:
            return list(runs)
        last = runs[-1]
        assert last.node is not None, "a match names a dropped copy"
        upper = self.state.tree.split(last.node, last.num_blocks - excess).host
        assert upper is not None, "half of a copy is missing"
        return [*runs[:-1], upper]

    def start_load(self, lease: Lease, plan: LoadPlan | None) -> None:
        """Record the hit of a new lease, and load the blocks that were reserved for it."""
        self._offloader.record_hit(lease.node)
        end = plan.runs[-1].node if plan is not None and plan.runs else lease.node
        assert end is not None, "a copy to load was dropped"
        self.state.recency.record_hit(end)
        if plan is not None:
            self.load(OpKind.HOST_TO_DEVICE, lease, plan)

    def load(self, kind: OpKind, lease: Lease, plan: LoadPlan) -> None:
        """Copy blocks into the first private blocks of a lease."""
        completion = LoadCompletion(self, lease, plan)
        first = lease.num_shared_blocks
        ids = lease.block_table[first : first + len(plan.sources) // ITEM_BYTES]
        lease.loading = self.state.submit(kind, completion, plan.sources, ids.tobytes())
        self.loading[lease.loading] = completion

    def publish_loaded(self, completion: LoadCompletion, num_blocks: int, tail_tokens: int) -> None:
        """Publish the blocks of a lease that were loaded and fenced."""
        lease = completion.lease
        assert lease is not None and lease.loading is not None, "a lease is loaded twice"
        del self.loading[lease.loading]
        lease.loading = None
        run = completion.plan.tokens[: num_blocks * self.state.tree.block_bytes]
        if run:
            self.state.publish_run(lease, run)
        self.promoted_blocks += num_blocks
        lease.num_promoted_blocks = num_blocks
        lease.num_ready_tokens = lease.num_shared_blocks * self.state.cache.block_size + tail_tokens

    def detach(self, lease: Lease) -> None:
        """Take over the blocks of a lease that ends while it is still loading.

        Blocks that left the host for it ("exclusive" policy) are in no other tier. Their copy
        continues for a detached lease, which publishes them and then ends. Other copies are
        cancelled.
        """
        assert lease.loading is not None, "a lease that does not load is detached"
        completion = self.loading[lease.loading]
        is_left = any([run.promoting and run.node is not None for run in completion.runs])
        if is_left and not completion.ended_by_reset:
            completion.lease = self.detached[completion] = _detached_lease(lease)
        else:
            self._quarantine(completion)
            self.state.operations.cancel(lease.loading)
        lease.loading = None

    def release_detached(self, completion: LoadCompletion) -> None:
        """End the detached lease that waited for a load, if there is one."""
        detached = self.detached.pop(completion, None)
        if detached is not None:
            self.state.tree.unpin(detached.node)
            self.state.device_pool.recycle(detached.block_table[detached.num_shared_blocks :])

    def reset(self) -> None:
        """End every detached lease and allow no more; their blocks are free with the fence."""
        for completion in self.loading.values():
            completion.ended_by_reset = True
        while self.detached:
            completion, _ = self.detached.popitem()
            self._quarantine(completion)

    def _quarantine(self, completion: LoadCompletion) -> None:
        """End the wait of a lease, and quarantine its private blocks until the fence."""
        lease = completion.lease
        assert lease is not None and lease.loading is not None, "a load is quarantined twice"
        del self.loading[lease.loading]
        completion.lease = None
        completion.quarantined = lease.block_table[lease.num_shared_blocks :].copy()
        self.state.tree.unpin(lease.node)


def _detached_lease(lease: Lease) -> Lease:
    """Return a lease of the same blocks with its own block table."""
    table = lease.block_table
    tables = BlockTables()
    row = tables.take_row()
    tables.grow(row, len(table))[:] = table
    tables.num_tokens[row] = lease.num_tokens
    detached = Lease(
        tables, row, lease.epoch, lease.node, lease.num_hit_blocks, lease.num_ready_tokens
    )
    detached.num_shared_blocks, detached.loading = lease.num_shared_blocks, lease.loading
    return detached
