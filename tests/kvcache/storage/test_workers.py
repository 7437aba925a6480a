import atexit
import gc
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread

import numpy as np
import pytest

from radixkv.kvcache.storage import (
    Backend,
    BackendIOError,
    Completion,
    Kind,
    OperationError,
    PayloadError,
    Status,
    StorageClosedError,
    StorageKeyError,
    StorageOpId,
    StorageWorkers,
)
from radixkv.kvcache.storage import workers as workers_module
from radixkv.kvcache.storage.checksummed import ChecksummedBackend
from radixkv.kvcache.storage.operation_table import Task
from radixkv.kvcache.storage.workers import AdaptiveParallelism

from .memory import BrokenBackend, HeldBackend, MemoryBackend

KEYS = [bytes([number]) * 32 for number in range(8)]
LONG_S = 1_000.0  # no test reaches this deadline


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def workers(backend: Backend, **options) -> Iterator[StorageWorkers]:
    storage = StorageWorkers(backend, **{"max_bytes_in_flight": 1_000, **options})
    try:
        yield storage
    finally:
        if isinstance(backend, HeldBackend):
            for _ in range(100):
                backend.go.release()
        assert storage.close(timeout_s=LONG_S)
        storage.check()


def wait_ended(storage: StorageWorkers, operation: StorageOpId) -> None:
    with storage._lock:
        storage._reported.wait_for(lambda: storage._table.ended(operation))


def wait_fenced(storage: StorageWorkers, operation: StorageOpId) -> None:
    with storage._lock:
        storage._reported.wait_for(lambda: storage._table.fenced(operation))


def wait(storage: StorageWorkers, operation: StorageOpId) -> Completion:
    """Return the completion of the only operation."""
    wait_ended(storage, operation)
    (completion,) = storage.poll()
    assert completion.operation == operation
    return completion


def wait_first(storage: StorageWorkers) -> Completion:
    """Return the completion of the only operation, which may end before a thread tells so."""
    while not (completions := storage.poll()):
        time.sleep(0.001)
    (completion,) = completions
    return completion


def submit(storage: StorageWorkers, kind: Kind, keys: list[bytes], **options) -> StorageOpId:
    """Submit an operation of a kind, on blocks of one byte."""
    options = {"timeout_s": LONG_S, **options}
    match kind:
        case Kind.LOAD:
            return storage.load(keys, [[bytearray(1)] for _ in keys], **options)
        case Kind.STORE:
            return storage.store(keys, [[b"a"] for _ in keys], **options)
        case _:
            return getattr(storage, kind.value)(keys, **options)


@pytest.mark.parametrize("kind", Kind)
def test_a_completion_tells_which_operation_has_ended(kind: Kind) -> None:
    clock = Clock()
    with workers(HeldBackend(), num_threads=1, clock=clock) as storage:
        clock.now = 100.0
        first = submit(storage, Kind.LOOKUP, KEYS, timeout_s=1_000.0)  # holds the thread
        keys = [*KEYS[:2]]
        second = submit(storage, kind, keys, timeout_s=5.0, epoch=7)
        keys.clear()  # the caller's list is the caller's
        third = submit(storage, kind, KEYS[:1], timeout_s=6.0)
        clock.now = 104.9
        assert storage.poll() == []
        clock.now = 105.0
        (completion,) = storage.poll()
        assert completion == Completion(second, 7, kind, (Status.TIMED_OUT,) * 2)
        assert storage.cancel(third)
        (completion,) = storage.poll()
        assert completion == Completion(third, 0, kind, (Status.CANCELLED,))
        assert not storage.fenced(first) and storage.fenced(second) and storage.fenced(third)


def test_stats_do_not_change_afterwards() -> None:
    backend = MemoryBackend()
    with workers(backend) as storage:
        backend.stats = lambda: storage_counts  # type: ignore[method-assign]
        storage_counts: dict[str, int] = {"values": 0}
        before = storage.stats()
        copy = replace(before, blocks={}, errors={}, backend={"values": 0})
        storage_counts["values"] = 1
        checksummed = storage._checksummed
        checksummed.backend = BrokenBackend(OSError())
        wait(storage, submit(storage, Kind.TOUCH, KEYS[:1]))
        assert before == copy
        after = storage.stats()
        assert (after.blocks, after.errors) == ({Status.FAILED: 1}, {"OSError": 1})
        assert after.backend == {"values": 1}


