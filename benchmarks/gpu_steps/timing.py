"""Time of one call on the device, for JAX and PyTorch.

JAX: a compiled program makes several calls on different blocks, so that no cache holds their data.
Several programs are started per round, so that the host runs ahead. The remaining host overhead is
the start of the first program, about 0.1 ms of 10 or more.

PyTorch: the calls are captured into a CUDA graph if possible, and timed by CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from .problems import Sizes


def time_jax(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], shared: Any, sizes: Sizes
) -> float:
    """Seconds of one `function(*shared, *call)`; each call has different arguments."""
    import jax

    program = jax.jit(lambda shared, calls: [function(*shared, *call) for call in calls])
    jax.block_until_ready(program(shared, calls))
    rounds = []
    for _ in range(sizes.rounds):
        start = time.perf_counter()
        for _ in range(sizes.launches):
            result = program(shared, calls)  # earlier results are freed when their program ends
        jax.block_until_ready(result)
        rounds.append(time.perf_counter() - start)
    return median(rounds) / sizes.launches / len(calls)


def time_in_place(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], state: Any, sizes: Sizes
) -> float:
    """Seconds of one `state = function(state, *call)`, with the state donated."""
    import jax

    def all_calls(state: Any, calls: Sequence[tuple[Any, ...]]) -> Any:
        for call in calls:
            state = function(state, *call)
        return state

    program = jax.jit(all_calls, donate_argnums=0)
    state = jax.block_until_ready(program(state, calls))
    rounds = []
    for _ in range(sizes.rounds):
        start = time.perf_counter()
        for _ in range(sizes.launches):
            state = program(state, calls)
        jax.block_until_ready(state)
        rounds.append(time.perf_counter() - start)
    return median(rounds) / sizes.launches / len(calls)


def kernel_seconds(function: Callable[..., Any], *arguments: Any) -> float | None:
    """Seconds of the kernels of one call, from CUPTI; None if CUPTI is not available."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    program = jax.jit(function)
    jax.block_until_ready(program(*arguments))
    try:
        _, times = profiler.measure(program, aggregate=True, iterations=5)(*arguments)
    except Exception as failure:  # many types, by driver and permissions
        print(f"no kernel times: {type(failure).__name__}: {failure}")
        return None
    known = [each for each in times or () if each is not None]
    return median(known) / 1e3 if known else None


def time_torch(calls: Sequence[Callable[[], Any]], sizes: Sizes) -> float:
    """Seconds of one call."""
    import torch

    def run() -> None:
        for call in calls:
            call()

    run()
    torch.cuda.synchronize()
    replay: Callable[[], Any] = run
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    except RuntimeError as failure:
        print(f"not captured: {failure}")
        torch.cuda.synchronize()
    replay()
    rounds = []
    for _ in range(sizes.rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(sizes.launches):
            replay()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3)
    return median(rounds) / sizes.launches / len(calls)
