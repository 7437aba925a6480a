"""Operations: one result each; late and repeated completions change nothing."""

from collections.abc import Sequence

import numpy as np
import pytest

from radixkv.kvcache import Epoch, OperationResultError, OpId, OpKind
from radixkv.kvcache.tiers.operations import CompletionHandler, Operations

from .tier_memory import TierMemory


class Record(CompletionHandler):
    """Records its calls in a list that several handlers share."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.runs = []
        self.name = name
        self.events = events

    def on_result(self, ok: Sequence[bool | None]) -> None:
        self.events.append(f"{self.name} {''.join('+' if good else '-' for good in ok)}")

    def on_fence(self) -> None:
        self.events.append(f"{self.name} fenced")


class Bench:
    """Operations of two blocks, and their results."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.operations = Operations()

    def submit(self, name: str = "a") -> OpId:
        return self.operations.submit(
            OpKind.DEVICE_TO_HOST,
            Record(name, self.events),
            epoch=Epoch(3),
            sources=np.array([1, 2], np.int32),
            destinations=np.array([4, 3], np.int32),
            timeout_s=9.0,
        )

    def dispatch(self, name: str = "a") -> OpId:
        op_id = self.submit(name)
        assert [operation.id for operation in self.operations.take()] == [op_id]
        return op_id

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of open and quarantined operations and of late completions."""
        now = self.operations
        return now.num_open, now.num_quarantined, now.late_completions


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_is_taken_says_what_to_copy(bench):
    first, second = bench.submit("a"), bench.submit("b")
    operation, other = bench.operations.take()
    assert (operation.id, other.id) == (first, second)
    assert (operation.epoch, operation.kind, operation.keys) == (3, OpKind.DEVICE_TO_HOST, ())
    assert operation.sources.tolist() == [1, 2]
    assert operation.destinations.tolist() == [4, 3]
    assert (operation.timeout_s, operation.num_blocks) == (9.0, 2)
    assert bench.operations.take() == []
    assert bench.counts == (2, 0, 0)


@pytest.mark.parametrize(("sources", "destinations", "keys"), [(3, 0, 3), (0, 3, 3), (0, 0, 3)])
def test_the_blocks_of_an_operation_with_storage(sources, destinations, keys):
    operations = Operations()
    operations.submit(
        OpKind.LOOKUP,
        Record("a", []),
        epoch=Epoch(0),
        sources=np.arange(sources, dtype=np.int32),
        destinations=np.arange(destinations, dtype=np.int32),
        keys=[b"key"] * keys,
        timeout_s=1.0,
    )
    [operation] = operations.take()
    assert operation.num_blocks == 3


@pytest.mark.parametrize("ok", [[True, True], [True, False], [False, True], [False, False]])
def test_a_result_per_block_ends_it_and_gives_its_blocks_back(bench, ok):
    op_id = bench.dispatch()
    assert bench.operations.complete(op_id, ok, fenced=True)
    marks = "".join("+" if good else "-" for good in ok)
    assert bench.events == [f"a {marks}", "a fenced"]
    assert bench.counts == (0, 0, 0)


def test_what_was_not_taken_has_no_result(bench):
    op_id = bench.submit()
    assert not bench.operations.complete(op_id, [True, True], fenced=True)
    assert bench.events == []
    assert bench.counts == (1, 0, 1)
    assert [operation.id for operation in bench.operations.take()] == [op_id]
    assert bench.operations.complete(op_id, [True, True], fenced=True)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_second_result_changes_nothing_but_a_count(bench, fenced):
    op_id = bench.dispatch()
    bench.operations.complete(op_id, [True, True], fenced=True)
    assert not bench.operations.complete(op_id, [False, False], fenced=fenced)
    assert not bench.operations.fence(op_id)
    assert bench.events == ["a ++", "a fenced"]
    assert bench.counts == (0, 0, 2)


def test_a_result_of_an_unknown_operation(bench):
    assert not bench.operations.complete(OpId(7), [], fenced=True)
    assert not bench.operations.fence(OpId(7))
    bench.operations.cancel(OpId(7))
    assert bench.counts == (0, 0, 2)


def test_unfenced_then_fenced(bench):
    op_id = bench.dispatch()
    assert bench.operations.complete(op_id, [True, False], fenced=False)
    assert bench.events == ["a +-"]
    assert bench.counts == (0, 1, 0)
    assert bench.operations.fence(op_id)
    assert bench.events == ["a +-", "a fenced"]
    assert bench.counts == (0, 0, 0)
    assert not bench.operations.fence(op_id)
    assert bench.counts == (0, 0, 1)


def test_a_late_result_is_a_fence_if_it_says_so(bench):
    op_id = bench.dispatch()
    bench.operations.complete(op_id, [False, False], fenced=False)
    assert not bench.operations.complete(op_id, [True, True], fenced=False)
    assert bench.counts == (0, 1, 1)
    assert not bench.operations.complete(op_id, [True, True], fenced=True)
    assert bench.events == ["a --", "a fenced"]
    assert bench.counts == (0, 0, 2)


def test_an_open_operation_cannot_be_fenced(bench):
    op_id = bench.dispatch()
    assert not bench.operations.fence(op_id)
    assert bench.counts == (1, 0, 1)
    assert bench.events == []


def test_cancelled_in_the_queue_it_never_was(bench):
    op_id = bench.submit()
    bench.operations.cancel(op_id)
    assert bench.events == ["a --", "a fenced"]
    assert bench.operations.take() == []
    assert bench.operations.take_cancelled() == []
    bench.operations.cancel(op_id)
    assert bench.counts == (0, 0, 0)


def test_cancelled_after_its_dispatch_it_waits_for_its_fence(bench):
    op_id = bench.dispatch()
    bench.operations.cancel(op_id)
    assert bench.events == ["a --"]
    assert bench.operations.take_cancelled() == [op_id]
    assert bench.operations.take_cancelled() == []
    bench.operations.cancel(op_id)
    assert bench.counts == (0, 1, 0)
    assert not bench.operations.complete(op_id, [True, True], fenced=True)
    assert bench.events == ["a --", "a fenced"]
    assert bench.counts == (0, 0, 1)


@pytest.mark.parametrize("num_results", [0, 1, 3])
def test_a_wrong_number_of_results(bench, num_results):
    op_id = bench.dispatch()
    with pytest.raises(OperationResultError) as caught:
        bench.operations.complete(op_id, [True] * num_results, fenced=True)
    assert str(caught.value) == f"operation 1 copies 2 blocks, but got {num_results} results"
    error = caught.value
    assert (error.op_id, error.results, error.num_blocks) == (op_id, num_results, 2)
    assert bench.counts == (1, 0, 0)
    assert bench.events == []
    assert bench.operations.complete(op_id, [True, True], fenced=True)


def test_all_are_cancelled_last_first(bench):
    bench.dispatch("a")
    done = bench.dispatch("b")
    bench.dispatch("c")
    bench.submit("d")
    bench.operations.complete(done, [True, True], fenced=False)
    bench.events.clear()
    bench.operations.cancel_all()
    assert bench.events == ["d --", "d fenced", "c --", "a --"]
    assert bench.operations.take_cancelled() == [3, 1]
    assert bench.counts == (0, 3, 0)


def test_ids_are_not_used_again():
    memory = TierMemory(2, 4)
    seen: list[OpId] = []
    for _ in range(3):
        memory.serve([1, 2])
        memory.manager.evict(2)
        seen += [operation.id for operation in memory.take()]
        memory.manager.reset()
    assert seen == [1, 2, 3]


def test_what_a_manager_counts_of_them():
    memory = TierMemory(3, 3)
    memory.serve([1, 2, 3])
    memory.manager.evict(1)
    memory.manager.evict(1)
    assert memory.tiers.num_open_operations == memory.stats.open_operations == 2
    first, second = memory.take()
    memory.finish(first, fenced=False)
    assert not memory.tiers.complete(first.id, [True], fenced=False)
    stats = memory.stats
    assert (stats.open_operations, stats.quarantined_operations) == (1, 1)
    assert (stats.late_completions, memory.tiers.num_open_operations) == (1, 2)
    memory.finish(second)
    assert memory.fence(first)
    assert memory.tiers.num_open_operations == 0
    memory.manager.check()