AT_EXIT = """
import sys
from radixkv.kvcache.storage import StorageWorkers

class Backend:
    def touch(self, keys):
        pass
    def close(self):
        print("closed", *sys.argv[1:])

storage = StorageWorkers(Backend(), max_bytes_in_flight=1)
storage.touch([bytes(32)], timeout_s=1000.0)
if sys.argv[1] == "before":
    assert storage.close(timeout_s=1000.0)
    print("exits")
"""


def test_a_storage_that_nobody_closed_is_closed_when_python_exits() -> None:
    for when, said in (("before", "closed before\nexits\n"), ("at exit", "closed at exit\n")):
        done = subprocess.run(
            [sys.executable, "-c", AT_EXIT, when], capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == (said, "")


def test_nothing_keeps_a_storage_that_was_closed() -> None:
    storage = StorageWorkers(MemoryBackend(), max_bytes_in_flight=1)
    wait(storage, submit(storage, Kind.STORE, KEYS[:1]))
    closed = weakref.ref(storage)
    assert storage.close(timeout_s=LONG_S)
    del storage
    gc.collect()
    assert closed() is None


def test_a_round_trip() -> None:
    with workers(MemoryBackend()) as storage:
        # A dtype without a buffer interface, like bfloat16.
        k, v = np.arange(6.0), np.arange(4).reshape(2, 2).astype("M8[s]")
        stored = wait(storage, storage.store(KEYS[:2], [[k, v], [b"abc"]], timeout_s=LONG_S))
        assert stored.statuses == (Status.STORED, Status.STORED)
        k2, v2, third = np.zeros(6), np.zeros_like(v), bytearray(3)
        operation = storage.load(
            KEYS[:3], [[k2, v2], [third], [bytearray(1)]], timeout_s=LONG_S, epoch=7
        )
        loaded = wait(storage, operation)
        assert loaded.statuses == (Status.LOADED, Status.LOADED, Status.MISSING)
        assert (loaded.epoch, loaded.prefix) == (7, 2)
        assert storage.fenced(operation)
        assert (k2 == k).all() and (v2 == v).all() and third == b"abc"
        assert storage.lookup_prefix(KEYS, timeout_s=LONG_S) == 2
        touched = wait(storage, storage.touch(KEYS[1:3], timeout_s=LONG_S))
        assert touched.statuses == (Status.TOUCHED, Status.TOUCHED)
        deleted = wait(storage, storage.delete(KEYS[1:3], timeout_s=LONG_S))
        assert deleted.statuses == (Status.DELETED, Status.MISSING)
        stats = storage.stats()
        assert stats.blocks[Status.LOADED] == 2
        assert stats.stored_bytes == stats.loaded_bytes == k.nbytes + v.nbytes + 3
        assert stats.backend == {"values": 1}


def test_existing_values_are_not_written_again() -> None:
    """FastDeploy's check for this was always false (fastdeploy.md, B47)."""
    backend = MemoryBackend()
    with workers(backend) as storage:
        for status in (Status.STORED, Status.EXISTS):
            done = wait(storage, storage.store(KEYS[:3], [[b"a"]] * 3, timeout_s=LONG_S))
            assert done.statuses == (status,) * 3
        assert backend.calls.count("put") == 3


def test_a_lookup_is_one_call() -> None:
    backend = MemoryBackend()
    with workers(backend) as storage:
        wait(storage, storage.lookup(KEYS, timeout_s=LONG_S))
        assert backend.calls == ["contains"]


def test_a_touch_is_one_call_in_the_order_of_its_keys() -> None:
    backend = MemoryBackend()
    with workers(backend) as storage:
        wait(storage, storage.store(KEYS[:3], [[b"a"]] * 3, timeout_s=LONG_S))
        wait(storage, storage.touch([KEYS[2], KEYS[5], KEYS[0]], timeout_s=LONG_S))
        assert list(backend.values) == [KEYS[1], KEYS[2], KEYS[0]]
        assert backend.calls.count("touch") == 1


@pytest.mark.parametrize(
    "error", [BackendIOError("reading", 5), OSError(28, "full"), KeyError("?")]
)
def test_an_error_becomes_a_status_and_the_threads_survive(error: Exception) -> None:
    """In FastDeploy, a backend that raised hung the engine (fastdeploy.md, B46)."""
    backend = BrokenBackend(error)
    with workers(backend, num_threads=1) as storage:
        for operation in (
            storage.lookup(KEYS[:2], timeout_s=LONG_S),
            storage.touch(KEYS[:2], timeout_s=LONG_S),
            storage.delete(KEYS[:2], timeout_s=LONG_S),
            storage.store(KEYS[:2], [[b"a"]] * 2, timeout_s=LONG_S),
            storage.load(KEYS[:2], [[bytearray(1)]] * 2, timeout_s=LONG_S),
        ):
            wait_ended(storage, operation)
        assert {c.statuses for c in storage.poll()} == {(Status.FAILED, Status.FAILED)}
        assert storage.lookup_prefix(KEYS, timeout_s=LONG_S) == 0
        assert storage.stats().errors == {type(error).__name__: 1 + 1 + 2 + 2 + 2 + 1}


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (OSError("redis://user:secret@host"), "OSError"),
        (BackendIOError("reading", 5), "BackendIOError: reading failed: EIO (Input/output error)"),
    ],
)
def test_only_a_backend_error_is_logged_with_its_text(
    error: Exception, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with workers(BrokenBackend(error)) as storage:
        wait(storage, storage.lookup(KEYS[:1], timeout_s=LONG_S))
    text = f"lookup failed in the backend: {logged}; more of these are only counted"
    assert [record.message for record in caplog.records] == [text]


def test_an_error_is_logged_again_only_after_a_success(caplog: pytest.LogCaptureFixture) -> None:
    backend = MemoryBackend()
    checksummed = ChecksummedBackend(backend)
    broken = BrokenBackend(OSError())
    for now in (broken, broken, backend, broken, backend, broken):
        checksummed.backend = now
        checksummed.lookup(KEYS[:1])
        checksummed.touch(KEYS[:1])
        checksummed.load(KEYS[0], [memoryview(bytearray(1))])
        checksummed.store(KEYS[0], [memoryview(b"a")])
        checksummed.delete(KEYS[1])
    calls = [message.split(" failed ")[0] for message in caplog.messages]
    assert calls == ["lookup", "touch", "load", "store", "delete"] * 3


def test_another_error_than_the_last_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    checksummed = ChecksummedBackend(MemoryBackend())
    for error in (OSError(), OSError(), KeyError(), KeyError(), OSError()):
        checksummed.backend = BrokenBackend(error)
        checksummed.touch(KEYS[:1])
    names = [message.split(": ")[1].split(";")[0] for message in caplog.messages]
    assert names == ["OSError", "KeyError", "OSError"]


def test_the_success_of_a_call_is_none_of_another(caplog: pytest.LogCaptureFixture) -> None:
    """A server that answers lookups but refuses writes is logged once."""
    backend = MemoryBackend()
    checksummed = ChecksummedBackend(backend)
    for _ in range(3):
        checksummed.backend = BrokenBackend(OSError())
        checksummed.touch(KEYS[:1])
        checksummed.backend = backend
        checksummed.lookup(KEYS[:1])
        checksummed.delete(KEYS[0])
    assert [message.split(" failed ")[0] for message in caplog.messages] == ["touch"]


@pytest.mark.parametrize("num_answers", [0, 1, 3])
def test_a_lookup_with_too_few_or_many_answers_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_answers: int
) -> None:
    backend = MemoryBackend()
    monkeypatch.setattr(backend, "contains", lambda keys: [True] * num_answers)
    assert ChecksummedBackend(backend).lookup(KEYS[:2]) == ([Status.FAILED] * 2, "BackendError")
    assert f"BackendError: {num_answers} answers for 2 keys;" in caplog.text


