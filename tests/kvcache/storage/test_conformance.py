"""The conformance tests on every backend."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import LocalStore

from radixkv.kvcache.storage import Backend, FileBackend
from radixkv.kvcache.storage.mooncake import backend as mooncake
from radixkv.kvcache.storage.object_storage.backend import ObjectStorageBackend, memory_store
from radixkv.kvcache.storage.redis.address import RedisAddress
from radixkv.kvcache.storage.redis.backend import RedisBackend
from radixkv.kvcache.storage.urls import BackendOptions, open_backend

from .conformance import BackendConformance, keys_of
from .fake_s3 import FakeS3
from .mooncake_server import MooncakeServer
from .redis_server import RedisServer

_numbers = itertools.count()
NO_ORDER_OF_OBJECTS = (
    "object storage keeps no LRU order: give the bucket a rule that expires objects, or remove all"
)


class TestFiles(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = FileBackend(tmp_path / "blocks", max_bytes=1 << 30)
        yield backend
        backend.check()
        backend.close()


class TestRedis(BackendConformance):
    order_refused = (
        "a Redis server does not report LRU order: let its maxmemory-policy evict values, "
        "or remove all"
    )

    @pytest.fixture(params=["socket", "tcp", "ttl"])
    def backend(
        self, request: pytest.FixtureRequest, shared_redis: RedisServer
    ) -> Iterator[Backend]:
        tcp = RedisAddress("127.0.0.1", shared_redis.port)
        address = tcp if request.param == "tcp" else RedisAddress(unix_path=shared_redis.socket)
        ttl_s = 600 if request.param == "ttl" else None
        prefix = f"test[{next(_numbers)}]*:"
        backend = RedisBackend(address, prefix=prefix, ttl_s=ttl_s, timeout_s=30.0)
        yield backend
        list(map(backend.delete, keys_of(backend)))
        backend.close()


class TestObjectsInMemory(BackendConformance):
    order_refused = NO_ORDER_OF_OBJECTS

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = ObjectStorageBackend(memory_store())
        yield backend
        backend.close()


class TestObjectsInDirectory(BackendConformance):
    order_refused = NO_ORDER_OF_OBJECTS

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = ObjectStorageBackend(LocalStore(prefix=tmp_path), prefix="a/b")
        yield backend
        backend.close()


class TestObjectsInS3(BackendConformance):
    order_refused = NO_ORDER_OF_OBJECTS

    @pytest.fixture
    def backend(self, s3: FakeS3) -> Iterator[Backend]:
        options = BackendOptions(timeout_s=30.0, connect_timeout_s=30.0)
        backend = open_backend("s3://bucket/kv/blocks", options)
        yield backend
        assert all(path.startswith("bucket/kv/blocks/") for path in s3.objects)
        backend.close()


class TestMooncake(BackendConformance):
    list_refused = "a Mooncake store does not list its keys; to remove all, restart its master"
    order_refused = list_refused

    @pytest.fixture
    def backend(
        self, shared_mooncake: MooncakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Backend]:
        # Wait for another writer of the same key for as long as it takes.
        monkeypatch.setattr(mooncake, "_BUSY_S", 30.0)
        namespace = f"{os.getpid():08x}{next(_numbers):08x}"
        options = BackendOptions(timeout_s=30.0, connect_timeout_s=30.0, namespace=namespace)
        backend = open_backend(f"mooncake://127.0.0.1:{shared_mooncake.port}", options)
        yield backend
        backend.close()
