"""Scenarios of `kvcache`: what its threads do at once, and what must hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from radixkv.kvcache.storage import BackendError, BackendIOError, Status
from radixkv.kvcache.storage.errors import StorageClosedError

from .baton import active
from .explore import Scenario
from .primitives import now, sleep, together

SOON_S = 2.0  # virtual time, of which the fakes below use milliseconds


def key(number: int, bucket: int = 0) -> bytes:
    return bytes([bucket, number]) * 16


# The writer of the host tier


class Host:
    """The host tier: says which blocks are being written, and which were."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.writing: set[int] = set()
        self.done: list[int] = []

    def write(self, ids: np.ndarray, pools: Sequence[np.ndarray]) -> None:
        blocks = ids.tolist()
        assert not self.writing & set(blocks), f"{blocks} are written twice at once"
        self.begun += blocks
        self.writing.update(blocks)
        sleep(0.001)
        self.writing.difference_update(blocks)
        self.done += blocks


def background_writer(code: ModuleType) -> None:
    host = Host()
    writer = code.BackgroundWriter(host, 2)

    def submit(op_id: int, *blocks: int) -> None:
        for block in blocks:
            ids = np.array([block], np.int32)
            writer.submit(code.StagedBlocks(op_id, slice(0, 1), ids, [ids], 4))

    kept: list[int] = []

    def withdraw() -> None:
        submit(2, 4, 5, 6)
        withdrawn = [staged.destinations[0] for staged in writer.withdraw(2)]
        assert not set(withdrawn) & set(host.begun), "withdrawn, and written"
        kept.extend({4, 5, 6} - set(withdrawn))

    reports: list[Any] = []

    def collect() -> None:
        reports.extend(writer.reports())

    together(lambda: submit(1, 1, 2, 3), withdraw, collect)
    before = now()
    while len(reports) < 3 + len(kept):
        writer.wait(SOON_S)
        assert now() < before + SOON_S, "a report is lost"
        collect()
    assert writer.close(SOON_S), "a thread is still there"
    assert sorted(host.done) == sorted([1, 2, 3, *kept]), f"written: {host.done}"
    assert not any(report.error for report in reports), reports


def writer_closes(code: ModuleType) -> None:
    host = Host()
    writer = code.BackgroundWriter(host, 2)
    accepted: list[int] = []

    def submit() -> None:
        for block in (1, 2, 3):
            ids = np.array([block], np.int32)
            try:
                writer.submit(code.StagedBlocks(1, slice(0, 1), ids, [ids], 4))
            except RuntimeError:
                return
            accepted.append(block)

    together(submit, lambda: writer.close(SOON_S))
    assert writer.close(SOON_S), "a thread is still there"
    assert host.done == accepted or sorted(host.done) == accepted, f"{host.done}, not {accepted}"


# Workers


class SlowBackend:
    """Values in a dictionary. Each call takes virtual time."""

    def __init__(self, seconds: float) -> None:
        self.values: dict[bytes, bytes] = {}
        self.writing: set[int] = set()  # ids of the buffers that a load may write
        self.num_inside = self.most_inside = 0
        self.closed = 0
        self._seconds = seconds

    def _call(self) -> None:
        assert not self.closed, "called after close"
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        sleep(self._seconds)
        self.num_inside -= 1

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._call()
        return [each in self.values for each in keys]

    def get(self, name: bytes, into: Sequence[memoryview]) -> int | None:
        self.writing.add(id(into[-1].obj))
        self._call()
        value = self.values.get(name)
        place = 0
        for part in into if value is not None else ():
            part[:] = value[place : place + len(part)]  # type: ignore[index]
            place += len(part)
        self.writing.discard(id(into[-1].obj))
        return None if value is None else len(value)

    def put(self, name: bytes, parts: Sequence[memoryview]) -> None:
        self._call()
        self.values[name] = b"".join(parts)

    def delete(self, name: bytes) -> bool:
        self._call()
        return self.values.pop(name, None) is not None

    def touch(self, keys: Sequence[bytes]) -> None:
        self._call()

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        assert not self.num_inside, "closed while a thread is inside"
        self.closed += 1


