"""How long a response may wait for its client, with a clock of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from radixkv.scheduler.server.limits import cut_off_stalls

STALL_S = 5.0


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[asyncio.TimerHandle] = []
        super().__init__()

    def time(self) -> float:
        return self.now

    def call_at(self, *arguments: Any, **options: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.timers.append(super().call_at(*arguments, **options))
        return self.timers[-1]


def run(test: Callable[[Loop], Coroutine[Any, Any, None]]) -> None:
    """Run a test; a timer that a response has left would go on for as long as the server."""
    loop = Loop()
    try:
        loop.run_until_complete(test(loop))
        assert not [each for each in loop.timers if not each.cancelled() and each.when() > loop.now]
    finally:
        loop.close()


async def turns() -> None:
    """Let the timers that are due run, and what they cancel."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_engine_may_take_as_long_as_it_likes_between_two_parts() -> None:
    sent: list[Any] = []

    async def send(part: Any) -> None:
        sent.append(part)

    async def test(loop: Loop) -> None:
        async with cut_off_stalls(send, STALL_S) as send_part:
            for number in range(4):
                loop.now += 3 * STALL_S
                await turns()
                await send_part({"number": number})
            loop.now += 3 * STALL_S
            await turns()
        assert len(sent) == 4

    run(test)


@pytest.mark.parametrize(("num_parts", "pause"), [(1, 0.75), (3, 0.75), (5, 0.4)])
def test_a_part_that_its_client_does_not_take_ends_the_response_in_time(
    num_parts: int, pause: float
) -> None:
    async def test(loop: Loop) -> None:
        stalls = False

        async def send(part: Any) -> None:
            while stalls:
                loop.now += 0.5
                await asyncio.sleep(0)

        with pytest.raises(ClientDisconnect):
            async with cut_off_stalls(send, STALL_S) as send_part:
                for _ in range(num_parts - 1):
                    loop.now += pause * STALL_S
                    await turns()
                    await send_part({})
                stalls, begun = True, loop.now
                await send_part({})
        assert STALL_S <= loop.now - begun <= STALL_S + 2

    run(test)


def test_an_error_of_the_response_passes_through() -> None:
    async def test(loop: Loop) -> None:
        with pytest.raises(TimeoutError, match=r"^of the engine$"):
            async with cut_off_stalls(lambda _: None, STALL_S):  # type: ignore[arg-type, return-value]
                raise TimeoutError("of the engine")

    run(test)
