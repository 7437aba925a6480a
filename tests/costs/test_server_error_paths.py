"""Backends of servers give connections, files and requests back, whatever is raised."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
from redis.connection import AbstractConnection

from radixkv.kvcache.storage import BackendError, remote
from radixkv.kvcache.storage.interface import Backend
from radixkv.kvcache.storage.mooncake import backend as mooncake_backend
from radixkv.kvcache.storage.mooncake import client_process
from radixkv.kvcache.storage.mooncake.backend import MooncakeBackend
from radixkv.kvcache.storage.mooncake.client_main import NOT_FOUND
from radixkv.kvcache.storage.mooncake.client_process import ClientProcess
from radixkv.kvcache.storage.object_storage import ObjectStorageBackend, memory_store
from radixkv.kvcache.storage.object_storage import backend as object_backend
from radixkv.kvcache.storage.redis import backend as redis_backend
from radixkv.kvcache.storage.redis import packer

from ..kvcache.storage.redis_calls import connected
from ..kvcache.storage.redis_server import RedisServer, running
from .injection import ALL_ERRORS, has_open_files, injections, open_files, second_injections
from .planting import Bug, bug, planted, planted_source

OF_CLIENTS = ("kill", "wait", "close", "_close", "_close_files", "_take_back")
KEYS = [bytes([number]) * 32 for number in range(6)]
VALUES = [bytes([number]) * 100 for number in range(6)]

REDIS, MOONCAKE = "kvcache.storage.redis.backend", "kvcache.storage.mooncake.backend"
OBJECTS, PROCESS = (
    "kvcache.storage.object_storage.backend",
    "kvcache.storage.mooncake.client_process",
)


def get(backend: Backend, number: int, room: int = 100) -> bytes | None:
    """Return a value, or the part of it for which there is room."""
    found = bytearray(room)
    num_bytes = backend.get(KEYS[number], [memoryview(found)[:40], memoryview(found)[40:]])
    assert num_bytes in (100, None)
    return None if num_bytes is None else bytes(found)


def put(backend: Backend, number: int) -> None:
    value = memoryview(VALUES[number])
    backend.put(KEYS[number], [value[:40], value[40:]])


REDIS_BUG = bug(
    "a connection is used again although its answer was not read",
    REDIS,
    ("                give_back(partial(pool.disconnect, inuse_connections=False))\n", ""),
)
OBJECT_BUGS = (
    bug(
        "a request whose result nobody got goes on",
        OBJECTS,
        ("                found[place] = asked[0].result()\n                asked.popleft()\n",
         "                found[place] = asked.popleft().result()\n"),
    ),
    bug(
        "the first requests go on when one cannot be sent",
        OBJECTS,
        ("        try:\n            asked.extend(self._heads.submit(self._exists, path)"
         " for path in first)\n",
         "        asked.extend(self._heads.submit(self._exists, path) for path in first)\n"
         "        try:\n"),
    ),
)  # fmt: skip
MOONCAKE_BUGS = {
    False: bug(
        "a client is lent again although its answer was not read",
        MOONCAKE,
        (
            "            except BaseException:  # the next",
            "            except TypeError:  # the next",
        ),
    ),
    True: bug(
        "the memory of a client that does not start stays open",
        PROCESS,
        ("partial(_close, self._file), ", ""),
    ),
}
CLEANING_BUGS = {
    "redis": bug(
        "the error of a disconnection replaces the first one",
        REDIS,
        ("give_back(partial(pool.disconnect, inuse_connections=False))",
         "pool.disconnect(inuse_connections=False)"),
    ),
    "objects": bug(
        "nobody waits for requests that cannot be cancelled",
        OBJECTS,
        ("    give_back(*[each.cancel for each in asked], partial(wait, asked))\n",
         "    for each in asked:\n        each.cancel()\n    wait(asked)\n"),
    ),
    "mooncake": bug(
        "the error of a client's end replaces the first one",
        MOONCAKE,
        ("answer to this one\n                give_back(client.kill)\n",
         "answer to this one\n                client.kill()\n"),
    ),
    "mooncake, starts": bug(
        "a client whose start is not finished runs on",
        PROCESS,
        ("            give_back(self.kill if self.alive else self._close_files)\n",
         "            give_back(self._close_files)\n"),
    ),
    "mooncake, closes": bug(
        "a file of a client stays open if another one cannot be closed",
        PROCESS,
        ("give_back(self._process.kill, self._process.wait, self._close_files)",
         "self._process.kill(), self._process.wait(), self._close_files()"),
    ),
    "mooncake, closes all": bug(
        "the next client lives if one cannot be killed",
        MOONCAKE,
        ("        give_back(*[client.kill for client in idle])\n",
         "        for client in idle:\n            client.kill()\n"),
    ),
}  # fmt: skip
ALL_BUGS: list[Bug] = [
    REDIS_BUG, *OBJECT_BUGS, *MOONCAKE_BUGS.values(), *CLEANING_BUGS.values()
]  # fmt: skip

CALLS: dict[str, Callable[[Any], Any]] = {
    "put": lambda backend: put(backend, 4),
    "get": lambda backend: get(backend, 0),
    "get what is long": lambda backend: get(backend, 0, 60),
    "get nothing": lambda backend: get(backend, 5),
    "delete": lambda backend: backend.delete(KEYS[1]),
    "delete nothing": lambda backend: backend.delete(KEYS[5]),
    "touch": lambda backend: backend.touch(KEYS[:3]),
    "contains": lambda backend: backend.contains(KEYS),
    "contains one": lambda backend: backend.contains(KEYS[:1]),
}
LISTS: dict[str, Callable[[Any], Any]] = {
    "list_values": lambda backend: list(backend.list_values()),
    "list_namespaces": lambda backend: list(backend.list_namespaces()),
}


def fill(backend: Backend) -> None:
    for number in range(4):
        put(backend, number)


def check_values(backend: Any) -> None:
    """It counts, and each value is right or missing; then all can be written and read."""
    assert not backend._counts._lock.locked(), "a lock is held"
    for number in range(6):
        assert get(backend, number) in (None, VALUES[number])
    for number in range(6):
        put(backend, number)
        assert get(backend, number) == VALUES[number]
    assert backend.contains(KEYS) == [True] * 6
    assert backend.delete(KEYS[4]) and backend.delete(KEYS[5])


def inject(
    backend: Any,
    modules: Sequence[Any],
    call: Callable[[Any], Any],
    check: Callable[[], None],
    prepare: Callable[[], None] = lambda: None,
    cleaning: Sequence[str] = (),
    after: Sequence[str] = (),
) -> None:
    """Call a backend again and again, and check it after each error.

    With ``after``, calls that clean up raise, alone and after another error.
    """
    modules = (*modules, remote)
    once = not isinstance(backend, ObjectStorageBackend)
    injectors = injections(
        *modules, errors=ALL_ERRORS, cleaning=cleaning, once_per_place=once or bool(after),
        after=after,
    )  # fmt: skip
    if after:
        injectors = chain(injectors, second_injections(*modules, after=after, cleaning=cleaning))
    for injector in injectors:
        try:
            prepare()
            injector.call(partial(call, backend), typed=(BackendError,))
            check()
            check_values(backend)
        except (AssertionError, BackendError, TimeoutError) as error:
            raise AssertionError(str(injector)) from error


# Redis


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running() as server:
        yield server


def inject_into_redis(server: RedisServer, name: str, *after: str) -> None:
    with connected(server, ttl_s=None if name == "touch" else 1000) as backend:
        fill(backend)
        pool, num_files = backend._client.connection_pool, open_files()

        def check() -> None:
            assert not pool._in_use_connections, "a connection is not given back"
            assert has_open_files(num_files), "a socket stays open"

        calls = {**CALLS, **LISTS}
        inject(backend, (redis_backend, packer), calls[name], check, after=after)


@pytest.mark.parametrize("name", [*CALLS, *LISTS])
def test_the_redis_backend_gives_back(server: RedisServer, name: str) -> None:
    inject_into_redis(server, name)


@pytest.mark.parametrize("name", ["get", "list_values"])
def test_the_redis_backend_gives_back_if_cleaning_raises(server: RedisServer, name: str) -> None:
    inject_into_redis(server, name, "disconnect")


def interrupt_before_the_answer(server: RedisServer) -> None:
    """Interrupt a read that was sent; its answer comes when the next read is sent."""
    with connected(server) as backend:
        fill(backend)
        send = AbstractConnection.send_packed_command

        def send_late(self: Any, *args: Any, **options: Any) -> None:
            send(self, *args, **options)
            server.go_on()

        server.pause()
        try:
            with (
                patch.object(
                    type(backend._client), "parse_response", side_effect=KeyboardInterrupt
                ),
                suppress(KeyboardInterrupt),
            ):
                get(backend, 0)
            with patch.object(AbstractConnection, "send_packed_command", send_late):
                if not backend._client.connection_pool._available_connections[0]._sock:
                    server.go_on()  # it connects anew
                assert get(backend, 1) == VALUES[1], "the answer to another command"
        finally:
            server.go_on()


def test_no_answer_is_that_of_an_interrupted_command(server: RedisServer) -> None:
    interrupt_before_the_answer(server)
    with planted(REDIS_BUG), pytest.raises(AssertionError, match="the answer to another command"):
        interrupt_before_the_answer(server)


# Object storage


class Executor:
    """Runs a task when somebody wants its result."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Task:
        self.tasks.append(Task(partial(function, *args)))
        return self.tasks[-1]

    def shutdown(self, **options: bool) -> None:
        pass


