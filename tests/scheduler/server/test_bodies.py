"""Bodies of requests: `BodyReader`, with sizes at its limits, and `parse`."""

from __future__ import annotations

import asyncio
import gc
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.requests import ClientDisconnect, Request

from radixkv.scheduler.server.errors import ApiError
from radixkv.scheduler.server.limits import BodyReader, ServerLimits
from radixkv.scheduler.server.schema import CompletionBody, parse

LIMIT = 100


def request(chunks: list[bytes], *, announces: bool = False, waits: Any = None) -> Request:
    """A request whose body comes in chunks; before the last one, it waits for an event."""
    rest = list(chunks)

    async def receive() -> Any:
        if len(rest) == 1 and waits is not None:
            await waits.wait()
        return {"type": "http.request", "body": rest.pop(0), "more_body": bool(rest)}

    length = str(sum(map(len, chunks))).encode()
    headers = [(b"content-length", length)] if announces else []
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_body_may_have_as_many_bytes_as_the_limit(more: int, announces: bool) -> None:
    reader = BodyReader(ServerLimits(max_body_bytes=LIMIT))
    chunks = [b"x" * 60, b"y" * (LIMIT - 60 + more)]
    reading = reader.read(request(chunks, announces=announces))
    if more > 0:
        size = "101 bytes" if announces else "more than 100 bytes"
        message = f"^the body has {size}; the server takes at most 100$"
        with pytest.raises(ApiError, match=message) as refused:
            asyncio.run(reading)
        assert refused.value.status == 413
    else:
        assert asyncio.run(reading) == b"".join(chunks)
    assert not (reader._num_bytes or reader._bodies or reader._refused)


def test_what_came_of_a_client_that_goes_away_is_forgotten() -> None:
    reader = BodyReader(ServerLimits(max_body_bytes=LIMIT))
    messages = [
        {"type": "http.request", "body": b"x" * 60, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    with pytest.raises(ClientDisconnect):
        asyncio.run(reader.read(Request({"type": "http", "headers": []}, receive)))
    assert not (reader._num_bytes or reader._bodies or reader._refused)


@pytest.mark.parametrize("more", [0, 1])
def test_bodies_may_have_as_many_bytes_together_as_the_limit(more: int) -> None:
    reader = BodyReader(ServerLimits(max_body_bytes=LIMIT, max_bodies_bytes=LIMIT))

    async def run() -> None:
        event = asyncio.Event()
        first = asyncio.create_task(reader.read(request([b"x" * 60, b""], waits=event)))
        while reader._num_bytes < 60:
            await asyncio.sleep(0)
        assert len(await reader.read(request([b"y" * (40 + more), b""]))) == 40 + more
        event.set()
        if more:
            with pytest.raises(ApiError, match=r"^the server has 100 bytes of bodies that come "):
                await first
        else:
            assert await first == b"x" * 60

    asyncio.run(run())
    assert not (reader._num_bytes or reader._bodies or reader._refused)


def test_the_slowest_body_gives_way_though_no_more_of_it_comes() -> None:
    reader = BodyReader(ServerLimits(max_body_bytes=LIMIT, max_bodies_bytes=LIMIT, stall_s=1e6))

    async def run() -> None:
        slow = asyncio.create_task(reader.read(request([b"x" * 60, b""], waits=asyncio.Event())))
        while reader._num_bytes < 60:
            await asyncio.sleep(0)
        assert len(await reader.read(request([b"y" * 41]))) == 41
        for _ in range(9):
            await asyncio.sleep(0)
        assert slow.done()
        with pytest.raises(ApiError) as refused:
            await slow
        error = refused.value
        assert (error.status, error.code) == (503, "too_many_bodies")
        assert error.headers == {"retry-after": "1"}

    asyncio.run(run())
    assert not (reader._num_bytes or reader._bodies or reader._refused)


@pytest.mark.parametrize("chunks", [[b"x" * 101], [b"x" * 60, b"x" * 41, b"x"]])
def test_a_body_that_is_too_large_alone_gives_way_itself(chunks: list[bytes]) -> None:
    reader = BodyReader(ServerLimits(max_bodies_bytes=LIMIT))
    with pytest.raises(ApiError, match=r"^the server has 100 bytes of bodies"):
        asyncio.run(reader.read(request(chunks)))
    assert not (reader._num_bytes or reader._bodies or reader._refused)


def test_a_body_whose_time_is_over_gives_way_without_a_new_end() -> None:
    reader = BodyReader(ServerLimits(max_bodies_bytes=LIMIT))
    over: Any = Mock(**{"expired.return_value": True})
    reader._bodies[over], reader._num_bytes = bytearray(LIMIT + 1), LIMIT + 1
    reader._make_room()
    assert (reader._num_bytes, reader._refused) == (0, {over})
    over.reschedule.assert_not_called()


def test_a_body_that_does_not_come_in_time_is_told_how_much_came() -> None:
    reader = BodyReader(ServerLimits(stall_s=0.0))
    with pytest.raises(ApiError) as refused:
        asyncio.run(reader.read(request([b"x" * 60, b""], waits=asyncio.Event())))
    assert refused.value.message == "the body did not come within 0 s: got 60 bytes"
    assert refused.value.status == 408


@pytest.mark.parametrize("announced", ["9" * 19, "0" * 18 + "9", "9" * 20, "-1", "1_000", "a", ""])
def test_a_length_is_believed_if_it_is_one(announced: str) -> None:
    """Those of up to 19 digits, as many as the largest of 64 bits."""
    reader = BodyReader(ServerLimits(max_body_bytes=LIMIT))
    asked = request([b"x"])
    asked.scope["headers"] = [(b"content-length", announced.encode())]
    if announced == "9" * 19:
        with pytest.raises(ApiError, match=f"^the body has {announced} bytes; "):
            asyncio.run(reader.read(asked))
    else:
        assert asyncio.run(reader.read(asked)) == b"x"


@pytest.mark.parametrize(
    ("body", "is_valid"),
    [
        (b'{"model": "m", "prompt": "a"}', True),
        (b'{"model": "m", "prompt": "a", "n": "b"}', False),
        (b'{"model": "m", "prompt": ', False),
        (b'{"metadata": ' + b'{"a": ' * 100_000, False),
    ],
    ids=["valid", "wrong type", "cut off", "nested"],
)
@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(
    body: bytes, is_valid: bool, collects: bool
) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with nullcontext() if is_valid else pytest.raises(ApiError):
            parse(body, CompletionBody)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
