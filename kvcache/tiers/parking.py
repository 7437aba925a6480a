"""Preemption that keeps its KV: what a request leaves on the host, to go on from there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import LeaseError, StorageConfigError
from ..prefix.lease import Lease
from ..prefix.node import ITEM_BYTES
from ..tokens import Tokens
from .completions import Landing
from .host_tier import HostRun
from .offload import HostWriter
from .operations import OpKind
from .parked import Parked, ParkedIn
from .state import TierState


class _ParkLanding(Landing):
    """The copy of what the host lacks of a request that is preempted."""

    def __init__(self, tiers: TierState, runs: Sequence[HostRun], parked: Parked) -> None:
        super().__init__(tiers, runs)
        self._parked = parked
        self._lost_tail: int | None = None

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        parked = self._parked
        parked.op_id = None
        if parked.tail_block is not None and not ok[-1]:
            # It may still be written: it is free with the fence.
            self._lost_tail, parked.tail_block = parked.tail_block, None
            parked.failed = True
        super().end(ok)

    def fenced(self) -> None:
        """See Effect."""
        super().fenced()
        self._tiers.host.pool.recycle(np.array(self.own_host_blocks(), np.int32))

    def own_host_blocks(self) -> list[int]:
        """See Effect."""
        return [] if self._lost_tail is None else [self._lost_tail]


def park(
    tiers: TierState, writer: HostWriter, lease: Lease, tokens: Tokens, where: ParkedIn
) -> Parked | None:
    """See `Tiers.park`."""
    if where not in ("host", "storage"):
        raise StorageConfigError(f"a request is parked in 'host' or 'storage', not {where!r}")
    if where == "storage" and tiers.tree.keys is None:
        raise StorageConfigError("a request is parked in storage, but the cache has none")
    cache, host = tiers.cache, tiers.host
    cache.publish(lease, tokens)
    path = tiers.tree.path(lease.node)
    copies = [node.host for node in path if node.host is not None]
    missing = {node: node.device_blocks for node in path if node.host is None}
    sources = b"".join(missing.values())
    tail_tokens = len(tokens) - lease.num_shared_blocks * cache.block_size
    if tail_tokens > 0:
        sources += lease.block_table[lease.num_shared_blocks].tobytes()
    kept = sum([run.num_blocks for run in copies if run.is_idle])
    if len(sources) // ITEM_BYTES > host.available - kept:
        return None
    held = host.hold(copies)  # so that they are not dropped to make room for the rest
    ids, runs = writer.land(missing, len(sources) // ITEM_BYTES)
    parked = Parked(lease, len(tokens), where)
    if tail_tokens > 0:
        parked.tail_block = int(ids[-1])
    parked.runs = host.hold([node.host for node in path if node.host is not None])
    tiers.let_go(held)
    lease.parking = True
    tiers.parked[parked] = None
    if sources:
        landing = _ParkLanding(tiers, runs, parked)
        parked.op_id = tiers.submit(OpKind.DEVICE_TO_HOST, landing, sources, ids.tobytes())
    tiers.settle_parked()
    return parked


def unpark(tiers: TierState, parked: Parked) -> None:
    """See `Tiers.unpark`."""
    require_parked(tiers, parked)
    _end(tiers, parked)
    _recycle_tail(tiers, parked)


def require_parked(tiers: TierState | None, parked: Parked) -> None:
    """Refuse what was resumed or let go before."""
    if tiers is None or parked not in tiers.parked:
        raise LeaseError("the parked request was resumed or let go before, or is of another cache")


def require_saved(tiers: TierState | None, parked: Parked, num_tokens: int) -> None:
    """Refuse to resume what is not parked, or not yet, or with fewer tokens than were computed."""
    require_parked(tiers, parked)
    if not parked.saved:
        raise LeaseError("the parked request is still being copied")
    if num_tokens < parked.num_tokens:
        raise LeaseError(
            f"a request was parked with {parked.num_tokens} tokens, but resumes with {num_tokens}"
        )


def resume(tiers: TierState, parked: Parked, num_blocks: int) -> tuple[int | None, int]:
    """Let go of what is parked, as its request goes on; hand out its tail.

    Args:
        tiers: where it is.
        parked: it, saved.
        num_blocks: how many blocks of it the cache has; if not all, the tail is of no use.

    Returns:
        The host block of the tail, which is the caller's now, or None, and its tokens.
    """
    _end(tiers, parked)
    whole, tail_tokens = divmod(parked.num_tokens, tiers.cache.block_size)
    if parked.tail_block is None or num_blocks != whole or parked.epoch != tiers.cache.epoch:
        _recycle_tail(tiers, parked)
        return None, 0
    return parked.tail_block, tail_tokens


def _end(tiers: TierState, parked: Parked) -> None:
    del tiers.parked[parked]
    if parked.op_id is not None:
        tiers.operations.cancel(parked.op_id)
    if not parked.saved:
        tiers.settle(parked)
    tiers.let_go(parked.runs)


def _recycle_tail(tiers: TierState, parked: Parked) -> None:
    if parked.tail_block is not None:
        tiers.host.pool.recycle(np.array([parked.tail_block], np.int32))