class Task(Future[Any]):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def result(self, timeout: float | None = None) -> Any:
        self.set_running_or_notify_cancel()
        try:
            self.set_result(self._function())
        except BaseException as error:
            self.set_exception(error)
        return super().result()

    def cancel(self) -> bool:
        return super().cancel() and not self.set_running_or_notify_cancel()


def inject_into_objects(name: str, *after: str) -> None:
    with closing(ObjectStorageBackend(memory_store(), prefix="here")) as backend:
        fill(backend)
        backend._heads.shutdown()
        executor = Executor()
        backend._heads = executor  # type: ignore[assignment]

        def check() -> None:
            assert all(task.done() for task in executor.tasks), "a request outlives its call"
            executor.tasks.clear()

        calls = {**CALLS, **LISTS}
        inject(
            backend,
            (object_backend,),
            calls[name],
            check,
            cleaning=["cancel", "wait", "_cancel_all"],
            after=after,
        )


@pytest.mark.parametrize("name", [*CALLS, *LISTS])
def test_the_object_storage_backend_gives_back(name: str) -> None:
    inject_into_objects(name)


def test_object_storage_gives_back_if_cleaning_raises() -> None:
    inject_into_objects("contains", "cancel", "wait")


@pytest.mark.parametrize("bug", OBJECT_BUGS, ids=str)
def test_what_object_storage_keeps_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        inject_into_objects("contains")


