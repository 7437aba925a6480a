from __future__ import annotations

import os
import time
import traceback
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store

from radixkv.kvcache.storage import FileBackend, Status, StorageNamespace, StorageWorkers
from radixkv.kvcache.storage.errors import StorageUrlError
from radixkv.kvcache.storage.object_storage.backend import ObjectStorageBackend
from radixkv.kvcache.storage.redis.backend import RedisBackend
from radixkv.kvcache.storage.urls import (
    BackendOptions,
    is_server_url,
    namespace_digits,
    open_backend,
    open_storage,
)

from .conformance import KEYS, get, keys_of, put
from .fake_s3 import FakeS3
from .redis_server import RedisServer

LONG_S = 1000.0
NAMESPACE = StorageNamespace("llama", "r1", "bfloat16", 16, (0, 2), (0, 4))
OTHER = StorageNamespace("llama", "r2", "bfloat16", 16, (0, 2), (0, 4))


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    directory = tmp_path / "with a space"
    url = directory.as_uri()
    assert "%20" in url
    options = BackendOptions(max_bytes=1000, sync="data", namespace=NAMESPACE)
    with closing(open_backend(url, options)) as backend:
        assert isinstance(backend, FileBackend)
        assert backend.directory == str(directory)
        put(backend, KEYS[0], b"abc")
        assert len(synced) == 1
        assert backend.stats()["max_bytes"] == 1000
    assert (directory / KEYS[0].hex()[:2] / KEYS[0].hex()).read_bytes() == b"abc"


def test_a_directory_without_a_limit_holds_16_gib(tmp_path: Path) -> None:
    for number, (max_bytes, expected) in enumerate([(None, 16 * 2**30), (5000, 5000)]):
        storage = open_storage((tmp_path / str(number)).as_uri(), None, max_bytes=max_bytes)
        assert storage.stats().backend["max_bytes"] == expected
        assert storage.close()


def test_a_limit_of_values_is_none_of_what_is_in_flight(tmp_path: Path) -> None:
    """And what has no limit of values needs none."""
    for url, max_bytes in ((tmp_path.joinpath("kv").as_uri(), 500), ("memory://", None)):
        storage = open_storage(url, None, max_bytes=max_bytes)
        assert storage._table.max_bytes_in_flight == 2**30
        storage.store(KEYS[:2], [[bytes(400)]] * 2, timeout_s=LONG_S)
        while not (completions := storage.poll()):
            time.sleep(0.001)
        # Two at a time have no room in the directory, but none is refused before its turn.
        assert Status.DROPPED not in completions[0].statuses
        assert Status.STORED in completions[0].statuses
        assert storage.close(timeout_s=LONG_S)


def test_which_urls_name_a_server() -> None:
    urls = ["redis://h", "rediss://h", "unix:///s", "s3://b", "mooncake://h"]
    assert all(map(is_server_url, urls))
    assert not any(map(is_server_url, ["file:///d", "memory://", "http://h", ""]))


def test_each_memory_backend_is_separate() -> None:
    with closing(open_backend("memory://")) as first, closing(open_backend("memory://")) as second:
        assert isinstance(first, ObjectStorageBackend)
        put(first, KEYS[0], b"abc")
        assert get(first, KEYS[0], 3) == (3, [b"abc"])
        assert second.contains(KEYS[:1]) == [False]


@pytest.mark.parametrize("digits", ["", "0" * 15, "0" * 17, "G" * 16, "*" * 16, f"{'0' * 16}\n"])
def test_a_namespace_that_is_not_of_16_digits_is_refused(digits: str) -> None:
    with pytest.raises(
        StorageUrlError, match=r"^a namespace is the first 16 digits of its digest$"
    ):
        namespace_digits(digits)


def test_a_namespace_is_named_by_its_digits() -> None:
    digits = namespace_digits(NAMESPACE)
    assert len(digits) == 16 and NAMESPACE.digest().hex().startswith(digits)
    assert namespace_digits(digits) == digits != namespace_digits(OTHER)


