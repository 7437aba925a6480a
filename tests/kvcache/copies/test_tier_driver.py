"""The tier driver: each kind of copy, its ends, and blocks that are overwritten meanwhile."""

from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kvcache import BlockArrays, CountError, OperationResult, Outcome, TierDriver
from radixkv.kvcache.storage import Status
from radixkv.kvcache.tiers.operations import OpKind

from ..driving import BLOCK_BYTES, LONG_S, SIZES, Bench, Clock, FakeStorage

DOWN, UP, ACROSS = OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_DEVICE
OUT, IN = OpKind.HOST_TO_STORAGE, OpKind.STORAGE_TO_HOST
KEYS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture
def bench():
    with Bench() as bench:
        yield bench


@jax.jit
def _after_long_work(pool: jax.Array) -> jax.Array:
    """Return the same pool, some tenths of a second later."""
    work = jax.lax.fori_loop(0, 20_000, lambda _, m: jnp.tanh(m @ m), jnp.ones((64, 64)))
    return pool + 0 * work[0, 0].astype(pool.dtype)


@pytest.mark.parametrize("kind", [DOWN, UP, ACROSS])
def test_dispatch_does_not_wait(bench, kind):
    """A stalled machine may finish the work meanwhile, but not ten times in a row."""
    for _ in range(10):
        bench.arrays.keys = tuple(_after_long_work(pool) for pool in bench.arrays.keys)
        bench.start(kind, [1], [2])
        waited = bench.arrays.keys[0].is_ready()
        bench.results()
        if not waited:
            return
    pytest.fail(f"{kind} is dispatched when what it copies has been computed")


