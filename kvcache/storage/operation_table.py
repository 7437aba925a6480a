"""The state of every storage operation: a state machine without threads or clocks.

::

    submit ──► queued ── take ──► in a task ── report ──► has a status
                 │                    │
                 └── cancel, expire ──┴──► ended; a later result is ignored

An operation is open until it gets its only completion. It is fenced when it is not open and no
thread has a task of it: from then on nothing uses its buffers.

A call that raises, as when memory runs out, leaves the bytes in flight as they were: what may raise
comes before the first change.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .errors import OperationError
from .interface import Completion, Kind, Status, StorageOpId

_MAX_LOADS_PER_TASK: Final = 8
"""Blocks that a thread loads per task; taking a task costs about as much as loading a block."""

_URGENCY: Final = {Kind.LOOKUP: 0, Kind.LOAD: 1}
"""Queue per kind, most urgent first: a scheduler waits for lookups, nobody for the others."""


@dataclass(eq=False, slots=True)
class StorageOperation:
    """One call of `Storage`, and its progress.

    Attributes:
        next_block: first block that no thread has taken.
        end_block: end of the blocks to take; the blocks from here on were dropped.
        tasks: tasks that were taken and not reported.
        num_left: blocks without a status, taken or not.
        quiet: whether `claim` returns the completion, instead of `drain`.
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
    tasks: dict[Task, None] = field(default_factory=dict)
    completion: Completion | None = None


@dataclass(eq=False, slots=True)
class Task:
    """Consecutive blocks of an operation, for one thread to process in order.

    Attributes:
        operation: operation of the blocks.
        first: number of the first block in the operation.
        keys: keys of the blocks.
        num_bytes: size of the blocks.
        results: statuses of the first blocks. The thread appends them without a lock, so that a
            block that was done before a deadline counts although later ones were not.
        num_counted: number of results that are in the operation's completion.
    """

    operation: StorageOperation
    first: int
    keys: Sequence[bytes]
    num_bytes: int
    results: list[Status] = field(default_factory=list)
    num_counted: int = 0

    @property
    def kind(self) -> Kind:
        """Kind of the operation."""
        return self.operation.kind

    @property
    def wanted(self) -> bool:
        """Whether the operation is open; if not, the thread stops and reports the task."""
        return self.operation.completion is None

    @property
    def blocks(self) -> Sequence[Sequence[memoryview]]:
        """The buffers of the blocks of a load or store."""
        return self.operation.blocks[self.first : self.first + len(self.keys)]


