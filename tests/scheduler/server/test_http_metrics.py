"""Counts of HTTP requests, with a clock of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from radixkv.scheduler.server.http_metrics import HttpMetrics

PATHS = ("/a", "/folder/")
OWN_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")


class World:
    """Requests to an application that does what each test says, and takes as long."""

    def __init__(self) -> None:
        self.now = 5.0
        self.metrics = HttpMetrics(PATHS, lambda: self.now)

    def ask(
        self,
        path: str = "/a",
        method: str = "GET",
        *,
        status: int | None = 200,
        lasts_s: float = 0.0,
        error: BaseException | None = None,
        kind: str = "http",
    ) -> list[str]:
        """Return what was sent."""
        sent: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if status is not None:
                await send({"type": "http.response.start", "status": status})
            self.now += lasts_s
            if error is not None:
                raise error
            await send({"type": "http.response.body", "status": 100})

        async def send(message: Any) -> None:
            sent.append(message["type"])

        async def ask() -> None:
            receive: Any = None
            scope = {"type": kind, "path": path, "method": method}
            await self.metrics.wrap(app)(scope, receive, send)

        asyncio.run(ask())
        return sent

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the samples of a name by the values of their labels, sorted by the labels."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in parse(self.metrics.exposition().decode())
            for sample in family.samples
            if sample.name == name
        }


@pytest.mark.parametrize("method", [*OWN_METHODS, "BREW", "get", ""])
@pytest.mark.parametrize("path", ["/a", "/folder/", "/folder/x", "/folder", "/a/", "/", "none"])
def test_what_the_server_does_not_know_counts_together(path: str, method: str) -> None:
    world = World()
    world.ask(path, method)
    handler = "/folder/" if path.startswith("/folder/") else path if path == "/a" else "none"
    name = method if method in OWN_METHODS else "other"
    assert world.samples("http_requests_total") == {(handler, name, "2xx"): 1}
    assert world.samples("http_request_duration_seconds_count") == {(handler, name): 1}


@pytest.mark.parametrize("status", [100, 199, 200, 299, 304, 404, 499, 500, 599])
def test_a_request_counts_by_the_class_of_its_status(status: int) -> None:
    world = World()
    assert world.ask(status=status) == ["http.response.start", "http.response.body"]
    assert world.samples("http_requests_total") == {("/a", "GET", f"{status // 100}xx"): 1}


def test_errors_and_clients_that_go_away_count_and_pass_through() -> None:
    world = World()
    with pytest.raises(ZeroDivisionError):
        world.ask(error=ZeroDivisionError())
    assert world.samples("http_requests_total") == {("/a", "GET", "5xx"): 1}
    world.ask(status=None)
    with pytest.raises(asyncio.CancelledError):
        world.ask(status=None, error=asyncio.CancelledError())
    assert world.samples("http_requests_total")["/a", "GET", "4xx"] == 2
    assert world.ask(kind="websocket") == ["http.response.start", "http.response.body"]
    assert sum(world.samples("http_requests_total").values()) == 3


@pytest.mark.parametrize("lasts_s", [0.0, 0.1, 0.25, 1.0, 100.0, 121.0])
def test_a_request_lasts_until_the_end_of_its_response(lasts_s: float) -> None:
    world = World()
    world.ask(lasts_s=lasts_s)
    found = world.samples("http_request_duration_seconds_sum")
    assert found == {("/a", "GET"): pytest.approx(lasts_s)}