class TestDeviceToHost:
    def test_blocks_arrive(self, bench):
        bench.fill()
        op_id = bench.start(DOWN, [1, 5, 2], [4, 2, 3])
        assert bench.results() == [OperationResult(op_id, (True,) * 3, fenced=True)]
        for source, destination in ((1, 4), (5, 2), (2, 3)):
            assert (bench.host.memory[destination] == bench.content(source)).all()
        assert not bench.host.memory[[0, 1, 5]].any()
        assert bench.driver.stats().copied_bytes == {DOWN: 3 * bench.host.bytes_per_block}

    def test_blocks_are_as_they_were_at_dispatch(self, bench):
        bench.fill()
        bench.host.held = True
        op_id = bench.start(DOWN, [1], [1])
        bench.host.entered.acquire()
        assert not bench.driver._table.get(op_id).staged  # only the writer holds its memory
        bench.step(1, bench.content(77))
        assert bench.driver.poll() == []
        bench.finish_write()
        assert bench.results()[0].ok == (True,)
        assert (bench.host.memory[1] == bench.content(1)).all()

    def test_it_ends_at_its_deadline_and_is_fenced_when_the_thread_is_done(self, bench):
        bench.host.held = True
        op_id = bench.start(DOWN, [1, 2, 3], [1, 2, 3], timeout_s=5)  # two pieces
        bench.host.entered.acquire()
        bench.clock.now = 5
        assert bench.driver.poll() == [OperationResult(op_id, (False,) * 3, fenced=False)]
        assert bench.driver.fenced() == []
        bench.finish_write()
        assert bench.driver.poll() == []
        assert bench.driver.fenced() == [op_id]
        assert bench.driver.fenced() == []
        assert not bench.host.memory[3].any()  # the second piece was not started

    def test_it_is_fenced_when_all_threads_are_done(self):
        with Bench(num_threads=2) as bench:
            bench.host.held = True
            op_id = bench.start(DOWN, [1, 2, 3], [1, 2, 3], timeout_s=5)
            for _ in range(2):
                bench.host.entered.acquire()
            bench.clock.now = 5
            assert bench.driver.poll() == [OperationResult(op_id, (False,) * 3, fenced=False)]
            bench.finish_write()
            assert bench.driver.fenced() == []
            bench.finish_write()
            assert bench.driver.fenced() == [op_id]

    def test_pieces_that_arrived_before_the_deadline_count(self, bench):
        bench.host.held = True
        op_id = bench.start(DOWN, [1, 2, 3], [1, 2, 3], timeout_s=5)
        bench.finish_write()
        assert bench.driver.poll() == []
        bench.host.entered.acquire()
        bench.host.entered.acquire()
        bench.clock.now = 5
        assert bench.driver.poll() == [OperationResult(op_id, (True, True, False), fenced=False)]

    @pytest.mark.parametrize("seconds", [4, 5, 100])
    def test_what_was_written_in_time_counts_however_late_it_is_polled(self, bench, seconds):
        bench.host.held = True
        op_id = bench.start(DOWN, [1], [1], timeout_s=5)
        bench.finish_write()
        bench.clock.now = seconds
        assert bench.driver.poll() == [OperationResult(op_id, (True,), fenced=True)]
        assert bench.driver.stats().operations == {(DOWN, Outcome.DONE): 1}

    def test_an_offload_that_no_thread_started_ends_fenced(self, bench):
        bench.host.held = True
        bench.start(DOWN, [1], [1])
        bench.host.entered.acquire()
        op_id = bench.start(DOWN, [2], [2], timeout_s=5)
        bench.clock.now = 5
        assert bench.driver.poll() == [OperationResult(op_id, (False,), fenced=True)]
        assert bench.driver.stats().operations == {(DOWN, Outcome.TIMED_OUT): 1}

    def test_a_fence_before_the_result_is_read_is_part_of_it(self, bench):
        bench.host.held = True
        op_id = bench.start(DOWN, [1], [1], timeout_s=5)
        bench.host.entered.acquire()
        bench.clock.now = 5
        assert bench.driver.fenced() == []  # checks the deadline too
        bench.finish_write()
        assert bench.driver.fenced() == []
        assert bench.driver.poll() == [OperationResult(op_id, (False,), fenced=True)]

    def test_an_error_fails_only_its_blocks(self, bench):
        bench.host.held = True
        op_id = bench.start(DOWN, [1, 2, 3], [1, 2, 3])
        bench.finish_write(MemoryError())
        bench.finish_write()
        assert bench.results() == [OperationResult(op_id, (False, False, True), fenced=True)]
        stats = bench.driver.stats()
        assert stats.errors == {"MemoryError": 1}
        assert stats.operations == {(DOWN, Outcome.FAILED): 1}

    def test_a_piece_that_the_writer_refuses_gives_its_bytes_back_once(self, bench, monkeypatch):
        submitted: list[Any] = []

        def submit(staged, submit=bench.driver._writer.submit):
            if submitted:
                raise MemoryError
            submitted.append(staged)
            submit(staged)

        monkeypatch.setattr(bench.driver._writer, "submit", submit)
        op_id = bench.start(DOWN, [1, 2, 3], [1, 2, 3])  # two pieces
        assert bench.results() == [OperationResult(op_id, (True, True, False), fenced=True)]
        stats = bench.driver.stats()
        assert (stats.bytes_in_flight, stats.errors) == (0, {"MemoryError": 1})
        assert stats.operations == {(DOWN, Outcome.FAILED): 1}

    def test_padding_that_the_writer_refuses_gives_its_bytes_back(self, monkeypatch):
        def refuse(staged):
            raise MemoryError

        with Bench(max_blocks_per_copy=4) as bench:
            monkeypatch.setattr(bench.driver._writer, "submit", refuse)
            op_id = bench.start(DOWN, [1, 2, 3], [1, 2, 3])  # four blocks are staged
            assert bench.results() == [OperationResult(op_id, (False,) * 3, fenced=True)]
            assert bench.driver.stats().bytes_in_flight == 0

    @pytest.mark.parametrize(("budget", "num_waits"), [(0, 2), (3, 1), (5, 0)])
    def test_blocks_over_the_budget_wait_for_earlier_ones(self, budget, num_waits, monkeypatch):
        """The budget is in blocks; a piece of two that exceeds it alone waits for all others."""
        with Bench(max_bytes_in_flight=max(budget * BLOCK_BYTES, 1)) as bench:
            num_gathered = 0
            gather_now = bench.driver._warm_copies().gather

            def gather(arrays, ids, size):
                nonlocal num_gathered
                num_gathered += len(ids)
                num_written = np.count_nonzero(bench.host.memory.any(axis=1))
                assert num_gathered - num_written <= max(budget, 2)
                return gather_now(arrays, ids, size)

            bench.fill()
            monkeypatch.setattr(bench.driver._copies, "gather", gather)
            bench.host.held = True
            for _ in range(num_waits):
                bench.host.words.put(None)
            op_id = bench.start(DOWN, [5, 4, 3, 2, 1], [1, 2, 3, 4, 5])
            while num_waits < 3:
                assert bench.driver.poll() == []
                bench.finish_write()
                num_waits += 1
            assert bench.results() == [OperationResult(op_id, (True,) * 5, fenced=True)]
            assert all((bench.host.memory[6 - n] == bench.content(n)).all() for n in range(1, 6))
            assert bench.driver.stats().bytes_in_flight == 0

    def test_blocks_that_find_no_room_before_their_deadline_are_dropped(self):
        class Ticking(Clock):
            def __call__(self) -> float:
                self.now += 1
                return self.now

        with Bench(max_bytes_in_flight=3 * BLOCK_BYTES, clock=Ticking()) as bench:
            bench.host.held = True
            first = bench.start(DOWN, [1, 2], [1, 2])
            second = bench.start(DOWN, [3, 4, 5], [3, 4, 5], timeout_s=5)
            assert bench.driver.poll() == [OperationResult(second, (False,) * 3, fenced=True)]
            assert bench.driver.stats().bytes_in_flight == 2 * BLOCK_BYTES
            assert bench.driver.stats().dropped_blocks == 3
            assert bench.driver.stats().operations == {(DOWN, Outcome.DROPPED): 1}
            bench.finish_write()
            assert [result.op_id for result in bench.results()] == [first]

    @pytest.mark.parametrize("error", [None, MemoryError()], ids=repr)
    def test_pieces_before_the_one_that_finds_no_room_count(self, error):
        """Only the rest is dropped; an error of a write is worse than that."""

        class Ticking(Clock):
            ticks = True

            def __call__(self) -> float:
                self.now += self.ticks
                return self.now

        clock = Ticking()
        with Bench(max_bytes_in_flight=3 * BLOCK_BYTES, clock=clock) as bench:
            bench.host.held = True
            first = bench.start(DOWN, [1], [1])
            second = bench.start(DOWN, [2, 3, 4, 5], [2, 3, 4, 5], timeout_s=50)  # two pieces
            assert bench.driver.stats().dropped_blocks == 2
            clock.now, clock.ticks = 0, False  # else it would end at its deadline, before its write
            bench.finish_write()
            assert [result.op_id for result in bench.results()] == [first]
            bench.finish_write(error)
            ok = (error is None,) * 2 + (False,) * 2
            assert bench.results() == [OperationResult(second, ok, fenced=True)]
            outcome = Outcome.DROPPED if error is None else Outcome.FAILED
            assert bench.driver.stats().operations[DOWN, outcome] == 1
            assert bench.driver.stats().dropped_blocks == 2

    def test_an_error_after_the_deadline_is_counted_too(self, bench):
        bench.host.held = True
        op_id = bench.start(DOWN, [1], [1], timeout_s=5)
        bench.host.entered.acquire()
        bench.clock.now = 5
        assert bench.driver.poll() == [OperationResult(op_id, (False,), fenced=False)]
        bench.finish_write(MemoryError())
        assert bench.driver.fenced() == [op_id]
        assert bench.driver.stats().errors == {"MemoryError": 1}


