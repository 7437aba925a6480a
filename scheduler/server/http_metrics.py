"""Metrics of HTTP requests, named as vLLM's: counted around the application, for all its paths."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS: Final = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0)
_METHODS: Final = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_GONE: Final = "4xx"
"""Status of a request whose client has gone before the response began, as the 499 of nginx."""


class HttpMetrics:
    """Counts requests by path, method and class of status, and how long they took.

    A client cannot add labels: paths and methods that the server does not know count together.
    """

    def __init__(self, paths: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Count nothing yet.

        Args:
            paths: values of the label ``handler``; one that ends with ``/`` stands for all below.
            clock: for tests.
        """
        self._paths = frozenset(each for each in paths if not each.endswith("/"))
        self._folders = tuple(each for each in paths if each.endswith("/"))
        self._clock = clock
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "http_requests",
            "HTTP requests that have ended, by path, method and class of status.",
            ["method", "status", "handler"],
            registry=self._registry,
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "From the head of a request to the end of its response.",
            ["method", "handler"],
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def exposition(self) -> bytes:
        """Return the metrics as text."""
        return generate_latest(self._registry)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return an application that counts the requests to another."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, begun = _GONE, self._clock()

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = f"{message['status'] // 100}xx"
                await send(message)

            try:
                await app(scope, receive, watched)
            except Exception:
                status = "5xx"
                raise
            finally:
                self._count(scope, status, self._clock() - begun)

        return counted

    def _count(self, scope: Scope, status: str, duration_s: float) -> None:
        path, method = scope["path"], scope["method"]
        method = method if method in _METHODS else "other"
        if path not in self._paths:
            path = next((each for each in self._folders if path.startswith(each)), "none")
        self._requests.labels(method, status, path).inc()
        self._durations.labels(method, path).observe(duration_s)
