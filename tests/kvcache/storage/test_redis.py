"""A Redis server that is stopped or killed, or that never answers."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from radixkv.kvcache.storage import Status, StorageWorkers
from radixkv.kvcache.storage.errors import BackendUnreachableError
from radixkv.kvcache.storage.interface import StorageOpId
from radixkv.kvcache.storage.redis.address import RedisAddress
from radixkv.kvcache.storage.redis.backend import RedisBackend

from .conformance import KEYS, get, put
from .redis_calls import DOING, LONG_S, SOON_S, connected, every_call, finish, wait_at_most
from .redis_server import RedisServer


def test_a_stopped_server_fails_every_call_and_is_used_again_when_it_goes_on(
    server: RedisServer,
) -> None:
    server.pause()
    with connected(server, timeout_s=SOON_S) as backend:
        for doing, error in zip(DOING, every_call(backend), strict=True):
            assert type(error) is BackendUnreachableError
            assert str(error) == f"{doing} failed: no answer within 0.1 s"
            assert (error.doing, error.reason) == (doing, "no answer within 0.1 s")
        server.go_on()
    # Late answers to the calls above must not count as answers to these.
    with connected(server) as backend:
        put(backend, KEYS[1], b"after")
        assert get(backend, KEYS[1], 5) == (5, [b"after"])
        assert backend.contains(KEYS[1:3]) == [True, False]


def test_there_are_no_retries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RedisAddress("127.0.0.1", listener.getsockname()[1])
        with closing(RedisBackend(address, timeout_s=SOON_S)) as backend:
            with pytest.raises(BackendUnreachableError):
                get(backend, KEYS[0], 3)
            listener.setblocking(False)
            listener.accept()[0].close()
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_one_backend_survives_stops_of_the_server(server: RedisServer) -> None:
    with connected(server) as backend:
        for number in range(3):
            put(backend, KEYS[number], b"%d" % number)
        server.pause()
        wait_at_most(backend, SOON_S)
        with pytest.raises(BackendUnreachableError):
            get(backend, KEYS[0], 1)
        server.go_on()
        wait_at_most(backend, LONG_S)
        for number in range(3):
            assert get(backend, KEYS[number], 1) == (1, [b"%d" % number])


def test_a_killed_server_fails_every_call_and_is_used_again_when_it_is_back(
    server: RedisServer,
) -> None:
    with connected(server) as backend:
        put(backend, KEYS[0], b"abc")
        server.kill()
        for doing, error in zip(DOING, every_call(backend), strict=True):
            assert str(error) == f"{doing} failed: no connection, or it was lost"
        server.start()
        assert get(backend, KEYS[0], 3) == (None, [bytes(3)])
        put(backend, KEYS[0], b"xyz")
        assert get(backend, KEYS[0], 3) == (3, [b"xyz"])


def test_a_server_that_comes_later(server: RedisServer) -> None:
    server.kill()
    with connected(server) as backend:
        assert all(type(error) is BackendUnreachableError for error in every_call(backend))
        server.start()
        assert backend.contains(KEYS) == [False] * len(KEYS)


def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RedisAddress("127.0.0.1", listener.getsockname()[1])
        with closing(RedisBackend(address, timeout_s=0.05)) as backend:
            for doing, error in zip(DOING, every_call(backend), strict=True):
                assert str(error) == f"{doing} failed: no answer within 0.05 s"


# -- under StorageWorkers: every operation ends


def submit_all(storage: StorageWorkers, timeout_s: float) -> list[StorageOpId]:
    keys = KEYS[:2]
    return [
        storage.lookup(keys, timeout_s=timeout_s),
        storage.load(keys, [[bytearray(4)], [bytearray(4)]], timeout_s=timeout_s),
        storage.store(keys, [[b"1234"], [b"5678"]], timeout_s=timeout_s),
        storage.touch(keys, timeout_s=timeout_s),
        storage.delete(keys, timeout_s=timeout_s),
    ]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_deadlines_are_kept_without_an_answer(server: RedisServer, how: str) -> None:
    """The test controls the clock: the operations end although no thread has returned."""
    now = 0.0
    backend = RedisBackend(RedisAddress(unix_path=server.socket), timeout_s=SOON_S)
    storage = StorageWorkers(backend, max_bytes_in_flight=100, clock=lambda: now)
    server.pause() if how == "stopped" else server.kill()
    operations = submit_all(storage, timeout_s=2.0)
    now = 2.0
    ended = storage.poll()
    assert sorted(completion.operation for completion in ended) == operations
    allowed = {
        Status.TIMED_OUT,
        Status.FAILED,
    }  # the client's limit may come first
    assert {status for completion in ended for status in completion.statuses} <= allowed
    assert storage.close(timeout_s=LONG_S)
    assert all(storage.fenced(operation) for operation in operations)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_each_block_fails_and_later_ones_do_not(server: RedisServer, how: str) -> None:
    backend = RedisBackend(RedisAddress(unix_path=server.socket), timeout_s=SOON_S)
    storage = StorageWorkers(backend, max_bytes_in_flight=100)
    server.pause() if how == "stopped" else server.kill()
    into = [[bytearray(4)], [bytearray(4)]]
    load = finish(storage, storage.load(KEYS[:2], into, timeout_s=LONG_S))
    assert load.statuses == (Status.FAILED, Status.FAILED)
    assert load.prefix == 0
    server.go_on() if how == "stopped" else server.start()
    wait_at_most(backend, LONG_S)
    store = finish(storage, storage.store(KEYS[:2], [[b"1234"], [b"5678"]], timeout_s=LONG_S))
    assert store.statuses == (Status.STORED, Status.STORED)
    load = finish(storage, storage.load(KEYS[:2], into, timeout_s=LONG_S))
    assert load.statuses == (Status.LOADED, Status.LOADED)
    assert into == [[b"1234"], [b"5678"]]
    assert storage.stats().errors == {"BackendUnreachableError": 2}
    assert storage.close(timeout_s=LONG_S)
    storage.check()
