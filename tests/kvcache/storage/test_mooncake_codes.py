"""Return codes of a Mooncake store, from a client process that the test scripts."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from radixkv.kvcache.storage import (
    BackendError,
    BackendIOError,
    BackendRefusedError,
    BackendUnreachableError,
)
from radixkv.kvcache.storage.mooncake import backend as module
from radixkv.kvcache.storage.mooncake import client_main
from radixkv.kvcache.storage.mooncake.backend import MooncakeBackend
from radixkv.kvcache.storage.mooncake.client_main import TOO_SMALL, _Memory

from .conformance import KEYS, get, put
from .mooncake_calls import LOST
from .mooncake_server import needs_wheels

pytestmark = needs_wheels

NAME = f"radixkv:{KEYS[0].hex()}"
STEP_S = 0.125  # duration of a request


class Clock:
    """A clock that advances only in requests and pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.pauses_s.append(time_s)


class ScriptedClient:
    """Replaces a `ClientProcess`; the last answer repeats."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answers: list[Any] = []
        self.asked: list[tuple[str, str, int, float]] = []
        self.connects_s: list[float] = []
        self.alive = True

    def wait_connected(self, timeout_s: float) -> None:
        self.connects_s.append(timeout_s)

    def write(self, parts: Sequence[memoryview]) -> int:
        return sum(map(len, parts))

    def view(self, num_bytes: int) -> memoryview:
        return memoryview(b"abcdefgh")[:num_bytes]

    def ask(self, do: str, name: str, num_bytes: int, timeout_s: float) -> dict[str, Any]:
        self.asked.append((do, name, num_bytes, timeout_s))
        self.clock.now_s += STEP_S
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {"code": answer, "found": "1"}

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def client(clock: Clock) -> ScriptedClient:
    return ScriptedClient(clock)


@pytest.fixture
def backend(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeBackend]:
    backend = MooncakeBackend("127.0.0.1", 1)
    monkeypatch.setattr(backend, "_start", lambda doing: client)
    yield backend
    backend.close()
    assert not client.alive


def idle(backend: MooncakeBackend) -> list[Any]:
    return [*backend._idle]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (4, (3, [b"abc"])),  # the value and the padding byte
        (7, (6, [b"abc"])),  # longer: its length is returned
        (1, (0, [bytes(3)])),
        (0, (0, [bytes(3)])),  # not written by radixkv
        (-704, (None, [bytes(3)])),
        (-703, (None, [bytes(3)])),  # another writer takes longer than we wait
    ],
)
def test_codes_of_a_read(
    backend: MooncakeBackend, client: ScriptedClient, code: int, expected: tuple
) -> None:
    client.answers = [code]
    assert get(backend, KEYS[0], 3) == expected
    assert client.asked[0] == ("get", NAME, 4, 1.0)
    assert idle(backend) == [client]
    assert backend.stats() == {"requests": 1, "failed_requests": 0}


def test_codes_of_a_delete(backend: MooncakeBackend, client: ScriptedClient) -> None:
    client.answers = [0, -704]
    assert [backend.delete(KEYS[0]), backend.delete(KEYS[0])] == [True, False]
    assert client.asked == [("remove", NAME, 0, 1.0)] * 2


@pytest.mark.parametrize("limits_s", [None, (2.0, 3.0)])
def test_a_connection_and_a_request_have_their_own_time_limits(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, limits_s: tuple[float, float] | None
) -> None:
    timeout_s, connect_timeout_s = limits_s or (1.0, 5.0)
    options: dict[str, Any] = {"timeout_s": timeout_s, "connect_timeout_s": connect_timeout_s}
    probes: list[tuple[tuple[str, int], float]] = []
    clients: list[ScriptedClient] = []

    def start(local_host: str, master: str) -> ScriptedClient:
        clients.append(ScriptedClient(clock))
        clients[0].answers = [1]
        return clients[0]

    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        connect = socket.create_connection
        backend = MooncakeBackend("127.0.0.1", port, **(options if limits_s else {}))

        def noted(address: tuple[str, int], limit_s: float) -> socket.socket:
            probes.append((address, limit_s))
            return connect(address, limit_s)

        monkeypatch.setattr(socket, "create_connection", noted)
        monkeypatch.setattr(module, "ClientProcess", start)
        assert backend.contains(KEYS[:1]) == [True]
        backend.touch(KEYS[:1])
    assert probes == [(("127.0.0.1", port), connect_timeout_s)]
    [client] = clients
    assert client.connects_s == [connect_timeout_s] * 2
    assert client.asked == [("exist", "", len(NAME), timeout_s)] * 2
    backend.close()


GONE = "the machine that has the value is gone"


@pytest.mark.parametrize(
    ("answer", "type_", "text", "stays"),
    [
        (-1, BackendRefusedError, "was refused by the server: code -1", True),
        (-799, BackendRefusedError, "was refused by the server: code -799", True),
        (-800, BackendUnreachableError, f"failed: {GONE}", True),
        (-899, BackendUnreachableError, f"failed: {GONE}", True),
        (-900, BackendUnreachableError, f"failed: {LOST}", False),
        (-999, BackendUnreachableError, f"failed: {LOST}", False),
        (-1000, BackendRefusedError, "was refused by the server: code -1000", True),
        (TimeoutError(), BackendUnreachableError, "failed: no answer within 1 s", False),
        (ConnectionResetError(), BackendUnreachableError, f"failed: {LOST}", False),
        (EOFError(), BackendUnreachableError, f"failed: {LOST}", False),
    ],
)
def test_codes_of_errors(
    backend: MooncakeBackend,
    client: ScriptedClient,
    answer: object,
    type_: type[BackendError],
    text: str,
    stays: bool,
) -> None:
    client.answers = [answer]
    for doing, call in {
        "looking up": lambda: backend.contains(KEYS[:1]),
        "reading": lambda: get(backend, KEYS[0], 3),
        "writing": lambda: put(backend, KEYS[0], b"abc"),
        "deleting": lambda: backend.delete(KEYS[0]),
    }.items():
        client.alive = True
        with pytest.raises(type_) as caught:
            call()
        assert str(caught.value) == f"{doing} {text}"
        assert idle(backend) == [client] * stays
        assert client.alive == stays
    assert backend.stats() == {"requests": 4, "failed_requests": 4}
    client.alive = False


@pytest.mark.parametrize("code", [-703, -601, -704])
def test_a_call_waits_a_moment_for_another_writer(
    backend: MooncakeBackend, client: ScriptedClient, clock: Clock, code: int
) -> None:
    """For a quarter of a second. A put whose key disappears also had another writer."""
    client.answers = [code, 0]
    put(backend, KEYS[0], b"abc")
    assert client.asked == [("put", NAME, 4, 1.0), ("put", NAME, 4, 1.0 - STEP_S)]
    client.asked = []
    client.answers = [code]
    with pytest.raises(BackendRefusedError, match=rf"^writing .*: code {code}$"):
        put(backend, KEYS[0], b"abc")
    times_s = [timeout_s for *_, timeout_s in client.asked]
    assert times_s == [1.0, 1.0 - STEP_S, 1.0 - 2 * STEP_S]
    assert clock.pauses_s == [0.001] * 3


def test_a_call_waits_for_another_writer_within_its_time_limit(
    backend: MooncakeBackend, client: ScriptedClient
) -> None:
    backend._timeout_s = STEP_S
    client.answers = [-703]
    with pytest.raises(BackendRefusedError):
        put(backend, KEYS[0], b"abc")
    assert len(client.asked) == 1


def test_a_call_after_close_kills_its_process(
    backend: MooncakeBackend, client: ScriptedClient
) -> None:
    client.answers = [0]
    put(backend, KEYS[0], b"abc")
    backend.close()
    assert not client.alive
    client.alive = True
    put(backend, KEYS[0], b"abc")
    assert not client.alive and idle(backend) == []


def test_a_call_that_is_in_progress_at_close_kills_its_process(
    backend: MooncakeBackend, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = client.ask

    def closing(*arguments: Any) -> dict[str, Any]:
        assert idle(backend) == []
        backend.close()
        return ask(*arguments)

    monkeypatch.setattr(client, "ask", closing)
    client.answers = [0]
    put(backend, KEYS[0], b"abc")
    assert not client.alive and idle(backend) == []


def test_the_client_that_was_used_last_is_used_next(
    backend: MooncakeBackend,
    client: ScriptedClient,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients: list[ScriptedClient] = []
    nested = [KEYS[1]]

    class Nested(ScriptedClient):
        def ask(self, *arguments: Any) -> dict[str, Any]:
            if nested:
                put(backend, nested.pop(), b"abc")  # as another thread, during this call
            return super().ask(*arguments)

    def start(doing: str) -> ScriptedClient:
        clients.append(Nested(clock))
        clients[-1].answers = [0]
        return clients[-1]

    monkeypatch.setattr(backend, "_start", start)
    for key in KEYS[:3]:
        put(backend, key, b"abc")
    assert [len(each.asked) for each in clients] == [3, 1]
    assert idle(backend) == clients[::-1]
    backend.close()
    assert not any(each.alive for each in clients)
    client.alive = False  # it was not used


# -- in the client process


class ScriptedStore:
    """Replaces Mooncake's client: scripted answers, and a record of the buffers."""

    def __init__(self, get_into: int = 0, size: int | None = None, ranges: int | None = None):
        self.codes = [code for code in (get_into, size, ranges) if code is not None]
        self.buffers: list[int] = []

    def get_into(self, name: str, address: int, num_bytes: int) -> int:
        return self.codes.pop(0)

    def get_size(self, name: str) -> int:
        return self.codes.pop(0)

    def get_into_ranges(self, *arguments: object) -> object:
        return (((self.codes.pop(0),),),)

    def register_buffer(self, address: int, num_bytes: int) -> None:
        self.buffers += [address, num_bytes]

    def unregister_buffer(self, address: int) -> None:
        assert self.buffers[-2] == address
        del self.buffers[-2:]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((8,), 8),
        ((-704,), -704),
        ((TOO_SMALL, -704), -704),  # removed meanwhile
        ((TOO_SMALL, -1), -1),
        ((TOO_SMALL, 0), TOO_SMALL),  # shorter meanwhile
        ((TOO_SMALL, 8), TOO_SMALL),
        ((TOO_SMALL, 9, 8), 9),
        ((TOO_SMALL, 9, 0), 9),
        ((TOO_SMALL, 9, -1), -1),
    ],
)
def test_the_start_of_a_longer_value_is_read(codes: tuple[int, ...], expected: int) -> None:
    store = ScriptedStore(*codes)
    assert client_main._get(store, _Memory(store, -1), NAME, 8) == expected
    assert store.codes == []


