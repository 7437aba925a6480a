"""The writer of the host tier reports each write once; threads that cannot start leave nothing."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from itertools import chain
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest

from radixkv.kvcache.copies import background_writer
from radixkv.kvcache.copies.background_writer import BackgroundWriter, StagedBlocks, WriteReport
from radixkv.kvcache.copies.host_arrays import HostArrays
from radixkv.kvcache.ids import OpId
from radixkv.kvcache.storage import StorageWorkers, operation_table, workers
from radixkv.scheduler.serving.engine_thread import EngineThread

from .injection import (
    ALL_ERRORS,
    OF_THREADS,
    PAIRS_OF_THREADS,
    injections,
    second_injections,
)
from .planting import Bug, bug, planted, planted_source
from .unthreaded import Unthreaded as UnthreadedStorage

MODULE = "kvcache.copies.background_writer"
CALLER_BUG = bug(
    "a write is queued before its thread is told",
    MODULE,
    ("            self._changed.notify_all()  # first, so that an error leaves nothing queued\n"
     "            self._queue.append(staged)\n",
     "            self._queue.append(staged)\n            self._changed.notify_all()\n"),
)  # fmt: skip
THREAD_BUGS = (
    bug(
        "a thread does not outlive an error",
        MODULE,
        ("            except Exception:  # before", "            except TypeError:  # before"),
    ),
    bug(
        "a report that fails is lost",
        MODULE,
        (
            "                except Exception as failure:\n",
            "                except TypeError as failure:\n",
        ),
    ),
    bug(
        "a report is tried once",
        MODULE,
        ("            while not is_reported:  # else", "            for _ in range(1):  # else"),
    ),
)


CLOSE_BUG = bug(
    "a backend stays open if the end of the program cannot forget it",
    "kvcache.storage.workers",
    ("        give_back(partial(atexit.unregister, self.close), self._backend.close)\n",
     "        atexit.unregister(self.close)\n        self._backend.close()\n"),
)  # fmt: skip


class Host:
    """A host tier that keeps the ids of the blocks that were written."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def write(self, ids: Any, pools: Any) -> None:
        self.written += ids.tolist()


class Unthreaded(BackgroundWriter):
    """A writer whose thread's work is done when the test says so."""

    def __init__(self) -> None:
        self.host = Host()
        with patch.object(Thread, "start"):
            super().__init__(cast(HostArrays, self.host), 1)
        self._threads = []
        atexit.unregister(self.close)

    def work(self) -> None:
        """Write what is queued."""
        self._closed = True  # so that the thread's loop ends
        try:
            self._work()
        finally:
            self._closed = False


def staged(number: int) -> StagedBlocks:
    ids = np.array([number], np.int32)
    return StagedBlocks(OpId(number), slice(0, 1), ids, [ids], 4)  # type: ignore[list-item]


def check_writer(writer: Unthreaded, numbers: list[int]) -> None:
    """The lock is free, the writes with these numbers get one report each, and it works."""
    changed: Any = writer._changed
    assert not changed._is_owned(), "the lock is held"
    writer.submit(staged(9))
    writer.work()
    reports = writer.reports()
    assert [each.op_id for each in reports] == [*numbers, 9], reports
    assert all(each.error or each.op_id in writer.host.written for each in reports)
    assert reports[-1] == WriteReport(OpId(9), slice(0, 1), 4, "")


def inject_into_caller() -> None:
    for injector in injections(background_writer, errors=ALL_ERRORS):
        writer, numbers = Unthreaded(), [1, 2]
        for number in numbers:
            writer.submit(staged(number))

        def call(writer: Unthreaded = writer, numbers: list[int] = numbers) -> None:
            writer.submit(staged(3))
            numbers.append(3)
            for each in writer.withdraw(OpId(2)):
                numbers.remove(each.op_id)

        injector.call(call)
        check_writer(writer, numbers)


def inject_into_thread() -> None:
    for injector in chain(
        injections(background_writer, errors=OF_THREADS),
        second_injections(background_writer, after=["notify_all"], pairs=PAIRS_OF_THREADS),
    ):
        writer, numbers = Unthreaded(), [1, 2]
        for number in numbers:
            writer.submit(staged(number))
        injector.call(writer.work)
        has_begun = not injector.raised_in.startswith("BackgroundWriter._work,")
        assert not (writer._queue and has_begun), f"the thread has died in {injector.raised_in}"
        check_writer(writer, numbers)


