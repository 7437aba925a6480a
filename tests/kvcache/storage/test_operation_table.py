"""The operation table in any order of submit, take, report, cancel and expire."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixkv.kvcache.storage import Completion, Kind, Status, StorageOpId
from radixkv.kvcache.storage.operation_table import OperationTable, Task

from ...profiles import scaled

BUDGET = 100
NUM_THREADS = 2
KEYS = [bytes([number]) * 32 for number in range(6)]
RESULTS = {
    Kind.LOOKUP: [Status.FOUND, Status.MISSING, Status.FAILED],
    Kind.LOAD: [Status.LOADED, Status.MISSING, Status.CORRUPT, Status.FAILED],
    Kind.STORE: [Status.STORED, Status.EXISTS, Status.FAILED],
    Kind.TOUCH: [Status.TOUCHED, Status.FAILED],
    Kind.DELETE: [Status.DELETED, Status.MISSING, Status.FAILED],
}
ONE_CALL = (Kind.LOOKUP, Kind.TOUCH)


class Expected:
    """The expected state of an operation."""

    def __init__(
        self, kind: Kind, epoch: int, deadline: int, sizes: list[int], quiet: bool
    ) -> None:
        self.kind = kind
        self.epoch = epoch
        self.deadline = deadline
        self.sizes = sizes
        self.quiet = quiet  # and not claimed yet
        self.reported: dict[int, Status] = {}
        self.end: Status | None = None  # status of the unfinished blocks, if it was ended early
        self.tasks: list[Task] = []
        self.completions = 0

    @property
    def over(self) -> bool:
        return self.end is not None or len(self.reported) == len(self.sizes)

    @property
    def statuses(self) -> list[Status | None]:
        return [self.reported.get(block, self.end) for block in range(len(self.sizes))]


class Operations(RuleBasedStateMachine):
    """The table against the expected state of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OperationTable(BUDGET, NUM_THREADS)
        self.expected: dict[StorageOpId, Expected] = {}
        self.tasks: list[Task] = []
        self.undelivered: dict[Task, dict[int, Status]] = {}  # results not reported yet
        self.late_in: dict[Task, int] = {}
        self.now = 0
        self.late = 0
        self.errors: Counter[str] = Counter()

    @rule(
        kind=st.sampled_from(Kind),
        sizes=st.lists(st.integers(0, 60), max_size=len(KEYS)),
        timeout=st.integers(1, 5),
        epoch=st.integers(0, 3),
        quiet=st.booleans(),
    )
    def submit(self, kind: Kind, sizes: list[int], timeout: int, epoch: int, quiet: bool) -> None:
        moves_bytes = kind in (Kind.LOAD, Kind.STORE)
        sizes = sizes if moves_bytes else [0] * len(sizes)
        room = BUDGET - self.table.bytes_in_flight[kind]
        blocks = [[memoryview(bytes(size))] for size in sizes] if moves_bytes else ()
        deadline = self.now + timeout
        operation = self.table.submit(
            kind, KEYS[: len(sizes)], blocks, deadline=deadline, epoch=epoch, quiet=quiet
        )
        assert operation not in self.expected
        expected = Expected(kind, epoch, deadline, sizes, quiet)
        self.expected[operation] = expected
        for block in range(len(sizes)):  # of a store a leading run fits; the others are dropped
            if kind is Kind.STORE and sum(sizes[: block + 1]) > room:
                expected.reported[block] = Status.DROPPED

    @rule()
    def take(self) -> None:
        task = self.table.take()
        if task is None:
            return
        expected = self.expected[task.operation.id]
        assert not expected.over, "a task of an operation that has ended"
        num_left = sum(n not in expected.reported for n in range(task.first, len(expected.sizes)))
        shares = dict.fromkeys(ONE_CALL, num_left)
        shares[Kind.LOAD] = -(-num_left // NUM_THREADS)
        assert len(task.keys) == shares.get(task.kind, 1)
        expected.tasks.append(task)
        self.tasks.append(task)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def do_a_block(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.tasks))
        self.do_one(task, data.draw(st.sampled_from(RESULTS[task.kind])))

    def do_one(self, task: Task, status: Status) -> None:
        """Process the next block of a task, or all blocks of a lookup or touch."""
        expected, done = self.expected[task.operation.id], len(task.results)
        statuses = [status] * (len(task.keys) if task.kind in ONE_CALL else 1)
        if done == len(task.keys):
            return
        assert task.wanted == (not expected.over)
        task.results += statuses
        if expected.over:
            self.late_in[task] = self.late_in.get(task, 0) + len(statuses)
        else:
            self.undelivered.setdefault(task, {}).update(enumerate(statuses, task.first + done))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.tasks))
        self.report_one(task, data.draw(st.sampled_from(RESULTS[task.kind])))

    def report_one(self, task: Task, status: Status) -> None:
        """Report a task like a thread: completely, or up to the end of its operation."""
        expected = self.expected[task.operation.id]
        while not expected.over and len(task.results) < len(task.keys):
            self.do_one(task, status)
        self.tasks.remove(task)
        expected.tasks.remove(task)
        expected.reported |= self.undelivered.pop(task, {})
        self.late += self.late_in.pop(task, 0)
        errors = ["OSError"] if Status.FAILED in task.results else []
        self.errors.update(errors)
        self.table.report(task, errors)

    def ends(self, expected: Expected, status: Status) -> None:
        """End an operation; the results so far count."""
        expected.end = status
        for task in expected.tasks:
            expected.reported |= self.undelivered.pop(task, {})

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(sorted(self.expected)))
        expected = self.expected[operation]
        assert self.table.cancel(operation) == (not expected.over)
        if not expected.over:
            self.ends(expected, Status.CANCELLED)

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.table.expire(self.now)
        for expected in self.expected.values():
            if not expected.over and expected.deadline <= self.now:
                self.ends(expected, Status.TIMED_OUT)

    @rule()
    def drain(self) -> None:
        for completion in self.table.drain():
            self.completed(completion)
        for expected in self.expected.values():
            assert expected.completions == (expected.over and not expected.quiet)

    @precondition(lambda self: any(each.quiet for each in self.expected.values()))
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        quiet = [operation for operation, each in self.expected.items() if each.quiet]
        self.claim_one(data.draw(st.sampled_from(quiet)))

    def claim_one(self, operation: StorageOpId) -> None:
        expected = self.expected[operation]
        if not expected.over:
            self.ends(expected, Status.TIMED_OUT)
        self.completed(self.table.claim(operation))
        expected.quiet = False

    def completed(self, completion: Completion) -> None:
        expected = self.expected[completion.operation]
        expected.completions += 1
        assert (completion.kind, completion.epoch) == (expected.kind, expected.epoch)
        assert list(completion.statuses) == expected.statuses

    @invariant()
    def it_agrees(self) -> None:
        self.table.check()
        assert self.table.late_blocks == self.late
        assert self.table.errors == self.errors  # also of those that are late
        for operation, expected in self.expected.items():
            assert self.table.ended(operation) == expected.over
            assert self.table.fenced(operation) == (expected.over and not expected.tasks)
        over = [expected for expected in self.expected.values() if expected.over]
        assert self.table.num_open == len(self.expected) - len(over)
        assert self.table.num_unfenced == sum(bool(expected.tasks) for expected in over)
        moved = {kind for kind, num_bytes in self.table.bytes_in_flight.items() if num_bytes}
        assert moved <= {Kind.LOAD, Kind.STORE}
        ended = [
            each
            for expected in over
            for each in zip(expected.statuses, expected.sizes, strict=True)
        ]
        assert self.table.ended_blocks == Counter(status for status, _ in ended)
        for status in Status:
            wanted = sum(num_bytes for each, num_bytes in ended if each is status)
            assert self.table.ended_bytes[status] == wanted

    def teardown(self) -> None:
        """After all tasks are reported, nothing is left."""
        self.table.cancel_all()
        for expected in self.expected.values():
            if not expected.over:
                self.ends(expected, Status.CANCELLED)
        assert self.table.take() is None
        for task in list(self.tasks):
            self.report_one(task, RESULTS[task.kind][0])
        for operation, expected in self.expected.items():
            if expected.quiet:
                self.claim_one(operation)
        self.drain()
        self.table.check()
        assert not any(self.table.bytes_in_flight.values())
        assert not self.table._known
        assert self.table.num_open == self.table.num_unfenced == 0


