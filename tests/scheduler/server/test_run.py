"""When the server ends, what it takes of its options, and how it writes a response."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from http.client import HTTPConnection
from typing import Any

import pytest
import uvicorn

from radixkv.scheduler.errors import GroupError
from radixkv.scheduler.server.descriptors import ACCEPTED_AT_ONCE
from radixkv.scheduler.server.limits import ServerLimits
from radixkv.scheduler.server.run import bind, serve
from radixkv.scheduler.serving import AsyncEngine


class Failing:
    """An engine without work that fails when it is told to."""

    has_work = False

    def __init__(self) -> None:
        self.fails = threading.Event()

    def step(self) -> Any:
        assert self.fails.wait(100)
        raise GroupError("process 1 is lost")

    def close(self, *, timeout_s: float) -> bool:
        return True


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


def run(engine: AsyncEngine, **options: Any) -> bool:
    return asyncio.run(serve(app, engine, bind("127.0.0.1", 0), **options))


def test_a_server_ends_with_its_engine() -> None:
    failing: Any = Failing()
    engine = AsyncEngine(failing, poll_s=0.001)
    with pytest.raises(GroupError, match=r"^process 1 is lost$"):
        run(engine, outlives_engine=False, on_ready=failing.fails.set)


def test_a_server_outlives_its_engine() -> None:
    failing: Any = Failing()
    engine = AsyncEngine(failing, poll_s=0.001)

    def fail_and_stop() -> None:
        failing.fails.set()
        engine.when_ended(lambda: os.kill(os.getpid(), signal.SIGTERM))

    assert run(engine, on_ready=fail_and_stop)
    assert isinstance(engine.failure, GroupError)


class Idle:
    """An engine without work."""

    has_work = False
    num_closed = 0

    def step(self) -> Any:
        return []

    def close(self, *, timeout_s: float) -> bool:
        self.num_closed += 1
        return True


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def idle() -> Any:
    return AsyncEngine(Idle())  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "seconds"), [(0.0, 0), (0.2, 1), (1.0, 1), (2.5, 3)])
def test_times_are_rounded_up_to_seconds(
    given: float, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[uvicorn.Config] = []
    make = uvicorn.Config

    def recorded(*arguments: Any, **options: Any) -> uvicorn.Config:
        found.append(make(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(uvicorn, "Config", recorded)
    limits = ServerLimits(keep_alive_s=given)
    assert run(idle(), limits=limits, drain_timeout_s=given, on_ready=stop)
    [config] = found
    assert (config.timeout_keep_alive, config.timeout_graceful_shutdown) == (seconds, seconds)


class Listener(socket.socket):
    """A socket that remembers how many connections may wait for it."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(fileno=listener.detach())
        self.backlogs: list[int] = []

    def listen(self, backlog: int = 0, /) -> None:
        self.backlogs.append(backlog)
        super().listen(backlog)


def test_more_connections_may_wait_than_are_accepted_at_once() -> None:
    listener = Listener(bind("127.0.0.1", 0))
    assert asyncio.run(serve(app, idle(), listener, on_ready=stop))
    assert listener.backlogs == [ACCEPTED_AT_ONCE, 2048]


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_closed_and_signals_are_given_back_also_after_an_error(fails: bool) -> None:
    inner = Idle()

    def on_ready() -> None:
        if fails:
            raise ValueError("of the caller")
        stop()

    async def test() -> None:
        engine = AsyncEngine(inner)  # type: ignore[arg-type]
        serving = serve(app, engine, listener, on_ready=on_ready)
        if fails:
            with pytest.raises(ValueError, match=r"^of the caller$"):
                await serving
        else:
            assert await serving
        loop = asyncio.get_running_loop()
        assert not any(map(loop.remove_signal_handler, (signal.SIGTERM, signal.SIGINT)))

    with closing(bind("127.0.0.1", 0)) as listener:
        asyncio.run(test())
    assert inner.num_closed == 1


PARTS = [b"the first", b"", b"x" * 70_000]


async def send_parts(scope: Any, receive: Any, send: Any) -> None:
    length = str(sum(map(len, PARTS))).encode()
    headers = [(b"content-length", length)] if scope["path"] == "/length" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in PARTS:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def ask(port: int, path: str) -> list[bytes]:
    """Return the bodies of responses over one connection, which must keep in step."""
    connection = HTTPConnection("127.0.0.1", port)
    bodies = []
    for method in ("GET", "HEAD", "GET"):
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == 200
        bodies.append(response.read())
    connection.close()
    return bodies


@asynccontextmanager
async def serving(application: Any) -> AsyncIterator[int]:
    """Serve an application on the port that is given."""
    listener, ready = bind("127.0.0.1", 0), asyncio.Event()
    port: int = listener.getsockname()[1]
    task = asyncio.create_task(serve(application, idle(), listener, on_ready=ready.set))
    await ready.wait()
    try:
        yield port
    finally:
        stop()
        await task


@pytest.mark.parametrize("path", ["/chunks", "/length"])
def test_a_response_comes_whole_whatever_its_parts_and_its_framing(path: str) -> None:
    """An empty chunk would end it, and the client takes no chunks of one with a length."""

    async def test() -> None:
        async with serving(send_parts) as port:
            whole = b"".join(PARTS)
            assert await asyncio.to_thread(ask, port, path) == [whole, b"", whole]

    asyncio.run(test())


def test_a_part_waits_for_a_client_that_does_not_read() -> None:
    """Otherwise all that is sent to it would be kept in memory."""
    number, part = 1_000, bytes(100_000)
    is_told, is_held = asyncio.Event(), False

    async def send_much(scope: Any, receive: Any, send: Any) -> None:
        nonlocal is_held
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(number):
            sending = asyncio.ensure_future(
                send({"type": "http.response.body", "body": part, "more_body": True})
            )
            for _ in range(20):
                await asyncio.sleep(0)
            if not sending.done():
                is_held = True
                is_told.set()
            await sending
        is_told.set()
        await send({"type": "http.response.body", "body": b""})

    async def test() -> None:
        async with serving(send_much) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                await is_told.wait()
                assert is_held, "all is in memory"
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                assert (await reader.read()).endswith(b"0\r\n\r\n")
            finally:
                writer.transport.abort()

    asyncio.run(asyncio.wait_for(test(), 60.0))