def test_a_write_is_submitted_and_withdrawn_or_nothing_happens() -> None:
    inject_into_caller()


def test_a_thread_reports_each_write() -> None:
    inject_into_thread()


class Startable:
    """Stands for a thread, of which only some can be started.

    Attributes:
        room: how many can be started.
        started: those that have been started and not joined.
    """

    room = 1
    started: ClassVar[list[Startable]] = []

    def __init__(self, **options: object) -> None:
        del options

    def start(self) -> None:
        if len(self.started) == self.room:
            raise RuntimeError("can't start new thread")
        self.started.append(self)

    def is_alive(self) -> bool:
        return self in self.started

    def join(self, timeout_s: float) -> None:
        self.started.remove(self)


def fail_to_start(module: ModuleType, room: int, make: Callable[[], object]) -> None:
    with (
        patch.object(module, "Thread", Startable),
        patch.object(Startable, "room", room),
        patch.object(atexit, "register") as register,
        patch.object(atexit, "unregister") as unregister,
        pytest.raises(RuntimeError, match=r"^can't start new thread$"),
    ):
        make()
    assert not Startable.started, "a thread is not stopped"
    assert unregister.call_args.args == register.call_args.args[:1], "it is closed at the end"


@pytest.mark.parametrize("room", [0, 1])
def test_a_writer_that_lacks_a_thread_stops_the_others(room: int) -> None:
    host = cast(HostArrays, Host())
    fail_to_start(background_writer, room, lambda: BackgroundWriter(host, 2))


@pytest.mark.parametrize("room", [0, 1])
def test_storage_that_lacks_a_thread_stops_the_others_and_its_backend(room: int) -> None:
    backend = Mock()
    fail_to_start(workers, room, lambda: StorageWorkers(backend, max_bytes_in_flight=1))
    assert backend.close.call_count == 1


def test_an_engine_that_lacks_its_thread_is_closed() -> None:
    engine = Mock(has_work=False)
    fail_to_start(threading, 0, lambda: EngineThread(engine))
    assert engine.close.call_count == 1


def test_an_engine_whose_thread_has_started_in_an_interrupt_is_closed_by_it() -> None:
    engine, started, start = Mock(has_work=False), list[Thread](), Thread.start

    def interrupted(thread: Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with patch.object(Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
        EngineThread(engine)
    started[0].join(timeout=60.0)
    assert not started[0].is_alive()
    assert engine.close.call_count == 1


def test_a_request_of_which_an_observer_cannot_be_told_is_not_submitted() -> None:
    with patch.object(Thread, "start"), patch.object(atexit, "register"):
        thread = EngineThread(Mock(has_work=False))
    thread.observe(Mock())
    thread.observe(Mock(**{"request_submitted.side_effect": MemoryError}))
    with pytest.raises(MemoryError):
        thread.submit([Mock()])
    assert not thread._lock.locked()
    assert not thread._deliveries, "a request is kept that the engine never gets"
    assert thread._commands.empty()


def test_storage_closes_its_backend_once_whatever_is_raised() -> None:
    close_storage()


def test_a_backend_that_stays_open_is_found() -> None:
    with planted(CLOSE_BUG), pytest.raises(AssertionError):
        close_storage()


def close_storage() -> None:
    modules = workers, operation_table
    after = ("unregister", "cancel_all", "notify_all", "join", "_end")
    for injector in injections(*modules, errors=ALL_ERRORS, after=after):
        storage = UnthreadedStorage()
        backend = storage._backend = Mock()
        storage._threads = [Mock(is_alive=lambda: False)]
        injector.call(storage.close)
        assert not storage._lock.locked(), f"the lock is held: {injector}"
        assert storage.close()
        assert backend.close.call_count == 1, f"the backend stays open: {injector}"


def test_what_a_caller_does_by_half_is_found() -> None:
    with planted(CALLER_BUG), pytest.raises(AssertionError):
        inject_into_caller()


@pytest.mark.parametrize("bug", THREAD_BUGS, ids=str)
def test_what_a_thread_loses_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        inject_into_thread()


def test_every_bug_fits() -> None:
    for each in (CALLER_BUG, *THREAD_BUGS, CLOSE_BUG):
        planted_source(each)
