"""`ApiError`: a refusal as OpenAI's clients read it, and which error of the library is which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...kvcache import RadixKVError
from ..errors import EngineClosedError, EngineFailedError, NodesFailedError
from ..text import ChatTemplateError


class ApiError(Exception):
    """A request is refused, or has failed.

    Attributes:
        status: HTTP status.
        message: text for the caller.
        param: name of the field that is wrong, or None.
        code: name of the problem for programs, or None.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def as_api_error(error: RadixKVError) -> ApiError:
    """Return how a caller sees an error of the library."""
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, EngineFailedError):  # its cause is for the operator
        return ApiError(500, "the engine has failed", code="engine_failed")
    if isinstance(error, NodesFailedError):  # on all nodes that it was tried on
        return ApiError(503, str(error), code="nodes_failed", headers={"retry-after": "1"})
    if isinstance(error, ChatTemplateError):  # without the path on the server
        return ApiError(400, str(error).removeprefix(f"{error.path}: "), param="messages")
    return ApiError(400, str(error))
