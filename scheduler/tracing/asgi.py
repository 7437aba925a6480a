"""`TraceContext`: the span of a client as the parent of what the server does for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import context, propagate

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class TraceContext:
    """ASGI middleware that reads the trace of a client from its headers, such as ``traceparent``.

    Which headers are read is OpenTelemetry's choice (``OTEL_PROPAGATORS``); others are ignored.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within the context of its client."""
        headers = {
            key.decode("latin-1"): value.decode("latin-1")
            for key, value in scope.get("headers", ())
        }
        token = context.attach(propagate.extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)