def test_namespaces_are_separate_in_a_server(shared_redis: RedisServer) -> None:
    url = f"redis://127.0.0.1:{shared_redis.port}/7"
    options = BackendOptions(ttl_s=60, timeout_s=30.0, connect_timeout_s=30.0, namespace=NAMESPACE)
    with (
        closing(open_backend(url, options)) as one,
        closing(open_backend(url, replace(options, namespace=OTHER))) as other,
    ):
        assert isinstance(one, RedisBackend)
        assert isinstance(other, RedisBackend)
        put(one, KEYS[0], b"abc")
        assert keys_of(one) == [KEYS[0]]
        assert keys_of(other) == []
        assert other.contains(KEYS[:1]) == [False]
        assert one.delete(KEYS[0])


@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_a_namespace_can_be_changed_where_there_is_one(
    scheme: str, shared_redis: RedisServer, s3: FakeS3
) -> None:
    url = {"redis": f"redis://127.0.0.1:{shared_redis.port}/9", "s3": "s3://bucket/kv"}[scheme]
    options = BackendOptions(timeout_s=30.0, connect_timeout_s=30.0, namespace=NAMESPACE)
    with (
        closing(open_backend(url, options)) as one,
        closing(open_backend(url, replace(options, namespace=OTHER))) as other,
        closing(open_backend(url, replace(options, namespace=None))) as outside,
    ):
        for backend in (one, outside):
            storage = StorageWorkers(backend, max_bytes_in_flight=100)
            storage.use_namespace(OTHER)
            storage.store(KEYS[:1], [[b"abc"]], timeout_s=LONG_S)
            while not storage.poll():
                time.sleep(0.001)
            assert other.contains(KEYS[:1]) == [backend is one]
            assert isinstance(backend, RedisBackend | ObjectStorageBackend)
            assert backend.namespace == (OTHER.digits if backend is one else None)
            assert storage.lookup_prefix(KEYS[:1], timeout_s=LONG_S) == 1
            storage.use_namespace(NAMESPACE)
            assert storage.lookup_prefix(KEYS[:1], timeout_s=LONG_S) == (backend is outside)
            assert backend.delete(KEYS[0]) == (backend is outside)
            assert other.delete(KEYS[0]) == (backend is one)
            assert storage.close(timeout_s=LONG_S)


@pytest.mark.parametrize("path", ["", "/", "/a/b", "/a//b/"])
def test_a_bucket(s3: FakeS3, path: str) -> None:
    options = BackendOptions(timeout_s=30.0, connect_timeout_s=30.0, namespace=NAMESPACE)
    with closing(open_backend(f"s3://bucket{path}", options)) as backend:
        put(backend, KEYS[0], b"abc")
    name = KEYS[0].hex()
    steps = ["bucket", *filter(None, path.split("/")), NAMESPACE.digest().hex()[:16]]
    assert list(s3.objects) == [f"{'/'.join(steps)}/{name[:2]}/{name}"]


@pytest.mark.usefixtures("s3")
def test_a_bucket_has_the_time_limits_that_are_given() -> None:
    options = BackendOptions(timeout_s=7.0, connect_timeout_s=0.5)
    with closing(open_backend("s3://bucket", options)) as backend:
        assert isinstance(backend, ObjectStorageBackend) and isinstance(backend._store, S3Store)
        limits = {"timeout": "7000ms", "connect_timeout": "500ms"}
        assert limits.items() <= dict(backend._store.client_options or {}).items()


@pytest.mark.parametrize("namespace", [None, NAMESPACE])
@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "s3://bucket"])
def test_the_storage_of_a_command_is_of_its_namespace(
    s3: FakeS3, url: str, namespace: StorageNamespace | None
) -> None:
    storage = open_storage(url, namespace)
    assert isinstance(storage._backend, RedisBackend | ObjectStorageBackend)
    assert storage._backend.namespace == (namespace and namespace.digits)
    assert storage.close()


