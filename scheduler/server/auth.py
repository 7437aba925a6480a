"""The API key: whoever does not send it is refused before the body is read."""

from __future__ import annotations

import hmac

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

_OPEN_PATHS = frozenset({"/health", "/metrics"})  # as in vLLM and SGLang


class ApiKey:
    """Lets requests with ``Authorization: Bearer KEY`` pass; /health and /metrics need no key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse a request."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            # Starlette decodes headers as latin-1, which every header can be.
            header = HTTPConnection(scope).headers.get("authorization", "").encode("latin-1")
            scheme, _, key = header.partition(b" ")
            is_same = hmac.compare_digest(key.strip(), self._key)  # takes as long for any key
            if not (is_same and scheme.lower() == b"bearer"):
                error = _refusal(is_missing=not header)
                response = JSONResponse(error.body(), error.status, headers=error.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(*, is_missing: bool) -> ApiError:
    message = "Incorrect API key provided"
    if is_missing:
        message = "No API key provided: send it as `Authorization: Bearer KEY`"
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)
