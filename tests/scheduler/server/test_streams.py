"""Outputs of several streams: in which order, and who is closed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.server.streams import merge

indices_of_streams = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3
)


class Stream:
    """A stream whose outputs come when a test puts them."""

    def __init__(self, num_outputs: int) -> None:
        self.num_left = num_outputs
        self.put: asyncio.Queue[Any] = asyncio.Queue()
        self.is_closed = False

    @property
    def has_ended(self) -> bool:
        return self.num_left == 0

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        if self.has_ended:
            raise StopAsyncIteration
        output = await self.put.get()
        if isinstance(output, Exception):
            raise output
        self.num_left -= 1
        return output

    async def aclose(self) -> None:
        self.is_closed = True


@given(indices_of_streams, st.data())
def test_each_output_comes_as_soon_as_it_is_there(
    indices: list[list[int]], data: st.DataObject
) -> None:
    async def test() -> None:
        streams: list[Any] = [Stream(len(each)) for each in indices]
        left = [list(each) for each in indices]
        async with aclosing(merge(streams, 3)) as outputs:
            while any(left):
                number = data.draw(st.sampled_from([n for n, each in enumerate(left) if each]))
                output: Any = SimpleNamespace(index=left[number].pop(0))
                streams[number].put.put_nowait(output)
                assert await anext(outputs) == (3 * number + output.index, output)
            with pytest.raises(StopAsyncIteration):
                await anext(outputs)
        assert all(stream.is_closed for stream in streams)

    asyncio.run(test())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_all_streams_are_closed_at_an_early_end(num_streams: int, fails: bool) -> None:
    async def test() -> None:
        streams: list[Any] = [Stream(2) for _ in range(num_streams)]
        error, output = ValueError("of the engine"), cast(Any, SimpleNamespace(index=0))
        async with aclosing(merge(streams, 1)) as outputs:
            streams[-1].put.put_nowait(error if fails else output)
            if fails:
                with pytest.raises(ValueError, match=r"^of the engine$"):
                    await anext(outputs)
            else:
                assert await anext(outputs) == (num_streams - 1, output)
        assert all(stream.is_closed for stream in streams)
        assert len(asyncio.all_tasks()) == 1, "none waits for an output"

    asyncio.run(test())


def test_outputs_that_come_together_are_those_of_the_first_stream_first() -> None:
    async def test() -> None:
        streams: list[Any] = [Stream(1) for _ in range(9)]
        for stream in reversed(streams):
            stream.put.put_nowait(SimpleNamespace(index=0))
        async with aclosing(merge(streams, 1)) as outputs:
            assert [number async for number, _ in outputs] == list(range(9))

    asyncio.run(test())
