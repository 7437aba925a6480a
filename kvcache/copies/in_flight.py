"""State of the operations that a tier driver has dispatched, without threads or clocks.

::

    add ──► open ──┬── end, fenced ────────────────────────► result
                   ├── end, not fenced ──► result, unfenced ── fence ──► fenced
                   ├── cancel, fenced ─────────────────────────────────► fenced
                   └── cancel, not fenced ─────────► unfenced ── fence ──► fenced
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..ids import OpId
from ..storage.interface import StorageOpId
from ..tiers.operations import Operation, OpKind


class Outcome(enum.Enum):
    """How an operation ended."""

    DONE = "done"
    """Every block was copied."""
    FAILED = "failed"
    """A block was not copied: an error, or storage does not have it."""
    DROPPED = "dropped"
    """A block was not copied: too many bytes were in flight."""
    TIMED_OUT = "timed out"
    """Its deadline came first."""
    NOT_ASKED = "not asked"
    """Storage hangs, and another lookup is waiting for its answer; this one was not sent."""
    CANCELLED = "cancelled"
    """The manager cancelled the operation, or the driver was closed."""


@dataclass(frozen=True, slots=True)
class OperationResult:
    """The end of an operation, for `Tiers.complete`.

    Attributes:
        op_id: id of the operation.
        ok: for each block, whether it was copied or, for a lookup, found; None if storage did not
            answer.
        fenced: whether its blocks are no longer in use; if False, `TierDriver.fenced` returns the
            id later.
    """

    op_id: OpId
    ok: tuple[bool | None, ...]
    fenced: bool


@dataclass(frozen=True, slots=True)
class TierDriverStats:
    """Counts since the start, and the current load.

    Attributes:
        operations: number of ended operations by kind and outcome.
        copied_bytes: bytes of copied blocks by kind, without blocks that storage already had.
        dropped_blocks: device-to-host blocks for which staging had no room before their deadline.
        errors: number of errors that ended copies, by type name, without storage's.
        open_operations: operations dispatched and not ended.
        unfenced_operations: ended operations whose blocks may still be in use.
        bytes_in_flight: bytes of staging waiting for the host tier, including padding.
    """

    operations: Mapping[tuple[OpKind, Outcome], int]
    copied_bytes: Mapping[OpKind, int]
    dropped_blocks: int
    errors: Mapping[str, int]
    open_operations: int
    unfenced_operations: int
    bytes_in_flight: int


class StagedPiece(NamedTuple):
    """A piece of an operation that was read and is not written yet.

    Attributes:
        blocks: slice of the operation's blocks.
        size: number of staged blocks, including padding.
        staging: KV of the blocks, an array per pool.
    """

    blocks: slice
    size: int
    staging: Any


@dataclass(eq=False, slots=True)
class InFlightOperation:
    """A dispatched operation that has not ended or is not fenced.

    Attributes:
        deadline: deadline by the driver's clock; storage keeps its own deadlines.
        ok: for each block, its result so far.
        staged: pieces that were read and are not written yet.
        copied: number of copied blocks, without blocks that storage already had.
        writes: number of pieces that the staging writer has not reported.
        storage_id: id of the operation in storage, if it was started there.
        outcome: outcome at the end, once it is known not to be DONE.
    """

    operation: Operation
    deadline: float
    ok: list[bool | None]
    staged: list[StagedPiece] = field(default_factory=list)
    copied: int = 0
    writes: int = 0
    storage_id: StorageOpId | None = None
    outcome: Outcome | None = None

    def mark(self, blocks: slice) -> None:
        """Record that these blocks were copied."""
        num_blocks = blocks.stop - blocks.start
        self.ok[blocks] = [True] * num_blocks
        self.copied += num_blocks


class InFlightTable:
    """All operations in flight, and the results and fences that the driver has not returned yet.

    In each call, what may raise comes before the first change.

    Attributes:
        open: operations that have not ended, in the order of dispatch.
        unfenced: ended operations whose blocks may still be in use.
        operations, copied_bytes: see `TierDriverStats`.
    """

    def __init__(self, bytes_per_block: int) -> None:
        self.open: dict[OpId, InFlightOperation] = {}
        self.unfenced: dict[OpId, InFlightOperation] = {}
        self.operations: Counter[tuple[OpKind, Outcome]] = Counter()
        self.copied_bytes: Counter[OpKind] = Counter()
        self._bytes_per_block = bytes_per_block
        self._results: dict[OpId, OperationResult] = {}
        self._fenced: list[OpId] = []

    @property
    def has_results(self) -> bool:
        """Whether there is a result or a fence to return."""
        return bool(self._results or self._fenced)

    def add(self, operation: Operation, deadline: float) -> InFlightOperation:
        """Add an operation; no block is copied yet, and storage has answered nothing."""
        is_new = operation.id not in self.open and operation.id not in self.unfenced
        assert is_new, f"operation {operation.id} came twice"
        nothing = None if operation.kind is OpKind.LOOKUP else False
        entry = InFlightOperation(operation, deadline, [nothing] * operation.num_blocks)
        self.open[operation.id] = entry
        return entry

    def get(self, op_id: OpId) -> InFlightOperation:
        """Return an operation that is open or not fenced."""
        return self.open[op_id] if op_id in self.open else self.unfenced[op_id]

    def end(self, entry: InFlightOperation, outcome: Outcome, *, fenced: bool) -> None:
        """End an operation, with the blocks copied so far."""
        op_id = entry.operation.id
        result = OperationResult(op_id, tuple(entry.ok), fenced)
        self._close(entry, outcome, fenced=fenced)
        self._results[op_id] = result

    def cancel(self, entry: InFlightOperation, *, fenced: bool) -> None:
        """End an operation without a result: the manager that cancelled it has already ended it."""
        self._close(entry, Outcome.CANCELLED, fenced=fenced)
        if fenced:
            self._fenced.append(entry.operation.id)

    def retract(self, op_id: OpId) -> None:
        """Drop the unreturned result of an operation cancelled after its end; keep its fence."""
        result = self._results.pop(op_id, None)
        if result is not None and result.fenced:
            self._fenced.append(op_id)

    def fence(self, entry: InFlightOperation) -> None:
        """Record that the blocks of an ended operation are no longer in use."""
        op_id = entry.operation.id
        if op_id in self._results:  # its end was not returned yet
            self._results[op_id] = replace(self._results[op_id], fenced=True)
        else:
            self._fenced.append(op_id)
        del self.unfenced[op_id]

    def take_results(self) -> list[OperationResult]:
        """Return the results since the last call, in the order of the ends."""
        results, self._results = self._results, {}
        return list(results.values())

    def take_fenced(self) -> list[OpId]:
        """Return the ids of the operations fenced since the last call."""
        fenced, self._fenced = self._fenced, []
        return fenced

    def _close(self, entry: InFlightOperation, outcome: Outcome, *, fenced: bool) -> None:
        kind = entry.operation.kind
        num_before = self.operations[kind, outcome]
        copied_before = self.copied_bytes[kind]
        del self.open[entry.operation.id]
        if not fenced:
            self.unfenced[entry.operation.id] = entry
        self.operations[kind, outcome] = num_before + 1
        self.copied_bytes[kind] = copied_before + entry.copied * self._bytes_per_block
