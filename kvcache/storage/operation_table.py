"""Which operations there are and how far each is: a state machine without threads or clocks.

::

    submit ──► queued ── take ──► in a task ── report ──► has a status
                 │                    │
                 └── cancel, expire ──┴──► ended; a result after this is late and changes nothing

An operation is open until it has its completion, exactly one. It is fenced when it is not open and
no thread has a task of it: then nothing uses its buffers any more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .errors import OperationError
from .interface import (
    Completion,
    Kind,
    Status,
    StorageOpId,
)


@dataclass(eq=False, slots=True)
class StorageOperation:
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

    operation: StorageOperation
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


_MOST_AT_ONCE: Final = 8
"""A thread loads so many blocks before it asks for more: that costs as much as to load a block."""

_URGENCY: Final = {Kind.LOOKUP: 0, Kind.LOAD: 1}
"""A lookup holds up a scheduler; whoever stores, touches or deletes does not wait for it."""


class OperationTable:
    """The operations of a driver, which calls this under a lock of its own."""

    def __init__(self, max_bytes_in_flight: int, num_threads: int) -> None:
        """Start with none; loads and stores may each hold max_bytes_in_flight."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self._num_threads = num_threads
        self.bytes_in_flight: Counter[Kind] = Counter()
        self.ended_blocks: Counter[Status] = Counter()
        self.ended_bytes: Counter[Status] = Counter()
        self.errors: Counter[str] = Counter()
        self.late_blocks = 0
        self._known: dict[StorageOpId, StorageOperation] = {}  # open, unfenced or unclaimed
        self.running: Counter[Kind] = Counter()  # tasks that are taken and not reported
        self.num_running = 0  # all of these
        self._queues: tuple[OrderedDict[StorageOpId, StorageOperation], ...] = tuple(
            OrderedDict() for _ in range(3)
        )  # by urgency, each in the order of submission
        self._completions: list[Completion] = []
        self._last_id = 0

    @property
    def num_open(self) -> int:
        """Operations without a completion."""
        return sum(operation.completion is None for operation in self._known.values())

    @property
    def num_unfenced(self) -> int:
        """Operations with a completion, of which a thread still has a task."""
        return sum(
            operation.completion is not None and len(operation.tasks) > 0
            for operation in self._known.values()
        )

    @property
    def has_work(self) -> bool:
        """Whether there is something to take."""
        return any(self._queues)

    def submit(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        blocks: Sequence[Sequence[memoryview]],
        *,
        deadline: float,
        epoch: int = 0,
        quiet: bool = False,
    ) -> StorageOpId:
        """Queue an operation; the blocks from the first that has no room on are dropped."""
        self._last_id += 1
        num_bytes = [sum(map(len, block)) for block in blocks] or [0] * len(keys)
        end_block = self._reserve(kind, num_bytes)
        operation = StorageOperation(
            id=StorageOpId(self._last_id),
            epoch=epoch,
            kind=kind,
            keys=tuple(keys),
            blocks=blocks,
            num_bytes=num_bytes,
            deadline=deadline,
            statuses=[None] * len(keys),
            end_block=end_block,
            num_left=end_block,
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
        """Return the next thing for a thread to do and to report; None if there is nothing.

        A load is shared out over the threads. A store is taken block by block, so that no read
        waits for more than one.
        """
        queue = next(filter(None, self._queues), None)
        if queue is None:
            return None
        operation = next(iter(queue.values()))
        first = operation.next_block
        num_left = operation.end_block - first
        match operation.kind:
            case Kind.LOOKUP | Kind.TOUCH:  # the order of a touch is that of its keys
                num_blocks = num_left
            case Kind.LOAD:
                num_blocks = min(-(-num_left // self._num_threads), _MOST_AT_ONCE)
            case _:
                num_blocks = 1
        operation.next_block += num_blocks
        if num_blocks == num_left:
            del queue[operation.id]
        task = Task(operation, first, operation.keys[first : first + num_blocks])
        operation.tasks.append(task)
        self.running[task.kind] += 1
        self.num_running += 1
        return task

    def report(self, task: Task, errors: Sequence[str] = ()) -> None:
        """Take in the results of a task, once: all of them, unless its operation has ended."""
        operation, first, num_blocks = task.operation, task.first, len(task.keys)
        assert task in operation.tasks, f"operation {operation.id}: a task was reported twice"
        operation.tasks.remove(task)
        self.running[task.kind] -= 1
        self.num_running -= 1
        self.errors.update(errors)
        self.bytes_in_flight[operation.kind] -= sum(operation.num_bytes[first : first + num_blocks])
        if operation.completion is not None:
            self.late_blocks += len(task.results) - task.num_counted
            self._forget_if_done(operation)
            return
        assert len(task.results) == num_blocks, f"{len(task.results)} for {num_blocks} blocks"
        operation.statuses[first : first + num_blocks] = task.results
        operation.num_left -= num_blocks
        if operation.num_left == 0:
            self._end(operation, Status.CANCELLED)

    def cancel(self, operation_id: StorageOpId) -> bool:
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

    def ended(self, operation_id: StorageOpId) -> bool:
        """Say whether an operation has its completion."""
        operation = self._known.get(operation_id)
        return operation is None or operation.completion is not None

    def claim(self, operation_id: StorageOpId) -> Completion:
        """Return the completion of a quiet operation, which ends now if it has not; once."""
        operation = self._known[operation_id]
        if operation.completion is None:
            self._end(operation, Status.TIMED_OUT)
        assert operation.completion is not None
        operation.quiet = False
        self._forget_if_done(operation)
        return operation.completion

    def fenced(self, operation_id: StorageOpId) -> bool:
        """Say whether an operation has ended and no thread has a task of it.

        Raises:
            OperationError: if there never was one of this id.
        """
        self._check_id(operation_id)
        operation = self._known.get(operation_id)
        return operation is None or (operation.completion is not None and not operation.tasks)

    def check(self) -> None:
        """Assert that the counts agree with the operations."""
        held: Counter[Kind] = Counter()
        for operation in self._known.values():
            running = sum(len(task.keys) for task in operation.tasks)
            waiting = operation.end_block - operation.next_block
            if operation.completion is None:
                assert operation.num_left == running + waiting, f"operation {operation.id}: lost"
                assert operation.statuses.count(None) == operation.num_left, "a status is lost"
            else:
                assert running or operation.quiet, f"operation {operation.id} is over"
            queued = operation.id in self._queue(operation)
            wanted = operation.completion is None and waiting > 0
            assert queued == wanted, f"operation {operation.id} queued: {queued}"
            places = [range(operation.next_block, operation.end_block)]
            places += [range(task.first, task.first + len(task.keys)) for task in operation.tasks]
            held[operation.kind] += sum(operation.num_bytes[n] for place in places for n in place)
        for kind, num_bytes in self.bytes_in_flight.items():
            assert num_bytes == held[kind], f"{kind}: {num_bytes} bytes, not {held[kind]}"
            assert num_bytes <= self.max_bytes_in_flight, f"{kind}: {num_bytes} bytes in flight"
        assert sum(map(len, self._queues)) <= self.num_open, "queued, not open"
        assert self.num_running == self.running.total(), f"{self.num_running} tasks in all"
        for kind in Kind:
            tasks = sum(len(o.tasks) for o in self._known.values() if o.kind is kind)
            assert self.running[kind] == tasks, f"{kind}: {tasks} tasks, not {self.running[kind]}"

    def _reserve(self, kind: Kind, num_bytes: Sequence[int]) -> int:
        """Count as many leading blocks as there is room for, and return how many those are."""
        used, end_block = self.bytes_in_flight[kind], 0
        for size in num_bytes:
            if used + size > self.max_bytes_in_flight:
                break
            used += size
            end_block += 1
        self.bytes_in_flight[kind] = used
        return end_block

    def _end(self, operation: StorageOperation, rest: Status) -> None:
        """Complete an operation; the blocks that have no status yet get this one."""
        self._queue(operation).pop(operation.id, None)
        for block in range(operation.next_block, operation.end_block):
            self.bytes_in_flight[operation.kind] -= operation.num_bytes[block]
        operation.next_block = operation.end_block
        for task in operation.tasks:  # what its thread has done until now counts
            done = task.results[:]
            operation.statuses[task.first : task.first + len(done)] = done
            task.num_counted = len(done)
        statuses = tuple(rest if status is None else status for status in operation.statuses)
        self.ended_blocks.update(statuses)
        for status, num_bytes in zip(statuses, operation.num_bytes, strict=True):
            self.ended_bytes[status] += num_bytes
        operation.completion = Completion(operation.id, operation.epoch, operation.kind, statuses)
        if not operation.quiet:
            self._completions.append(operation.completion)
        self._forget_if_done(operation)

    def _forget_if_done(self, operation: StorageOperation) -> None:
        if operation.completion is not None and not operation.tasks and not operation.quiet:
            self._known.pop(operation.id, None)

    def _queue(self, operation: StorageOperation) -> OrderedDict[StorageOpId, StorageOperation]:
        return self._queues[_URGENCY.get(operation.kind, 2)]

    def _check_id(self, operation_id: StorageOpId) -> None:
        if not 1 <= operation_id <= self._last_id:
            raise OperationError(f"no operation {operation_id}: the last is {self._last_id}")