def _until_done(workers: Any, operations: Sequence[int]) -> dict[int, Any]:
    ended: dict[int, Any] = {}
    before = now()
    while not ended.keys() >= set(operations):
        for completion in workers.poll():
            assert completion.operation not in ended, "it ended twice"
            ended[completion.operation] = completion
        sleep(0.002)
        assert now() < before + SOON_S, "an operation does not end"
    return ended


def _store_and_load(workers: Any, bucket: int) -> None:
    keys = [key(number, bucket) for number in range(3)]
    stored = workers.store(keys, [[bytes([number]) * 100] for number in range(3)], timeout_s=SOON_S)
    touched = workers.touch(keys, timeout_s=SOON_S)
    done = _until_done(workers, [stored, touched])
    assert done[stored].statuses == (Status.STORED,) * 3, done[stored]
    blocks = [bytearray(100) for _ in range(3)]
    loaded = workers.load(keys, [[block] for block in blocks], timeout_s=SOON_S)
    done = _until_done(workers, [loaded])
    assert done[loaded].statuses == (Status.LOADED,) * 3, done[loaded]
    assert [block[0] for block in blocks] == [0, 1, 2], blocks


def _look_up(workers: Any, expected: range) -> None:
    before = now()
    found = workers.lookup_prefix([key(number) for number in range(3)], timeout_s=SOON_S)
    assert now() < before + SOON_S / 2, "nobody was woken for a lookup"
    assert found in expected, found
    stats = workers.stats()
    assert 0 <= stats.unfenced_operations <= stats.open_operations + 1
    assert stats.stored_bytes == 100 * stats.blocks.get(Status.STORED, 0), stats
    workers.check()


def storage_workers(code: ModuleType, seconds: float = 0.003) -> None:
    backend = SlowBackend(seconds)
    workers = code.StorageWorkers(backend, num_threads=2, max_bytes_in_flight=1000)
    together(lambda: _store_and_load(workers, 0), lambda: _look_up(workers, range(4)))
    _look_up(workers, range(3, 4))
    workers.check()
    stats = workers.stats()
    assert stats.store_bytes_in_flight == stats.load_bytes_in_flight == 0, stats
    assert stats.loaded_bytes == 300, stats
    assert workers.close(timeout_s=SOON_S), "a thread is still there"
    assert backend.closed == 1


def storage_workers_fast(table: ModuleType, code: ModuleType) -> None:
    storage_workers(code, seconds=0.0)


def storage_workers_slow(table: ModuleType, code: ModuleType) -> None:
    storage_workers(code, seconds=0.003)


def storage_looked_up_at_once(table: ModuleType, code: ModuleType) -> None:
    """Each of the threads that wait at the same time is woken for its own lookup."""
    workers = code.StorageWorkers(SlowBackend(0.003), num_threads=2, max_bytes_in_flight=1000)
    together(*[lambda: _look_up(workers, range(1))] * 3)
    assert workers.close(timeout_s=SOON_S), "a thread is still there"


def storage_cancels(table: ModuleType, code: ModuleType) -> None:
    backend = SlowBackend(0.003)
    workers = code.StorageWorkers(backend, num_threads=2, max_bytes_in_flight=1000)
    blocks = [bytearray(100) for _ in range(4)]
    loaded = workers.load(
        [key(number) for number in range(4)], [[block] for block in blocks], timeout_s=SOON_S
    )
    ended: list[int] = []

    def cancel() -> None:
        sleep(0.004)
        workers.cancel(loaded)
        while not workers.fenced(loaded):
            sleep(0.001)
            assert now() < 1_000 + SOON_S
        assert not backend.writing & {id(block) for block in blocks}, "fenced, but written"

    def delete() -> None:
        deleted = workers.delete([key(9), key(8)], timeout_s=SOON_S)
        _until_done(workers, [deleted, loaded])
        ended.append(deleted)

    together(cancel, delete)
    workers.check()
    assert workers.stats().unfenced_operations == 0
    assert workers.close(timeout_s=SOON_S)


