"""Operations that a driver has dispatched: how far each is, without threads or clocks.

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
    """Some block was not: an error, or storage does not have it."""
    DROPPED = "dropped"
    """Some block was not: too many bytes were in flight."""
    TIMED_OUT = "timed out"
    """Its deadline came first."""
    NOT_ASKED = "not asked"
    """Another asked storage in vain; until it answers, one at a time waits for it."""
    CANCELLED = "cancelled"
    """Nobody wanted it any more, or the driver was closed."""


@dataclass(frozen=True, slots=True)
class OperationResult:
    """The end of an operation, for `complete`.

    Attributes:
        op_id: which.
        ok: for each block, whether it was copied.
        fenced: nobody uses its blocks any more; if False, `TierDriver.fenced` will say when.
    """

    op_id: OpId
    ok: tuple[bool, ...]
    fenced: bool


@dataclass(frozen=True, slots=True)
class TierDriverStats:
    """Counts since the start, and what is going on now.

    Attributes:
        operations: how many ended, by kind and outcome.
        copied_bytes: of the blocks that were copied, by kind; what storage had already was not.
        dropped_blocks: device to host, for want of room in flight; storage counts its own.
        errors: what ended copies, by name of its type; storage counts its own.
        open_operations: dispatched and not ended.
        unfenced_operations: ended, but somebody may still use their blocks.
        bytes_in_flight: staging that waits to be written to the host tier, padding included.
    """

    operations: Mapping[tuple[OpKind, Outcome], int]
    copied_bytes: Mapping[OpKind, int]
    dropped_blocks: int
    errors: Mapping[str, int]
    open_operations: int
    unfenced_operations: int
    bytes_in_flight: int


class StagedPiece(NamedTuple):
    """A piece of an operation that was read, and is not yet written.

    Attributes:
        blocks: which of the operation's it is.
        size: blocks of staging, padding included.
        staging: their KV, an array per pool.
    """

    blocks: slice
    size: int
    staging: Any


@dataclass(eq=False, slots=True)
class InFlightOperation:
    """An operation that has not ended, or is not fenced.

    Attributes:
        deadline: by the driver's clock; storage keeps its own.
        ok: for each block, whether it was copied.
        staged: pieces that were read and not yet written.
        copied: blocks that were copied, and not there before.
        writes: pieces that the host writer has not reported.
        storage_id: what storage calls it, if it is there.
        outcome: how it will end, once that is known not to be well.
    """

    operation: Operation
    deadline: float
    ok: list[bool]
    staged: list[StagedPiece] = field(default_factory=list)
    copied: int = 0
    writes: int = 0
    storage_id: StorageOpId | None = None
    outcome: Outcome | None = None

    def mark(self, blocks: slice) -> None:
        """Note that these blocks have been copied."""
        num_blocks = blocks.stop - blocks.start
        self.ok[blocks] = [True] * num_blocks
        self.copied += num_blocks


class InFlightTable:
    """All of them, and what poll and fenced have yet to hand out.

    Attributes:
        open: those without an end, in the order of dispatch.
        unfenced: those that ended, whose blocks somebody may still use.
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
    def has_news(self) -> bool:
        """Whether there is anything to hand out."""
        return bool(self._results or self._fenced)

    def add(self, operation: Operation, deadline: float) -> InFlightOperation:
        """Start an operation; no block is copied yet."""
        assert operation.id not in self.open | self.unfenced, f"operation {operation.id} came twice"
        entry = InFlightOperation(operation, deadline, [False] * operation.num_blocks)
        self.open[operation.id] = entry
        return entry

    def get(self, op_id: OpId) -> InFlightOperation:
        """Return an operation that is open or not fenced."""
        return self.open[op_id] if op_id in self.open else self.unfenced[op_id]

    def end(self, entry: InFlightOperation, outcome: Outcome, *, fenced: bool) -> None:
        """End an operation with what is known of its blocks."""
        op_id = entry.operation.id
        self._close(entry, outcome, fenced=fenced)
        self._results[op_id] = OperationResult(op_id, tuple(entry.ok), fenced)

    def cancel(self, entry: InFlightOperation, *, fenced: bool) -> None:
        """End an operation without a result: who cancelled it has given it one."""
        self._close(entry, Outcome.CANCELLED, fenced=fenced)
        if fenced:
            self._fenced.append(entry.operation.id)

    def retract(self, op_id: OpId) -> None:
        """Turn the result of an operation that was cancelled too late into a fence."""
        result = self._results.pop(op_id, None)
        if result is not None and result.fenced:
            self._fenced.append(op_id)

    def fence(self, entry: InFlightOperation) -> None:
        """Say that nobody uses the blocks of an ended operation any more."""
        op_id = entry.operation.id
        del self.unfenced[op_id]
        if op_id in self._results:  # who has not heard of its end cannot be told of its fence
            self._results[op_id] = replace(self._results[op_id], fenced=True)
        else:
            self._fenced.append(op_id)

    def take_results(self) -> list[OperationResult]:
        """Hand out the results since the last call, in the order of the ends."""
        results, self._results = self._results, {}
        return list(results.values())

    def take_fenced(self) -> list[OpId]:
        """Hand out the fences since the last call."""
        fenced, self._fenced = self._fenced, []
        return fenced

    def _close(self, entry: InFlightOperation, outcome: Outcome, *, fenced: bool) -> None:
        kind = entry.operation.kind
        del self.open[entry.operation.id]
        if not fenced:
            self.unfenced[entry.operation.id] = entry
        self.operations[kind, outcome] += 1
        self.copied_bytes[kind] += entry.copied * self._bytes_per_block