TestOperations = Operations.TestCase
TestOperations.settings = scaled(150, 40)


def test_lookups_go_first_then_loads_then_the_others_in_order() -> None:
    table = OperationTable(BUDGET, NUM_THREADS)
    kinds = [Kind.STORE, Kind.TOUCH, Kind.DELETE, Kind.LOAD, Kind.LOOKUP]
    for kind in kinds:
        table.submit(kind, KEYS[:1], [[memoryview(b"a")]], deadline=1)
    order = []
    while (task := table.take()) is not None:
        order.append(task.kind)
    assert order == [Kind.LOOKUP, Kind.LOAD, Kind.STORE, Kind.TOUCH, Kind.DELETE]


@pytest.mark.parametrize("kind", Kind)
def test_operations_of_a_kind_are_taken_whole_in_the_order_of_submission(kind: Kind) -> None:
    """A touch and a delete may count on the stores before them, and no operation starves."""
    table = OperationTable(BUDGET, 1)
    blocks = [[memoryview(b"a")] for _ in KEYS]
    operations = [
        table.submit(kind, KEYS * 2, blocks * 2, deadline=1, quiet=quiet)
        for quiet in (False, True, False)
    ]
    taken = {operation: 0 for operation in operations}
    while (task := table.take()) is not None:
        assert task.first == taken[task.operation.id]
        taken[task.operation.id] += len(task.keys)
        left = [operation for operation in operations if taken[operation] < 2 * len(KEYS)]
        assert all(taken[operation] == 0 for operation in left[1:])
    assert [*taken.values()] == [2 * len(KEYS)] * 3