# Mooncake


class Store:
    """A program in place of Mooncake's client, over the same socket and memory.

    It answers when `ClientProcess` reads, so that a test needs no process.
    """

    def __init__(self, values: dict[str, bytes], arguments: Sequence[str], **options: Any) -> None:
        control, memory, life = (os.dup(int(each)) for each in arguments[3:6])
        os.close(life)
        self._control = socket.socket(fileno=control)
        self._memory = memory
        self._values = values
        self._control.send(b'{"code": 0}')

    def serve(self) -> None:
        """Answer the requests that have been sent."""
        self._control.setblocking(False)
        with suppress(BlockingIOError):
            while message := self._control.recv(1 << 20):
                self._control.send(json.dumps(self._answer(**json.loads(message))).encode())

    def _answer(self, do: str, name: str, num_bytes: int, memory_bytes: int) -> dict[str, Any]:
        match do:
            case "exist":
                names = os.pread(self._memory, num_bytes, 0).decode().split("\n")
                return {"code": 0, "found": "".join(str(int(n in self._values)) for n in names)}
            case "put":
                self._values[name] = os.pread(self._memory, num_bytes, 0)
                return {"code": 0}
            case "remove":
                return {"code": NOT_FOUND if self._values.pop(name, None) is None else 0}
        value = self._values.get(name)
        if value is None:
            return {"code": NOT_FOUND}
        os.pwrite(self._memory, value[:num_bytes], 0)
        return {"code": len(value)}

    def kill(self) -> None:
        self._control.close()
        os.close(self._memory)

    def wait(self) -> None:
        pass


