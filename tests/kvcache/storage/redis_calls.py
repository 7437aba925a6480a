"""Helpers of the Redis tests: time limits, connections, every call of a backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import redis

from radixkv.kvcache.storage import BackendError, Completion, StorageWorkers
from radixkv.kvcache.storage.interface import StorageOpId
from radixkv.kvcache.storage.redis.address import RedisAddress
from radixkv.kvcache.storage.redis.backend import RedisBackend

from .conformance import KEYS, get, put
from .redis_server import RedisServer

SOON_S = 0.1  # for calls that end without an answer
LONG_S = 60.0  # for calls that get an answer


@contextmanager
def connected(
    server: RedisServer, *, timeout_s: float = LONG_S, **options
) -> Iterator[RedisBackend]:
    address = RedisAddress(unix_path=server.socket)
    with closing(RedisBackend(address, timeout_s=timeout_s, **options)) as backend:
        yield backend


@contextmanager
def raw(server: RedisServer, **options) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=server.socket, **options) as client:
        yield client


def every_call(backend: RedisBackend) -> Iterator[BackendError]:
    """Yield the error of each method while the server is broken."""
    calls = [
        lambda: backend.contains(KEYS[:2]),
        lambda: get(backend, KEYS[0], 3),
        lambda: put(backend, KEYS[0], b"abc"),
        lambda: backend.delete(KEYS[0]),
        lambda: backend.touch(KEYS[:2]),
        lambda: list(backend.list_values()),
    ]
    for call in calls:
        with pytest.raises(BackendError) as caught:
            call()
        yield caught.value


def wait_at_most(backend: RedisBackend, timeout_s: float) -> None:
    """Set the time limit of calls, also for open connections."""
    pool = backend._client.connection_pool
    pool.connection_kwargs["socket_timeout"] = timeout_s
    for connection in pool._available_connections:
        connection.socket_timeout = timeout_s
        if connection._sock is not None:
            connection._sock.settimeout(timeout_s)


DOING = [
    "looking up",
    "reading",
    "writing",
    "deleting",
    "touching",
    "listing",
]


def finish(storage: StorageWorkers, operation: StorageOpId) -> Completion:
    """Return the completion of an operation that ends before its deadline."""
    with storage._lock:
        storage._reported.wait_for(lambda: storage._table.ended(operation))
    (completion,) = storage.poll()
    return completion
