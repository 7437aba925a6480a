"""From the host to the device: what a request hits there is copied into its own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ids import OpId
from ..prefix.block_tables import BlockTables
from ..prefix.lease import Lease, Match
from ..prefix.node import ITEM_BYTES, Walk
from ..tokens import Int32Array, as_bytes
from .completions import leading
from .host_tier import HostRun
from .offload import HostWriter
from .operations import (
    Effect,
    OpKind,
)
from .parked import Parked
from .parking import resume
from .state import TierState


@dataclass(frozen=True, slots=True)
class Loads:
    """What is copied into a lease.

    Attributes:
        sources: the blocks to read, as bytes of int32.
        runs: copies on the host that are among them, held.
        tokens: in the whole blocks, as bytes of int32.
        tail_tokens: in one more block, the last of sources; 0 if there is none.
        tail_block: that block, if it is on the host, and free when it has been read.
    """

    sources: bytes
    runs: list[HostRun] = field(default_factory=list)
    tokens: bytes = b""
    tail_tokens: int = 0
    tail_block: int | None = None


class Promotion(Effect):
    """Blocks are copied into those of a lease, which publishes what has arrived.

    Attributes:
        lease: who waits for them, or its heir; None if there is neither, and then `orphans` are
            its blocks.
        is_void: whether a reset has ended it.
    """

    def __init__(self, reader: HostReader, lease: Lease, loads: Loads) -> None:
        """Take over what was reserved for a lease."""
        self.lease: Lease | None = lease
        self.loads = loads
        self.runs = loads.runs
        self.orphans: Int32Array | None = None
        self.is_void = False
        self._reader = reader
        self._num_good = 0
        self._tail_tokens = 0

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        self._num_good = leading(ok)
        if self.loads.tail_tokens and self._num_good == len(ok):
            self._num_good -= 1
            self._tail_tokens = self.loads.tail_tokens

    def fenced(self) -> None:
        """See Effect. Not sooner, because the lease computes into what has not arrived."""
        reader, tiers = self._reader, self._reader.tiers
        if self.lease is not None:
            reader.promoted(self, self._num_good, self._tail_tokens)
        reader.end_heir(self)
        if self.orphans is not None:
            tiers.device_pool.recycle(self.orphans)
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
        return [] if self.loads.tail_block is None else [self.loads.tail_block]


class HostReader:
    """Finds on the host what a request lacks on the device, and has it copied.

    Attributes:
        promoted_blocks: blocks that arrived and were published.
        loading: what leases and heirs wait for, by its operation.
        heirs: of leases that were released while they were loaded, by what they wait for.
    """

    def __init__(self, tiers: TierState, writer: HostWriter) -> None:
        self.promoted_blocks = 0
        self.tiers = tiers
        self._writer = writer
        self.loading: dict[OpId, Promotion] = {}
        self.heirs: dict[Promotion, Lease] = {}

    def match(self, match: Match, walk: Walk) -> None:
        """Add to a match what the host has after the blocks on the device."""
        rest = as_bytes(match._tokens)[walk.num_bytes :]
        match.host_runs, match.num_host_blocks = self.tiers.tree.host_runs(walk.node, rest)

    def reserve(self, match: Match, parked: Parked | None) -> Loads | None:
        """Keep what a match found on the host, and what a parked request left; None if nothing."""
        tiers, num_blocks = self.tiers, match.num_host_blocks
        tail_block, tail_tokens = None, 0
        if parked is not None:
            tail_block, tail_tokens = resume(tiers, parked, match.num_blocks + num_blocks)
        if num_blocks == tail_tokens == 0:
            return None
        runs = self._exactly(match.host_runs, num_blocks)
        sources = b"".join([run.blocks for run in runs])
        if tail_block is not None:
            sources += np.int32(tail_block).tobytes()
        if tiers.config.write == "exclusive":
            tiers.tree.version += 1
            for run in runs:
                if not run.holders:
                    tiers.host.leave(run)  # what is evicted for them may take their place
        first = match.num_tokens
        tokens = match._tokens[first : first + num_blocks * tiers.cache.block_size].tobytes()
        return Loads(sources, tiers.host.hold(runs), tokens, tail_tokens, tail_block)

    def _exactly(self, runs: Sequence[HostRun], num_blocks: int) -> list[HostRun]:
        """Split the last of some runs so that they have num_blocks blocks."""
        excess = sum([run.num_blocks for run in runs]) - num_blocks
        if excess == 0:
            return list(runs)
        last = runs[-1]
        assert last.node is not None, "a match names a dropped copy"
        upper = self.tiers.tree.split(last.node, last.num_blocks - excess).host
        assert upper is not None, "half of a copy is missing"
        return [*runs[:-1], upper]

    def admitted(self, lease: Lease, loads: Loads | None) -> None:
        """Copy what was reserved into a lease that was just admitted."""
        self._writer.hit(lease.node)
        end = loads.runs[-1].node if loads is not None and loads.runs else lease.node
        assert end is not None, "a copy that is to be loaded was dropped"
        self.tiers.uses.hit(end)
        if loads is not None:
            self.load(OpKind.HOST_TO_DEVICE, lease, loads)

    def load(self, kind: OpKind, lease: Lease, loads: Loads) -> None:
        """Copy blocks into those of a lease that follow its shared ones."""
        promotion = Promotion(self, lease, loads)
        first = lease.num_shared_blocks
        ids = lease.block_table[first : first + len(loads.sources) // ITEM_BYTES]
        lease.loading = self.tiers.submit(kind, promotion, loads.sources, ids.tobytes())
        self.loading[lease.loading] = promotion

    def promoted(self, promotion: Promotion, num_blocks: int, tail_tokens: int) -> None:
        """Publish what has arrived, and is fenced, in the blocks of a lease."""
        lease = promotion.lease
        assert lease is not None and lease.loading is not None, "a lease is loaded twice"
        del self.loading[lease.loading]
        lease.loading = None
        run = promotion.loads.tokens[: num_blocks * self.tiers.tree.block_bytes]
        if run:
            self.tiers.publish_run(lease, run)
        self.promoted_blocks += num_blocks
        lease.num_promoted_blocks = num_blocks
        lease.num_ready_tokens = lease.num_shared_blocks * self.tiers.cache.block_size + tail_tokens

    def abandon(self, lease: Lease) -> None:
        """Take over what a lease holds that ends while it is loaded.

        What has left the host for it is nowhere else. So the copy goes on, for an heir of the
        lease, which publishes what arrives, and then ends as well.
        """
        assert lease.loading is not None, "a lease that does not load is abandoned"
        promotion = self.loading[lease.loading]
        is_left = any([run.leaving and run.node is not None for run in promotion.runs])
        if is_left and not promotion.is_void:
            promotion.lease = self.heirs[promotion] = _heir(lease)
        else:
            self._orphan(promotion)
            self.tiers.operations.cancel(lease.loading)
        lease.loading = None

    def end_heir(self, promotion: Promotion) -> None:
        """End the heir that waited for a promotion, if one did: what it published is idle."""
        heir = self.heirs.pop(promotion, None)
        if heir is not None:
            self.tiers.tree.unpin(heir.node)
            self.tiers.device_pool.recycle(heir.block_table[heir.num_shared_blocks :])

    def reset(self) -> None:
        """End every heir now, and let there be no more; its blocks are free with the fence."""
        for promotion in self.loading.values():
            promotion.is_void = True
        while self.heirs:
            promotion, _ = self.heirs.popitem()
            self._orphan(promotion)

    def _orphan(self, promotion: Promotion) -> None:
        """Leave the private blocks of a lease or heir to what writes them."""
        lease = promotion.lease
        assert lease is not None and lease.loading is not None, "a promotion is orphaned twice"
        del self.loading[lease.loading]
        promotion.lease = None
        promotion.orphans = lease.block_table[lease.num_shared_blocks :].copy()
        self.tiers.tree.unpin(lease.node)


def _heir(lease: Lease) -> Lease:
    """Return a lease of the same blocks, in a table of its own, that waits in its place."""
    table = lease.block_table
    tables = BlockTables()
    row = tables.take_row()
    tables.widen(len(table))
    tables.ids[row, : len(table)] = table
    tables.num_blocks[row], tables.num_tokens[row] = len(table), lease.num_tokens
    heir = Lease(tables, row, lease.epoch, lease.node, lease.num_hit_blocks, lease.num_ready_tokens)
    heir.num_shared_blocks, heir.loading = lease.num_shared_blocks, lease.loading
    return heir
