"""Limits of what clients may ask of the server at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Send

from .errors import ApiError


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the server.

    Attributes:
        max_body_bytes: size of the body of a request.
        max_bodies_bytes: size of all bodies together that have not come whole.
        max_requests: number of choices, ``n`` for each prompt, that are served or wait at a time.
        max_connections: number of connections; see `serve`.
        head_s: how long a client may take for the head of a request.
        stall_s: how long the server waits for a body, and for a client to read what it has sent.
        keep_alive_s: how long a connection may be idle between two requests.
    """

    max_body_bytes: int = 4 * 2**20
    max_bodies_bytes: int = 64 * 2**20
    max_requests: int = 256
    max_connections: int = 1024
    head_s: float = 10.0
    stall_s: float = 60.0
    keep_alive_s: float = 5.0


_MAX_PROMPT_RECORDS: Final = 4 << 20
"""Log probabilities of prompts at a time, of up to 500 bytes each while JSON is made of them."""


class RequestCount:
    """Counts what is served or waits, up to limits; for one event loop.

    Attributes:
        active: number of choices.
        num_records: number of records of prompts' log probabilities, which all stay until the
            response is written.
    """

    def __init__(self, limit: int, max_records: int = _MAX_PROMPT_RECORDS) -> None:
        self.active = 0
        self.num_records = 0
        self._limit = limit
        self._max_records = max_records

    @contextmanager
    def admit(self, num_prompts: int, n: int = 1) -> Iterator[None]:
        """Count ``n`` choices of each prompt during the block.

        Raises:
            ApiError: if there are too many.
        """
        num_choices = num_prompts * n
        if num_choices > self._limit:
            raise ApiError(
                400,
                f"the request asks for {num_choices} choices; the server takes at most "
                f"{self._limit} at a time",
                param="prompt" if num_prompts > self._limit else "n",
            )
        if self.active + num_choices > self._limit:
            raise ApiError(
                429,
                f"the server has {self.active} of at most {self._limit} choices at a time, and "
                f"the request adds {num_choices}: try again later",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        self.active += num_choices
        try:
            yield
        finally:
            self.active -= num_choices

    @contextmanager
    def admit_records(self, num_records: int) -> Iterator[None]:
        """Count records of prompts' log probabilities during the block.

        Raises:
            ApiError: if there are too many.
        """
        if num_records > self._max_records:
            raise ApiError(
                400,
                f"prompt_logprobs asks for {num_records} log probabilities; the server takes at "
                f"most {self._max_records} at a time",
                param="prompt_logprobs",
            )
        if self.num_records + num_records > self._max_records:
            raise ApiError(
                429,
                f"the server has {self.num_records} of at most {self._max_records} log "
                f"probabilities of prompts at a time, and the request adds {num_records}: try "
                "again later",
                param="prompt_logprobs",
                code="too_many_logprobs",
                headers={"retry-after": "1"},
            )
        self.num_records += num_records
        try:
            yield
        finally:
            self.num_records -= num_records


class BodyReader:
    """Reads the bodies of requests within limits of size and time; for one event loop.

    When all that have not come whole are too large together, the one that began first is refused:
    it is the slowest.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._num_bytes = 0  # of those below
        self._bodies: dict[asyncio.Timeout, bytearray] = {}  # those that began first first
        self._refused: set[asyncio.Timeout] = set()

    async def read(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            ApiError: if it is too large, does not come in time, or must give way to others.
            ClientDisconnect: if the client goes away.
        """
        limits = self._limits
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20:
            self._check_size(int(announced), f"{int(announced)} bytes")
        body, timeout = bytearray(), asyncio.timeout(limits.stall_s)
        try:
            async with timeout:
                self._bodies[timeout] = body
                async for chunk in request.stream():
                    if timeout in self._bodies:
                        body += chunk
                        self._num_bytes += len(chunk)
                        self._check_size(len(body), f"more than {limits.max_body_bytes} bytes")
                        self._make_room()
                    if timeout in self._refused:
                        raise TimeoutError
        except TimeoutError:
            if timeout in self._refused:
                raise ApiError(
                    503,
                    f"the server has {limits.max_bodies_bytes} bytes of bodies that come too "
                    "slowly: try again later",
                    code="too_many_bodies",
                    headers={"retry-after": "1"},
                ) from None
            raise ApiError(
                408, f"the body did not come within {limits.stall_s:g} s: got {len(body)} bytes"
            ) from None
        finally:
            self._forget(timeout)
            self._refused.discard(timeout)
        return bytes(body)

    def _make_room(self) -> None:
        while self._num_bytes > self._limits.max_bodies_bytes:
            oldest = next(iter(self._bodies))
            self._forget(oldest)
            self._refused.add(oldest)
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())

    def _forget(self, timeout: asyncio.Timeout) -> None:
        self._num_bytes -= len(self._bodies.pop(timeout, b""))

    def _check_size(self, num_bytes: int, size: str) -> None:
        limit = self._limits.max_body_bytes
        if num_bytes > limit:
            raise ApiError(
                413, f"the body has {size}; the server takes at most {limit}", code="body_too_large"
            )


@asynccontextmanager
async def cut_off_stalls(send: Send, stall_s: float) -> AsyncIterator[Send]:
    """Yield a `send` for the parts of a response that may wait for a client for `stall_s` at most.

    There is one timer per response. A timer per part would cost more than the part.

    Raises:
        ClientDisconnect: if a part waits longer.
    """
    loop = asyncio.get_running_loop()
    begun: float | None = None  # when the part in progress began
    timer: asyncio.TimerHandle

    async def send_part(message: Message) -> None:
        nonlocal begun
        begun = loop.time()
        await send(message)
        begun = None

    def look() -> None:
        nonlocal timer
        now = loop.time()
        due = (now if begun is None else begun) + stall_s
        if due > now:
            timer = loop.call_at(due, look)
        else:
            timeout.reschedule(now)

    timer = loop.call_later(stall_s, look)
    try:
        async with asyncio.timeout(None) as timeout:
            yield send_part
    except TimeoutError:
        if not timeout.expired():
            raise
        raise ClientDisconnect from None
    finally:
        timer.cancel()