class TestToTheDevice:
    def test_loaded_blocks_are_visible_at_once(self, bench):
        bench.fill_host()
        op_id = bench.start(UP, [5, 1, 4], [2, 6, 1])
        assert bench.driver.poll() == [OperationResult(op_id, (True,) * 3, fenced=True)]
        device = bench.device()
        for source, destination in ((5, 2), (1, 6), (4, 1)):
            assert (device[destination] == bench.content(50 + source)).all()
        assert not device[[0, 3, 4, 5]].any()

    def test_the_source_is_read_at_dispatch(self, bench):
        bench.fill_host()
        bench.start(UP, [3], [3])
        bench.host.memory[:] = 0
        assert (bench.device()[3] == bench.content(53)).all()

    def test_copies_within_the_pools(self, bench):
        bench.fill()
        op_id = bench.start(ACROSS, [1, 2, 3], [6, 5, 4])
        assert bench.driver.poll() == [OperationResult(op_id, (True,) * 3, fenced=True)]
        device = bench.device()
        for block, source in enumerate([1, 2, 3, 3, 2, 1], 1):
            assert (device[block] == bench.content(source)).all()

    @pytest.mark.parametrize("order", list(permutations(range(4))))
    def test_operations_of_one_dispatch_are_simultaneous(self, bench, order):
        """To exchange blocks, every source is read before any destination is written."""
        bench.fill()
        bench.fill_host()
        operations = [
            bench.operation(DOWN, [1, 2, 4], [1, 2, 4]),
            bench.operation(UP, [1, 2], [2, 1]),
            bench.operation(ACROSS, [3], [4]),
            bench.operation(UP, [3], [3]),
        ]
        bench.driver.dispatch([operations[place] for place in order], bench.arrays)
        bench.step(1, bench.content(99))
        done: list[OperationResult] = []
        while len(done) < 4:
            done += bench.results()
        for block in (1, 2, 4):
            assert (bench.host.memory[block] == bench.content(block)).all()
        device = bench.device()
        for block, content in ((2, 51), (3, 53), (4, 3)):
            assert (device[block] == bench.content(content)).all()

    def test_pools_are_replaced_in_place(self, bench):
        """Also during an offload: nothing keeps a view of the pools."""
        bench.host.held = True
        pools = (*bench.arrays.keys, *bench.arrays.values)
        pointers = [pool.unsafe_buffer_pointer() for pool in pools]
        for _ in range(3):
            bench.start(DOWN, [1], [1])
            bench.start(UP, [2, 3, 4], [2, 3, 4])
            bench.start(ACROSS, [1], [5])
        bench.finish_write()
        assert all(pool.is_deleted() for pool in pools)
        pools = (*bench.arrays.keys, *bench.arrays.values)
        assert [pool.unsafe_buffer_pointer() for pool in pools] == pointers


