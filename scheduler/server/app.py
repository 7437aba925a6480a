"""`make_app`: the ASGI application, with all its paths."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...kvcache import RadixKVError
from ..errors import EngineFailedError
from ..metrics import CONTENT_TYPE, EngineMetrics, NodesMetrics
from .auth import ApiKey
from .errors import ApiError, as_api_error
from .generation import GenerationEndpoint, ServedModel
from .http_metrics import HttpMetrics
from .limits import BodyReader, RequestCount, ServerLimits
from .schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)

__all__ = ["ServedModel", "make_app"]

PATHS: Final = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
)
"""All paths of the application; one that ends with ``/`` has names below it."""


def make_app(
    model: ServedModel,
    *,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    metrics: EngineMetrics | NodesMetrics | None = None,
    has_engine: bool = True,
) -> Starlette:
    """Return the application.

    Args:
        model: the model to serve; who started its engine closes it.
        api_key: what clients must send as ``Authorization: Bearer KEY``; None for no key.
        limits: of bodies and of requests at a time.
        metrics: of the engine or of nodes, for /metrics; default: new ones of the engine, without
            namespaces.
        has_engine: whether there is an engine to measure; False for nodes.
    """
    limits = limits or ServerLimits()
    if metrics is None and has_engine:
        metrics = EngineMetrics(model.engine, model_name=model.name)
    http_metrics = HttpMetrics(PATHS)

    async def metrics_page(_: Request) -> Response:
        text = b"" if metrics is None else await metrics.scrape()
        text += http_metrics.exposition()
        return Response(text, media_type=CONTENT_TYPE)

    count = RequestCount(limits.max_requests)
    bodies = BodyReader(limits)
    about = _About(model, count, bodies)
    post = ["POST"]
    return Starlette(
        routes=[
            Route(
                "/v1/completions",
                GenerationEndpoint(CompletionBody, model, limits, count, bodies),
                methods=post,
            ),
            Route(
                "/v1/chat/completions",
                GenerationEndpoint(ChatBody, model, limits, count, bodies),
                methods=post,
            ),
            Route("/v1/models", about.models),
            Route("/v1/models/{name:path}", about.model),
            Route("/tokenize", about.tokenize, methods=post),
            Route("/detokenize", about.detokenize, methods=post),
            Route("/health", about.health),
            Route("/metrics", metrics_page),
        ],
        middleware=[
            Middleware(http_metrics.wrap),
            *([] if api_key is None else [Middleware(ApiKey, api_key)]),
        ],
        exception_handlers={
            ApiError: _refuse,
            RadixKVError: _refuse,
            HTTPException: _refuse,
            ClientDisconnect: _refuse,
            Exception: _refuse,
        },
    )


class _About:
    """The endpoints that generate nothing."""

    def __init__(self, model: ServedModel, count: RequestCount, bodies: BodyReader) -> None:
        self._model = model
        self._count = count
        self._bodies = bodies

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._model.check_name(request.path_params["name"])
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        body = parse(await self._bodies.read(request), TokenizeBody)
        self._model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected either prompt or messages", param="prompt")
        if body.messages is None and body.chat_template_kwargs is not None:
            name = "chat_template_kwargs"
            raise ApiError(400, f"{name} needs messages", param=name)
        with self._count.admit(1):  # those who generate share the threads
            tokens = await asyncio.to_thread(self._encode, body)
        limit = self._model.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = parse(await self._bodies.read(request), DetokenizeBody)
        self._model.check_name(body.model)
        with self._count.admit(1):
            text = await asyncio.to_thread(self._model.tokenizer().decode, body.tokens)
        return JSONResponse({"prompt": text})

    async def health(self, _: Request) -> Response:
        try:
            await self._model.engine.call(lambda _: None)  # between two steps
        except EngineFailedError as error:
            raise ApiError(503, "the engine has failed", code="engine_failed") from error
        return JSONResponse({"status": "ok"})

    def _encode(self, body: TokenizeBody) -> list[int]:
        if body.messages is None:
            return self._model.encode(body.prompt or "")
        return self._model.encode_chat(body.messages, body.chat_template_kwargs)

    def _card(self) -> Mapping[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "radixkv",
            "max_model_len": self._model.max_model_len,
        }


async def _refuse(request: Request, error: Exception) -> Response:
    """Return the response to an error; those of no known kind say nothing of the inside."""
    if isinstance(error, RadixKVError):
        error = as_api_error(error)
    elif isinstance(error, HTTPException):
        detail = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, detail, headers=error.headers)
    elif isinstance(error, ClientDisconnect):  # nobody reads it
        error = ApiError(HTTPStatus.BAD_REQUEST, "the client has gone")
    elif not isinstance(error, ApiError):
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        error = ApiError(status, "the server has failed; its log has the cause")
    return JSONResponse(error.body(), error.status, headers=error.headers)
