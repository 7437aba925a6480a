"""Hostile clients of a real server, each beside a client that behaves and must not notice."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from radixkv.scheduler import ConfigError, GenerationParams
from radixkv.scheduler.server import ServerLimits, run
from radixkv.scheduler.server import app as app_module
from radixkv.scheduler.server.connections import Connection, Connections
from radixkv.scheduler.server.descriptors import reserve_descriptors
from radixkv.scheduler.server.limits import BodyReader

from . import test_server
from .test_async_engine import Gate
from .test_server import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    PATIENT,
    Answer,
    Served,
    in_loop,
    listening,
    served,
)

llm = test_server.llm
PROMPT = "the cache holds"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class CountedConnections(Connections):
    """Counts the connections that it has had."""

    num_opened = 0

    def opened(self, connection: Connection) -> None:
        self.num_opened += 1
        super().opened(connection)


def limited(owner: Connections | BodyReader, **limits: Any) -> AbstractContextManager[object]:
    """Limit connections or bodies that begin in the context: clients that behave come after it."""
    name = "limits" if isinstance(owner, Connections) else "_limits"
    return patch.object(owner, name, replace(PATIENT, **limits))


class Server:
    """A server that listens, and a client that behaves.

    Attributes:
        connections, bodies: of the server; see `limited`.
    """

    connections: CountedConnections
    bodies: BodyReader

    def __init__(self, client: Any, port: int, expected: str) -> None:
        self.port = port
        self._client = client
        self.expected = expected
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def disconnect(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def send(self, data: bytes) -> Streams:
        reader, writer = await self.connect()
        writer.write(data)
        with suppress(ConnectionError):  # the server may have closed it
            await writer.drain()
        return reader, writer

    async def accepted(self, num: int) -> None:
        """Wait until the server has had a number of connections."""
        while self.connections.num_opened < num:
            await asyncio.sleep(0)

    async def check(self) -> None:
        """A client gets the right text, as a whole and as a stream, over new connections."""
        fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, **GREEDY}
        headers = {"connection": "close"}
        whole = await self._client.completions.create(**fields, extra_headers=headers)
        assert whole.choices[0].text == self.expected
        stream = await self._client.completions.create(**fields, stream=True, extra_headers=headers)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == self.expected


@asynccontextmanager
async def serving(llm: Any, **limits: Any) -> AsyncIterator[Server]:
    """Serve within limits that let clients on a slow machine stop for a while; see `limited`."""
    [expected] = [output.text for output in await expected_of(llm)]
    options: dict[str, Any] = {"limits": replace(PATIENT, **limits)}
    connections: list[CountedConnections] = []
    bodies: list[BodyReader] = []

    def make_connections(limits: ServerLimits) -> Connections:
        connections.append(CountedConnections(limits))
        return connections[-1]

    def make_bodies(limits: ServerLimits) -> BodyReader:
        bodies.append(BodyReader(limits))
        return bodies[-1]

    with (
        patch.object(run, "Connections", make_connections),
        patch.object(app_module, "BodyReader", make_bodies),
    ):
        async with (
            served(llm, **options) as server,
            listening(server, **options) as (client, _, port),
            peer_of(client, port, expected) as peer,
        ):
            [peer.connections], [peer.bodies] = connections, bodies
            yield peer


@asynccontextmanager
async def peer_of(client: Any, port: int, expected: str = "") -> AsyncIterator[Server]:
    peer = Server(client, port, expected)
    try:
        yield peer
    finally:
        await peer.disconnect()


async def expected_of(llm: Any) -> Any:
    return await asyncio.to_thread(llm.generate, PROMPT, GenerationParams(24))


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the server closes a connection that got no answer."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def head(path: str = COMPLETIONS, length: int = 0, method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n".encode()


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", **fields}).encode()


def unchunked(data: bytes) -> bytes:
    """Return the content of a body in chunks, which must be whole."""
    content = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n"
        content, data = content + data[:length], data[length + 2 :]
    assert length == 0
    return content


# Time


@pytest.mark.parametrize(
    "sent", [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: "], ids=len
)
def test_a_head_that_does_not_come(llm, sent):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            with limited(server.connections, head_s=0.05):
                reader, _ = await server.send(sent)
                await server.accepted(1)
            await server.check()
            assert await is_closed(reader)

    test()


def test_a_head_that_comes_byte_by_byte(llm):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            with limited(server.connections, head_s=0.05):
                reader, writer = await server.connect()
                closed = asyncio.create_task(is_closed(reader))
                while not closed.done():  # a byte does not move the deadline
                    writer.write(b"x")
                    await asyncio.sleep(0.001)
            assert closed.result()
            await server.check()

    test()


def test_the_second_head_that_does_not_come(llm):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            reader, writer = await server.send(head("/health", method="GET"))
            await reader.readuntil(b"}")
            with limited(server.connections, head_s=0.05):
                writer.write(b"G")
                assert await is_closed(reader)
            await server.check()

    test()


def test_a_body_after_its_response(llm):
    """The server has answered before the body came; what drips in moves no deadline."""

    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            reader, writer = await server.send(head("/health", 10**6, "GET"))
            await reader.readuntil(b"}")
            with limited(server.connections, head_s=0.05):
                closed = asyncio.create_task(is_closed(reader))
                while not closed.done():
                    writer.write(b"x")
                    await asyncio.sleep(0)
            await server.check()

    test()


def test_a_body_that_does_not_come(llm):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            with limited(server.bodies, stall_s=0.2):
                reader, _ = await server.send(head(length=100) + b"{")
                assert b" 408 " in await reader.readuntil(b"\r\n")
            await server.check()

    test()


def test_a_client_that_never_reads(llm):
    """The response does not fit the buffers; its connection is closed though it never reads."""

    @in_loop
    async def test() -> None:
        async with serving(llm, keep_alive_s=0) as server:
            tokens = json.dumps({"tokens": [300] * 500_000}).encode()
            with limited(server.connections, stall_s=0.05):
                _, writer = await server.connect()
                await server.accepted(1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(head("/detokenize", len(tokens)) + tokens)
            await writer.drain()
            await server.check()
            while server.connections.num_open:
                await asyncio.sleep(0.001)
            assert not (server.connections._waiting or server.connections.num_dropped)

    test()


# Bytes


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/one\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n"
        b"content-length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\n no: space\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 2**20 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 2**18 + b"\r\n",
    ],
    ids=range(11),
)
def test_what_is_no_http(llm, sent):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            reader, writer = await server.connect()
            writer.write(sent)
            try:
                line = await reader.readline()
                assert line.split()[1:2] == [b"400"]
                assert len(await reader.read()) < 2000
            except ConnectionError:  # more came than was read
                pass
            await server.check()

    test()


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 10**6,
        b'{"model": "tiny", "prompt": ' + b"[" * 10**6,
        b'{"model": "tiny", "prompt": [' + b"[1]," * 10**6 + b"[1]]}",
        b'{"model": "tiny", "prompt": [' + b"1," * 10**6 + b"1]}",
        b'{"model": "tiny", "prompt": "a", "metadata": {' + b'"a":{' * 10**5 + b"}" * 10**5 + b"}}",
        b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 10**6 + b"}",
        b'{"model": "tiny", "prompt": "a", "temperature": 1e' + b"9" * 10**6 + b"}",
        b'{"model": "tiny", "prompt": "a", "' + b"k" * 10**6 + b'": 1}',
    ],
    ids=range(8),
)
def test_json_bombs(llm, sent):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            reader, _ = await server.send(head(length=len(sent)) + sent)
            assert b" 400 " in await reader.readuntil(b"\r\n")
            assert len(await reader.readuntil(b"}}")) < 2000
            await server.check()

    test()


def test_requests_in_one_packet_are_answered_in_order(llm):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            one = body(prompt=PROMPT, max_tokens=1, temperature=0)
            reader, _ = await server.send(
                (head(length=len(one)) + one) * 20 + head("/v2", method="GET")
            )
            statuses: list[int] = []
            while len(statuses) < 21:
                line = await reader.readline()
                if line.startswith(b"HTTP/1.1 ") or b"HTTP/1.1 " in line:
                    statuses.append(int(line.split(b"HTTP/1.1 ")[1][:3]))
            assert statuses == [200] * 20 + [404]
            await server.check()

    test()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_has_the_framing_of_its_version(llm, version):
    """HTTP/1.0 has no chunks: its connection ends with the response."""

    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            one = body(prompt=PROMPT, stream=True, **GREEDY)
            sent = head(length=len(one)).replace(b"/1.1", b"/" + version)
            sent = sent.replace(b"host: a", b"host: a\r\nconnection: close")
            reader, _ = await server.send(sent + one)
            answer_head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
            assert (b"transfer-encoding: chunked" in answer_head.lower()) == (version == b"1.1")
            if version == b"1.1":
                rest = unchunked(rest)
            events = rest.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(each.removeprefix("data: ")) for each in events[:-2]]
            got = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert got == server.expected

    test()


# Numbers


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", head(length=9)], ids=len)
def test_more_connections_than_there_may_be(llm, sent):
    """Those that wait longest go; a client that sends its request is served."""

    @in_loop
    async def test() -> None:
        async with serving(llm, max_connections=8) as server:
            crowd = [await server.send(sent) for _ in range(50)]
            await server.check()
            for reader, _ in crowd[: 50 - 8]:
                assert await is_closed(reader)

    test()


def test_connections_with_requests_in_progress_are_kept(llm):
    """The one that is too many is refused, and none of the others is closed."""
    gates: list[Gate] = []

    @in_loop
    async def test() -> None:
        limits, asked = replace(PATIENT, max_connections=2), []
        async with served(llm, lambda e: gates.append(Gate(e)), limits=limits) as server:
            app = server.app

            async def watched(scope: Any, receive: Any, send: Any) -> None:
                asked.append(scope)
                await app(scope, receive, send)

            server.app = watched  # type: ignore[assignment]
            await check_refusal(server, limits, asked, gates[0])

    test()


async def check_refusal(server: Served, limits: ServerLimits, asked: list[Any], gate: Gate) -> None:
    async with listening(server, limits=limits) as (client, _, port), peer_of(client, port) as peer:
        one = body(prompt=PROMPT, max_tokens=3, temperature=0)
        busy = []
        for _ in range(2):
            busy.append(await peer.send(head(length=len(one)) + one))
        while len(asked) < 2:
            await asyncio.sleep(0)
        reader, _ = await peer.connect()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        problem = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert problem["code"] == "too_many_connections"
        assert problem["message"] == (
            "the server has 2 of at most 2 connections, all with requests in progress: "
            "try again later"
        )
        gate.open()
        for reader, _ in busy:
            assert b" 200 " in await reader.readline()


def test_clients_that_leave_in_the_middle_of_a_stream(llm):
    @in_loop
    async def test() -> None:
        async with serving(llm) as server:
            chat = {"messages": [{"role": "user", "content": "the cache"}]}
            for path, fields in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, chat)):
                long = body(max_tokens=100, stream=True, ignore_eos=True, **fields)
                crowd = [await server.send(head(path, len(long)) + long) for _ in range(6)]
                for reader, _ in crowd[::2]:
                    await reader.readline()
                checked = asyncio.create_task(server.check())
                for _, writer in crowd:
                    writer.transport.abort()
                await checked
        # `served` asserts that nothing is left.

    test()


@pytest.mark.parametrize("more", [0, 1])
def test_a_text_that_cannot_fit_is_not_made_tokens_of(llm, more):
    num_chars = 128 * llm.tokenizer.max_token_chars + more
    limit = (
        f"the model takes at most 128 tokens, of up to {llm.tokenizer.max_token_chars} characters "
        "each"
    )
    message = f"characters: {limit}"
    of_chat = f"characters with the chat template: {limit}"
    text = "x" * num_chars

    @in_loop
    async def test() -> None:
        async with served(llm) as server:
            messages = [{"role": "user", "content": "x"}]
            around = len(llm.tokenizer.render_chat(messages)) - 1
            messages = [{"role": "user", "content": text[around:]}]
            for path, fields, problem in (
                (COMPLETIONS, {"prompt": text}, f"the prompt has {num_chars} {message}"),
                ("/tokenize", {"prompt": text}, f"the prompt has {num_chars} {message}"),
                (CHAT, {"messages": messages}, f"the messages have {num_chars} {of_chat}"),
            ):
                answer = await server.post(path, **fields)
                if more:
                    assert (answer.status, answer.json()["error"]["message"]) == (400, problem)
                else:
                    assert "characters" not in answer.body.decode()

    test()


# Bodies that come slowly, together


def test_the_slowest_body_gives_way(llm, monkeypatch):
    readers: list[BodyReader] = []

    def make_reader(limits: ServerLimits) -> BodyReader:
        readers.append(BodyReader(limits))
        return readers[0]

    monkeypatch.setattr(app_module, "BodyReader", make_reader)

    @in_loop
    async def test() -> None:
        limits = ServerLimits(max_bodies_bytes=100)
        async with served(llm, limits=limits) as server:
            first = Answer()
            slow = asyncio.create_task(
                server.ask("POST", COMPLETIONS, [b" " * 60], answer=first, stalls=True)
            )
            while readers[0]._num_bytes < 60:
                await asyncio.sleep(0)
            whole = body(prompt=PROMPT, max_tokens=1)
            answer = await server.ask("POST", COMPLETIONS, [whole[:50], whole[50:]])
            assert answer.status == 200
            await slow
            assert (first.status, first.headers["retry-after"]) == (503, "1")
            problem = first.json()["error"]
            assert problem["code"] == "too_many_bodies"
            assert not (readers[0]._num_bytes or readers[0]._bodies or readers[0]._refused)
            assert problem["message"] == (
                "the server has 100 bytes of bodies that come too slowly: try again later"
            )

    test()


# Descriptors


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_descriptors_are_reserved(monkeypatch, more):
    limits = {"soft": 100, "hard": 5000}
    monkeypatch.setattr(os, "listdir", lambda _: ["0", "1", "2"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, both: limits.update(soft=both[0], hard=both[1])
    )
    others = 3 + 4 * 64 + 128
    wanted = 5000 - others + more
    if more > 0:
        message = (
            f"{wanted} connections need 5001 file descriptors, and the limit is 5000 "
            r"\(`ulimit -Hn`\)"
        )
        with pytest.raises(ConfigError, match=message):
            reserve_descriptors(wanted)
        assert limits == {"soft": 100, "hard": 5000}
    else:
        assert reserve_descriptors(wanted) == wanted
        assert limits == {"soft": wanted + others, "hard": 5000}
        assert reserve_descriptors(1) == 1
        assert limits["soft"] == wanted + others  # a limit is never lowered
    limits.update(soft=100)
    assert reserve_descriptors(None) == 1024
    limits.update(soft=500, hard=500)
    assert reserve_descriptors(None) == 500 - others
    limits.update(hard=others)
    with pytest.raises(ConfigError, match=f"^1024 connections need {1024 + others} file"):
        reserve_descriptors(None)
