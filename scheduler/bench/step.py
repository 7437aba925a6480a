"""CPU time of the host between two steps of decode, beside a device that takes a set time.

The scheduler, the block tables, the packing and the dispatch are those of an engine. The program
takes what an engine's program takes, and makes its arrays of them, but has no model: the stand-in
device says how long a step lasts, by its own clock. So the idle time of a GPU can be measured
without one.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Array, Int32

from ...kvcache import CacheManager
from ..engine.batch_state import BatchState, DeviceBatch
from ..engine.step_arrays import Shape, Shapes, pack, unpack
from ..mixed import MixedScheduler
from ..request import Request
from .timing import clock_cost_ns, now_ns, quiet_heap
from .workload import TokenSupply, WorkloadError

BLOCK_SIZE: Final = 16
NUM_STEPS: Final = 200
_TOKEN_BUDGET: Final = 8192
PHASES: Final = ("schedule", "pack", "dispatch", "read", "update")


def bench_step(
    *,
    rows: int,
    max_model_len: int,
    prompt_tokens: int = 64,
    depth: int = 2,
    device_ms: float = 8.0,
    waiting: int = 0,
) -> dict[str, Any]:
    """Decode `rows` requests for 200 steps; return the results for JSON.

    Args:
        rows: running requests.
        max_model_len: limit of prompt and output of a request, in tokens.
        prompt_tokens: length of each prompt.
        depth: most steps in flight.
        device_ms: time that the stand-in device takes for a step.
        waiting: requests that wait for blocks all the time.

    Returns:
        The sizes, `host_us_per_step` (CPU time, `total` and by phase), `bytes_per_step` from the
        host to the device, and `idle_share` of the device.

    Raises:
        WorkloadError: if the requests are too short for the steps.
    """
    # All rows decode to the end, also those that begin while others prefill.
    new_tokens = NUM_STEPS + 2 * depth + rows * prompt_tokens // max(_TOKEN_BUDGET, rows) + 2
    if max_model_len < prompt_tokens + new_tokens:
        raise WorkloadError(
            f"max_model_len {max_model_len} is less than {prompt_tokens} prompt tokens and "
            f"{new_tokens} new ones"
        )
    blocks_per_row = -(-(prompt_tokens + new_tokens) // BLOCK_SIZE)
    bench = _Bench(rows, max_model_len, depth, device_ms / 1000, rows * blocks_per_row)
    bench.admit(rows, waiting, prompt_tokens, new_tokens)
    with quiet_heap():
        bench.measure()
    spans = {name: np.median(bench.spans_ns[name]) - clock_cost_ns() for name in PHASES}
    phases = {name: round(float(ns) / 1000, 1) for name, ns in spans.items()}
    return {
        "rows": rows,
        "max_model_len": max_model_len,
        "prompt_tokens": prompt_tokens,
        "depth": depth,
        "device_ms": device_ms,
        "waiting": waiting,
        "steps": NUM_STEPS,
        "host_us_per_step": {"total": round(sum(phases.values()), 1), **phases},
        "bytes_per_step": round(bench.num_bytes / NUM_STEPS),
        "idle_share": round(bench.device.idle_s / bench.duration_s, 4),
    }


class _StandInDevice:
    """Device that takes a set time for a step, one after the other.

    Attributes:
        idle_s: time without a step since `begin`.
    """

    def __init__(self, step_s: float) -> None:
        self.idle_s = 0.0
        self._step_s = step_s
        self._ends: deque[float] = deque()
        self._busy_until: float | None = None

    def begin(self) -> float:
        """Count idle time from now on; return now."""
        now = time.perf_counter()
        self.idle_s = 0.0
        if self._busy_until is not None:
            self._busy_until = max(now, self._busy_until)
        return now

    def launch(self) -> None:
        now = time.perf_counter()
        start = now if self._busy_until is None else max(now, self._busy_until)
        if self._busy_until is not None:
            self.idle_s += start - self._busy_until
        self._busy_until = start + self._step_s
        self._ends.append(self._busy_until)

    def wait(self) -> None:
        """Wait for the first step."""
        left_s = self._ends.popleft() - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _Bench:
    def __init__(
        self, rows: int, max_model_len: int, depth: int, step_s: float, num_blocks: int
    ) -> None:
        width = -(-max_model_len // BLOCK_SIZE)
        self.manager = CacheManager(num_blocks, BLOCK_SIZE)
        # A slot is free for one more request, but its blocks are reserved for the rows.
        self.scheduler = MixedScheduler(
            self.manager,
            token_budget=max(_TOKEN_BUDGET, rows + 1),
            max_running=rows + 1,
            depth=depth,
            reserve_tokens=None,
        )
        self.device = _StandInDevice(step_s)
        self.spans_ns: dict[str, list[int]] = defaultdict(list)
        self.num_bytes = 0
        self.duration_s = 0.0
        self._shapes = Shapes(token_budget=max(_TOKEN_BUDGET, rows), max_running=rows)
        self._batch = DeviceBatch(rows, width)
        self._tokens: deque[Any] = deque()
        self._plans: deque[Any] = deque()

    def admit(self, rows: int, waiting: int, prompt_tokens: int, new_tokens: int) -> None:
        """Admit the rows, and compute their prompts."""
        supply = TokenSupply()
        for number in range(rows + waiting):
            self.scheduler.add(Request(str(number), supply.take(prompt_tokens), new_tokens))
        while len(self.scheduler.running) < rows or self.scheduler.running[-1].is_prefilling:
            plan = self.scheduler.schedule()
            self.scheduler.update(plan, [0] * plan.num_chunks)

    def measure(self) -> None:
        """Decode, with as many steps in flight as the scheduler may have."""
        for _ in range(self.scheduler.depth):  # compiles, and fills the queue
            self._start()
        self.spans_ns.clear()
        self.num_bytes = 0
        begin = self.device.begin()
        for _ in range(NUM_STEPS):
            self._read()
            self._start()
        self.duration_s = time.perf_counter() - begin

    def _start(self) -> None:
        with self._timed("schedule"):
            plan = self.scheduler.schedule()
        with self._timed("pack"):
            tables = self.manager.tables
            slots = self._batch.send(plan, tables)
            shape = self._shapes.fit(plan.num_tokens, plan.num_chunks)
            packed = pack(plan, slots, shape, tables, BLOCK_SIZE)
        self.num_bytes += packed.nbytes
        with self._timed("dispatch"):
            tokens, self._batch.state = _step(packed, self._batch.state, shape)
            tokens.copy_to_host_async()
        self._tokens.append(tokens)
        self._plans.append(plan)
        self.device.launch()

    def _read(self) -> None:
        self.device.wait()
        plan = self._plans.popleft()
        with self._timed("read"):
            tokens = np.asarray(self._tokens.popleft()).tolist()[: plan.num_chunks]
        with self._timed("update"):
            self.scheduler.update(plan, tokens)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = now_ns()
        yield
        self.spans_ns[phase].append(now_ns() - start)


@partial(jax.jit, static_argnums=2, donate_argnums=1)
def _step(
    packed: Int32[Array, " packed"], state: BatchState, shape: Shape
) -> tuple[Int32[Array, " rows"], BatchState]:
    """Update the state as a step does, and sample something at little cost."""
    batch, _, state, slots = unpack(packed, state, shape, BLOCK_SIZE)
    tokens = batch.tokens[batch.logit_rows] + batch.block_tables[:, 0]
    last_tokens = state.last_tokens.at[slots].set(tokens, mode="drop")
    return tokens, state._replace(last_tokens=last_tokens)
