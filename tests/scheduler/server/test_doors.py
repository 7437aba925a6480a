"""What stands before an endpoint of the server, without an engine: key, counts and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.kvcache import RadixKVError
from radixkv.scheduler.errors import (
    EngineClosedError,
    EngineFailedError,
    HandoffFailedError,
    NodesFailedError,
    RequestError,
)
from radixkv.scheduler.server import app as app_module
from radixkv.scheduler.server.app import PATHS, ServedModel, make_app
from radixkv.scheduler.server.auth import ApiKey
from radixkv.scheduler.server.errors import ApiError, as_api_error
from radixkv.scheduler.server.limits import BodyReader, RequestCount, ServerLimits
from radixkv.scheduler.text.errors import ChatTemplateError


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"Bearer other", b"Basic key", b"key", b"Bearer k\xe9", b"Bearer key"),
        *(b"bearer   key", b"Bearer key other"),
    ],
)
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
    is_open = path in ("/health", "/metrics") or header in (b"Bearer key", b"bearer   key")
    assert passed == ([path] if is_open else [])
    if is_open:
        assert not sent
        return
    start, body = sent
    assert start["status"] == 401
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert error["code"] == "invalid_api_key"
    assert error["message"] == (
        "Incorrect API key provided"
        if header
        else "No API key provided: send it as `Authorization: Bearer KEY`"
    )


def test_what_is_no_request_needs_no_key() -> None:
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    unused: Any = None
    for kind in ("lifespan", "websocket"):
        asyncio.run(ApiKey(app, "key")({"type": kind}, unused, unused))
    assert passed == ["lifespan", "websocket"]


def test_choices_are_counted_up_to_the_limit_and_given_back_after_errors() -> None:
    count = RequestCount(3)
    for error in (KeyboardInterrupt(), MemoryError(), ApiError(400, "no")):
        with pytest.raises(type(error)), count.admit(3):
            raise error
        assert count.active == 0
    with count.admit(2):
        with count.admit(1):
            assert count.active == 3
        with (
            pytest.raises(ApiError, match="has 2 of at most 3 choices") as busy,
            count.admit(1, n=2),
        ):
            pass
        for num_prompts, n, param in ((4, 1, "prompt"), (1, 4, "n"), (2, 2, "n"), (4, 2, "prompt")):
            text = f"^the request asks for {num_prompts * n} choices; the server takes at most 3 at"
            with pytest.raises(ApiError, match=text) as large, count.admit(num_prompts, n=n):
                pass
            assert (large.value.status, large.value.param) == (400, param)
    assert (busy.value.status, count.active) == (429, 0)


def test_log_probabilities_of_prompts_are_counted_up_to_the_limit() -> None:
    count = RequestCount(1, max_records=10)
    for error in (KeyboardInterrupt(), MemoryError(), ApiError(400, "no")):
        with pytest.raises(type(error)), count.admit_records(10):
            raise error
        assert count.num_records == 0
    with count.admit_records(7), count.admit_records(3), count.admit_records(0):
        text = (
            r"^the server has 10 of at most 10 log probabilities of prompts at a time, and the "
            r"request adds 1: try again later$"
        )
        with pytest.raises(ApiError, match=text) as busy, count.admit_records(1):
            pass
    text = "^prompt_logprobs asks for 11 log probabilities; the server takes at most 10 at a time$"
    with pytest.raises(ApiError, match=text) as large, count.admit_records(11):
        pass
    assert [(each.value.status, each.value.param) for each in (busy, large)] == [
        (429, "prompt_logprobs"),
        (400, "prompt_logprobs"),
    ]
    assert (busy.value.code, count.num_records) == ("too_many_logprobs", 0)


def test_an_error_of_a_template_names_no_path_of_the_server() -> None:
    found = as_api_error(ChatTemplateError(Path("/srv/secret/model"), "it takes no messages"))
    assert (found.status, found.message, found.param) == (400, "it takes no messages", "messages")
    kinds = [ApiError(status, "").body()["error"]["type"] for status in (400, 429, 499, 500, 503)]
    wrong, failed = "invalid_request_error", "server_error"
    assert kinds == [wrong, "rate_limit_error", wrong, failed, failed]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1]},
    "/v1/chat/completions": {"messages": []},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def test_all_paths_share_the_limits_of_bodies_and_of_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that only make tokens have the same threads as those that generate."""
    counts: list[RequestCount] = []
    readers: list[BodyReader] = []

    def full(limit: int) -> RequestCount:
        counts.append(RequestCount(limit))
        counts[-1].active = limit
        return counts[-1]

    def reader(limits: ServerLimits) -> BodyReader:
        readers.append(BodyReader(limits))
        return readers[-1]

    monkeypatch.setattr(app_module, "RequestCount", full)
    monkeypatch.setattr(app_module, "BodyReader", reader)
    unused: Any = None
    model = ServedModel("m", unused, 40, 7)
    app = make_app(model, limits=ServerLimits(max_requests=3), has_engine=False)
    statuses: dict[str, int] = {}

    async def ask(path: str) -> None:
        body = json.dumps({"model": "m", **BODIES[path]}).encode()
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body}]

        async def receive() -> Any:
            return messages.pop()

        async def send(message: Any) -> None:
            statuses.setdefault(path, message.get("status"))

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await app(scope, receive, send)

    for path in BODIES:
        asyncio.run(ask(path))
    assert statuses == dict.fromkeys(BODIES, 429)
    assert (len(counts), len(readers), counts[0].active) == (1, 1, 3)


FAILED = "the engine has failed"


@pytest.mark.parametrize(
    ("error", "status", "message", "code", "headers"),
    [
        (EngineClosedError("it is closed"), 503, "it is closed", "shutting_down", None),
        (EngineFailedError("its cause"), 500, FAILED, "engine_failed", None),
        (NodesFailedError("all"), 503, "all", "nodes_failed", {"retry-after": "1"}),
        (HandoffFailedError("it"), 503, "it", "nodes_failed", {"retry-after": "1"}),
        (RequestError("it is wrong"), 400, "it is wrong", None, None),
    ],
)
def test_errors_of_the_library_have_a_status(
    error: RadixKVError, status: int, message: str, code: str | None, headers: Any
) -> None:
    found = as_api_error(error)
    assert (found.status, found.message, found.code) == (status, message, code)
    assert (found.param, found.headers, str(found)) == (None, headers, message)
    kind = "invalid_request_error" if status < 500 else "server_error"
    expected = {"message": message, "type": kind, "param": None, "code": code}
    assert found.body() == {"error": expected}
