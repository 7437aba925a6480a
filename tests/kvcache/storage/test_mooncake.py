"""A Mooncake store that is stopped or killed, or that never answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from radixkv.kvcache.storage import (
    BackendError,
    BackendRefusedError,
    BackendUnreachableError,
    Status,
    StorageWorkers,
)
from radixkv.kvcache.storage.mooncake.backend import MooncakeBackend

from .conformance import KEYS, MIB, get, put
from .mooncake_calls import LONG_S, LOST, SOON_S, clients_of, connected, runs
from .mooncake_server import MooncakeServer, needs_wheels
from .redis_calls import finish

DOING = ["looking up", "reading", "writing", "deleting", "looking up"]


def every_call(backend: MooncakeBackend) -> Iterator[BackendError]:
    """Yield the error of each method while the store is broken."""
    calls: list[Callable[[], object]] = [
        lambda: backend.contains(KEYS[:2]),
        lambda: get(backend, KEYS[0], 3),
        lambda: put(backend, KEYS[0], b"abc"),
        lambda: backend.delete(KEYS[0]),
        lambda: backend.touch(KEYS[:2]),
    ]
    for call in calls:
        with pytest.raises(BackendError) as caught:
            call()
        yield caught.value


def test_a_stopped_master_fails_every_call_and_is_used_again_when_it_goes_on(
    mooncake: MooncakeServer,
) -> None:
    with connected(mooncake) as backend:
        assert backend.contains(KEYS[:1]) == [False]
        backend._timeout_s = backend._connect_timeout_s = SOON_S
        mooncake.pause()
        reasons = {"no answer within 0.1 s", "no connection within 0.1 s"}
        for doing, error in zip(DOING, every_call(backend), strict=True):
            assert isinstance(error, BackendUnreachableError)
            assert error.doing == doing
            assert error.reason in reasons
            assert str(error) == f"{doing} failed: {error.reason}"
        assert backend.stats()["failed_requests"] >= len(DOING)
        mooncake.go_on()
    with connected(mooncake) as backend:
        put(backend, KEYS[1], b"after")
        assert get(backend, KEYS[1], 5) == (5, [b"after"])


def test_a_slow_connection_succeeds_in_the_end(mooncake: MooncakeServer) -> None:
    """A client started for a call that gave up serves a later call."""
    with connected(mooncake, LONG_S, SOON_S) as backend:
        mooncake.pause()
        with pytest.raises(BackendUnreachableError, match=r"no connection within 0\.1 s$"):
            put(backend, KEYS[0], b"abc")
        (client,) = clients_of(backend)
        mooncake.go_on()
        backend._connect_timeout_s = LONG_S
        put(backend, KEYS[0], b"abc")
        assert clients_of(backend) == [client]


def test_a_killed_master_fails_every_call_and_is_used_again_when_it_is_back(
    mooncake: MooncakeServer,
) -> None:
    with connected(mooncake) as backend:
        put(backend, KEYS[0], b"abc")
        mooncake.kill_master()
        for doing, error in zip(DOING, every_call(backend), strict=True):
            assert str(error) == f"{doing} failed: {LOST}"
            assert type(error) is BackendUnreachableError
        assert clients_of(backend) == []
        mooncake.start()
        assert get(backend, KEYS[0], 3) == (None, [bytes(3)])  # it lost its metadata
        put(backend, KEYS[0], b"xyz")
        assert get(backend, KEYS[0], 3) == (3, [b"xyz"])


def test_a_killed_memory_process(mooncake: MooncakeServer) -> None:
    with connected(mooncake) as backend:
        put(backend, KEYS[0], b"abc")
        mooncake.kill_memory()
        with pytest.raises(BackendUnreachableError) as caught:
            get(backend, KEYS[0], 3)
        assert str(caught.value) == "reading failed: the machine that has the value is gone"
        assert len(clients_of(backend)) == 1


def test_a_value_without_room_is_refused(mooncake: MooncakeServer) -> None:
    with connected(mooncake) as backend:
        put(backend, KEYS[0], b"abc")
        with pytest.raises(BackendRefusedError) as caught:
            put(backend, KEYS[1], bytes(300 * MIB))  # the memory has 256 MiB
        assert str(caught.value) == f"writing was refused by the server: {caught.value.reply}"
        assert caught.value.reply.startswith("code -")
        # The master evicts values to make room, which takes a while.
        assert get(backend, KEYS[0], 3) in ((3, [b"abc"]), (None, [bytes(3)]))


@needs_wheels
def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with closing(MooncakeBackend("127.0.0.1", port, connect_timeout_s=SOON_S)) as backend:
            for doing, error in zip(DOING, every_call(backend), strict=True):
                assert str(error) == f"{doing} failed: no connection within 0.1 s"
            (client,) = clients_of(backend)
        assert not runs(client)


# -- under StorageWorkers: every operation ends


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_deadlines_are_kept_without_an_answer(mooncake: MooncakeServer, how: str) -> None:
    """The test controls the clock: the operations end although no thread has returned."""
    now = 0.0
    backend = MooncakeBackend("127.0.0.1", mooncake.port, timeout_s=SOON_S)
    storage = StorageWorkers(backend, max_bytes_in_flight=100, clock=lambda: now)
    mooncake.pause() if how == "stopped" else mooncake.kill_master()
    into = [[bytearray(4)], [bytearray(4)]]
    operations = [
        storage.lookup(KEYS[:2], timeout_s=2.0),
        storage.load(KEYS[:2], into, timeout_s=2.0),
        storage.store(KEYS[:2], [[b"1234"], [b"5678"]], timeout_s=2.0),
    ]
    now = 2.0
    ended = storage.poll()
    assert sorted(completion.operation for completion in ended) == operations
    allowed = {Status.TIMED_OUT, Status.FAILED}
    assert {status for completion in ended for status in completion.statuses} <= allowed
    assert storage.close(timeout_s=LONG_S)


def test_each_block_fails_and_later_ones_do_not(mooncake: MooncakeServer) -> None:
    backend = MooncakeBackend(
        "127.0.0.1", mooncake.port, timeout_s=LONG_S, connect_timeout_s=LONG_S
    )
    storage = StorageWorkers(backend, max_bytes_in_flight=100)
    mooncake.kill_master()
    into = [[bytearray(4)], [bytearray(4)]]
    load = finish(storage, storage.load(KEYS[:2], into, timeout_s=LONG_S))
    assert load.statuses == (Status.FAILED, Status.FAILED)
    mooncake.start()
    store = finish(storage, storage.store(KEYS[:2], [[b"1234"], [b"5678"]], timeout_s=LONG_S))
    assert store.statuses == (Status.STORED, Status.STORED)
    load = finish(storage, storage.load(KEYS[:2], into, timeout_s=LONG_S))
    assert load.statuses == (Status.LOADED, Status.LOADED)
    assert into == [[b"1234"], [b"5678"]]
    assert storage.stats().errors == {"BackendUnreachableError": 2}
    assert storage.close(timeout_s=LONG_S)
