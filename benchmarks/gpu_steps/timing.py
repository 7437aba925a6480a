"""Time of one call on the device, for JAX and PyTorch.

JAX: a compiled program makes several calls on different blocks, so that no cache holds their data.
Several programs are started per round, so that the host runs ahead. The remaining host overhead is
the start of the first program, about 0.1 ms of 10 or more.

PyTorch: the calls are captured into a CUDA graph if possible, and timed by CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from .problems import Record, Sizes

_NAMES = ("ceiling", "operation", "point", "block_size", "config")


@dataclass(frozen=True)
class Timing:
    """A program to time, and the record that gets its time.

    Attributes:
        record: what is known before; `measure` adds the seconds of one call.
        function: the function to call.
        make: returns what all calls share, and the other arguments of each call. Arrays are made
            when the program is timed, so that those of one program at a time are on the device.
        is_in_place: whether ``state = function(state, *call)`` is timed, with the state donated,
            and not ``function(*shared, *call)``.
        may_fail: whether it is left out if it cannot be compiled or its results are wrong;
            otherwise that is a failure of the run.
    """

    record: Record
    function: Callable[..., Any]
    make: Callable[[], tuple[Any, Sequence[tuple[Any, ...]]]]
    is_in_place: bool = False
    may_fail: bool = False

    @property
    def name(self) -> str:
        """Name of the program in reports."""
        about = [str(self.record[key]) for key in _NAMES if key in self.record]
        return ", ".join(about)

    def compile(self) -> Callable[..., Any]:
        """Compile all calls to one program."""
        import jax

        function = self.function

        def apply(shared: Any, calls: Sequence[tuple[Any, ...]]) -> Any:
            return [function(*shared, *call) for call in calls]

        def update(state: Any, calls: Sequence[tuple[Any, ...]]) -> Any:
            for call in calls:
                state = function(state, *call)
            return state

        shapes = jax.eval_shape(self.make)
        if self.is_in_place:
            return jax.jit(update, donate_argnums=0).lower(*shapes).compile()
        return jax.jit(apply).lower(*shapes).compile()


def measure(
    timings: Iterable[Timing],
    sizes: Sizes,
    start_clock: Callable[[], object] = lambda: None,
    check: Callable[[Record, Any], None] = lambda record, results: None,
) -> Iterator[Record]:
    """Yield the record of each timing with its seconds, or with the reason of its failure.

    Args:
        timings: programs, compiled at once on all cores before the first is timed.
        sizes: number of launches and rounds.
        start_clock: called when all are compiled.
        check: called with the record and the first results of each; raises if they are wrong.
    """
    timings = list(timings)
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(timing.compile) for timing in timings]
    start_clock()
    for timing, future in zip(timings, futures, strict=True):
        try:
            yield timing.record | {"seconds": _seconds(timing, future.result(), sizes, check)}
        except Exception as failure:  # of one program: the others are still measured
            reason = f"{type(failure).__name__}: {str(failure)[:2000]}"
            what = "left_out" if timing.may_fail else "failed"
            yield {what: timing.name, "reason": reason}


def _seconds(
    timing: Timing,
    program: Callable[..., Any],
    sizes: Sizes,
    check: Callable[[Record, Any], None],
) -> float:
    import jax

    shared, calls = timing.make()
    result = jax.block_until_ready(program(shared, calls))
    check(timing.record, result)
    rounds = []
    for _ in range(sizes.rounds):
        start = time.perf_counter()
        for _ in range(sizes.launches):
            # Earlier results are freed when their program ends.
            result = program(result if timing.is_in_place else shared, calls)
        jax.block_until_ready(result)
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
