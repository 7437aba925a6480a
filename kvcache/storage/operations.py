"""Which operations there are and how far each is: a state machine without threads or clocks.

::

    submit ──► queued ── take ──► running ── report ──► has a status
                 │                   │
                 └── cancel, expire ─┴──► ended; a report after this is late and changes nothing

An operation is open until it has its completion, exactly one. It is fenced when it is not open and
none of its blocks is running: then nothing uses its buffers any more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Completion, Kind, OperationId, Status
from .errors import OperationError


@dataclass(eq=False, slots=True)
class _Operation:
    """What one call asked for, and how far it is.

    Attributes:
        next_block: the first that no thread has taken.
        end_block: one past the last to take; those from here on were dropped.
        running: how many blocks are taken and not reported.
        quiet: its completion is for `claim`, not for `drain`.
    """

    id: OperationId
    epoch: int
    kind: Kind
    keys: Sequence[bytes]
    blocks: Sequence[Sequence[memoryview]]
    num_bytes: Sequence[int]
    deadline: float
    statuses: list[Status | None]
    end_block: int
    quiet: bool
    next_block: int = 0
    running: int = 0
    completion: Completion | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Task:
    """What a thread does next: all keys of a lookup, or one block of anything else."""

    operation: _Operation
    first: int
    keys: Sequence[bytes]

    @property
    def kind(self) -> Kind:
        """What is to be done."""
        return self.operation.kind

    @property
    def parts(self) -> Sequence[memoryview]:
        """The buffers of the block of a load or store."""
        return self.operation.blocks[self.first]


class OperationTable:
    """The operations of a driver, which calls this under a lock of its own."""

    def __init__(self, max_bytes_in_flight: int) -> None:
        """Start with none; loads and stores may each hold max_bytes_in_flight."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self.bytes_in_flight: Counter[Kind] = Counter()
        self.ended_blocks: Counter[Status] = Counter()
        self.ended_bytes: Counter[Status] = Counter()
        self.errors: Counter[str] = Counter()
        self.late_blocks = 0
        self._known: dict[OperationId, _Operation] = {}  # open, or not fenced, or to be claimed
        # Reads before writes, then in the order of submission.
        self._reads: OrderedDict[OperationId, _Operation] = OrderedDict()
        self._writes: OrderedDict[OperationId, _Operation] = OrderedDict()
        self._completions: list[Completion] = []
        self._last_id = 0

    @property
    def num_open(self) -> int:
        """Operations without a completion."""
        return sum(operation.completion is None for operation in self._known.values())

    @property
    def num_unfenced(self) -> int:
        """Operations with a completion, and blocks that are still running."""
        return sum(
            operation.completion is not None and operation.running > 0
            for operation in self._known.values()
        )

    def submit(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        blocks: Sequence[Sequence[memoryview]],
        *,
        deadline: float,
        epoch: int = 0,
        quiet: bool = False,
    ) -> OperationId:
        """Queue an operation; the blocks from the first that has no room on are dropped."""
        self._last_id += 1
        num_bytes = [sum(len(part) for part in block) for block in blocks] or [0] * len(keys)
        operation = _Operation(
            id=OperationId(self._last_id),
            epoch=epoch,
            kind=kind,
            keys=tuple(keys),
            blocks=blocks,
            num_bytes=num_bytes,
            deadline=deadline,
            statuses=[None] * len(keys),
            end_block=self._reserve(kind, num_bytes),
            quiet=quiet,
        )
        for block in range(operation.end_block, len(keys)):
            operation.statuses[block] = Status.DROPPED
        self._known[operation.id] = operation
        if operation.end_block == 0:
            self._end(operation, Status.DROPPED)
        else:
            self._queue(operation)[operation.id] = operation
        return operation.id

    def take(self) -> Task | None:
        """Return the next thing to do, which is running from now on; None if there is nothing."""
        queue = self._reads or self._writes
        if not queue:
            return None
        operation = next(iter(queue.values()))
        first = operation.next_block
        num_blocks = operation.end_block if operation.kind is Kind.LOOKUP else 1
        operation.next_block += num_blocks
        operation.running += num_blocks
        if operation.next_block == operation.end_block:
            del queue[operation.id]
        return Task(operation, first, operation.keys[first : first + num_blocks])

    def report(self, task: Task, statuses: Sequence[Status], error: str = "") -> None:
        """Say what became of a task; once per task. Late reports change no status."""
        operation = task.operation
        assert len(statuses) == len(task.keys), f"{len(statuses)} for {len(task.keys)} blocks"
        operation.running -= len(statuses)
        assert operation.running >= 0, f"operation {operation.id}: a task was reported twice"
        if error:
            self.errors[error] += 1
        for block, status in enumerate(statuses, task.first):
            self.bytes_in_flight[operation.kind] -= operation.num_bytes[block]
            if operation.completion is None:
                operation.statuses[block] = status
        if operation.completion is not None:
            self.late_blocks += len(statuses)
            self._forget_if_done(operation)
        elif None not in operation.statuses:
            self._end(operation, Status.CANCELLED)

    def cancel(self, operation_id: OperationId) -> bool:
        """End an operation now; False if it has ended.

        Raises:
            OperationError: if there never was one of this id.
        """
        self._check_id(operation_id)
        operation = self._known.get(operation_id)
        if operation is None or operation.completion is not None:
            return False
        self._end(operation, Status.CANCELLED)
        return True

    def cancel_all(self) -> None:
        """End all operations now."""
        for operation in list(self._known.values()):
            if operation.completion is None:
                self._end(operation, Status.CANCELLED)

    def expire(self, now: float) -> None:
        """End the operations whose deadline has come."""
        for operation in list(self._known.values()):
            if operation.completion is None and operation.deadline <= now:
                self._end(operation, Status.TIMED_OUT)

    def drain(self) -> list[Completion]:
        """Return the completions since the last call, in the order in which they came."""
        completions, self._completions = self._completions, []
        return completions

    def ended(self, operation_id: OperationId) -> bool:
        """Say whether an operation has its completion."""
        operation = self._known.get(operation_id)
        return operation is None or operation.completion is not None

    def claim(self, operation_id: OperationId) -> Completion:
        """Return the completion of a quiet operation, which ends now if it has not; once."""
        operation = self._known[operation_id]
        if operation.completion is None:
            self._end(operation, Status.TIMED_OUT)
        assert operation.completion is not None
        operation.quiet = False
        self._forget_if_done(operation)
        return operation.completion

    def fenced(self, operation_id: OperationId) -> bool:
        """Say whether an operation has ended and none of its blocks is running.

        Raises:
            OperationError: if there never was one of this id.
        """
        self._check_id(operation_id)
        operation = self._known.get(operation_id)
        return operation is None or (operation.completion is not None and not operation.running)

    def check(self) -> None:
        """Assert that the counts agree with the operations."""
        held: Counter[Kind] = Counter()
        for operation in self._known.values():
            started = operation.statuses[: operation.next_block]
            running = started.count(None) if operation.completion is None else operation.running
            assert operation.running == running, f"operation {operation.id}: {running} running"
            queued = operation.id in self._queue(operation)
            wanted = operation.completion is None and operation.next_block < operation.end_block
            assert queued == wanted, f"operation {operation.id} queued: {queued}"
            waiting = range(operation.next_block, operation.end_block)
            held[operation.kind] += sum(operation.num_bytes[block] for block in waiting)
            if operation.completion is not None:
                assert operation.running or operation.quiet, f"operation {operation.id} is over"
        idle = all(operation.running == 0 for operation in self._known.values())
        for kind, num_bytes in self.bytes_in_flight.items():
            assert held[kind] <= num_bytes <= self.max_bytes_in_flight, f"{kind}: {num_bytes} bytes"
            assert not idle or num_bytes == held[kind], f"{kind}: {num_bytes} bytes in flight"
        assert len(self._reads.keys() | self._writes.keys()) <= self.num_open, "queued, not open"

    def _reserve(self, kind: Kind, num_bytes: Sequence[int]) -> int:
        """Count as many leading blocks as there is room for, and return how many those are."""
        for block, size in enumerate(num_bytes):
            if self.bytes_in_flight[kind] + size > self.max_bytes_in_flight:
                return block
            self.bytes_in_flight[kind] += size
        return len(num_bytes)

    def _end(self, operation: _Operation, rest: Status) -> None:
        """Complete an operation; the blocks that have no status yet get this one."""
        self._queue(operation).pop(operation.id, None)
        for block in range(operation.next_block, operation.end_block):
            self.bytes_in_flight[operation.kind] -= operation.num_bytes[block]
        operation.next_block = operation.end_block
        statuses = tuple(rest if status is None else status for status in operation.statuses)
        for status, num_bytes in zip(statuses, operation.num_bytes, strict=True):
            self.ended_blocks[status] += 1
            self.ended_bytes[status] += num_bytes
        operation.completion = Completion(operation.id, operation.epoch, operation.kind, statuses)
        if not operation.quiet:
            self._completions.append(operation.completion)
        self._forget_if_done(operation)

    def _forget_if_done(self, operation: _Operation) -> None:
        if operation.completion is not None and not operation.running and not operation.quiet:
            self._known.pop(operation.id, None)

    def _queue(self, operation: _Operation) -> OrderedDict[OperationId, _Operation]:
        is_read = operation.kind in (Kind.LOOKUP, Kind.LOAD)
        return self._reads if is_read else self._writes

    def _check_id(self, operation_id: OperationId) -> None:
        if not 1 <= operation_id <= self._last_id:
            raise OperationError(f"no operation {operation_id}: the last is {self._last_id}")