class OperationTable:
    """The operations of a `StorageWorkers`, which holds its lock during every call."""

    def __init__(self, max_bytes_in_flight: int, num_threads: int) -> None:
        """Start without operations; all stores together may hold max_bytes_in_flight."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self._num_threads = num_threads
        self.bytes_in_flight: Counter[Kind] = Counter(dict.fromkeys(Kind, 0))
        self.ended_blocks: Counter[Status] = Counter()
        self.ended_bytes: Counter[Status] = Counter()
        self.errors: Counter[str] = Counter()
        self.late_blocks = 0
        # Operations that are open, not fenced, or not yet claimed.
        self._known: dict[StorageOpId, StorageOperation] = {}
        # Tasks that were taken and not reported.
        self.running: Counter[Kind] = Counter(dict.fromkeys(Kind, 0))
        self.num_running = 0  # the total of these
        self._queues: tuple[OrderedDict[StorageOpId, StorageOperation], ...] = tuple(
            OrderedDict() for _ in range(3)
        )  # by urgency, each in the order of submission
        self._completions: list[Completion] = []
        self._last_id = 0

    @property
    def num_open(self) -> int:
        """Number of operations without a completion."""
        return sum(operation.completion is None for operation in self._known.values())

    @property
    def num_unfenced(self) -> int:
        """Number of completed operations of which a thread still has a task."""
        return sum(
            operation.completion is not None and len(operation.tasks) > 0
            for operation in self._known.values()
        )

    @property
    def has_work(self) -> bool:
        """Whether a task can be taken."""
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
        """Queue an operation. A store drops its blocks from the first that does not fit."""
        self._last_id += 1
        num_bytes = [sum(map(len, block)) for block in blocks] or [0] * len(keys)
        end_block, used = self._fitting(kind, num_bytes)
        operation = StorageOperation(
            id=StorageOpId(self._last_id),
            epoch=epoch,
            kind=kind,
            keys=tuple(keys),
            blocks=blocks,
            num_bytes=num_bytes,
            deadline=deadline,
            statuses=[None] * end_block + [Status.DROPPED] * (len(keys) - end_block),
            end_block=end_block,
            num_left=end_block,
            quiet=quiet,
        )
        queue = self._queue(operation)
        self._known[operation.id] = operation
        if end_block == 0:
            self._end(operation, Status.DROPPED)
        else:
            queue[operation.id] = operation
            self.bytes_in_flight[kind] = used
        return operation.id

    def take(self) -> Task | None:
        """Return the next task for a thread, which must report it; None if there is none.

        A load is split over the threads. A store is taken block by block, so that a read waits for
        one block at most.
        """
        queue = next(filter(None, self._queues), None)
        if queue is None:
            return None
        operation = next(iter(queue.values()))
        first = operation.next_block
        num_left = operation.end_block - first
        match operation.kind:
            case Kind.LOOKUP | Kind.TOUCH:  # one call; a touch depends on the order of its keys
                num_blocks = num_left
            case Kind.LOAD:
                num_blocks = min(-(-num_left // self._num_threads), _MAX_LOADS_PER_TASK)
            case _:
                num_blocks = 1
        stop = first + num_blocks
        num_bytes = sum(operation.num_bytes[first:stop])
        task = Task(operation, first, operation.keys[first:stop], num_bytes)
        operation.tasks[task] = None
        operation.next_block = stop
        if num_blocks == num_left:
            del queue[operation.id]
        self.running[operation.kind] += 1
        self.num_running += 1
        return task

    def report(self, task: Task, errors: Sequence[str] = ()) -> None:
        """Record the results of a task, once; they are complete unless the operation has ended."""
        operation, first, num_blocks = task.operation, task.first, len(task.keys)
        assert task in operation.tasks, f"operation {operation.id}: a task was reported twice"
        is_late = operation.completion is not None
        num_results = len(task.results)
        assert is_late or num_results == num_blocks, f"{num_results} for {num_blocks} blocks"
        self.errors.update(errors)
        del operation.tasks[task]
        self.running[operation.kind] -= 1
        self.num_running -= 1
        self.bytes_in_flight[operation.kind] -= task.num_bytes
        if is_late:
            self.late_blocks += num_results - task.num_counted
            if not operation.tasks and not operation.quiet:
                del self._known[operation.id]
            return
        operation.statuses[first : first + num_blocks] = task.results
        operation.num_left -= num_blocks
        if operation.num_left == 0:
            self._end(operation, Status.CANCELLED)

    def cancel(self, operation_id: StorageOpId) -> bool:
        """End an operation now; False if it has already ended.

        Raises:
            OperationError: for an unknown id.
        """
        if self.ended(operation_id):
            return False
        self._end(self._known[operation_id], Status.CANCELLED)
        return True

    def cancel_all(self) -> None:
        """End all operations now."""
        for operation in list(self._known.values()):
            if operation.completion is None:
                self._end(operation, Status.CANCELLED)

    def expire(self, now: float) -> None:
        """End the operations whose deadline has passed."""
        for operation in list(self._known.values()):
            if operation.completion is None and operation.deadline <= now:
                self._end(operation, Status.TIMED_OUT)

    def drain(self) -> list[Completion]:
        """Return the completions since the last call, in the order of the ends."""
        completions, self._completions = self._completions, []
        return completions

    def ended(self, operation_id: StorageOpId) -> bool:
        """Return whether an operation has its completion.

        Raises:
            OperationError: for an unknown id.
        """
        if not 1 <= operation_id <= self._last_id:
            raise OperationError(f"no operation {operation_id}: the last is {self._last_id}")
        operation = self._known.get(operation_id)
        return operation is None or operation.completion is not None

    def claim(self, operation_id: StorageOpId) -> Completion:
        """Return the completion of a quiet operation, once; end the operation if it is open."""
        operation = self._known[operation_id]
        if operation.completion is None:
            self._end(operation, Status.TIMED_OUT)
        assert operation.completion is not None
        operation.quiet = False
        if not operation.tasks:
            del self._known[operation_id]
        return operation.completion

    def fenced(self, operation_id: StorageOpId) -> bool:
        """Return whether an operation has ended and no thread has a task of it.

        Raises:
            OperationError: for an unknown id.
        """
        ended = self.ended(operation_id)
        operation = self._known.get(operation_id)
        return ended and (operation is None or not operation.tasks)

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
        stored = self.bytes_in_flight[Kind.STORE]
        assert stored <= self.max_bytes_in_flight, f"{stored} bytes of stores in flight"
        assert sum(map(len, self._queues)) <= self.num_open, "queued, not open"
        assert self.num_running == self.running.total(), f"{self.num_running} tasks in all"
        for kind in Kind:
            tasks = sum(len(o.tasks) for o in self._known.values() if o.kind is kind)
            assert self.running[kind] == tasks, f"{kind}: {tasks} tasks, not {self.running[kind]}"

    def _fitting(self, kind: Kind, num_bytes: Sequence[int]) -> tuple[int, int]:
        """Return how many leading blocks fit, and the bytes in flight with them.

        A load always fits: its caller has allocated the destinations, so it needs no other memory.
        """
        used, end_block = self.bytes_in_flight[kind], 0
        if kind is not Kind.STORE:
            return len(num_bytes), used + sum(num_bytes)
        for size in num_bytes:
            if used + size > self.max_bytes_in_flight:
                break
            used += size
            end_block += 1
        return end_block, used

    def _end(self, operation: StorageOperation, status: Status) -> None:
        """Complete an operation; blocks without a status get this one."""
        queue = self._queue(operation)
        not_taken = sum(operation.num_bytes[operation.next_block : operation.end_block])
        for task in operation.tasks:  # the results so far count
            done = task.results[:]
            operation.statuses[task.first : task.first + len(done)] = done
            task.num_counted = len(done)
        statuses = tuple([status if each is None else each for each in operation.statuses])
        completion = Completion(operation.id, operation.epoch, operation.kind, statuses)
        self.ended_blocks.update(statuses)
        for each, num_bytes in zip(statuses, operation.num_bytes, strict=True):
            self.ended_bytes[each] += num_bytes
        if not operation.quiet:
            self._completions.append(completion)
        operation.completion = completion
        operation.next_block = operation.end_block
        self.bytes_in_flight[operation.kind] -= not_taken
        if operation.id in queue:
            del queue[operation.id]
        if not operation.tasks and not operation.quiet:
            del self._known[operation.id]

    def _queue(self, operation: StorageOperation) -> OrderedDict[StorageOpId, StorageOperation]:
        return self._queues[_URGENCY.get(operation.kind, 2)]
