"""A Mooncake store that is stopped, is killed, or never answers; and what it needs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from radixkv.kvcache.storage import (
    BackendError,
    BackendOptions,
    BackendRefusedError,
    BackendUnreachableError,
    MissingLibraryError,
    MissingPackageError,
    Status,
    StorageUrlError,
    StorageWorkers,
    open_backend,
)
from radixkv.kvcache.storage.mooncake import MooncakeBackend, master_of

from . import mooncake_server
from .conformance import KEYS, MIB, get, put, value_of
from .mooncake_server import MooncakeServer
from .redis_calls import finish

SOON_S = 0.1  # for requests that are to end without an answer
LONG_S = 30.0  # for those that are to end with one
LOST = "no connection, or it was lost"


def connected(
    store: MooncakeServer, timeout_s: float = LONG_S, connect_timeout_s: float = LONG_S
) -> closing[MooncakeBackend]:
    return closing(
        MooncakeBackend(
            "127.0.0.1", store.port, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
        )
    )


DOING = ["looking up", "reading", "writing", "deleting", "looking up"]


def every_call(backend: MooncakeBackend) -> Iterator[BackendError]:
    """What each method raises, with a store that is not well."""
    calls: list[Callable[[], object]] = [
        lambda: backend.contains(KEYS[:2]),
        lambda: get(backend, KEYS[0], 3),
        lambda: put(backend, KEYS[0], b"abc"),
        lambda: backend.delete(KEYS[0]),
        lambda: backend.touch(KEYS[0]),
    ]
    for call in calls:
        with pytest.raises(BackendError) as caught:
            call()
        yield caught.value


def helpers_of(backend: MooncakeBackend) -> list[int]:
    """The process ids of those that wait for a call."""
    return [helper._process.pid for helper in backend._idle]


def runs(pid: int) -> bool:
    """Whether a process is there, and has not ended without anybody asking how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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


def test_a_connection_that_takes_long_is_made_in_the_end(mooncake: MooncakeServer) -> None:
    """What was started for a call that gave up serves one that comes later."""
    with connected(mooncake, LONG_S, SOON_S) as backend:
        mooncake.pause()
        with pytest.raises(BackendUnreachableError, match=r"no connection within 0\.1 s$"):
            put(backend, KEYS[0], b"abc")
        (helper,) = helpers_of(backend)
        mooncake.go_on()
        backend._connect_timeout_s = LONG_S
        put(backend, KEYS[0], b"abc")
        assert helpers_of(backend) == [helper]


def test_a_killed_master_fails_every_call_and_is_used_again_when_it_is_back(
    mooncake: MooncakeServer,
) -> None:
    with connected(mooncake) as backend:
        put(backend, KEYS[0], b"abc")
        mooncake.kill_master()
        for doing, error in zip(DOING, every_call(backend), strict=True):
            assert str(error) == f"{doing} failed: {LOST}"
            assert type(error) is BackendUnreachableError
        assert helpers_of(backend) == []
        mooncake.start()
        assert get(backend, KEYS[0], 3) == (None, [bytes(3)])  # it forgot where everything is
        put(backend, KEYS[0], b"xyz")
        assert get(backend, KEYS[0], 3) == (3, [b"xyz"])


def test_memory_that_is_gone(mooncake: MooncakeServer) -> None:
    with connected(mooncake) as backend:
        put(backend, KEYS[0], b"abc")
        mooncake.kill_memory()
        with pytest.raises(BackendUnreachableError) as caught:
            get(backend, KEYS[0], 3)
        assert str(caught.value) == "reading failed: the machine that has the value is gone"
        assert len(helpers_of(backend)) == 1


def test_a_value_that_has_no_room_is_refused(mooncake: MooncakeServer) -> None:
    with connected(mooncake) as backend:
        put(backend, KEYS[0], b"abc")
        with pytest.raises(BackendRefusedError) as caught:
            put(backend, KEYS[1], bytes(300 * MIB))  # the memory has 256
        assert str(caught.value) == f"writing was refused by the server: {caught.value.reply}"
        assert caught.value.reply.startswith("code -")
        assert get(backend, KEYS[0], 3) == (3, [b"abc"])


def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with closing(MooncakeBackend("127.0.0.1", port, connect_timeout_s=SOON_S)) as backend:
            for doing, error in zip(DOING, every_call(backend), strict=True):
                assert str(error) == f"{doing} failed: no connection within 0.1 s"
            (helper,) = helpers_of(backend)
        assert not runs(helper)


def test_a_helper_that_dies_fails_one_call(shared_mooncake: MooncakeServer) -> None:
    with connected(shared_mooncake) as backend:
        put(backend, KEYS[2], b"abc")
        backend._idle[0]._process.kill()
        backend._idle[0]._process.wait()
        with pytest.raises(BackendUnreachableError, match=f"^reading failed: {LOST}$"):
            get(backend, KEYS[2], 3)
        assert get(backend, KEYS[2], 3) == (3, [b"abc"])