def test_operations_on_a_hung_backend_end_at_the_deadline() -> None:
    backend, clock = HeldBackend(), Clock()
    backend.values[KEYS[0]] = b"not sealed"
    with workers(backend, num_threads=1, clock=clock) as storage:
        destination = bytearray(1)
        stuck = storage.load(KEYS[:2], [[destination], [bytearray(1)]], timeout_s=2.0)
        backend.entered.acquire()
        behind = storage.lookup(KEYS, timeout_s=3.0)
        clock.now = 1.9
        assert storage.poll() == []
        clock.now = 2.0
        (completion,) = storage.poll()
        assert (completion.operation, set(completion.statuses)) == (stuck, {Status.TIMED_OUT})
        assert not storage.fenced(stuck)  # its thread may still write to the buffer
        clock.now = 3.0
        (completion,) = storage.poll()
        assert (completion.operation, set(completion.statuses)) == (behind, {Status.TIMED_OUT})
        assert storage.fenced(behind)  # no thread took it
        assert storage.stats().unfenced_operations == 1
        backend.go.release()
        wait_fenced(storage, stuck)
        assert storage.poll() == []  # late results change nothing
        assert storage.stats().late_blocks == 1
        assert storage.stats().load_bytes_in_flight == 0


def test_a_poll_wakes_another_thread_if_the_first_is_stuck() -> None:
    backend = HeldBackend()
    with workers(backend, num_threads=2) as storage:
        backend.go.release()
        wait(storage, storage.load(KEYS[:1], [[bytearray(1)]], timeout_s=LONG_S))
        backend.entered.acquire()
        loads = []
        for key in KEYS[:2]:
            loads.append(storage.load([key], [[bytearray(1)]], timeout_s=LONG_S))
            assert storage.poll() == []
            backend.entered.acquire()
        for _ in loads:
            backend.go.release()
        for load in loads:
            wait_ended(storage, load)