class TestCancel:
    def test_a_cancelled_running_copy_is_fenced_later_without_a_result(self, bench):
        bench.host.held = True
        op_id = bench.start(DOWN, [1, 2, 3], [1, 2, 3])
        bench.host.entered.acquire()
        bench.driver.cancel([op_id])
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [])
        bench.finish_write()
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [op_id])
        assert bench.driver.stats().operations == {(DOWN, Outcome.CANCELLED): 1}

    def test_cancelling_an_unread_result_leaves_a_fence(self, bench):
        op_id = bench.start(UP, [1], [1])
        bench.driver.cancel([op_id])
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [op_id])

    def test_cancelling_an_ended_operation_changes_nothing(self, bench):
        op_id = bench.start(UP, [1], [1])
        bench.driver.poll()
        bench.driver.cancel([op_id, op_id])
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [])


class TestRefused:
    @pytest.mark.parametrize(
        ("kind", "sources", "destinations", "error"),
        [
            (DOWN, [7], [1], "device block 7 is not in 1 to 6"),
            (DOWN, [1], [6], "host block 6 is not in 1 to 5"),
            (DOWN, [1], [0], "host block 0 is not in 1 to 5"),
            (DOWN, [1, 2, 7], [1, 2, 3], "device block 7 is not in 1 to 6"),
            (UP, [6], [1], "host block 6 is not in 1 to 5"),
            (UP, [0], [1], "host block 0 is not in 1 to 5"),
            (UP, [1], [0], "device block 0 is not in 1 to 6"),
            (ACROSS, [7], [1], "device block 7 is not in 1 to 6"),
            (ACROSS, [1], [-1], "device block -1 is not in 1 to 6"),
            (ACROSS, [1, 2], [2, 3], "a block is written twice, or read and written"),
            (ACROSS, [1, 2], [3, 3], "a block is written twice, or read and written"),
            (OUT, [6], [], "host block 6 is not in 1 to 5"),
            (IN, [], [6], "host block 6 is not in 1 to 5"),
        ],
    )
    def test_invalid_blocks_are_refused(self, kind, sources, destinations, error):
        """Nothing is started, not even the other operations of the dispatch."""
        with Bench(storage=FakeStorage()) as bench:
            bench.fill()
            before = bench.device()
            keys = KEYS[:1] if kind in (OUT, IN) else ()
            wrong = bench.operation(kind, sources, destinations, keys)
            with pytest.raises((IndexError, ValueError), match=error):
                bench.driver.dispatch([bench.operation(UP, [1], [2]), wrong], bench.arrays)
            assert bench.results() == [] and bench.driver.stats().open_operations == 0
            assert (bench.device() == before).all()

    def test_losing_the_pools_raises(self, bench, monkeypatch):
        def lose(arrays, *args):
            for pool in arrays.keys:
                pool.delete()
            raise MemoryError

        monkeypatch.setattr(bench.driver._copies, "scatter", lose)
        with pytest.raises(MemoryError):
            bench.start(UP, [1], [1])

    @pytest.mark.parametrize(
        "other",
        [
            {"num_layers": 3},
            {"kv_heads": 7},
            {"block_size": 7},
            {"head_dim": 5},
            {"dtype": "float16"},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_pools_of_another_shape_or_dtype_are_refused(self, bench, other):
        sizes = {**SIZES, "dtype": "float32", **other}
        arrays = BlockArrays.zeros(**{**sizes, "dtype": jnp.dtype(sizes["dtype"])})
        with pytest.raises(ValueError, match="layers, block and dtype"):
            bench.driver.warm_up(arrays)

    @pytest.mark.parametrize("name", ["max_bytes_in_flight", "max_blocks_per_copy", "num_threads"])
    def test_counts(self, bench, name):
        with pytest.raises(CountError, match=name):
            TierDriver(bench.host, **dict[str, Any]({name: 0}))
        assert TierDriver(bench.host, **dict[str, Any]({name: 1})).close(timeout_s=LONG_S)


def test_wait_returns_at_once_if_nothing_is_in_flight(bench):
    bench.driver.wait(LONG_S)
    assert bench.driver.poll() == []


def test_wait_ends_at_its_timeout(bench):
    bench.host.held = True
    bench.start(DOWN, [1], [1])
    bench.driver.wait(0.0)
    bench.driver.wait(0.002)
    assert bench.driver.poll() == []


def test_wait_ends_with_the_first_result(bench):
    bench.host.held = True
    bench.start(DOWN, [1], [1])
    bench.host.entered.acquire()
    up = bench.start(UP, [1], [1])
    assert [result.op_id for result in bench.results()] == [up]
    cancelled = bench.start(DOWN, [2], [2])
    bench.driver.cancel([cancelled])
    bench.driver.wait(LONG_S)
    assert bench.driver.fenced() == [cancelled]


def test_counts_that_were_read_do_not_change_later(bench):
    bench.host.held = True
    before = bench.driver.stats()
    bench.start(DOWN, [1], [1])
    bench.finish_write(MemoryError())
    bench.results()
    after = bench.driver.stats()
    bench.start(UP, [1], [1])
    bench.start(DOWN, [1], [1])
    bench.finish_write(MemoryError())
    bench.results()
    assert (before.operations, before.copied_bytes, before.errors) == ({}, {}, {})
    assert after.operations == {(DOWN, Outcome.FAILED): 1}
    assert (after.copied_bytes, after.errors) == ({DOWN: 0}, {"MemoryError": 1})


def test_results_can_be_read_after_close(bench):
    bench.host.held = True
    op_id = bench.start(DOWN, [1], [1])
    bench.finish_write()
    assert bench.driver.close(timeout_s=LONG_S)
    assert bench.driver.poll() == [OperationResult(op_id, (True,), fenced=True)]


def test_close_ends_open_operations(bench):
    bench.host.held = True
    first = bench.start(DOWN, [1], [1])
    bench.host.entered.acquire()
    second = bench.start(DOWN, [2], [2])
    assert not bench.driver.close(timeout_s=0)
    assert bench.driver.poll() == [
        OperationResult(first, (False,), fenced=False),
        OperationResult(second, (False,), fenced=True),
    ]
    bench.host.words.put(None)
    assert bench.driver.close(timeout_s=LONG_S)
    assert bench.driver.fenced() == [first]
    third = bench.start(DOWN, [1], [1])
    assert bench.driver.poll() == [OperationResult(third, (False,), fenced=True)]
    assert bench.driver.stats().bytes_in_flight == 0
    assert np.array_equal(bench.device(), np.zeros_like(bench.device()))


class TestLookup:
    @pytest.mark.parametrize(
        ("statuses", "outcome"),
        [
            ([Status.FOUND, Status.MISSING], Outcome.DONE),  # a missing block is an answer too
            ([Status.FOUND, Status.FAILED], Outcome.FAILED),
            ([Status.TIMED_OUT, Status.TIMED_OUT], Outcome.TIMED_OUT),
        ],
    )
    def test_a_lookup_copies_nothing(self, statuses, outcome):
        storage = FakeStorage()
        with Bench(storage=storage) as bench:
            op_id = bench.start(OpKind.LOOKUP, keys=[b"0" * 32, b"1" * 32])
            storage.end(storage.asked[0], statuses, fenced=True)
            answers = {Status.FOUND: True, Status.MISSING: False}
            ok = tuple(answers.get(status) for status in statuses)  # None is no answer
            assert bench.results() == [OperationResult(op_id, ok, fenced=True)]
            assert bench.driver.stats().operations == {(OpKind.LOOKUP, outcome): 1}
            assert bench.driver.stats().copied_bytes == {OpKind.LOOKUP: 0}