def test_enlarged_memory_is_registered_again() -> None:
    store, file = ScriptedStore(), os.memfd_create("memory")
    memory = _Memory(store, file)
    memory.grow(0)
    assert store.buffers == []
    for size, mapped in ((4096, 4096), (4096, 4096), (8192, 8192), (100, 8192)):
        os.ftruncate(file, mapped)
        memory.grow(size)
        assert store.buffers == [memory.address, mapped]
    os.pwrite(file, b"a\nbc", 0)
    assert memory.names(4) == ["a", "bc"]
    os.close(file)


@pytest.mark.parametrize(
    ("owner", "call"),
    [(subprocess, "Popen"), (os, "memfd_create"), (os, "pipe"), (socket, "socketpair")],
)
def test_a_system_that_has_no_room_for_a_client_is_an_error_of_the_backend(
    owner: object, call: str
) -> None:
    full = OSError(errno.EMFILE, "")
    with socket.create_server(("127.0.0.1", 0)) as master:
        backend = MooncakeBackend("127.0.0.1", master.getsockname()[1])
        with patch.object(owner, call, side_effect=full), pytest.raises(BackendIOError) as caught:
            get(backend, KEYS[0], 3)
        backend.close()
    assert str(caught.value) == "reading failed: EMFILE (Too many open files)"
    assert backend.stats()["failed_requests"] == 1
