"""Object storage that refuses, fails or never answers; lists and requirements."""

from __future__ import annotations

import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore, S3Store

from radixkv.kvcache.storage import BackendError, Status, StorageWorkers
from radixkv.kvcache.storage.errors import (
    BackendRefusedError,
    MissingPackageError,
    StorageUrlError,
)
from radixkv.kvcache.storage.object_storage.backend import (
    ObjectStorageBackend,
    memory_store,
    s3_store,
)

from ...ports import reserved_port
from .conformance import KEYS, MIB, check_namespaces, get, keys_of, put
from .fake_s3 import FakeS3

LONG_S = 30.0
DOING = ["looking up", "looking up", "reading", "writing", "looking up", "listing"]


def patient(prefix: str = "") -> ObjectStorageBackend:
    """Return a backend with time limits that are never reached."""
    return ObjectStorageBackend(
        s3_store("bucket", timeout_s=LONG_S, connect_timeout_s=LONG_S), prefix=prefix
    )


def every_call(backend: ObjectStorageBackend) -> Iterator[BackendError]:
    """Yield the error of each method while the server is broken."""
    calls: list[Callable[[], object]] = [
        lambda: backend.contains(KEYS[:1]),
        lambda: backend.contains(KEYS),
        lambda: get(backend, KEYS[0], 3),
        lambda: put(backend, KEYS[0], b"abc"),
        lambda: backend.delete(KEYS[0]),
        lambda: list(backend.list_values()),
    ]
    for call in calls:
        with pytest.raises(BackendError) as caught:
            call()
        yield caught.value


def check_nothing_is_shown(error: BackendError, server: FakeS3) -> None:
    text = "\n".join([repr(error), repr(vars(error)), *traceback.format_exception(error)])
    assert not any(secret in text for secret in ("a-secret-key", "an-access-key", server.url))


@pytest.mark.parametrize(
    ("status", "name"), [(403, "PermissionDeniedError"), (401, "UnauthenticatedError")]
)
def test_a_bucket_that_refuses(s3: FakeS3, status: int, name: str) -> None:
    with closing(patient()) as backend:
        s3.status = status
        *refused, listing = every_call(backend)
        for doing, error in zip(DOING[:-1], refused, strict=True):
            assert str(error) == f"{doing} was refused by the server: {name}"
            assert isinstance(error, BackendRefusedError)
            assert (error.doing, error.reply) == (doing, name)
            check_nothing_is_shown(error, s3)
        assert str(listing) == "listing failed: GenericError"  # obstore reports no details
        assert backend.stats()["failed_requests"] >= len(DOING)
        s3.status = None
        assert backend.contains(KEYS[:2]) == [False, False]


def test_a_failed_request_is_not_retried(s3: FakeS3) -> None:
    with closing(patient()) as backend:
        s3.status = 500
        for doing, error in zip(DOING, every_call(backend), strict=True):
            assert str(error) == f"{doing} failed: GenericError"
            check_nothing_is_shown(error, s3)
        assert s3.num_requests <= len(DOING) - 1 + len(KEYS)  # one request per key
        s3.status, before = None, s3.num_requests
        put(backend, KEYS[0], b"abc")
        assert get(backend, KEYS[0], 3) == (3, [b"abc"])
        assert s3.num_requests == before + 2


def test_a_failed_lookup_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_one_runs, ended = threading.Event(), threading.Event()

    def exists(path: str) -> bool:
        if KEYS[0].hex() in path:
            assert slow_one_runs.wait(60)
            raise BackendError("looking up failed")
        slow_one_runs.set()
        threading.Event().wait(0.2)  # a slow answer
        ended.set()
        return True

    with closing(ObjectStorageBackend(memory_store())) as backend:
        monkeypatch.setattr(backend, "_exists", exists)
        with pytest.raises(BackendError):
            backend.contains(KEYS[:2])
        assert ended.is_set(), "a request goes on"