def storage_closes(table: ModuleType, code: ModuleType) -> None:
    backend = SlowBackend(0.003)
    workers = code.StorageWorkers(backend, num_threads=2, max_bytes_in_flight=1000)
    operations: list[int] = []

    def submit() -> None:
        for number in range(3):
            try:
                operations.append(
                    workers.store([key(number)], [[bytes(100)]], timeout_s=SOON_S),
                )
            except StorageClosedError:
                return

    def look_up() -> None:
        before = now()
        try:
            workers.lookup_prefix([key(1)], timeout_s=SOON_S)
        except StorageClosedError:
            return
        assert now() < before + SOON_S / 2, "a lookup was not woken by close"

    together(submit, look_up, lambda: workers.close(timeout_s=SOON_S))
    assert workers.close(timeout_s=SOON_S), "a thread is still there"
    assert backend.closed == 1
    completions = [completion.operation for completion in workers.poll()]
    assert sorted(completions) == sorted(operations), f"{completions}, not {operations}"
    stats = workers.stats()
    assert stats.open_operations == stats.store_bytes_in_flight == 0, stats


def storage_ends_at_once(table: ModuleType, code: ModuleType) -> None:
    """Operations end, are cancelled and run into their deadlines at the same time."""
    backend = SlowBackend(0.004)
    workers = code.StorageWorkers(backend, num_threads=2, max_bytes_in_flight=1000)
    block = bytearray(100)
    loaded = workers.load([key(1)], [[block]], timeout_s=0.004)
    deleted = workers.delete([key(2)], timeout_s=SOON_S)

    def look_up() -> None:
        assert workers.lookup_prefix([key(number) for number in range(2)], timeout_s=0.004) == 0

    def cancel() -> None:
        sleep(0.004)
        workers.cancel(deleted)

    def poll() -> None:
        sleep(0.004)
        _until_done(workers, [loaded, deleted])

    together(look_up, cancel, poll)
    assert workers.close(timeout_s=SOON_S)
    workers.check()
    stats = workers.stats()
    assert stats.open_operations == stats.unfenced_operations == 0, stats
    assert stats.load_bytes_in_flight == stats.store_bytes_in_flight == 0, stats
    assert stats.late_blocks <= 4, stats


def storage_stuck(table: ModuleType, code: ModuleType) -> None:
    """A call of the backend takes long; the next poll lets another thread go on."""
    backend = SlowBackend(0.0)
    workers = code.StorageWorkers(backend, num_threads=2, max_bytes_in_flight=1000)
    backend._seconds = 1.0
    stuck = workers.store([key(1)], [[bytes(100)]], timeout_s=SOON_S)
    sleep(0.01)
    backend._seconds = 0.0
    quick = workers.store([key(2)], [[bytes(100)]], timeout_s=SOON_S)
    before = now()
    done = _until_done(workers, [quick])
    assert now() < before + 0.5, "no thread went on"
    sleep(1.0)
    _until_done(workers, [] if stuck in done else [stuck])
    assert workers.close(timeout_s=SOON_S)


def storage_closes_stuck(table: ModuleType, code: ModuleType) -> None:
    """It is closed while one thread is stuck in the backend, and the other one is about to end."""
    backend = SlowBackend(1.0)
    workers = code.StorageWorkers(backend, num_threads=2, max_bytes_in_flight=1000)
    workers.store([key(1)], [[bytes(100)]], timeout_s=SOON_S)
    sleep(0.01)
    backend._seconds = 0.0005
    workers.store([key(2)], [[bytes(100)]], timeout_s=SOON_S)
    workers.poll()
    sleep(0.0003)
    assert workers.close(timeout_s=SOON_S), "a thread is still there"