@pytest.fixture
def mooncake() -> Iterator[MooncakeBackend]:
    """A backend whose clients are not processes."""
    values: dict[str, bytes] = {}
    receive = ClientProcess._receive

    def serve_and_receive(self: Any, timeout_s: float) -> Any:
        self._process.serve()
        return receive(self, timeout_s)

    def probe(*args: Any) -> socket.socket:
        return socket.socket()

    with (
        patch.object(subprocess, "Popen", partial(Store, values)),
        patch.object(mooncake_backend, "_check_installed"),
        patch.object(socket, "create_connection", probe),
        patch.object(ClientProcess, "_receive", serve_and_receive),
        closing(MooncakeBackend("127.0.0.1")) as backend,
    ):
        yield backend


def inject_into_mooncake(
    backend: MooncakeBackend, name: str, *after: str, is_started: bool = False
) -> None:
    fill(backend)
    gc.collect()  # garbage of other tests may have files
    num_files = open_files()

    def restart() -> None:
        while is_started and backend._idle:
            backend._idle.pop().kill()

    def check() -> None:
        assert not backend._lock.locked(), "a lock is held"
        assert backend.contains(KEYS[2:4]) == [True, True]
        assert len(backend._idle) == 1, "a client is lost, or was started beside an idle one"
        assert has_open_files(num_files), "a file of a client stays open"

    modules = (mooncake_backend, client_process)
    cleaning = [*OF_CLIENTS, "__enter__"]  # the last one of a socket: it does nothing
    inject(backend, modules, CALLS[name], check, restart, cleaning, after)


@pytest.mark.parametrize("is_started", [False, True], ids=["idle", "started"])
@pytest.mark.parametrize("name", CALLS)
def test_the_mooncake_backend_gives_back(
    mooncake: MooncakeBackend, name: str, is_started: bool
) -> None:
    inject_into_mooncake(mooncake, name, is_started=is_started)


@pytest.mark.parametrize("is_started", [False, True], ids=["idle", "started"])
def test_the_mooncake_backend_gives_back_if_cleaning_raises(
    mooncake: MooncakeBackend, is_started: bool
) -> None:
    inject_into_mooncake(mooncake, "get", *OF_CLIENTS, is_started=is_started)


def test_closing_a_mooncake_backend_ends_all_clients(mooncake: MooncakeBackend) -> None:
    close_clients(mooncake)


def close_clients(mooncake: MooncakeBackend) -> None:
    num_files = open_files()
    for injector in injections(client_process, mooncake_backend, after=OF_CLIENTS):
        clients = [mooncake._start("testing") for _ in range(2)]
        mooncake._idle += clients
        injector.call(mooncake.close)
        assert not any(client.alive for client in clients), f"a client lives: {injector}"
        assert has_open_files(num_files), f"a file of a client stays open: {injector}"


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if "mooncake" in name else [])
        for name in CLEANING_BUGS
    ],
)
def test_what_is_left_if_cleaning_raises_is_found(
    server: RedisServer, mooncake: MooncakeBackend, name: str
) -> None:
    with planted(CLEANING_BUGS[name]), pytest.raises((AssertionError, KeyError)):
        if name == "redis":
            inject_into_redis(server, "get", "disconnect")
        elif name == "objects":
            inject_into_objects("contains", "cancel", "wait")
        elif "closes" in name:
            close_clients(mooncake)
        else:
            is_started = "starts" in name
            inject_into_mooncake(mooncake, "get", *OF_CLIENTS, is_started=is_started)
    gc.collect()  # a client that runs on


@pytest.mark.nightly
@pytest.mark.parametrize("is_started", MOONCAKE_BUGS)
def test_what_mooncake_keeps_is_found(mooncake: MooncakeBackend, is_started: bool) -> None:
    with planted(MOONCAKE_BUGS[is_started]), pytest.raises((AssertionError, KeyError)):
        inject_into_mooncake(mooncake, "get", is_started=is_started)


def test_every_bug_fits() -> None:
    for each in ALL_BUGS:
        planted_source(each)
