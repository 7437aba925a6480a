"""What a manager wants copied, and how far each copy is: a state machine without I/O.

::

    submit ──► queued ── take ──► dispatched ── complete ─────────────────► ended
                 │                     ├── complete, not fenced ──┐
                 └── cancel ──► ended  └── cancel ──► quarantined ◄ ── fence ──► ended

An operation has one result, whatever comes late or twice. Its blocks are given back when nobody
can write them any more: with the result, or, where a thread may still be at it, with the fence.
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
    """From where to where an operation copies."""

    DEVICE_TO_HOST = "device to host"
    HOST_TO_DEVICE = "host to device"
    HOST_TO_STORAGE = "host to storage"
    STORAGE_TO_HOST = "storage to host"
    DEVICE_TO_DEVICE = "device to device"
    LOOKUP = "look up in storage"
    """Copies nothing: the result of a block is whether storage has its key."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Copy some blocks.

    The operations of one `take` happen as if at once, after the step before and before the next:
    all sources are read, then all destinations written. So two of them may exchange blocks, and a
    block that was evicted is free at once. Only the host source of a copy to storage is read at any
    time until the operation has ended, and is kept until then. Nobody reads a destination before
    its operation has ended well.

    Attributes:
        id: for `complete`, `fence` and `cancel`.
        epoch: of the manager, when it was decided.
        kind: from where to where.
        sources: int32 ``[n]`` block ids in the source tier; empty if that is storage.
        destinations: int32 ``[n]`` block ids in the destination tier; empty if that is storage.
        keys: a storage key per block, if storage is one side; else empty.
        timeout_s: how long it may take from its dispatch on.
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
        """How many blocks it names; it has a result for each."""
        return max(len(self.sources), len(self.destinations), len(self.keys))


class Effect:
    """What the end of an operation does to the cache.

    Attributes:
        runs: host copies that it holds.
    """

    runs: list[HostRun]

    def end(self, ok: Sequence[bool]) -> None:
        """Take in the result of each block: once, first."""
        raise NotImplementedError

    def fenced(self) -> None:
        """Give back the blocks that came to nothing: once, after `end`."""
        raise NotImplementedError

    def own_device_blocks(self) -> list[int]:
        """Return the device blocks that are nobody else's until it is fenced."""
        return []

    def own_host_blocks(self) -> list[int]:
        """Return the host blocks that are nobody else's until it is fenced."""
        return []


class Operations:
    """The operations that have not ended, in the order in which they were decided.

    Attributes:
        late_completions: results and fences of operations that had theirs, or were never taken.
    """

    def __init__(self) -> None:
        self.late_completions = 0
        self._last_id = 0
        self._queued: dict[OpId, Operation] = {}
        self._open: dict[OpId, tuple[Operation, Effect]] = {}
        self._quarantined: dict[OpId, Effect] = {}
        self._cancelled: list[OpId] = []

    @property
    def num_open(self) -> int:
        """Operations without a result."""
        return len(self._open)

    @property
    def num_quarantined(self) -> int:
        """Operations with a result whose blocks may still be written."""
        return len(self._quarantined)

    def submit(
        self,
        kind: OpKind,
        effect: Effect,
        *,
        epoch: Epoch,
        sources: Int32Array = _NO_BLOCKS,
        destinations: Int32Array = _NO_BLOCKS,
        keys: Sequence[bytes] = (),
        timeout_s: float,
    ) -> OpId:
        """Decide an operation; `take` hands it out."""
        self._last_id += 1
        op_id = OpId(self._last_id)
        operation = Operation(op_id, epoch, kind, sources, destinations, tuple(keys), timeout_s)
        self._queued[op_id] = operation
        self._open[op_id] = operation, effect
        return op_id

    def take(self) -> list[Operation]:
        """Hand out what was decided since the last call, in order."""
        taken = list(self._queued.values())
        self._queued.clear()
        return taken

    def take_cancelled(self) -> list[OpId]:
        """Hand out which dispatched operations were cancelled since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def complete(self, op_id: OpId, ok: Sequence[bool], *, fenced: bool) -> bool:
        """End an operation that was taken; False if it had ended, or was never taken.

        Raises:
            OperationResultError: if there is not one result per block; nothing is changed.
        """
        if op_id not in self._open or op_id in self._queued:
            self.late_completions += 1
            if fenced:
                self._lift(op_id)
            return False
        operation, _ = self._open[op_id]
        if len(ok) != operation.num_blocks:
            raise OperationResultError(op_id, len(ok), operation.num_blocks)
        self._end(op_id, ok, fenced=fenced)
        return True

    def fence(self, op_id: OpId) -> bool:
        """Say that nobody writes the blocks of an operation any more; False if it is known."""
        if self._lift(op_id):
            return True
        self.late_completions += 1
        return False

    def cancel(self, op_id: OpId) -> None:
        """End an operation now, as failed, if it has not ended."""
        if op_id not in self._open:
            return
        operation, _ = self._open[op_id]
        dispatched = self._queued.pop(op_id, None) is None
        if dispatched:
            self._cancelled.append(op_id)
        self._end(op_id, [False] * operation.num_blocks, fenced=not dispatched)

    def cancel_all(self) -> None:
        """Cancel every operation, the last first: what builds on others goes before them."""
        for op_id in reversed(list(self._open)):
            self.cancel(op_id)

    def _end(self, op_id: OpId, ok: Sequence[bool], *, fenced: bool) -> None:
        _, effect = self._open.pop(op_id)
        effect.end(ok)
        if fenced:
            effect.fenced()
        else:
            self._quarantined[op_id] = effect

    def _lift(self, op_id: OpId) -> bool:
        effect = self._quarantined.pop(op_id, None)
        if effect is not None:
            effect.fenced()
        return effect is not None

    def effects(self) -> list[Effect]:
        """Return what has not been fenced, for checks."""
        return [*(effect for _, effect in self._open.values()), *self._quarantined.values()]