def storage_errors(table: ModuleType, code: Any) -> None:
    """Both threads meet errors of their own, and each error is counted."""
    num_left = [4]

    class FailingTable(table.OperationTable):  # type: ignore[misc, name-defined]
        def take(self) -> Any:
            if num_left[0]:
                num_left[0] -= 1
                raise MemoryError
            return super().take()

    code.OperationTable = FailingTable
    workers = code.StorageWorkers(SlowBackend(0.0), num_threads=2, max_bytes_in_flight=1000)
    _until_done(workers, [workers.delete([key(1)], timeout_s=SOON_S)])
    assert workers.close(timeout_s=SOON_S), "a thread is still there"
    assert workers.stats().errors == {"MemoryError": 4}, workers.stats().errors


def storage_parallel(table: ModuleType, code: ModuleType) -> None:
    """A slow backend is called by both threads."""
    backend = SlowBackend(0.003)
    workers = code.StorageWorkers(backend, num_threads=2, max_bytes_in_flight=1000)
    workers.delete([key(number) for number in range(16)], timeout_s=SOON_S)
    sleep(0.5)
    assert [completion.statuses for completion in workers.poll()] == [(Status.MISSING,) * 16]
    assert backend.most_inside == 2, "the threads took turns"
    assert workers.close(timeout_s=SOON_S)


# Files


