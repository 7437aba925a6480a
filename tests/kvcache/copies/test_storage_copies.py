"""The tier driver with storage: statuses, deadlines, fences and a hanging storage."""

from dataclasses import replace
from unittest.mock import Mock

import jax.numpy as jnp
import pytest

from radixkv.kvcache import OperationResult, Outcome, StorageConfigError
from radixkv.kvcache.copies import in_flight
from radixkv.kvcache.ids import Epoch
from radixkv.kvcache.storage import Status, StorageWorkers, open_backend
from radixkv.kvcache.tiers.operations import OpKind

from ..driving import LONG_S, Bench, FakeStorage

DOWN, UP, ACROSS = OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_DEVICE
OUT, IN = OpKind.HOST_TO_STORAGE, OpKind.STORAGE_TO_HOST
KEYS = [bytes([number]) * 32 for number in range(8)]


class TestStorage:
    """With storage whose operations end when the test says so."""

    @pytest.fixture
    def storage(self):
        return FakeStorage()

    @pytest.fixture
    def bench(self, storage):
        with Bench(storage=storage) as bench:
            bench.fill_host()
            yield bench

    def test_store_and_load(self, bench, storage):
        out = bench.start(OUT, [2, 4], keys=KEYS[:2])
        storage.end(storage.asked[0], [Status.STORED, Status.EXISTS], fenced=True)
        assert bench.driver.poll() == [OperationResult(out, (True, True), fenced=True)]
        assert storage.values == {KEYS[0]: bench.content(52).tobytes()}
        into = bench.start(IN, destinations=[5, 1], keys=KEYS[:2])
        storage.end(storage.asked[1], [Status.LOADED, Status.CORRUPT], fenced=True)
        assert bench.driver.poll() == [OperationResult(into, (True, False), fenced=True)]
        assert (bench.host.memory[5] == bench.content(52)).all()
        size = bench.host.bytes_per_block
        assert bench.driver.stats().copied_bytes == {OUT: size, IN: size}
        assert bench.driver.stats().operations == {(OUT, Outcome.DONE): 1, (IN, Outcome.FAILED): 1}

    def test_look_up(self, bench, storage):
        op_id, _ = [bench.start(OpKind.LOOKUP, keys=KEYS[:3]) for _ in range(2)]
        assert len(storage.asked) == 2  # storage is not known to hang
        storage.end(storage.asked[0], [Status.FOUND, Status.FOUND, Status.MISSING], fenced=True)
        assert bench.driver.poll() == [OperationResult(op_id, (True, True, False), fenced=True)]

    @pytest.mark.parametrize("kind", [OpKind.LOOKUP, OUT, IN])
    def test_storage_gets_all_of_an_operation(self, bench, storage, kind):
        where = {OUT: "sources", IN: "destinations"}
        ids = {where[kind]: [4, 2]} if kind in where else {}
        operation = bench.operation(kind, **ids, keys=KEYS[:2], timeout_s=7.0)
        bench.driver.dispatch([replace(operation, epoch=Epoch(3))], bench.arrays)
        bench.driver.touch(KEYS[2:4])
        asked, touched = storage.asked
        assert (tuple(asked.keys), asked.timeout_s, asked.epoch) == (operation.keys, 7.0, 3)
        rows = [bench.host.memory[block] for block in ids.get(where.get(kind, ""), [])]
        assert [bytes(part) for [part] in asked.parts] == [row.tobytes() for row in rows]
        assert (touched.keys, touched.timeout_s) == (KEYS[2:4], 5.0)
        storage.end(asked, [Status.FAILED] * 2, fenced=True)
        bench.driver.poll()

    @pytest.mark.parametrize("fenced", [False, True])
    def test_a_store_is_no_reason_for_a_lookup_to_wait(self, bench, storage, fenced):
        """Nor is a lookup that has ended, although a thread still has it."""
        bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        storage.end(storage.asked[0], [Status.TIMED_OUT], fenced=fenced)
        bench.driver.poll()
        bench.start(OUT, [2], keys=KEYS[:1])
        bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        assert [asked.kind.name for asked in storage.asked] == ["LOOKUP", "STORE", "LOOKUP"]
        for asked in storage.asked:
            asked.fenced = True
        for asked in storage.asked[1:]:
            storage.end(asked, [Status.FAILED], fenced=True)
        bench.driver.poll()

    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            (OpKind.LOOKUP, Status.TIMED_OUT),
            (OpKind.LOOKUP, Status.FAILED),  # a backend's time limit may be below the deadline
            (IN, Status.TIMED_OUT),
        ],
    )
    def test_while_storage_hangs_one_lookup_at_a_time_waits(self, bench, storage, kind, status):
        into = {} if kind is OpKind.LOOKUP else {"destinations": [1]}
        bench.start(kind, **into, keys=KEYS[:1])
        storage.end(storage.asked[0], [status], fenced=True)
        bench.driver.poll()
        asks = bench.start(OpKind.LOOKUP, keys=KEYS[:2])
        others = [bench.start(OpKind.LOOKUP, keys=KEYS[:2]) for _ in range(2)]
        stores = bench.start(OUT, [2], keys=KEYS[:1])
        assert [asked.kind.name for asked in storage.asked[1:]] == ["LOOKUP", "STORE"]
        nothing = [OperationResult(other, (None, None), fenced=True) for other in others]
        assert bench.driver.poll() == nothing
        assert bench.driver.stats().operations[OpKind.LOOKUP, Outcome.NOT_ASKED] == 2
        storage.end(
            storage.asked[2], [Status.TIMED_OUT], fenced=True
        )  # no request waited for this store
        storage.end(storage.asked[1], [Status.TIMED_OUT, Status.FAILED], fenced=False)
        assert {result.op_id for result in bench.driver.poll()} == {asks, stores}
        bench.start(OpKind.LOOKUP, keys=KEYS[:2])  # storage may work again
        bench.start(OpKind.LOOKUP, keys=KEYS[:2])
        assert len(storage.asked) == 4
        storage.end(storage.asked[3], [Status.MISSING] * 2, fenced=True)
        bench.driver.poll()
        bench.start(kind, **into, keys=KEYS[:1])
        storage.end(storage.asked[4], [Status.MISSING], fenced=True)
        bench.driver.poll()
        for _ in range(2):
            bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        assert len(storage.asked) == 7

    @pytest.mark.parametrize(("hangs", "other"), [(OpKind.LOOKUP, IN), (IN, OpKind.LOOKUP)])
    def test_an_answer_of_another_kind_does_not_end_a_hang(self, bench, storage, hangs, other):
        """A file system may tell from memory what is on a disk that hangs."""
        storage.values[KEYS[0]] = bytes(bench.host.bytes_per_block)

        def ask(kind, status):
            into = {"destinations": [1]} if kind is IN else {}
            bench.start(kind, **into, keys=KEYS[:1])
            storage.end(storage.asked[-1], [status], fenced=True)
            bench.driver.poll()

        def num_asked_of_two():
            before = len(storage.asked)
            lookups = [bench.start(OpKind.LOOKUP, keys=KEYS[:1]) for _ in range(2)]
            bench.driver.cancel(lookups)
            return len(storage.asked) - before

        answers = {OpKind.LOOKUP: Status.FOUND, IN: Status.LOADED}
        ask(hangs, Status.TIMED_OUT)
        ask(other, answers[other])
        assert num_asked_of_two() == 1
        ask(hangs, answers[hangs])
        assert num_asked_of_two() == 2

    def test_cancelled_or_dropped_operations_do_not_show_a_hang(self, bench, storage):
        bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        storage.end(storage.asked[0], [Status.TIMED_OUT], fenced=True)
        bench.driver.poll()
        bench.driver.cancel([bench.start(OpKind.LOOKUP, keys=KEYS[:1])])
        for place, status in ((2, Status.DROPPED), (3, Status.FAILED)):  # one value may be bad
            bench.start(IN, destinations=[1], keys=KEYS[:1])
            storage.end(storage.asked[place], [status], fenced=True)
            bench.driver.poll()
        for _ in range(2):
            bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        assert len(storage.asked) == 5

    @pytest.mark.parametrize(
        "statuses",
        [
            [Status.DROPPED],
            [Status.FAILED],  # one value may be bad
            [Status.LOADED, Status.TIMED_OUT],  # storage is slow, and answers
            [Status.TIMED_OUT, Status.MISSING],
        ],
    )
    def test_a_load_that_storage_answers_does_not_show_a_hang(self, bench, storage, statuses):
        size = len(statuses)
        storage.values[KEYS[0]] = bytes(bench.host.bytes_per_block)
        bench.start(IN, destinations=[1, 2][:size], keys=KEYS[:size])
        storage.end(storage.asked[0], statuses, fenced=True)
        bench.driver.poll()
        for _ in range(2):
            bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        assert len(storage.asked) == 3

    @pytest.mark.parametrize("kind", [OUT, IN])
    @pytest.mark.parametrize(
        ("status", "outcome"),
        [
            (Status.TIMED_OUT, Outcome.TIMED_OUT),
            (Status.CANCELLED, Outcome.CANCELLED),
            (Status.DROPPED, Outcome.DROPPED),
            (Status.FAILED, Outcome.FAILED),
            (Status.MISSING, Outcome.FAILED),
        ],
    )
    def test_an_operation_is_fenced_with_storage(self, bench, storage, kind, status, outcome):
        ids = {"sources": [1]} if kind is OUT else {"destinations": [1]}
        op_id = bench.start(kind, **ids, keys=KEYS[:1])
        storage.end(storage.asked[0], [status], fenced=False)
        assert bench.driver.poll() == [OperationResult(op_id, (False,), fenced=False)]
        assert bench.driver.fenced() == []
        storage.asked[0].fenced = True
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [op_id])
        assert bench.driver.stats().operations == {(kind, outcome): 1}

    @pytest.mark.parametrize("fenced", [False, True])
    def test_cancel(self, bench, storage, fenced):
        op_id = bench.start(IN, destinations=[1], keys=KEYS[:1])
        storage.asked[0].fenced = fenced
        bench.driver.cancel([op_id])
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [op_id] if fenced else [])
        storage.asked[0].fenced = True
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [] if fenced else [op_id])

    @pytest.mark.parametrize("fenced", [False, True])
    def test_cancel_after_an_end_that_was_not_returned(self, bench, storage, fenced):
        op_id = bench.start(OUT, [1], keys=KEYS[:1])
        storage.end(storage.asked[0], [Status.STORED], fenced=fenced)
        assert bench.driver.fenced() == []  # the result is there, and takes the fence along
        bench.driver.cancel([op_id])
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [op_id] if fenced else [])
        storage.asked[0].fenced = True
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [] if fenced else [op_id])

    def test_a_fence_that_could_not_be_recorded_is_recorded_later(
        self, bench, storage, monkeypatch
    ):
        op_id = bench.start(OUT, [1], keys=KEYS[:1])
        storage.end(storage.asked[0], [Status.STORED], fenced=True)
        with monkeypatch.context() as patch:
            patch.setattr(in_flight, "replace", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                bench.driver.poll()
        assert bench.driver.poll() == [OperationResult(op_id, (True,), fenced=True)]
        stats = bench.driver.stats()
        assert (stats.open_operations, stats.unfenced_operations) == (0, 0)

    def test_an_operation_refused_by_storage_fails_alone(self, bench, monkeypatch, storage):
        def closed(*args, **kwargs):
            raise RuntimeError

        monkeypatch.setattr(storage, "store", closed)
        op_id = bench.start(OUT, [1], keys=KEYS[:1])
        assert bench.driver.poll() == [OperationResult(op_id, (False,), fenced=True)]
        assert bench.driver.stats().errors == {"RuntimeError": 1}

    @pytest.mark.parametrize("is_closed", [True, False])
    def test_a_lookup_without_an_answer_is_no_miss(self, bench, monkeypatch, storage, is_closed):
        if is_closed:
            monkeypatch.delattr(FakeStorage, "lookup")
        op_id = bench.start(OpKind.LOOKUP, keys=KEYS[:2])
        if not is_closed:
            bench.driver.close()
        assert bench.driver.poll() == [OperationResult(op_id, (None, None), fenced=is_closed)]
        for asked in storage.asked:
            asked.fenced = True

    def test_a_touch_reaches_storage_and_has_no_result(self, bench, storage):
        bench.driver.touch([])
        assert not storage.asked and not bench.driver.is_touching
        for _ in range(20):
            bench.driver.touch(KEYS[:2])
        assert len(storage.asked) == 16  # more touches are dropped while storage is behind
        assert storage.asked[0].keys == KEYS[:2]
        assert bench.driver.is_touching and bench.driver.stats().open_operations == 0
        for number, asked in enumerate(storage.asked):
            status = Status.FAILED if number % 2 else Status.TOUCHED
            storage.end(asked, [status] * 2, fenced=True)
        assert (bench.driver.poll(), bench.driver.fenced()) == ([], [])
        assert not bench.driver.is_touching
        bench.driver.touch(KEYS[2:4])
        assert storage.asked[-1].keys == KEYS[2:4]

    @pytest.mark.parametrize("fenced", [True, False])
    def test_wait_lasts_until_storage_has_ended_and_fenced_all(
        self, bench, storage, monkeypatch, fenced
    ):
        """Also a touch, which has no result, and the fence of what has ended."""
        if fenced:
            bench.driver.touch(KEYS[:2])
        else:
            bench.start(IN, destinations=[1], keys=KEYS[:1])
            storage.end(storage.asked[0], [Status.MISSING], fenced=False)
            assert len(bench.driver.poll()) == 1
        asked, poll = storage.asked[0], storage.poll
        polls: list[None] = []

        def late():
            polls.append(None)
            if len(polls) == 3:
                if fenced:
                    storage.end(asked, [Status.TOUCHED] * 2, fenced=True)
                asked.fenced = True
            return poll()

        monkeypatch.setattr(storage, "poll", late)
        bench.driver.wait(LONG_S)
        assert not bench.driver.is_touching and len(polls) == 3
        assert len(bench.driver.fenced()) == (not fenced)

    def test_storage_keeps_the_deadlines_of_its_operations(self, bench, storage):
        """By its own clock: what it answers late, but in time, counts."""
        op_id = bench.start(OUT, [1], keys=KEYS[:1], timeout_s=5)
        bench.clock.now = 100
        assert bench.driver.poll() == []
        storage.end(storage.asked[0], [Status.STORED], fenced=True)
        assert bench.driver.poll() == [OperationResult(op_id, (True,), fenced=True)]

    def test_while_storage_hangs_a_lookup_does_not_follow_a_load(self, bench, storage):
        bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        storage.end(storage.asked[0], [Status.TIMED_OUT], fenced=True)
        bench.driver.poll()
        bench.start(IN, destinations=[1], keys=KEYS[:1])
        op_id = bench.start(OpKind.LOOKUP, keys=KEYS[:1])
        assert bench.driver.poll() == [OperationResult(op_id, (None,), fenced=True)]
        assert [asked.kind.name for asked in storage.asked] == ["LOOKUP", "LOAD"]
        storage.end(storage.asked[1], [Status.MISSING], fenced=True)
        bench.driver.poll()

    def test_the_first_block_that_was_not_stored_tells_the_outcome(self, bench, storage):
        bench.start(OUT, [1, 2], keys=KEYS[:2])
        storage.end(storage.asked[0], [Status.TIMED_OUT, Status.DROPPED], fenced=True)
        bench.driver.poll()
        assert bench.driver.stats().operations == {(OUT, Outcome.TIMED_OUT): 1}

    def test_a_touch_of_a_closed_storage_is_an_error(self):
        storage = StorageWorkers(open_backend("memory://"), max_bytes_in_flight=1)
        with Bench(storage=storage) as bench:
            assert storage.close()
            bench.driver.touch(KEYS[:2])
            assert bench.driver.stats().errors == {"StorageClosedError": 1}
            assert not bench.driver.is_touching

    def test_a_driver_without_storage(self):
        text = "^the manager uses storage, but the driver has none$"
        with Bench() as bench:
            operations = [bench.operation(DOWN, [1], [1]), bench.operation(OUT, [1], keys=KEYS[:1])]
            with pytest.raises(StorageConfigError, match=text):
                bench.driver.dispatch(operations, bench.arrays)
            with pytest.raises(StorageConfigError, match=text):
                bench.driver.touch(KEYS[:1])
            bench.driver.touch([])
            assert bench.driver.stats().open_operations == 0


def test_through_storage_and_back():
    """Device, host, storage, other host blocks, other device blocks."""
    storage = StorageWorkers(open_backend("memory://"), max_bytes_in_flight=2**20)
    with Bench(jnp.bfloat16, storage) as bench:
        bench.fill()
        for ids in (
            {"kind": DOWN, "sources": [1, 2, 3], "destinations": [3, 2, 1]},
            {"kind": OUT, "sources": [3, 2], "keys": KEYS[:2]},
            {"kind": IN, "destinations": [5, 4], "keys": KEYS[:2]},
            {"kind": UP, "sources": [5, 4, 1], "destinations": [6, 5, 4]},
        ):
            bench.start(**ids)
            (result,) = bench.results()
            assert all(result.ok), ids["kind"]
        device = bench.device()
        for block, source in ((6, 1), (5, 2), (4, 3)):
            assert (device[block] == bench.content(source)).all()
        bench.start(IN, destinations=[1], keys=KEYS[5:6])
        assert bench.results()[0].ok == (False,)
    assert storage.close()
