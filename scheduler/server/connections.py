"""Connections of clients: how many there may be, and how long one may take to send a request.

uvicorn has no limit of connections that wait, and no time limit for the head of a request. Here is
what nginx does: at the limit, a new connection takes the place of the one that waits longest::

    waits for a request       ── head and body are whole ──►   in progress (is not closed)
      closed after head_s     ◄── response is complete ────
      closed for a new one
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import ServerLimits

_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s"
)
_REFUSAL_BODY: Final = (
    b'{"error":{"message":"the server has %d of at most %d connections, all with requests in '
    b'progress: try again later","type":"server_error","param":null,"code":"too_many_connections"}}'
)


class Connections:
    """All connections of a server, for one event loop.

    Attributes:
        limits: the limits; of them, max_connections, head_s and stall_s.
        num_open: number of connections, without those that are being dropped.
        num_dropped: number of connections that were closed for others, or refused.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.num_open = 0
        self.num_dropped = 0
        self._waiting: dict[Connection, None] = {}  # for a request, those that wait longest first

    def protocol(self) -> type[asyncio.Protocol]:
        """Return what uvicorn calls as a class, once per connection."""

        def make(**arguments: Any) -> Connection:
            return Connection(self, **arguments)

        return cast("type[asyncio.Protocol]", make)

    def opened(self, connection: Connection) -> None:
        """Count a connection; above the limit, close the one that has waited longest."""
        self.num_open += 1
        self._waiting[connection] = None
        if self.num_open > self.limits.max_connections:
            self.num_dropped += 1
            oldest = next(iter(self._waiting))
            if oldest is connection:  # all others have requests in progress
                connection.refuse(self.num_open - 1)
            else:
                oldest.drop()

    def waits(self, connection: Connection, waits: bool) -> None:
        """Note whether a connection waits for a request; it keeps its place while it does."""
        if not waits:
            self._waiting.pop(connection, None)
        else:
            self._waiting.setdefault(connection)

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self.num_open -= 1
        self._waiting.pop(connection, None)


class Connection(H11Protocol):
    """A connection that closes if a request does not come in time."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = connections
        self._app = cast(ASGIApp, self.app)
        self.app = self._answer
        self._deadline: asyncio.TimerHandle | None = None
        self._is_counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        lingering = _LingeringTransport(transport, self.loop, self._all.limits.stall_s)
        super().connection_made(cast(asyncio.Transport, lingering))
        self._is_counted = True
        self._limit_head()
        self._all.opened(self)

    def data_received(self, data: bytes) -> None:
        """Take in bytes, which may complete a request, or begin one."""
        super().data_received(data)
        self._look()
        if self._is_waiting_for_head():
            self._limit_head()  # the first bytes after a response

    def on_response_complete(self) -> None:
        """Wait for the next request; until its first byte, uvicorn limits the time."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once."""
        self._end()
        self.transport.abort()

    def refuse(self, num_open: int) -> None:
        """Close the connection with a response."""
        self._end()
        body = _REFUSAL_BODY % (num_open, self._all.limits.max_connections)
        self.transport.write(_REFUSAL % (len(body), body))
        self.transport.close()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application, and write the chunks of a response without the parser's checks."""
        cycle = self.cycle
        is_chunked = False

        async def write(message: Any) -> None:
            nonlocal is_chunked
            if is_chunked and message["type"] == "http.response.body" and message.get("more_body"):
                if cycle.flow.write_paused and not cycle.disconnected:
                    await cycle.flow.drain()
                if message["body"] and not cycle.disconnected:
                    self.transport.write(b"%x\r\n%b\r\n" % (len(message["body"]), message["body"]))
                return
            await send(message)
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                is_chunked = may_be_chunked and not has_length

        may_be_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        await self._app(scope, receive, write)

    def _is_waiting_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        """Follow the state after an event."""
        if not self._is_counted:
            return
        is_waiting_for_head = self._is_waiting_for_head()
        self._all.waits(self, is_waiting_for_head or self.cycle.more_body)
        if not is_waiting_for_head and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _limit_head(self) -> None:
        if self._is_counted and self._deadline is None:
            self._deadline = self.loop.call_later(self._all.limits.head_s, self.drop)

    def _end(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._all.closed(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _LingeringTransport:
    """A transport whose `close` waits for a peer that does not read, but not for ever."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, linger_s: float
    ) -> None:
        self._transport = transport
        self._abort_later: Callable[[], object] = lambda: loop.call_later(linger_s, self.abort)
        self.write = transport.write  # the one that is called often
        self.abort = transport.abort

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._abort_later()