class Files:
    """A file system in a dictionary; each call is a point."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.open: dict[int, str] = {}
        self.folders: list[str] = []
        self.fail_unlink = 0
        self._number = 0

    def make_directory(self, path: str) -> None:
        active().operation()
        self.folders.append(path)

    def lock(self, path: str) -> int:
        return 0

    def directories(self, path: str) -> list[str]:
        return [folder.rsplit("/", 1)[-1] for folder in self.folders]

    def scan(self, path: str) -> Iterator[tuple[str, int, int]]:
        for name, value in self.files.items():
            if name.startswith(path):
                yield name.rsplit("/", 1)[-1], len(value), 1

    def create(self, path: str) -> int:
        active().operation()
        assert path not in self.files, "two threads write one file"
        self._number += 1
        self.files[path] = b""
        self.open[self._number] = path
        return self._number

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        active().operation()
        data = b"".join(parts)
        self.files[self.open[file]] += data
        return len(data)

    def read(self, path: str, into: Sequence[memoryview]) -> int:
        active().operation()
        if path not in self.files:
            raise FileNotFoundError
        for part in into[:1]:
            part[:] = self.files[path]
        return len(self.files[path])

    def stamp(self, file: int | str, time_ns: int) -> None:
        active().operation()

    def sync(self, file: int) -> None:
        active().operation()

    def sync_directory(self, path: str) -> None:
        active().operation()

    def close(self, file: int) -> None:
        self.open.pop(file, None)

    def rename(self, old: str, new: str) -> None:
        active().operation()
        self.files[new] = self.files.pop(old)

    def unlink(self, path: str) -> None:
        active().operation()
        if self.fail_unlink:
            self.fail_unlink -= 1
            raise OSError(5, "broken")
        if path not in self.files:
            raise FileNotFoundError
        del self.files[path]


VALUE = 10


def _check_files(backend: Any, files: Files) -> None:
    """What must hold when no thread is in the backend."""
    backend.check()
    indexed = {each.key.hex(): each.num_bytes for each in backend.list_values()}
    there = {path.rsplit("/", 1)[-1]: len(value) for path, value in files.files.items()}
    assert indexed == there, f"indexed {sorted(indexed)}, in files {sorted(there)}"


def _put(backend: Any, *keys: bytes) -> None:
    for each in keys:
        backend.put(each, [memoryview(bytes(VALUE))])


def _backend(code: ModuleType, num_values: int, sync: str = "none") -> tuple[Any, Files]:
    files = Files()
    backend = code.FileBackend("/d", max_bytes=num_values * VALUE, files=files, sync=sync)
    return backend, files


def files_of_one_key(index: ModuleType, code: ModuleType) -> None:
    backend, files = _backend(code, 4, "data")
    _put(backend, key(0))

    def read() -> None:
        into = bytearray(VALUE)
        assert backend.get(key(0), [memoryview(into)]) in (None, VALUE)
        if backend.delete(key(1)):
            assert backend.contains([key(0)]) in ([True], [False])

    together(lambda: _put(backend, key(0), key(1)), lambda: backend.delete(key(0)), read)
    _check_files(backend, files)


def files_evicted(index: ModuleType, code: ModuleType) -> None:
    backend, files = _backend(code, 4)
    _put(backend, key(0), key(1))

    def use() -> None:
        backend.touch([key(0)])
        backend.get(key(1), [memoryview(bytearray(VALUE))])

    together(
        lambda: _put(backend, key(2), key(3), key(0)),
        lambda: _put(backend, key(4), key(5)),
        use,
    )
    _check_files(backend, files)
    num_there = backend.stats()["values"]
    evicted = backend.stats()["evicted_values"]
    assert 6 - num_there <= evicted <= 7 - num_there, f"{num_there} there, {evicted} evicted"


def files_lost(index: ModuleType, code: ModuleType) -> None:
    """Somebody else removed a file; it is read, and written again at the same time."""
    backend, files = _backend(code, 4)
    _put(backend, key(0))
    files.files.clear()
    into = memoryview(bytearray(VALUE))
    together(lambda: _put(backend, key(0)), lambda: backend.get(key(0), [into]))
    _check_files(backend, files)
    assert backend.contains([key(0)]) == [True], "put, and gone"


def files_broken(index: ModuleType, code: ModuleType) -> None:
    """A file cannot be removed."""
    backend, files = _backend(code, 4)
    _put(backend, key(0))
    files.fail_unlink = 1

    def delete() -> None:
        try:
            backend.delete(key(0))
        except BackendIOError:
            assert backend.contains([key(0)]) == [True], "not removed, and gone"

    together(delete, lambda: _put(backend, key(1)))
    _check_files(backend, files)


def files_small(index: ModuleType, code: ModuleType) -> None:
    """There is room for one value."""
    backend, files = _backend(code, 1)
    _put(backend, key(0))
    together(lambda: _put(backend, key(1)), lambda: backend.delete(key(0)))
    _check_files(backend, files)


def lru_index(code: ModuleType) -> None:
    index = code.LruIndex(1000, lambda: 1)
    stamps: list[int] = []
    seen: list[list[bool]] = []

    def write(*numbers: int) -> None:
        for number in numbers:
            index.reserve(VALUE)
            stamps.append(index.next_stamp_ns())
            index.commit(key(number), VALUE)
            index.use(key(number))

    def remove() -> None:
        index.forget(key(2))
        index.take(key(3))
        index.put_back(key(3))
        index.reserve(VALUE)
        index.give_back(VALUE)

    def look() -> None:
        seen.append(index.contains([key(0), key(1)]))
        assert all(value.num_bytes == VALUE for value in index.sizes())
        index.coldest_over_budget()

    write(2)
    together(lambda: write(0, 1), lambda: write(3), remove, look)
    index.check()
    assert [False, True] not in seen, "no moment had the second key alone"
    assert len(set(stamps)) == 4, f"stamps repeat: {stamps}"


def lru_index_of_one(code: ModuleType) -> None:
    """Threads use, write and evict one value."""
    index = code.LruIndex(VALUE, lambda: 1)
    index.reserve(VALUE)
    index.commit(key(0), VALUE)
    stamps: list[int | None] = []

    def evict() -> None:
        index.reserve(VALUE)
        while (coldest := index.coldest_over_budget()) is not None:
            index.take(coldest)
            index.removed(coldest)
        index.commit(key(1), VALUE)

    def use() -> None:
        stamps.append(index.use(key(0), is_due=True))

    def write() -> None:
        index.reserve(VALUE)
        index.commit(key(0), VALUE)
        index.forget(key(0))

    together(use, evict, use, write)
    index.check()
    known = [stamp for stamp in stamps if stamp is not None]
    assert len(set(known)) == len(known), f"stamps repeat: {stamps}"


# Servers


def request_counts(code: ModuleType) -> None:
    counts = code.RequestCounts()

    def ask(fails: bool) -> None:
        for _ in range(2):
            try:
                with counts.request():
                    if fails:
                        raise BackendError("no")
            except BackendError:
                pass

    def read() -> None:
        read = counts.read()
        assert read["failed_requests"] <= read["requests"], read

    together(lambda: ask(True), lambda: ask(True), read)
    assert counts.read() == {"requests": 4, "failed_requests": 4}, counts.read()


class Client:
    """A process of Mooncake's client, for one call at a time."""

    started: ClassVar[list[Client]]

    def __init__(self, local_host: str, master: str) -> None:
        self.alive = True
        self.is_busy = False
        self.started.append(self)

    def wait_connected(self, timeout_s: float) -> None:
        assert self.alive, "it was killed"
        assert not self.is_busy, "two calls use one client"
        self.is_busy = True
        active().operation()

    def write(self, parts: Sequence[memoryview]) -> int:
        return 1

    def ask(self, do: str, name: str, num_bytes: int, timeout_s: float) -> dict[str, Any]:
        sleep(0.001)
        assert self.alive, "killed in a call"
        self.is_busy = False
        return {"code": 0, "found": "1"}

    def kill(self) -> None:
        self.alive = False


