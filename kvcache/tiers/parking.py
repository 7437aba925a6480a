"""Preemption that keeps the KV of a request: park on the host or in storage, resume, unpark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import LeaseError, StorageConfigError
from ..prefix.lease import Lease
from ..prefix.node import ITEM_BYTES
from ..tokens import Tokens, as_tokens
from .completion_handlers import OffloadCompletion
from .host_tier import HostRun
from .offload import Offloader
from .operations import OpKind
from .parked import Parked, ParkedIn
from .state import TierState


class _ParkCompletion(OffloadCompletion):
    """Handler of the copy of those blocks of a parked request that the host lacks."""

    def __init__(self, state: TierState, runs: Sequence[HostRun], parked: Parked) -> None:
        super().__init__(state, runs)
        self._parked = parked
        self._lost_tail: int | None = None

    def on_result(self, ok: Sequence[bool | None]) -> None:
        """See CompletionHandler."""
        parked = self._parked
        parked.op_id = None
        if parked.tail_block is not None and not ok[-1]:
            # The block may still be written until the fence.
            self._lost_tail, parked.tail_block = parked.tail_block, None
            parked.failed = True
        super().on_result(ok)

    def on_fence(self) -> None:
        """See CompletionHandler."""
        super().on_fence()
        self._state.host.pool.recycle(np.array(self.owned_host_blocks(), np.int32))

    def owned_host_blocks(self) -> list[int]:
        """See CompletionHandler."""
        return [] if self._lost_tail is None else [self._lost_tail]


def park(
    state: TierState, offloader: Offloader, lease: Lease, tokens: Tokens, where: ParkedIn
) -> Parked | None:
    """See `Tiers.park`."""
    if where not in ("host", "storage"):
        raise StorageConfigError(f"where must be 'host' or 'storage', got {where!r}")
    if where == "storage" and state.tree.keys is None:
        raise StorageConfigError("where is 'storage', but the cache has no storage")
    cache, host = state.cache, state.host
    tokens = as_tokens(tokens)
    cache.publish(lease, tokens)
    path = state.tree.path(lease.node)
    copies = [node.host for node in path if node.host is not None]
    missing = {node: node.device_blocks for node in path if node.host is None}
    sources = b"".join(missing.values())
    tail_tokens = len(tokens) - lease.num_shared_blocks * cache.block_size
    if tail_tokens > 0:
        sources += lease.block_table[lease.num_shared_blocks].tobytes()
    kept = sum([run.num_blocks for run in copies if run.is_idle])
    if len(sources) // ITEM_BYTES > host.available - kept:
        return None
    held = host.hold(copies)  # making room for the rest must not drop them
    ids, runs = offloader.allocate(missing, len(sources) // ITEM_BYTES)
    parked = Parked(lease, len(tokens), where)
    if tail_tokens > 0:
        parked.tail_block = int(ids[-1])
    parked.runs = host.hold([node.host for node in path if node.host is not None])
    state.release_hold(held)
    lease.parking = True
    state.parked[parked] = None
    if sources:
        handler = _ParkCompletion(state, runs, parked)
        parked.op_id = state.submit(OpKind.DEVICE_TO_HOST, handler, sources, ids.tobytes())
    state.release_saved()
    return parked


def unpark(state: TierState, parked: Parked) -> None:
    """See `Tiers.unpark`."""
    require_parked(state, parked)
    _end(state, parked)
    _recycle_tail(state, parked)


def require_parked(state: TierState | None, parked: Parked) -> None:
    """Raise LeaseError for a request that was resumed or unparked before."""
    if not isinstance(parked, Parked):
        raise LeaseError(f"parked must be a Parked, got {type(parked).__name__}")
    if state is None or parked not in state.parked:
        raise LeaseError("the parked request was resumed or unparked, or is of another cache")


def require_saved(state: TierState | None, parked: Parked, num_tokens: int) -> None:
    """Raise LeaseError unless a parked request is saved and resumes with all of its tokens."""
    require_parked(state, parked)
    if not parked.saved:
        raise LeaseError("the parked request is not saved yet: its copy is still in flight")
    if num_tokens < parked.num_tokens:
        raise LeaseError(
            f"the request was parked with {parked.num_tokens} tokens, but resumes with {num_tokens}"
        )


def resume(state: TierState, parked: Parked, num_blocks: int) -> tuple[int | None, int]:
    """End a saved parked request whose request resumes, and return its tail.

    Args:
        state: the tiers.
        parked: the parked request.
        num_blocks: number of its blocks that the cache still has. The tail is useful only if that
            is all of them.

    Returns:
        The host block of the tail, which the caller now owns, or None; and its number of tokens.
    """
    _end(state, parked)
    whole, tail_tokens = divmod(parked.num_tokens, state.cache.block_size)
    if parked.tail_block is None or num_blocks != whole or parked.epoch != state.cache.epoch:
        _recycle_tail(state, parked)
        return None, 0
    return parked.tail_block, tail_tokens


def _end(state: TierState, parked: Parked) -> None:
    del state.parked[parked]
    if parked.op_id is not None:
        state.operations.cancel(parked.op_id)
    if not parked.saved:
        state.mark_saved(parked)
    state.release_hold(parked.runs)


def _recycle_tail(state: TierState, parked: Parked) -> None:
    if parked.tail_block is not None:
        state.host.pool.recycle(np.array([parked.tail_block], np.int32))