@pytest.mark.parametrize("fails", [False, True])
def test_a_poll_wakes_a_thread_only_without_progress_since_the_last_poll(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A block that fails is progress too: the thread is not stuck."""

    class FailsAfterwards(HeldBackend):
        def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
            found = super().get(key, into)
            if fails:
                raise OSError
            return found

    backend = FailsAfterwards()
    with workers(backend, num_threads=1) as storage:
        storage.load(KEYS[:2], [[bytearray(1)]] * 2, timeout_s=LONG_S)
        backend.entered.acquire()
        backend.go.release()
        backend.entered.acquire()  # the first block is done
        storage.load(KEYS[:1], [[bytearray(1)]], timeout_s=LONG_S)
        woken: list[None] = []
        with monkeypatch.context() as patched:
            patched.setattr(storage._submitted, "notify", lambda: woken.append(None))
            storage.poll()
            assert not woken
            storage.poll()
            assert woken


def test_threads_are_woken_when_one_finds_that_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.perf_counter()
    observed: list[tuple[bool, bool]] = []

    def observe(parallelism: AdaptiveParallelism, took_s: float, *, alone: bool) -> bool:
        observed.append((0 <= took_s <= time.perf_counter() - begun, alone))
        return len(observed) == 1

    monkeypatch.setattr(AdaptiveParallelism, "observe", observe)
    backend = HeldBackend()
    with workers(backend, num_threads=2) as storage:
        load = storage.load(KEYS[:3], [[bytearray(1)]] * 3, timeout_s=LONG_S)
        backend.entered.acquire()  # one thread has two blocks
        backend.go.release()
        for _ in range(2):
            backend.entered.acquire()  # each thread has one block
        assert observed == [(True, True)]
        for _ in range(2):
            backend.go.release()
        wait_ended(storage, load)
        assert observed[1] == (True, False)


def test_a_lookup_does_not_wait_for_a_stuck_thread() -> None:
    backend = HeldBackend()
    with workers(backend, num_threads=3) as storage:
        storage.load(KEYS[:1], [[bytearray(1)]], timeout_s=LONG_S)
        backend.entered.acquire()
        for _ in range(2):
            storage.lookup(KEYS, timeout_s=LONG_S)
            backend.entered.acquire()


@pytest.mark.parametrize(("stuck", "use_all"), [(Kind.STORE, False), (Kind.LOAD, True)])
def test_a_thread_goes_on_beside_one_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch, stuck: Kind, use_all: bool
) -> None:
    """Without a poll, if that one has another kind of operation, or all threads work."""
    begun, may_end = Event(), Event()

    class HoldsFirstKey(MemoryBackend):
        def hold(self, key: bytes) -> None:
            if key == KEYS[0]:
                begun.set()
                assert may_end.wait(LONG_S)

        def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
            self.hold(key)
            return super().get(key, into)

        def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
            self.hold(key)
            super().put(key, parts)

    monkeypatch.setattr(AdaptiveParallelism, "observe", lambda *args, **options: False)
    with workers(HoldsFirstKey(), num_threads=2) as storage:
        storage._parallelism.use_all_threads = use_all
        first = submit(storage, stuck, KEYS[:1])
        assert begun.wait(LONG_S)
        load = submit(storage, Kind.LOAD, KEYS[1:4])  # two tasks
        with storage._lock:
            is_over = storage._reported.wait_for(lambda: storage._table.ended(load), 60)
        may_end.set()
        assert is_over, "a thread waits for the one that is stuck"
        wait_ended(storage, first)


def test_submitted_operations_wake_all_threads_if_that_pays() -> None:
    backend = HeldBackend()
    with workers(backend, num_threads=3) as storage:
        storage._parallelism.use_all_threads = True
        storage.load(KEYS[:2], [[bytearray(1)]] * 2, timeout_s=LONG_S)
        storage.store(KEYS[2:3], [[b"a"]], timeout_s=LONG_S)
        for _ in range(3):
            backend.entered.acquire()  # without a poll


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("running", [None, *Kind])
@pytest.mark.parametrize("use_all", [False, True])
def test_how_many_threads_an_operation_wakes(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, running: Kind | None, use_all: bool
) -> None:
    """One, unless its kind runs already: that thread goes on. Lookups never wait for another."""
    with workers(MemoryBackend(), num_threads=1) as storage:
        with storage._lock:
            while not storage._submitted._waiters:  # type: ignore[attr-defined]
                storage._reported.wait(0.001)
        woken: list[int] = []
        with monkeypatch.context() as patched:
            patched.setattr(storage._submitted, "notify", lambda n=1: woken.append(n))
            patched.setattr(storage._parallelism, "use_all_threads", use_all)
            if running is not None:
                patched.setitem(storage._table.running, running, 1)
            submit(storage, kind, KEYS[:3])
        assert sum(woken) == (3 if use_all else int(kind is Kind.LOOKUP or kind is not running))


@pytest.mark.parametrize(
    ("times_us", "alone", "wakes"),
    [
        ([20, 300, 20, 300], True, [False] * 4),  # occasional interruptions
        ([300, 300, 300, 20, 300, 300], True, [False, True, False, False, False, True]),
        ([999, 999, 999], False, [False] * 3),  # it may have waited for another thread
        ([1001, 1001, 1001], False, [False, True, False]),
    ],
)
def test_several_threads_start_when_one_waits_for_the_backend(
    times_us: list[int], alone: bool, wakes: list[bool]
) -> None:
    parallelism = AdaptiveParallelism()
    assert [parallelism.observe(us / 1e6, alone=alone) for us in times_us] == wakes


def test_a_synchronous_lookup_times_out() -> None:
    backend = HeldBackend()
    with workers(backend, num_threads=1) as storage:
        assert storage.lookup_prefix(KEYS, timeout_s=0.0) == 0
        assert storage.poll() == []
        assert storage.stats().blocks == {Status.TIMED_OUT: len(KEYS)}


def test_cancel_before_and_during() -> None:
    backend = HeldBackend()
    with workers(backend, num_threads=1) as storage:
        running = storage.store(KEYS[:2], [[b"aa"], [b"b"]], timeout_s=LONG_S)
        waiting = storage.store(KEYS[2:3], [[b"c"]], timeout_s=LONG_S)
        backend.entered.acquire()
        assert storage.cancel(waiting) and storage.cancel(running)
        assert not storage.cancel(running)
        assert [c.operation for c in storage.poll()] == [waiting, running]
        assert storage.fenced(waiting) and not storage.fenced(running)
        assert storage.stats().store_bytes_in_flight == 2  # the block that the thread has
        backend.go.release()
        wait_fenced(storage, running)
        assert storage.stats().store_bytes_in_flight == 0
    assert set(backend.values) == {KEYS[0]}  # it had started, and is complete


def test_blocks_loaded_before_the_deadline_count_and_later_ones_do_not_start() -> None:
    backend, clock = HeldBackend(), Clock()
    with workers(backend, num_threads=1, clock=clock) as storage:
        stored = storage.store(KEYS[:3], [[b"a"], [b"b"], [b"c"]], timeout_s=LONG_S)
        for _ in range(3):
            backend.go.release()
        wait_ended(storage, stored)
        storage.poll()
        destinations = [bytearray(1) for _ in range(3)]
        load = storage.load(KEYS[:3], [[each] for each in destinations], timeout_s=2.0)
        for _ in range(3 + 1):  # three stores and the first load
            backend.entered.acquire()
        backend.go.release()
        backend.entered.acquire()  # the thread is at the second block
        clock.now = 2.0
        (completion,) = storage.poll()
        assert completion.statuses == (Status.LOADED, Status.TIMED_OUT, Status.TIMED_OUT)
        assert destinations[0] == b"a" and not storage.fenced(load)
        backend.go.release()
        wait_fenced(storage, load)
        assert destinations[2] == b"\0"
        assert storage.stats().late_blocks == 1
        assert backend.calls.count("get") == 2


def test_blocks_over_the_budget_are_dropped_and_counted() -> None:
    backend = HeldBackend()
    with workers(backend, num_threads=1, max_bytes_in_flight=10) as storage:
        first = storage.store(KEYS[:3], [[bytes(4)]] * 3, timeout_s=LONG_S)
        second = storage.store(KEYS[3:4], [[bytes(4)]], timeout_s=LONG_S)
        (dropped,) = storage.poll()
        assert (dropped.operation, dropped.statuses) == (second, (Status.DROPPED,))
        load = storage.load(KEYS[:2], [[bytearray(10)]] * 2, timeout_s=LONG_S)  # without a budget
        assert storage.poll() == []
        storage.cancel(load)
        for _ in range(3):
            backend.go.release()
        wait_ended(storage, first)
        done = {c.operation: c.statuses for c in storage.poll()}
        assert done[first] == (Status.STORED, Status.STORED, Status.DROPPED)
        assert storage.stats().dropped_bytes == 8


def test_invalid_input_is_refused() -> None:
    with workers(MemoryBackend()) as storage:
        with pytest.raises(StorageKeyError, match=r"^a key is 32 bytes, got str$"):
            storage.lookup(["a" * 32], timeout_s=1)  # type: ignore[list-item]
        with pytest.raises(PayloadError, match=r"^2 keys, but 1 blocks$"):
            storage.store(KEYS[:2], [[b"a"]], timeout_s=1)
        with pytest.raises(PayloadError, match=r"^part 0 of a destination is read-only$"):
            storage.load(KEYS[:1], [[b"a"]], timeout_s=1)
        with pytest.raises(PayloadError, match=r"^part 1 of a block is not contiguous$"):
            storage.store(KEYS[:1], [[b"a", np.arange(4)[::2]]], timeout_s=1)
        with pytest.raises(PayloadError, match=r"^part 0 of a block is not contiguous$"):
            storage.store(KEYS[:1], [[memoryview(b"abcd")[::2]]], timeout_s=1)
        with pytest.raises(OperationError, match=r"^no operation 1: the last is 0$"):
            storage.cancel(StorageOpId(1))
        with pytest.raises(OperationError, match=r"^no operation 9: the last is 0$"):
            storage.fenced(StorageOpId(9))
        with pytest.raises(OperationError, match=r"^no operation 0: the last is 0$"):
            storage.fenced(StorageOpId(0))
        assert storage.stats().open_operations == 0
    with pytest.raises(ValueError, match=r"^num_threads must be at least 1, got 0$"):
        StorageWorkers(MemoryBackend(), num_threads=0, max_bytes_in_flight=1)
    with pytest.raises(ValueError, match=r"^max_bytes_in_flight must be at least 1, got 0$"):
        StorageWorkers(MemoryBackend(), max_bytes_in_flight=0)


def test_close_cancels_and_waits_for_the_threads() -> None:
    backend = HeldBackend()
    storage = StorageWorkers(backend, num_threads=1, max_bytes_in_flight=10)
    operation = storage.store(KEYS[:1], [[b"a"]], timeout_s=LONG_S)
    backend.entered.acquire()
    assert not storage.close(timeout_s=0.0)  # a thread is stuck in the backend
    assert not backend.closed
    assert storage.poll()[0].statuses == (Status.CANCELLED,)
    with pytest.raises(StorageClosedError, match=r"^storage is closed$"):
        storage.lookup(KEYS, timeout_s=1)
    backend.go.release()
    assert storage.close(timeout_s=LONG_S)
    assert backend.closed and storage.fenced(operation)
    backend.closed = False
    assert storage.close()
    assert not backend.closed  # it was closed only once


def test_close_ends_a_waiting_lookup() -> None:
    backend = HeldBackend()
    with workers(backend, num_threads=1) as storage, ThreadPoolExecutor(1) as caller:
        prefix = caller.submit(storage.lookup_prefix, KEYS, timeout_s=LONG_S)
        backend.entered.acquire()
        assert not storage.close(timeout_s=0.0)
        assert prefix.result() == 0


def test_close_ends_threads_that_return_one_by_one() -> None:
    backend = HeldBackend()
    storage = StorageWorkers(backend, num_threads=2, max_bytes_in_flight=10)
    assert all(thread.daemon for thread in storage._threads)  # they do not keep the process alive
    for key in KEYS[:2]:
        storage.load([key], [[bytearray(1)]], timeout_s=LONG_S)
        storage.poll()
        backend.entered.acquire()
    assert not storage.close(timeout_s=0.0)
    for _ in range(2):
        backend.go.release()
    assert storage.close(timeout_s=LONG_S)


def test_an_interrupted_lookup_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with workers(HeldBackend(), num_threads=1) as storage:
        with monkeypatch.context() as patched:
            patched.setattr(storage._reported, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                storage.lookup_prefix(KEYS, timeout_s=LONG_S)
        assert storage.stats().open_operations == 0 and storage.poll() == []
        assert storage.stats().blocks == {Status.TIMED_OUT: len(KEYS)}


@pytest.mark.parametrize("kind", Kind)
def test_an_error_of_ours_fails_the_blocks_that_were_not_done(
    monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    with workers(MemoryBackend(), num_threads=1) as storage:
        checksummed = storage._checksummed
        original = getattr(checksummed, kind.value)
        calls: list[None] = []

        def broken(*arguments: object) -> object:
            calls.append(None)
            if len(calls) == (1 if kind in (Kind.LOOKUP, Kind.TOUCH) else 2):
                raise MemoryError
            return original(*arguments)

        monkeypatch.setattr(checksummed, kind.value, broken)
        expected = {  # a store and a delete go on, block by block
            Kind.LOAD: (Status.MISSING, Status.FAILED, Status.FAILED),
            Kind.STORE: (Status.STORED, Status.FAILED, Status.STORED),
            Kind.DELETE: (Status.MISSING, Status.FAILED, Status.MISSING),
        }
        done = wait(storage, submit(storage, kind, KEYS[:3]))
        assert done.statuses == expected.get(kind, (Status.FAILED,) * 3)
        assert storage.stats().errors == {"MemoryError": 1}


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_result_is_not_lost_with_an_error_of_its_record(
    monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    with workers(MemoryBackend(), num_threads=1) as storage:
        original = storage._table.report
        failed: list[None] = []

        def report(task: Task, errors: Sequence[str] = ()) -> None:
            if failed or is_recorded:
                original(task, errors)
            if not failed:
                failed.append(None)
                raise MemoryError

        monkeypatch.setattr(storage._table, "report", report)
        submit(storage, Kind.STORE, KEYS[:1])
        stored = wait_first(storage)
        assert stored.statuses == (Status.STORED,)
        found = wait(storage, submit(storage, Kind.LOOKUP, KEYS[:1]))  # the thread goes on
        assert found.statuses == (Status.FOUND,)
        assert storage.stats().errors == {"MemoryError": 1}


@pytest.mark.parametrize("num_started", range(3))
def test_without_room_for_more_threads_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, num_started: int
) -> None:
    original = Thread.start
    started: list[Thread] = []

    def start(thread: Thread) -> None:
        if len(started) == num_started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        original(thread)

    kept: list[object] = []
    monkeypatch.setattr(atexit, "register", kept.append)
    monkeypatch.setattr(atexit, "unregister", kept.remove)
    monkeypatch.setattr(Thread, "start", start)
    backend = MemoryBackend()
    with pytest.raises(RuntimeError, match=r"^can't start new thread$"):
        StorageWorkers(backend, num_threads=3, max_bytes_in_flight=1)
    assert backend.closed and kept == []
    assert len(started) == num_started and not any(thread.is_alive() for thread in started)


class StuckThread:
    """Never ends; waiting for it takes the time that the caller allows."""

    def __init__(self, waited_s: list[float]) -> None:
        self.waited_s = waited_s

    def is_alive(self) -> bool:
        return True

    def join(self, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)

    def monotonic(self) -> float:
        """Return the time, which passes only while somebody waits for a thread."""
        return sum(self.waited_s)

    perf_counter = monotonic


def test_close_waits_for_all_threads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryBackend()
    with workers(backend) as storage:
        waited_s: list[float] = []
        stuck = StuckThread(waited_s)
        with monkeypatch.context() as patched:
            patched.setattr(storage, "_threads", [stuck] * 3)
            patched.setattr(workers_module, "time", stuck)
            assert not storage.close(timeout_s=3.0)
            assert waited_s == [3.0, 0.0, 0.0]
        assert not backend.closed


def test_races_leak_nothing() -> None:
    """Ten thousand operations on real threads, some cancelled, some already expired."""
    rng = random.Random(1)
    backend = MemoryBackend()
    with workers(backend, max_bytes_in_flight=400) as storage:
        seen: dict[StorageOpId, Completion] = {}
        submitted = []
        for _ in range(10_000):
            count = rng.randrange(4)
            keys = rng.sample(KEYS, count)
            timeout_s = rng.choice([-1.0, LONG_S])
            match rng.randrange(4):
                case 0:
                    blocks = [[key] for key in keys]
                    submitted.append(storage.store(keys, blocks, timeout_s=timeout_s))
                case 1:
                    into = [[bytearray(32)] for _ in keys]
                    submitted.append(storage.load(keys, into, timeout_s=timeout_s))
                case 2:
                    submitted.append(storage.delete(keys, timeout_s=timeout_s))
                case _:
                    submitted.append(storage.lookup(keys, timeout_s=timeout_s))
            if rng.randrange(3) == 0:
                storage.cancel(rng.choice(submitted[-8:]))
            if rng.randrange(4) == 0:
                for completion in storage.poll():
                    assert seen.setdefault(completion.operation, completion) is completion
        for operation in submitted:
            wait_ended(storage, operation)
        for completion in storage.poll():
            assert seen.setdefault(completion.operation, completion) is completion
        assert seen.keys() == set(submitted)
        assert storage.close(timeout_s=LONG_S)
        stats = storage.stats()
        assert stats.open_operations == stats.unfenced_operations == 0
        assert stats.store_bytes_in_flight == stats.load_bytes_in_flight == 0
        assert Status.CORRUPT not in stats.blocks and not stats.errors
