"""What stands before an endpoint of the server, without an engine: key, counts and errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.server.app import PATHS
from radixkv.scheduler.server.auth import ApiKey
from radixkv.scheduler.server.errors import ApiError, as_api_error
from radixkv.scheduler.server.limits import RequestCount
from radixkv.scheduler.text.errors import ChatTemplateError


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", [b"", b"Bearer other", b"Basic key", b"key", b"Bearer key"])
def test_every_path_but_two_needs_the_key(path: str, header: bytes) -> None:
    passed: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(b"authorization", header)]}
    asyncio.run(ApiKey(app, "key")(scope, receive, send))
    is_open = path in ("/health", "/metrics") or header == b"Bearer key"
    assert passed == ([path] if is_open else [])
    assert [each["status"] for each in sent if "status" in each] == ([] if is_open else [401])


def test_prompts_are_counted_up_to_the_limit_and_given_back_after_errors() -> None:
    count = RequestCount(3)
    for error in (KeyboardInterrupt, MemoryError, ApiError(400, "no")):
        with pytest.raises(BaseException), count.admit(3):  # noqa: B017
            raise error
        assert count.active == 0
    with count.admit(2):
        with count.admit(1):
            assert count.active == 3
        with pytest.raises(ApiError, match="has 2 of at most 3 prompts") as busy, count.admit(2):
            pass
        with pytest.raises(ApiError, match="has 4 prompts") as large, count.admit(4):
            pass
    assert (busy.value.status, large.value.status, count.active) == (429, 400, 0)


def test_an_error_of_a_template_names_no_path_of_the_server() -> None:
    found = as_api_error(ChatTemplateError(Path("/srv/secret/model"), "it takes no messages"))
    assert (found.status, found.message, found.param) == (400, "it takes no messages", "messages")
    kinds = [ApiError(status, "").body()["error"]["type"] for status in (400, 429, 499, 500, 503)]
    wrong, failed = "invalid_request_error", "server_error"
    assert kinds == [wrong, "rate_limit_error", wrong, failed, failed]
