"""What a call asked for, and the parts of it that threads take: what an operation table keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .base import (
    Completion,
    Kind,
    Status,
    StorageOpId,
)


@dataclass(eq=False, slots=True)
class Operation:
    """What one call asked for, and how far it is.

    Attributes:
        next_block: the first that no thread has taken.
        end_block: one past the last to take; those from here on were dropped.
        tasks: those taken and not reported.
        num_left: blocks without a status, taken or not.
        quiet: its completion is for `claim`, not for `drain`.
    """

    id: StorageOpId
    epoch: int
    kind: Kind
    keys: Sequence[bytes]
    blocks: Sequence[Sequence[memoryview]]
    num_bytes: Sequence[int]
    deadline: float
    statuses: list[Status | None]
    end_block: int
    num_left: int
    quiet: bool
    next_block: int = 0
    tasks: list[Task] = field(default_factory=list)
    completion: Completion | None = None


@dataclass(eq=False, slots=True)
class Task:
    """What a thread does next: some blocks of an operation, one after the other.

    Attributes:
        operation: of which it is a part.
        first: its first block.
        keys: of its blocks.
        results: of its first blocks, which the thread appends without a lock: what was done before
            a deadline counts, though the rest was not.
        num_counted: how many results are in the completion of the operation.
    """

    operation: Operation
    first: int
    keys: Sequence[bytes]
    results: list[Status] = field(default_factory=list)
    num_counted: int = 0

    @property
    def kind(self) -> Kind:
        """What is to be done."""
        return self.operation.kind

    @property
    def wanted(self) -> bool:
        """Whether the operation has not ended; else the thread reports what it has done so far."""
        return self.operation.completion is None

    @property
    def blocks(self) -> Sequence[Sequence[memoryview]]:
        """The buffers of the blocks of a load or store."""
        return self.operation.blocks[self.first : self.first + len(self.keys)]