def _mooncake(code: Any) -> tuple[Any, type[Client]]:
    class Started(Client):
        started: ClassVar[list[Client]] = []

    code.ClientProcess = Started
    code._check_installed = lambda: None
    code.MooncakeBackend._start = lambda self, doing: Started("", "")
    return code.MooncakeBackend("host"), Started


def mooncake(remote: ModuleType, code: ModuleType) -> None:
    backend, clients = _mooncake(code)

    def call() -> None:
        for number in range(2):
            backend.contains([key(number)])

    together(call, call)
    assert len(clients.started) <= 2, "an idle client was not used again"
    assert backend.stats()["requests"] == 4


def mooncake_closes(remote: ModuleType, code: ModuleType) -> None:
    backend, clients = _mooncake(code)
    backend.contains([key(0)])

    def close() -> None:
        sleep(0.001)  # until the calls are about to end
        backend.close()

    together(*[lambda: backend.contains([key(0)])] * 3, close)
    assert not any(client.alive for client in clients.started), "a process outlives close"


_WORKERS = ("kvcache.storage.operation_table", "kvcache.storage.workers")
_FILES = ("kvcache.storage.files.lru_index", "kvcache.storage.files.backend")

SCENARIOS = [
    *(
        Scenario(["kvcache.copies.background_writer"], each)
        for each in (background_writer, writer_closes)
    ),
    *(
        Scenario(_WORKERS, each)
        for each in (
            storage_workers_slow,
            storage_workers_fast,
            storage_looked_up_at_once,
            storage_cancels,
            storage_closes,
            storage_ends_at_once,
            storage_stuck,
            storage_closes_stuck,
            storage_errors,
            storage_parallel,
        )
    ),
    *(
        Scenario(_FILES, each)
        for each in (files_of_one_key, files_evicted, files_lost, files_broken, files_small)
    ),
    *(Scenario(_FILES[:1], each) for each in (lru_index, lru_index_of_one)),
    Scenario(["kvcache.storage.remote"], request_counts),
    *(
        Scenario(["kvcache.storage.remote", "kvcache.storage.mooncake.backend"], each)
        for each in (mooncake, mooncake_closes)
    ),
]
