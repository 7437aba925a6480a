"""Outputs of several streams as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ..serving import GenerationOutput, OutputStream


async def merge(
    streams: Sequence[OutputStream], num_samples: int
) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
    """Yield the outputs of all streams, each with its number among all samples of all streams.

    Nothing is queued: a slow consumer gets the outputs of a stream together. All streams are closed
    at the end, also at an early one: use it in `contextlib.aclosing`.
    """
    waiting: dict[asyncio.Task[GenerationOutput], int] = {}
    try:
        if len(streams) == 1:  # the usual case, without a task per output
            async for output in streams[0]:
                yield output.index, output
            return
        for index, stream in enumerate(streams):
            waiting[asyncio.create_task(stream.__anext__())] = index
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                output = task.result()
                if not streams[index].has_ended:
                    waiting[asyncio.create_task(streams[index].__anext__())] = index
                yield index * num_samples + output.index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
