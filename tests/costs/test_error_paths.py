"""Budgets and locks of storage are given back, whatever is raised, wherever it is raised."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from radixkv.kvcache.storage import Status, checksummed, operation_table, workers
from radixkv.kvcache.storage.errors import BackendIOError
from radixkv.kvcache.storage.files import backend as files_backend
from radixkv.kvcache.storage.files import lru_index, system_calls
from radixkv.kvcache.storage.files.backend import FileBackend

from .injection import (
    ALL_ERRORS,
    ERRORS,
    PAIRS_OF_THREADS,
    injections,
    open_descriptors,
    second_injections,
)
from .planting import Bug, bug, planted, planted_source
from .unthreaded import Unthreaded

KEYS = [bytes([number]) * 32 for number in range(6)]
VALUE = [memoryview(b"x" * 40), memoryview(b"y" * 60)]
_numbers = count()

BACKEND, INDEX = "kvcache.storage.files.backend", "kvcache.storage.files.lru_index"
SYSTEM, TABLE = "kvcache.storage.files.system_calls", "kvcache.storage.operation_table"
FILE_BUGS = {
    "put": (
        bug(
            "a put gives its bytes back after an error of the disk only",
            BACKEND,
            (
                "            except BaseException:\n"
                "                self._index.give_back(num_bytes)\n"
                "                raise\n\n    def delete",
                "            except BackendIOError:\n"
                "                self._index.give_back(num_bytes)\n"
                "                raise\n\n    def delete",
            ),
        ),
        bug(
            "a file that is written in part stays open",
            BACKEND,
            ("            finally:\n                self._files.close(file)\n",
             "            except OSError:\n                self._files.close(file)\n"
             "                raise\n            self._files.close(file)\n"),
        ),
        bug(
            "a directory that is not synced stays open",
            SYSTEM,
            ("            os.fsync(directory)\n        finally:\n            os.close(directory)\n",
             "            os.fsync(directory)\n        finally:\n            pass\n"
             "        os.close(directory)\n"),
        ),
        bug(
            "the stripe of a name is taken without with",
            BACKEND,
            ("        with self._stripe(key):\n            try:\n"
             "                self._files.rename(temporary, path)\n",
             "        self._stripe(key).acquire()\n        if True:\n            try:\n"
             "                self._files.rename(temporary, path)\n"),
            ("            self._index.commit(key, num_bytes)\n",
             "            self._index.commit(key, num_bytes)\n"
             "        self._stripe(key).release()\n"),
        ),
    ),
    "put and evict": (
        bug(
            "an eviction puts back after an error of the disk only",
            BACKEND,
            ("            except BaseException:\n                self._index.put_back",
             "            except OSError:\n                self._index.put_back"),
        ),
    ),
    "get": (
        bug(
            "a file that cannot be read stays open",
            SYSTEM,
            ("            return _read_rest(file, into, done)\n        finally:\n"
             "            os.close(file)\n",
             "            return _read_rest(file, into, done)\n        except OSError:\n"
             "            os.close(file)\n            raise\n"),
        ),
        bug(
            "the lock of the index is taken without with",
            INDEX,
            ("        with self._lock:\n            value = self._values.get(key)\n",
             "        self._lock.acquire()\n        if True:\n"
             "            value = self._values.get(key)\n"),
            ("            if value is None:\n                return None\n",
             "            self._lock.release() if value is None else None\n"
             "            if value is None:\n                return None\n"),
            ("                return 0\n", "                return self._lock.release() or 0\n"),
            ("            return stamp_ns\n",
             "            return self._lock.release() or stamp_ns\n"),
        ),
    ),
    "delete": (
        bug(
            "a deletion puts back after an error of the disk only",
            BACKEND,
            ("            except BaseException:\n                self._index.put_back",
             "            except OSError:\n                self._index.put_back"),
        ),
    ),
}  # fmt: skip
STORAGE_BUGS = {
    ("store", None): (
        bug(
            "bytes are in flight before there is an operation",
            TABLE,
            ("            end_block += 1\n        return",
             "            end_block += 1\n        self.bytes_in_flight[kind] = used\n"
             "        return"),
        ),
        bug(
            "the lock of storage is taken without with",
            "kvcache.storage.workers",
            ("        with self._lock:\n            if self._closed:\n                raise",
             "        self._lock.acquire()\n        if True:\n            if self._closed:\n"
             "                raise"),
            ("                self._submitted.notify()\n            return operation\n",
             "                self._submitted.notify()\n            self._lock.release()\n"
             "            return operation\n"),
        ),
    ),
    ("load", "work"): (
        bug(
            "a thread that fails keeps its task",
            "kvcache.storage.workers",
            ("        except BaseException as error:  # of ours",
             "        except TypeError as error:  # of ours"),
        ),
        bug(
            "a thread does not outlive an error",
            "kvcache.storage.workers",
            ("            except Exception as error:\n                with self._lock:\n",
             "            except TypeError as error:\n                with self._lock:\n"),
        ),
        bug(
            "a task is taken from the queue before it is made",
            TABLE,
            ("        stop = first + num_blocks\n",
             "        stop = first + num_blocks\n        operation.next_block = stop\n"),
        ),
    ),
    ("store", "cancel"): (
        bug(
            "bytes are given back before an operation has its end",
            TABLE,
            ("        statuses = tuple([",
             "        self.bytes_in_flight[operation.kind] -= not_taken\n"
             "        statuses = tuple(["),
            ("        operation.next_block = operation.end_block\n"
             "        self.bytes_in_flight[operation.kind] -= not_taken\n",
             "        operation.next_block = operation.end_block\n"),
        ),
    ),
    ("store", "poll"): (
        bug(
            "the lock is taken without with by poll",
            "kvcache.storage.workers",
            ("        with self._lock:\n            self._table.expire(now)\n",
             "        self._lock.acquire()\n        if True:\n"
             "            self._table.expire(now)\n"),
            ("            return self._table.drain()\n",
             "            drained = self._table.drain()\n            self._lock.release()\n"
             "            return drained\n"),
        ),
    ),
}  # fmt: skip
LOOKUP_BUG = bug(
    "nobody claims a lookup that was interrupted",
    "kvcache.storage.workers",
    ("                give_back(partial(self._table.claim, operation))\n", ""),
)
ALL_BUGS: list[Bug] = [LOOKUP_BUG, *(each for bugs in FILE_BUGS.values() for each in bugs)]
ALL_BUGS += [each for bugs in STORAGE_BUGS.values() for each in bugs]

FILE_CALLS: dict[str, Callable[[FileBackend], Any]] = {
    "put": lambda backend: backend.put(KEYS[4], VALUE),
    "put again": lambda backend: backend.put(KEYS[0], VALUE),
    "put and evict": lambda backend: put_both(backend),
    "get": lambda backend: backend.get(KEYS[0], [memoryview(bytearray(100))]),
    "get what is lost": lambda backend: get_lost(backend),
    "delete": lambda backend: backend.delete(KEYS[1]),
    "touch": lambda backend: backend.touch(KEYS[:3]),
    "contains": lambda backend: backend.contains(KEYS),
    "list_values": lambda backend: list(backend.list_values()),
}


def put_both(backend: FileBackend) -> None:
    for key in KEYS[4:]:
        backend.put(key, VALUE)


def get_lost(backend: FileBackend) -> None:
    with suppress(FileNotFoundError):
        os.unlink(backend._path(KEYS[0]))
    assert backend.get(KEYS[0], [memoryview(bytearray(100))]) is None


def file_backend(directory: Path) -> FileBackend:
    backend = FileBackend(directory, max_bytes=450, sync="data")
    for key in KEYS[:4]:
        backend.put(key, VALUE)
    return backend


def check_file_backend(backend: FileBackend) -> None:
    """Locks are free, the budget is that of the values, and it works."""
    locks = [*backend._stripes, backend._index._lock]
    assert not any(lock.locked() for lock in locks), "a lock is held"
    backend.check()
    for key in KEYS:
        found = bytearray(100)
        if backend.contains([key])[0]:
            assert backend.get(key, [memoryview(found)]) in (100, None)
            assert found in (b"x" * 40 + b"y" * 60, bytes(100))
    for key in KEYS:
        backend.put(key, VALUE)
    assert sum(backend.contains(KEYS)) == 4
    backend.check()


def inject_into_files(
    tmp_path: Path, call: Callable[[FileBackend], Any], after: Sequence[str] = ()
) -> None:
    errors = ALL_ERRORS if after else ERRORS
    modules = files_backend, lru_index, system_calls
    for injector in injections(*modules, errors=errors, after=after, once_per_place=bool(after)):
        before = open_descriptors()
        backend = file_backend(tmp_path / str(next(_numbers)))
        try:
            with suppress(*([BackendIOError] if after else [])):  # of an OSError
                injector.call(partial(call, backend))
            check_file_backend(backend)
        except (AssertionError, BackendIOError) as error:
            raise AssertionError(str(injector)) from error
        finally:
            with suppress(OSError):
                backend.close()
        assert open_descriptors() <= before, f"a file stays open after {injector.raised_in}"


@pytest.mark.parametrize("name", FILE_CALLS)
def test_the_file_backend_gives_back(tmp_path: Path, name: str) -> None:
    inject_into_files(tmp_path, FILE_CALLS[name])


def test_a_value_whose_name_is_not_durable_is_no_more_found(tmp_path: Path) -> None:
    backend = file_backend(tmp_path)
    with (
        patch.object(backend._files, "sync_directory", side_effect=OSError(5, "")),
        pytest.raises(BackendIOError),
    ):
        backend.put(KEYS[0], VALUE)
    assert backend.contains(KEYS[:1]) == [False]
    assert (backend.stats()["values"], backend.stats()["bytes"]) == (3, 300)
    check_file_backend(backend)
    backend.close()


FILE_CLEANING = ("close", "unlink", "give_back", "removed", "put_back", "forget", "take")
CLEANING_BUGS = (
    bug(
        "what is taken is put back only after an error of the file",
        BACKEND,
        ("            try:\n                num_bytes = self._index.take(key)  # forget",
         "            num_bytes = self._index.take(key)\n            try:\n                #"),
    ),
    bug(
        "what is removed is put back",
        INDEX,
        ("self._removing.pop(key, 0)", "self._removing.get(key, 0)"),
    ),
)  # fmt: skip


@pytest.mark.parametrize("bug", CLEANING_BUGS, ids=str)
def test_what_is_left_if_cleaning_raises_is_found(tmp_path: Path, bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        inject_into_files(tmp_path, FILE_CALLS["delete"], FILE_CLEANING)


@pytest.mark.parametrize("name", FILE_CALLS)
def test_the_file_backend_gives_back_if_cleaning_raises(tmp_path: Path, name: str) -> None:
    inject_into_files(tmp_path, FILE_CALLS[name], FILE_CLEANING)


def test_a_directory_that_was_not_opened_is_free(tmp_path: Path) -> None:
    file_backend(tmp_path / "files").close()
    for injector in injections(files_backend, lru_index, system_calls):
        before = open_descriptors()
        opened: list[FileBackend] = []

        def open_one(opened: list[FileBackend] = opened) -> None:
            opened.append(FileBackend(tmp_path / "files", max_bytes=450, sync="data"))

        injector.call(open_one)
        for backend in opened:
            backend.close()
        left = {each for each in open_descriptors() - before if not each[1].startswith("socket:")}
        assert not left, f"a file stays open after {injector.raised_in}"  # sockets are of others
        FileBackend(tmp_path / "files", max_bytes=450).close()


def stored(number: int) -> list[Any]:
    return [memoryview(bytes([number]) * 100)]


STORAGE_CALLS: dict[str, Callable[[Unthreaded], Any]] = {
    "store": lambda s: s.store(KEYS[:3], [stored(n) for n in range(3)], timeout_s=9.0),
    "load": lambda s: s.load(KEYS[:2], [[bytearray(100)] for _ in range(2)], timeout_s=9.0),
    "lookup": lambda s: s.lookup(KEYS, timeout_s=9.0),
    "delete": lambda s: s.delete(KEYS[:1], timeout_s=9.0),
    "touch": lambda s: s.touch(KEYS[:2], timeout_s=9.0),
}
FOLLOWING: dict[str, Callable[[Unthreaded, Any], Any]] = {
    "work": lambda s, operation: s.work(),
    "cancel": lambda s, operation: s.cancel(operation),
    "poll": lambda s, operation: s.poll(),
    "expire": lambda s, operation: s._table.expire(1e18),
    "stats": lambda s, operation: s.stats(),
}


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def check_storage(storage: Unthreaded) -> None:
    """The lock is free, all operations end, and nothing is in flight then."""
    assert not storage._lock.locked(), "the lock is held"
    storage.check()
    storage.work()
    table = storage._table
    table.expire(1e18)
    storage.poll()
    storage.check()
    assert not table._known, f"{len(table._known)} operations never end"
    assert not any(table.bytes_in_flight.values()), dict(table.bytes_in_flight)
    assert not any(table.running.values()) and not table.num_running
    operation = storage.store(KEYS[4:], [stored(4), stored(5)], timeout_s=9.0)
    storage.work()
    [done] = storage.poll()
    assert done.operation == operation
    assert set(done.statuses) <= {Status.STORED, Status.EXISTS}


def inject_into_storage(
    submit: Callable[[Unthreaded], Any], *then: str, after: Sequence[str] = ()
) -> None:
    modules = workers, operation_table, checksummed
    injectors = injections(*modules)
    if after:
        injectors = second_injections(*modules, after=after, pairs=PAIRS_OF_THREADS)
    for injector in injectors:
        storage = Unthreaded()
        operation = submit(storage) if then else None
        with quiet():
            try:
                if then:
                    injector.call(partial(FOLLOWING[then[0]], storage, operation))
                    is_begun = not injector.raised_in.startswith("StorageWorkers._live,")
                    is_outlived = issubclass(injector.error, Exception)
                    if then[0] == "work" and is_begun and is_outlived:
                        assert storage.has_ended, "the thread has died"
                else:
                    injector.call(partial(submit, storage))
                check_storage(storage)
            except AssertionError as error:
                raise AssertionError(str(injector)) from error


@pytest.mark.parametrize("name", STORAGE_CALLS)
def test_an_operation_that_is_not_submitted_holds_nothing(name: str) -> None:
    inject_into_storage(STORAGE_CALLS[name])


def interrupt_a_lookup() -> None:
    storage = Unthreaded()
    with (
        patch.object(storage._reported, "wait_for", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        storage.lookup_prefix(KEYS, timeout_s=9.0)
    check_storage(storage)


def test_an_interrupted_lookup_is_forgotten() -> None:
    interrupt_a_lookup()
    with planted(LOOKUP_BUG), pytest.raises(AssertionError, match="operations never end"):
        interrupt_a_lookup()


@pytest.mark.parametrize("name", STORAGE_CALLS)
def test_an_operation_ends_if_cleaning_raises(name: str) -> None:
    after = ("report", "_end", "notify_all", "delete")
    inject_into_storage(STORAGE_CALLS[name], "work", after=after)


@pytest.mark.parametrize("then", FOLLOWING)
@pytest.mark.parametrize("name", STORAGE_CALLS)
def test_an_operation_ends_and_gives_back(name: str, then: str) -> None:
    inject_into_storage(STORAGE_CALLS[name], then)


@pytest.mark.parametrize(
    ("name", "bug"), [(name, each) for name, bugs in FILE_BUGS.items() for each in bugs], ids=str
)
def test_what_a_file_backend_keeps_is_found(tmp_path: Path, name: str, bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        inject_into_files(tmp_path, FILE_CALLS[name])


@pytest.mark.parametrize(
    ("case", "bug"), [(case, each) for case, bugs in STORAGE_BUGS.items() for each in bugs], ids=str
)
def test_what_storage_keeps_is_found(case: tuple[str, str | None], bug: Bug) -> None:
    submit, then = case
    with planted(bug), pytest.raises(BaseException):  # noqa: B017
        inject_into_storage(STORAGE_CALLS[submit], *([then] if then else []))


def test_every_bug_fits() -> None:
    for each in (*ALL_BUGS, *CLEANING_BUGS):
        planted_source(each)