def test_values_outlive_the_backend_and_its_processes(shared_mooncake: MooncakeServer) -> None:
    value = value_of(5, 2 * MIB)
    with connected(shared_mooncake) as backend:
        put(backend, KEYS[5], value[:1000], value[1000:])
        (helper,) = helpers_of(backend)
    assert not runs(helper)
    with connected(shared_mooncake) as backend:
        assert get(backend, KEYS[5], len(value)) == (len(value), [value])
        assert backend.delete(KEYS[5])


ENGINE = """
import sys, time
from radixkv.kvcache.storage import open_backend, BackendOptions
backend = open_backend(sys.argv[1], BackendOptions(connect_timeout_s=0.1))
try:
    backend.contains([bytes(32)])
except Exception:
    pass
print(backend._idle[0]._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("answers", [True, False])
def test_no_process_outlives_the_engine(shared_mooncake: MooncakeServer, answers: bool) -> None:
    """Not even one that waits for a master, and so runs no Python."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = shared_mooncake.port if answers else listener.getsockname()[1]
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, f"mooncake://127.0.0.1:{port}"], stdout=subprocess.PIPE
        )
        assert engine.stdout is not None
        helper = int(engine.stdout.readline())
        assert runs(helper)
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        engine.stdout.close()
        end = time.monotonic() + LONG_S
        while runs(helper):
            assert time.monotonic() < end, "the process is still there"
            time.sleep(0.01)


def open_ports(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in links
    ]


def test_nobody_can_connect_to_a_helper(shared_mooncake: MooncakeServer) -> None:
    """Mooncake's client listens to the whole network; what comes is dropped."""
    with connected(shared_mooncake) as backend:
        assert backend.contains(KEYS[:1]) == [False]
        ports = open_ports(helpers_of(backend)[0])
        assert ports
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.2)
        put(backend, KEYS[0], b"abc")
        assert get(backend, KEYS[0], 3) == (3, [b"abc"])
        assert backend.delete(KEYS[0])


# -- under the driver: an operation ends, whatever the store does


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_deadlines_are_kept_without_an_answer(mooncake: MooncakeServer, how: str) -> None:
    """The clock is the test's: no thread has come back, and the operations end all the same."""
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


# -- its URL, and what it needs


def test_namespaces_are_apart(shared_mooncake: MooncakeServer) -> None:
    url = f"mooncake://127.0.0.1:{shared_mooncake.port}"
    one = BackendOptions(timeout_s=LONG_S, connect_timeout_s=LONG_S, namespace="1" * 16)
    two = BackendOptions(timeout_s=LONG_S, connect_timeout_s=LONG_S, namespace="2" * 16)
    with closing(open_backend(url, one)) as first, closing(open_backend(url, two)) as second:
        put(first, KEYS[0], b"abc")
        assert second.contains(KEYS[:1]) == [False]
        assert first.delete(KEYS[0])


@pytest.mark.parametrize(
    ("url", "master"),
    [
        ("mooncake://master", ("master", 50051)),
        ("mooncake://10.0.0.1:7/", ("10.0.0.1", 7)),
        ("mooncake://", None),
        ("mooncake://:7", None),
        ("mooncake://[::1]:7", None),
        ("mooncake://[hunter2", None),
        ("mooncake://host:hunter2", None),
        ("mooncake://user:hunter2@host", None),
        ("mooncake://host/hunter2", None),
        ("mooncake://host?x=hunter2", None),
    ],
)
def test_urls(url: str, master: tuple[str, int] | None) -> None:
    if master is not None:
        assert master_of(url) == master
        return
    with pytest.raises(StorageUrlError) as caught:
        open_backend(url)
    assert str(caught.value) == "a Mooncake store's URL is mooncake://HOST[:PORT], of its master"


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(MissingPackageError) as caught:
        open_backend("mooncake://host")
    assert str(caught.value) == "mooncake is not installed: pip install 'radixkv[mooncake]'"
    monkeypatch.undo()
    monkeypatch.setattr(mooncake_server, "find_spec", lambda name: None)
    with pytest.raises(AssertionError, match=r"^these tests start a Mooncake store: "):
        mooncake_server.program("mooncake_master")


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(MissingLibraryError) as caught:
        open_backend("mooncake://host")
    assert str(caught.value) == "libibverbs.so.1 is not installed: apt-get install libibverbs1"
    error = caught.value
    assert (error.library, error.debian_package) == ("libibverbs.so.1", "libibverbs1")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (BackendOptions(timeout_s=0.0), "timeout_s"),
        (BackendOptions(connect_timeout_s=0.0), "connect_timeout_s"),
    ],
)
def test_times_that_are_none(options: BackendOptions, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_backend("mooncake://host", options)
    assert str(caught.value) == f"{name} must be positive, got 0.0"
