"""Operations between tiers and their life cycle, as a state machine without I/O.

::

    submit ──► queued ── take ──► dispatched ── complete ─────────────────► ended
                 │                     ├── complete, not fenced ──┐
                 └── cancel ──► ended  └── cancel ──► quarantined ◄ ── fence ──► ended

An operation has one result; late and repeated completions change nothing. Its blocks are returned
when nothing can write them any more: with the result, or with the fence if a thread may still run.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import OperationResultError
from ..ids import Epoch, OpId
from ..tokens import Int32Array

if TYPE_CHECKING:
    from .host_tier import HostRun

_NO_BLOCKS: Final = np.empty(0, np.int32)


class OpKind(enum.Enum):
    """Source and destination tier of an operation."""

    DEVICE_TO_HOST = "device to host"
    HOST_TO_DEVICE = "host to device"
    HOST_TO_STORAGE = "host to storage"
    STORAGE_TO_HOST = "storage to host"
    DEVICE_TO_DEVICE = "device to device"
    LOOKUP = "look up in storage"
    """Copies nothing: the result of each block tells whether storage has its key. None is no
    answer: it counts as a miss, and as no news of storage."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A copy of blocks between tiers.

    All operations of one ``take`` run as if at once, between two steps of the model: all sources
    are read, then all destinations written. Two of them may therefore exchange blocks, and an
    evicted block is free at once. The exception is the host source of a copy to storage: it is read
    at any time until the operation ends, and is kept until then. A destination may be read only
    after its operation has succeeded.

    Attributes:
        id: identifies the operation in `Tiers.complete`, `Tiers.fence` and `Tiers.cancel`.
        epoch: epoch of the manager when the operation was queued.
        kind: source and destination tier.
        sources: int32 ``[n]``, block ids in the source tier; empty if that is storage.
        destinations: int32 ``[n]``, block ids in the destination tier; empty if that is storage.
        keys: one storage key per block if storage takes part, else empty.
        timeout_s: deadline, in seconds from the dispatch.
    """

    id: OpId
    epoch: Epoch
    kind: OpKind
    sources: Int32Array
    destinations: Int32Array
    keys: tuple[bytes, ...]
    timeout_s: float

    @property
    def num_blocks(self) -> int:
        """Number of blocks, and of results."""
        return max(len(self.sources), len(self.destinations), len(self.keys))


class CompletionHandler:
    """Applies the result of an operation to the cache.

    Attributes:
        runs: host copies that the operation holds.
    """

    runs: list[HostRun]

    def on_result(self, ok: Sequence[bool | None]) -> None:
        """Apply the result of each block, None if it is unknown. Called once, before `on_fence`."""
        raise NotImplementedError

    def on_fence(self) -> None:
        """Return the blocks that were not written. Called once, after `on_result`."""
        raise NotImplementedError

    def owned_device_blocks(self) -> list[int]:
        """Return the device blocks that only this operation owns, until its fence."""
        return []

    def owned_host_blocks(self) -> list[int]:
        """Return the host blocks that only this operation owns, until its fence."""
        return []


class Operations:
    """Operations that have not ended, oldest first.

    Attributes:
        late_completions: number of results and fences for operations that had theirs already, or
            were never taken.
    """

    def __init__(self) -> None:
        self.late_completions = 0
        self._last_id = 0
        self._queued: dict[OpId, Operation] = {}
        self._open: dict[OpId, tuple[Operation, CompletionHandler]] = {}
        self._quarantined: dict[OpId, CompletionHandler] = {}
        self._cancelled: list[OpId] = []

    @property
    def num_open(self) -> int:
        """Number of operations without a result."""
        return len(self._open)

    @property
    def num_quarantined(self) -> int:
        """Number of operations with a result whose blocks may still be written."""
        return len(self._quarantined)

    def submit(
        self,
        kind: OpKind,
        handler: CompletionHandler,
        *,
        epoch: Epoch,
        sources: Int32Array = _NO_BLOCKS,
        destinations: Int32Array = _NO_BLOCKS,
        keys: Sequence[bytes] = (),
        timeout_s: float,
    ) -> OpId:
        """Queue an operation; `take` hands it out."""
        self._last_id += 1
        op_id = OpId(self._last_id)
        operation = Operation(op_id, epoch, kind, sources, destinations, tuple(keys), timeout_s)
        self._queued[op_id] = operation
        self._open[op_id] = operation, handler
        return op_id

    def take(self) -> list[Operation]:
        """Return the operations queued since the last call, oldest first."""
        taken = list(self._queued.values())
        self._queued.clear()
        return taken

    def take_cancelled(self) -> list[OpId]:
        """Return the dispatched operations that were cancelled since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def complete(self, op_id: OpId, ok: Sequence[bool | None], *, fenced: bool) -> bool:
        """Report the result of a dispatched operation; False if it has one, or was never taken.

        Raises:
            OperationResultError: if there is not one result per block. Nothing changes.
        """
        if op_id not in self._open or op_id in self._queued:
            self.late_completions += 1
            if fenced:
                self._end_quarantine(op_id)
            return False
        operation, _ = self._open[op_id]
        if len(ok) != operation.num_blocks:
            raise OperationResultError(op_id, len(ok), operation.num_blocks)
        self._end(op_id, ok, fenced=fenced)
        return True

    def fence(self, op_id: OpId) -> bool:
        """Report that nothing writes the blocks of an operation any more; False if known."""
        if self._end_quarantine(op_id):
            return True
        self.late_completions += 1
        return False

    def cancel(self, op_id: OpId) -> None:
        """End an operation with unknown results, unless it has a result."""
        if op_id not in self._open:
            return
        operation, _ = self._open[op_id]
        dispatched = self._queued.pop(op_id, None) is None
        if dispatched:
            self._cancelled.append(op_id)
        self._end(op_id, [None] * operation.num_blocks, fenced=not dispatched)

    def cancel_all(self) -> None:
        """Cancel every operation, newest first, because new ones depend on older ones."""
        for op_id in reversed(list(self._open)):
            self.cancel(op_id)

    def cancel_storage(self) -> None:
        """Cancel every operation that has storage keys."""
        for op_id, (operation, _) in list(self._open.items()):
            if operation.keys:
                self.cancel(op_id)

    def _end(self, op_id: OpId, ok: Sequence[bool | None], *, fenced: bool) -> None:
        _, handler = self._open.pop(op_id)
        handler.on_result(ok)
        if fenced:
            handler.on_fence()
        else:
            self._quarantined[op_id] = handler

    def _end_quarantine(self, op_id: OpId) -> bool:
        handler = self._quarantined.pop(op_id, None)
        if handler is not None:
            handler.on_fence()
        return handler is not None

    def handlers(self) -> list[CompletionHandler]:
        """Return the handlers of all operations that are not fenced."""
        return [*(handler for _, handler in self._open.values()), *self._quarantined.values()]
