"""`serve`: an application on uvicorn, until a signal; then drain, and close the engine."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from ..serving import AsyncEngine
from .connections import Connections
from .descriptors import ACCEPTED_AT_ONCE
from .limits import ServerLimits

_BACKLOG = 2048
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """A server whose signals end it alone, so that the engine is closed after it."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], object] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers; uvicorn's raise the signals once more at the end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell."""
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(_BACKLOG)  # asyncio accepts no more at once than it was told to listen for
        if self._on_ready is not None:
            self._on_ready()


async def serve(
    app: ASGIApp,
    engine: AsyncEngine,
    listener: socket.socket,
    *,
    limits: ServerLimits | None = None,
    drain_timeout_s: float = 30.0,
    on_ready: Callable[[], object] | None = None,
    outlives_engine: bool = True,
) -> bool:
    """Serve until SIGTERM or SIGINT, and then close the engine.

    New connections are refused first. Requests that run have some time for their ends, and a second
    SIGINT takes it from them; then they are aborted.

    With as many connections as the limits allow, a new one takes the place of the one that waits
    longest for a request. It is refused if all have requests in progress.

    Args:
        app: the application.
        engine: its engine.
        listener: a socket that is bound; it is closed.
        limits: of connections; those of requests are limits of the application.
        drain_timeout_s: how long to wait for the ends of requests, rounded up to seconds.
        on_ready: called when the server accepts connections.
        outlives_engine: whether to answer requests when the engine has failed; otherwise that ends
            the server, too.

    Returns:
        Whether the copies between the tiers ended in time; see `AsyncEngine.close`.

    Raises:
        BaseException: what the engine has failed with, unless the server outlives it.
    """
    limits = limits or ServerLimits()
    config = uvicorn.Config(
        app,
        http=Connections(limits).protocol(),
        interface="asgi3",
        lifespan="off",
        ws="none",
        log_config=None,
        log_level=logging.ERROR,  # a line for each bad request would fill a disk
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(limits.keep_alive_s),
        timeout_graceful_shutdown=math.ceil(drain_timeout_s),
        backlog=ACCEPTED_AT_ONCE,
    )
    server = _Server(config, on_ready)
    loop = asyncio.get_running_loop()
    for each in _SIGNALS:
        loop.add_signal_handler(each, server.handle_exit, each, None)
    if not outlives_engine:
        end = partial(setattr, server, "should_exit", True)
        engine.when_ended(partial(loop.call_soon_threadsafe, end))
    try:
        await server.serve([listener])
    finally:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
        is_closed = await engine.close(drain=False)
    if engine.failure is not None and not outlives_engine:
        raise engine.failure
    return is_closed


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