def test_a_dead_server(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with closing(patient()) as backend:
            for doing, error in zip(DOING, every_call(backend), strict=True):
                assert str(error) == f"{doing} failed: GenericError"


def test_a_server_that_never_answers(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        store = s3_store("bucket", timeout_s=0.1, connect_timeout_s=0.2)
        times = {"timeout": "100ms", "connect_timeout": "200ms"}
        assert isinstance(store, S3Store) and store.client_options is not None
        assert times.items() <= dict(store.client_options).items()
        with closing(ObjectStorageBackend(store)) as backend:
            for doing, error in zip(DOING, every_call(backend), strict=True):
                assert str(error) == f"{doing} failed: GenericError"


def test_deadlines_are_kept_without_an_answer(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test controls the clock: the operations end although no thread has returned."""
    now = 0.0
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        backend = ObjectStorageBackend(s3_store("bucket", timeout_s=0.1))
        storage = StorageWorkers(backend, max_bytes_in_flight=100, clock=lambda: now)
        operations = [
            storage.lookup(KEYS[:2], timeout_s=2.0),
            storage.load(KEYS[:2], [[bytearray(4)], [bytearray(4)]], timeout_s=2.0),
            storage.store(KEYS[:2], [[b"1234"], [b"5678"]], timeout_s=2.0),
        ]
        now = 2.0
        ended = storage.poll()
        assert sorted(completion.operation for completion in ended) == operations
        statuses = {status for completion in ended for status in completion.statuses}
        assert statuses <= {Status.TIMED_OUT, Status.FAILED}
        assert storage.close(timeout_s=LONG_S)
        assert all(storage.fenced(operation) for operation in operations)


def test_paths_of_objects(s3: FakeS3) -> None:
    with closing(patient("kv/one")) as backend:
        put(backend, KEYS[0], b"abc")
        name = KEYS[0].hex()
        assert s3.objects == {f"bucket/kv/one/{name[:2]}/{name}": b"abc"}


def test_a_value_of_any_size_is_written_and_read_by_one_request_each(s3: FakeS3) -> None:
    value = bytes(12 * MIB)  # obstore would upload it in three parts
    with closing(patient()) as backend:
        put(backend, KEYS[0], value)
        assert s3.num_requests == backend.stats()["requests"] == 1
        assert list(s3.objects.values()) == [value]
        assert get(backend, KEYS[0], len(value)) == (len(value), [value])
        assert s3.num_requests == 2


def test_a_list_skips_foreign_objects() -> None:
    asked = []

    class Watched(MemoryStore):
        def list(self, prefix=None, **options):
            asked.append(prefix)
            return super().list(prefix, **options)

    store = Watched()
    name = KEYS[0].hex()
    for path in ("kv/read.me", f"kv/{name}", f"kv/00/{name}x", f"other/{name[:2]}/{name}"):
        store.put(path, b"x")
    with closing(ObjectStorageBackend(store, prefix="kv")) as backend:
        assert keys_of(backend) == []
        put(backend, KEYS[0], b"x")
        assert keys_of(backend) == [KEYS[0]]
    assert asked == ["kv/"] * 2  # the prefix excludes foreign objects


def test_an_empty_page_does_not_end_a_list() -> None:
    class Paged(MemoryStore):
        def list(self, prefix=None, **options):
            pages = [[each] for page in super().list(prefix, **options) for each in page]
            return iter([[], pages[0], [], *pages[1:]])

    with closing(ObjectStorageBackend(Paged())) as backend:
        for key in KEYS[:2]:
            put(backend, key, b"x")
        assert sorted(keys_of(backend)) == sorted(KEYS[:2])


@pytest.mark.parametrize("prefix", ["", "kv", "k.v/+"])
@pytest.mark.parametrize("where", ["memory", "directory"])
def test_namespaces_are_listed_without_foreign_names(
    tmp_path: Path, where: str, prefix: str
) -> None:
    store = MemoryStore() if where == "memory" else LocalStore(prefix=tmp_path)
    space, start, key = "0123456789abcdef", KEYS[0].hex()[:2], KEYS[0].hex()
    folder = f"{prefix}/" if prefix else ""
    for path in (
        f"{folder}{space.upper()}/{start}/{key}",
        f"{folder}{space[1:]}/{start}/{key}",
        f"{folder}{space}/{start}/{key[1:]}",
        f"{folder}{space}/00/{key}",
        f"{folder}{space}/{key}",
        f"{folder}{space}/{space}/{start}/{key}",
        f"kxv/{space}/{start}/{key}",
    ):
        store.put(path, b"theirs")
    with (
        closing(ObjectStorageBackend(store, prefix=prefix)) as backend,
        closing(ObjectStorageBackend(store, prefix=f"{folder}{space}")) as inside,
    ):
        check_namespaces(backend, inside, space)


def test_a_delete_that_loses_a_race() -> None:
    class Racing(MemoryStore):
        def delete(self, paths) -> None:
            raise FileNotFoundError

    with closing(ObjectStorageBackend(Racing())) as backend:
        put(backend, KEYS[0], b"x")
        assert not backend.delete(KEYS[0])


def test_requests_are_counted() -> None:
    class Broken(MemoryStore):
        def head(self, path):
            raise OSError("the cable is out")

    with closing(ObjectStorageBackend(Broken())) as backend:
        assert backend.stats() == {"requests": 0, "failed_requests": 0}
        put(backend, KEYS[0], b"x")
        assert get(backend, KEYS[1], 1) == (None, [b"\0"])
        with pytest.raises(BackendError) as caught:
            backend.contains(KEYS[:1])
        assert str(caught.value) == "looking up failed: OSError"
        backend.touch(KEYS)  # sends no request: there is no LRU order
        assert backend.stats() == {"requests": 3, "failed_requests": 1}


def test_a_lookup_ends_soon_after_the_first_missing_key() -> None:
    keys = [bytes([number]) * 32 for number in range(64)]
    with closing(ObjectStorageBackend(MemoryStore())) as backend:
        for key in (*keys[:30], *keys[31:]):
            put(backend, key, b"x")
        assert backend.contains(keys) == [True] * 30 + [False] * 34
        asked = backend.stats()["requests"] - 63
        assert 31 <= asked <= 30 + 16, f"{asked} requests"
    for thread in backend._heads._threads:
        thread.join()  # close ends the threads


def test_time_limits_are_whole_milliseconds(s3: FakeS3) -> None:
    store = s3_store("bucket", timeout_s=5.0, connect_timeout_s=0.0001)
    assert isinstance(store, S3Store) and store.client_options is not None
    times = {"timeout": "5000ms", "connect_timeout": "1ms"}
    assert times.items() <= dict(store.client_options).items()


@pytest.mark.parametrize("text", ["true", "TRUE", "True", "false", "1", "", None])
def test_only_a_variable_that_is_true_allows_no_tls(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is None:
        monkeypatch.delenv("AWS_ALLOW_HTTP")
    else:
        monkeypatch.setenv("AWS_ALLOW_HTTP", text)
    with closing(patient()) as backend:
        if text is not None and text.lower() == "true":
            assert backend.contains(KEYS[:1]) == [False]
        else:
            with pytest.raises(BackendError, match=r"^looking up failed: GenericError$"):
                backend.contains(KEYS[:1])
        assert s3.num_requests == backend.stats()["requests"] - backend.stats()["failed_requests"]


@pytest.mark.parametrize(
    "make", [memory_store, lambda: s3_store("bucket"), lambda: ObjectStorageBackend(MemoryStore())]
)
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackageError) as caught:
        make()
    assert str(caught.value) == "obstore is not installed: pip install 'radixkv[objects]'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": -1.0}, "timeout_s must be positive, got -1.0"),
        ({"connect_timeout_s": 0}, "connect_timeout_s must be positive, got 0"),
    ],
)
def test_invalid_time_limits(options: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        s3_store("bucket", **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "url", ["no url", "http://[::1", "ftp://h", "http://", "http://h x", "http://h\n", "http://ü"]
)
def test_an_endpoint_that_is_none(s3: FakeS3, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    message = r"^AWS_ENDPOINT_URL is no address with http:// or https://$"
    with pytest.raises(StorageUrlError, match=message):
        s3_store("bucket")


def test_a_panic_is_an_error_of_the_backend() -> None:
    class PanicException(BaseException):
        pass

    class Store:
        def head(self, path: str) -> None:
            raise PanicException("with a secret")

    store: Any = Store()
    with closing(ObjectStorageBackend(store)) as backend:
        with pytest.raises(BackendError) as caught:
            backend.contains(KEYS[:1])
        assert str(caught.value) == "looking up failed: obstore panicked"
        store.head = interrupt
        with pytest.raises(KeyboardInterrupt):
            backend.contains(KEYS[:1])


def interrupt(path: str) -> None:
    raise KeyboardInterrupt