def test_each_thread_gets_its_share_of_what_is_left_of_a_load() -> None:
    table = OperationTable(BUDGET, 3)
    keys = [bytes([number]) * 32 for number in range(12)]
    for _ in range(2):
        table.submit(Kind.LOAD, keys, [[memoryview(b"a")]] * len(keys), deadline=1)
    taken = []
    while (task := table.take()) is not None:
        taken.append(len(task.keys))
    assert taken == [4, 3, 2, 1, 1, 1] * 2


@pytest.mark.parametrize("size", [BUDGET, BUDGET + 1])
def test_a_block_may_take_the_whole_budget_and_no_more(size: int) -> None:
    table = OperationTable(BUDGET, 1)
    table.submit(Kind.STORE, KEYS[:1], [[memoryview(bytes(size))]], deadline=1)
    table.check()
    assert table.has_work == (size == BUDGET)
    assert table.bytes_in_flight[Kind.STORE] == (size if size == BUDGET else 0)
    assert [each.statuses for each in table.drain()] == [(Status.DROPPED,)] * (size > BUDGET)


def test_a_lookup_waits_for_a_few_loads_at_most() -> None:
    table = OperationTable(BUDGET, NUM_THREADS)
    keys = [bytes([number]) * 32 for number in range(50)]
    table.submit(Kind.LOAD, keys, [[memoryview(b"a")]] * len(keys), deadline=1)
    taken = []
    while (task := table.take()) is not None:
        taken.append(len(task.keys))
    assert sum(taken) == len(keys)
    assert max(taken) <= 8


class GrowsWhenMeasured(list[Status]):
    """The results of a thread that ends another block whenever somebody asks for their number."""

    def __len__(self) -> int:
        length = super().__len__()
        self.append(Status.LOADED)
        return length


@pytest.mark.parametrize("end", ["cancel", "expire", "claim"])
def test_a_thread_may_end_a_block_while_its_operation_ends(end: str) -> None:
    table = OperationTable(BUDGET, 1)
    blocks = [[memoryview(b"a")] for _ in KEYS]
    operation = table.submit(Kind.LOAD, KEYS, blocks, deadline=1, quiet=end == "claim")
    task = table.take()
    assert task is not None and len(task.keys) == len(KEYS)
    task.results = GrowsWhenMeasured([Status.LOADED])
    if end == "claim":
        completion = table.claim(operation)
    else:
        table.cancel(operation) if end == "cancel" else table.expire(1)
        [completion] = table.drain()
    loaded = completion.prefix
    status = Status.CANCELLED if end == "cancel" else Status.TIMED_OUT
    left = [status] * (len(KEYS) - loaded)
    assert loaded in (1, 2) and [*completion.statuses] == [Status.LOADED] * loaded + left


def test_a_prefix_ends_at_the_first_gap() -> None:
    """FastDeploy's file store counted all blocks instead of the prefix (fastdeploy.md, B48)."""
    found, missing = Status.FOUND, Status.MISSING

    def prefix(*statuses: Status) -> int:
        return Completion(StorageOpId(1), 0, Kind.LOOKUP, statuses).prefix

    assert prefix(found, missing, found) == 1
    assert prefix(missing, found) == 0
    assert prefix(found, found) == 2
    assert prefix() == 0


@pytest.mark.parametrize("is_reported_first", [False, True])
def test_nothing_is_left_of_a_claimed_operation_when_its_last_task_is_reported(is_reported_first):
    """Also if the claim has ended it while a thread had its task."""
    table = OperationTable(BUDGET, NUM_THREADS)
    operation = table.submit(Kind.LOOKUP, KEYS[:1], (), deadline=5, epoch=0, quiet=True)
    task = table.take()
    assert task is not None
    if is_reported_first:
        task.results += [Status.FOUND]
        table.report(task, [])
    status = table.claim(operation).statuses
    assert status == ((Status.FOUND,) if is_reported_first else (Status.TIMED_OUT,))
    assert table.fenced(operation) == is_reported_first
    if not is_reported_first:
        table.report(task, [])
    assert table.fenced(operation) and table.drain() == []
    assert table._known == {}
