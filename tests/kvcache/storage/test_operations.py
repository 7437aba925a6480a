"""All orders of submit, take, report, cancel and expire, without a thread or a clock."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixkv.kvcache.storage import Completion, Kind, OperationId, Status
from radixkv.kvcache.storage.operations import OperationTable, Task

BUDGET = 100
KEYS = [bytes([number]) * 32 for number in range(4)]
RESULTS = {
    Kind.LOOKUP: [Status.FOUND, Status.MISSING, Status.FAILED],
    Kind.LOAD: [Status.LOADED, Status.MISSING, Status.CORRUPT, Status.FAILED],
    Kind.STORE: [Status.STORED, Status.EXISTS, Status.FAILED],
    Kind.TOUCH: [Status.TOUCHED, Status.MISSING, Status.FAILED],
    Kind.DELETE: [Status.DELETED, Status.MISSING, Status.FAILED],
}


class Expected:
    """What is known of an operation from outside."""

    def __init__(self, kind: Kind, epoch: int, deadline: int, sizes: list[int]) -> None:
        self.kind = kind
        self.epoch = epoch
        self.deadline = deadline
        self.sizes = sizes
        self.reported: dict[int, Status] = {}
        self.end: Status | None = None  # what ended it, if it was no report
        self.running = 0
        self.completions = 0

    @property
    def over(self) -> bool:
        return self.end is not None or len(self.reported) == len(self.sizes)


class Operations(RuleBasedStateMachine):
    """The table, beside what the rules of `Storage` say of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OperationTable(BUDGET)
        self.expected: dict[OperationId, Expected] = {}
        self.tasks: list[Task] = []
        self.now = 0
        self.late = 0

    @rule(
        kind=st.sampled_from(Kind),
        sizes=st.lists(st.integers(0, 60), max_size=4),
        timeout=st.integers(1, 5),
        epoch=st.integers(0, 3),
    )
    def submit(self, kind: Kind, sizes: list[int], timeout: int, epoch: int) -> None:
        moves_bytes = kind in (Kind.LOAD, Kind.STORE)
        sizes = sizes if moves_bytes else [0] * len(sizes)
        room = BUDGET - self.table.bytes_in_flight[kind]
        blocks = [[memoryview(bytes(size))] for size in sizes] if moves_bytes else ()
        operation = self.table.submit(
            kind, KEYS[: len(sizes)], blocks, deadline=self.now + timeout, epoch=epoch
        )
        assert operation not in self.expected
        expected = Expected(kind, epoch, self.now + timeout, sizes)
        self.expected[operation] = expected
        for block in range(len(sizes)):  # a leading run fits; the others are dropped
            if sum(sizes[: block + 1]) > room:
                expected.reported[block] = Status.DROPPED

    @rule()
    def take(self) -> None:
        task = self.table.take()
        if task is None:
            return
        expected = self.expected[task.operation.id]
        assert not expected.over, "a task of an operation that has ended"
        assert len(task.keys) == (len(expected.sizes) if task.kind is Kind.LOOKUP else 1)
        expected.running += len(task.keys)
        self.tasks.append(task)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        task = self.tasks.pop(data.draw(st.integers(0, len(self.tasks) - 1)))
        expected = self.expected[task.operation.id]
        statuses = [data.draw(st.sampled_from(RESULTS[task.kind])) for _ in task.keys]
        expected.running -= len(statuses)
        if expected.over:
            self.late += len(statuses)
        else:
            expected.reported |= dict(enumerate(statuses, task.first))
        self.table.report(task, statuses, "OSError" if Status.FAILED in statuses else "")

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(sorted(self.expected)))
        expected = self.expected[operation]
        assert self.table.cancel(operation) == (not expected.over)
        if not expected.over:
            expected.end = Status.CANCELLED

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.table.expire(self.now)
        for expected in self.expected.values():
            if not expected.over and expected.deadline <= self.now:
                expected.end = Status.TIMED_OUT

    @rule()
    def drain(self) -> None:
        for completion in self.table.drain():
            self.completed(completion)
        for expected in self.expected.values():
            assert expected.completions == expected.over

    def completed(self, completion: Completion) -> None:
        expected = self.expected[completion.operation]
        expected.completions += 1
        assert (completion.kind, completion.epoch) == (expected.kind, expected.epoch)
        wanted = [expected.reported.get(n, expected.end) for n in range(len(expected.sizes))]
        assert list(completion.statuses) == wanted

    @invariant()
    def it_agrees(self) -> None:
        self.table.check()
        assert self.table.late_blocks == self.late
        for operation, expected in self.expected.items():
            assert self.table.ended(operation) == expected.over
            assert self.table.fenced(operation) == (expected.over and not expected.running)

    def teardown(self) -> None:
        """Whatever happened: when all threads have come back, nothing is left."""
        self.table.cancel_all()
        for expected in self.expected.values():
            expected.end = expected.end or (None if expected.over else Status.CANCELLED)
        assert self.table.take() is None
        for task in self.tasks:
            self.table.report(task, [RESULTS[task.kind][0]] * len(task.keys))
        self.drain()
        self.table.check()
        assert not any(self.table.bytes_in_flight.values())
        assert not self.table._known
        assert self.table.num_open == self.table.num_unfenced == 0


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=150, stateful_step_count=40)


def test_reads_go_before_writes_and_then_in_order() -> None:
    table = OperationTable(BUDGET)
    kinds = [Kind.STORE, Kind.DELETE, Kind.LOAD, Kind.LOOKUP]
    for kind in kinds:
        table.submit(kind, KEYS[:1], [[memoryview(b"a")]], deadline=1)
    order = []
    while (task := table.take()) is not None:
        order.append(task.kind)
    assert order == [Kind.LOAD, Kind.LOOKUP, Kind.STORE, Kind.DELETE]


def test_a_prefix_ends_at_the_first_gap() -> None:
    """FastDeploy's file store counted all that it had (fastdeploy.md, B48)."""
    found, missing = Status.FOUND, Status.MISSING

    def prefix(*statuses: Status) -> int:
        return Completion(OperationId(1), 0, Kind.LOOKUP, statuses).prefix

    assert prefix(found, missing, found) == 1
    assert prefix(missing, found) == 0
    assert prefix(found, found) == 2
    assert prefix() == 0
