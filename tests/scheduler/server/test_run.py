"""When the server ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from radixkv.scheduler.errors import GroupError
from radixkv.scheduler.server.run import bind, serve
from radixkv.scheduler.serving import AsyncEngine


class Failing:
    """An engine without work that fails when it is told to."""

    has_work = False

    def __init__(self) -> None:
        self.fails = threading.Event()

    def step(self) -> Any:
        assert self.fails.wait(100)
        raise GroupError("process 1 is lost")

    def close(self, *, timeout_s: float) -> bool:
        return True


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


def run(engine: AsyncEngine, **options: Any) -> bool:
    return asyncio.run(serve(app, engine, bind("127.0.0.1", 0), **options))


def test_a_server_ends_with_its_engine() -> None:
    failing: Any = Failing()
    engine = AsyncEngine(failing, poll_s=0.001)
    with pytest.raises(GroupError, match=r"^process 1 is lost$"):
        run(engine, outlives_engine=False, on_ready=failing.fails.set)


def test_a_server_outlives_its_engine() -> None:
    failing: Any = Failing()
    engine = AsyncEngine(failing, poll_s=0.001)

    def fail_and_stop() -> None:
        failing.fails.set()
        engine.when_ended(lambda: os.kill(os.getpid(), signal.SIGTERM))

    assert run(engine, on_ready=fail_and_stop)
    assert isinstance(engine.failure, GroupError)