UNKNOWN = (
    "a storage URL starts with one of file://, redis://, rediss://, unix://, s3://, "
    "mooncake://, memory://; /a/path is file:///a/path"
)
DIRECTORY = "a directory's URL is file:///DIRECTORY, with its path from the root"
BUCKET = "a bucket's URL is s3://BUCKET or s3://BUCKET/PREFIX"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", UNKNOWN),
        ("/tmp/blocks", UNKNOWN),
        ("redis:host", UNKNOWN),
        ("redis", UNKNOWN),
        ("http://hunter2@host", UNKNOWN),
        ("FILE:///tmp", UNKNOWN),
        ("file://host/tmp", DIRECTORY),
        ("file://", DIRECTORY),
        ("file:///", DIRECTORY),
        ("file:///tmp?max_bytes=1", DIRECTORY),
        ("file:///tmp#1", DIRECTORY),
        ("file:///tmp%00x", DIRECTORY),
        ("file:///tmp/blocks", "file:// needs the option max_bytes"),
        ("file://[hunter2", "the storage URL is malformed"),
        ("s3://", BUCKET),
        ("s3:///prefix", BUCKET),
        ("s3://key:hunter2@bucket", BUCKET),
        ("s3://bucket:9000", BUCKET),
        ("s3://bucket?region=x", BUCKET),
        ("s3://bucket#x", BUCKET),
        ("s3://..", BUCKET),
        ("s3://../..", BUCKET),
        ("s3://b%20d", BUCKET),
        ("s3://bucket/../x", "a bucket's prefix has no steps . and .."),
        ("s3://bucket/x/%2e", "a bucket's prefix has no steps . and .."),
        *(
            (f"{url}{break_}x", "the storage URL has a tab or a line break: write %09, %0D or %0A")
            for url in ("file:///d", "s3://bucket/d", "redis://host/1", "unix:///d")
            for break_ in "\t\r\n"
        ),
        ("memory://x", "the URL of memory:// ends there"),
        ("redis://host/x", None),
    ],
)
def test_malformed_urls(url: str, message: str | None) -> None:
    with pytest.raises(StorageUrlError) as caught:
        open_backend(url)
    assert message is None or str(caught.value) == message
    shown = [repr(caught.value), *traceback.format_exception(caught.value)]
    assert "hunter2" not in "".join(shown)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix", "s3", "file", "memory"])
def test_each_option_is_of_some_schemes(scheme: str, s3: FakeS3, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_bytes": 1, "sync": "data", "ttl_s": 1, "ca_file": "/ca"}
    options |= {"timeout_s": 1.0, "connect_timeout_s": 1.0}
    server = {"timeout_s", "connect_timeout_s"}
    allowed = {
        "redis": {*server, "ttl_s"},
        "rediss": {*server, "ttl_s", "ca_file"},
        "unix": {*server, "ttl_s"},
        "s3": server,
        "file": {"max_bytes", "sync"},
        "memory": set[str](),
    }
    rest = {"unix": "/run/x", "file": f"{tmp_path}/kv", "memory": ""}.get(scheme, "bucket")
    url = f"{scheme}://{rest}"
    open_backend(url, BackendOptions(**{name: options[name] for name in allowed[scheme]})).close()
    for name in options.keys() - allowed[scheme]:
        with pytest.raises(StorageUrlError, match=rf"^{scheme}:// has no option {name}$"):
            open_backend(url, BackendOptions(**{name: options[name]}))


def test_a_limit_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^max_bytes must be at least 1, got 0$"):
        open_storage(tmp_path.as_uri(), None, max_bytes=0)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("memory://", BackendOptions(max_bytes=1), "memory:// has no option max_bytes"),
        ("redis://host", BackendOptions(max_bytes=1), "redis:// has no option max_bytes"),
        ("redis://host", BackendOptions(ca_file="x"), "redis:// has no option ca_file"),
        ("rediss://host", BackendOptions(sync="data"), "rediss:// has no option sync"),
        ("file:///x", BackendOptions(ttl_s=1), "file:// has no option ttl_s"),
        ("s3://bucket", BackendOptions(ttl_s=1), "s3:// has no option ttl_s"),
    ],
)
def test_options_of_another_scheme(url: str, options: BackendOptions, message: str) -> None:
    with pytest.raises(StorageUrlError) as caught:
        open_backend(url, options)
    assert str(caught.value) == message
