"""Cost of a request's whole life in the cache, over a trace.

Each request, one after the other: match, admit, extend by its output, publish, release. Tokens
are made outside the timed spans. The trace runs three times, each on a new manager that sees the
same calls. The first pass grows the process to its size, so its times hold the kernel's page
faults; it is reported apart. The second times each request as one span, the third each phase, so
that the readings of the clock between phases are not part of a request's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...kvcache import CacheManager
from ..replay.trace import TraceRequest
from .timing import (
    Nanoseconds,
    clock_cost_ns,
    now_ns,
    quiet_heap,
    us_summary,
)
from .workload import (
    Work,
    WorkloadError,
    expand,
)

PHASES = ("match", "admit", "extend", "publish", "release")


@dataclass(frozen=True, slots=True)
class CacheBench:
    """What one run of the benchmark measured."""

    block_size: int
    num_blocks: int
    prompt_tokens: int
    output_tokens: int
    blocks: int
    """Blocks that the requests covered, each request's last partial one included."""
    hit_tokens: int
    evicted_blocks: int
    clock_ns: int
    """Cost of one timed span, already subtracted from each."""
    first_ns: Nanoseconds
    """int64[requests]: each request as one span, in the pass that grows the process."""
    spans_ns: Nanoseconds
    """int64[requests]: the same in the second pass."""
    phase_ns: Nanoseconds
    """int64[requests, phases]: the phases, from the third pass."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures; times are CPU time of the thread."""
        return {
            "requests": len(self.spans_ns),
            "block_size": self.block_size,
            "device_blocks": self.num_blocks,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "blocks": self.blocks,
            "hit_tokens": self.hit_tokens,
            "hit_rate": round(self.hit_tokens / self.prompt_tokens, 6),
            "evicted_blocks": self.evicted_blocks,
            "clock_ns": self.clock_ns,
            **self._cost(self.spans_ns),
            "first_pass_us_per_request": us_summary(self.first_ns),
            "phases": {
                name: self._cost(self.phase_ns[:, column]) for column, name in enumerate(PHASES)
            },
        }

    def _cost(self, spans_ns: Nanoseconds) -> dict[str, Any]:
        return {
            "us_per_request": us_summary(spans_ns),
            "ns_per_block": round(float(spans_ns.sum()) / self.blocks, 3),
        }


def bench_cache(
    requests: Sequence[TraceRequest], *, block_size: int, num_blocks: int
) -> CacheBench:
    """Run the requests through three new managers, and time it.

    Args:
        requests: At least one; each is alone in the cache while it runs.
        block_size: Tokens per block.
        num_blocks: Blocks of the pool.

    Raises:
        WorkloadError: There is no request, or one needs more blocks than the pool has.
    """
    lengths = [request.input_length + request.output_length for request in requests]
    _check_sizes(lengths, block_size, num_blocks)
    clock_ns = clock_cost_ns()
    first = _time(_run_whole, requests, num_blocks, block_size)
    second = _time(_run_whole, requests, num_blocks, block_size)
    assert second.counts == first.counts, f"{second.counts} in the second pass, not {first.counts}"
    third = _time(_run_phases, requests, num_blocks, block_size)
    assert third.counts == first.counts, f"{third.counts} in the third pass, not {first.counts}"
    return CacheBench(
        block_size=block_size,
        num_blocks=num_blocks,
        prompt_tokens=sum(request.input_length for request in requests),
        output_tokens=sum(request.output_length for request in requests),
        blocks=sum(-(-length // block_size) for length in lengths),
        hit_tokens=first.counts.hit_tokens,
        evicted_blocks=first.counts.evicted_blocks,
        clock_ns=clock_ns,
        first_ns=first.spans_ns[:, 0] - clock_ns,
        spans_ns=second.spans_ns[:, 0] - clock_ns,
        phase_ns=third.spans_ns - clock_ns,
    )


def _check_sizes(lengths: Sequence[int], block_size: int, num_blocks: int) -> None:
    if not lengths:
        raise WorkloadError("the trace has no requests")
    index = int(np.argmax(lengths))
    needed = -(-lengths[index] // block_size)
    if needed > num_blocks:
        raise WorkloadError(
            f"request {index} has {lengths[index]} tokens and needs {needed} blocks of "
            f"{block_size}, but the cache has {num_blocks}"
        )


class _Counts(NamedTuple):
    """What a pass counted: the same in each."""

    hit_tokens: int
    evicted_blocks: int


class _Pass(NamedTuple):
    """What a pass showed; the cost of the clock is in its spans, int64[requests, n]."""

    spans_ns: Nanoseconds
    counts: _Counts


def _time(
    run: Callable[[CacheManager, Work], tuple[int, tuple[int, ...]]],
    requests: Sequence[TraceRequest],
    num_blocks: int,
    block_size: int,
) -> _Pass:
    """Run the requests through a new manager."""
    manager = CacheManager(num_blocks, block_size)
    hit_tokens = 0
    rows = []
    with quiet_heap():
        for work in expand(requests):
            hit, readings = run(manager, work)
            hit_tokens += hit
            rows.append(readings)
    readings_ns = np.array(rows, dtype=np.int64)
    spans_ns = readings_ns[:, 1:] - readings_ns[:, :-1]
    return _Pass(spans_ns, _Counts(hit_tokens, manager.stats().evicted_blocks))


def _run_whole(manager: CacheManager, work: Work) -> tuple[int, tuple[int, ...]]:
    """Return the hit tokens and the clock before and after."""
    prompt, tokens = work
    num_output = len(tokens) - len(prompt)
    start = now_ns()
    match = manager.match(prompt)
    lease = manager.admit(match)
    manager.extend(lease, num_output)
    manager.publish(lease, tokens)
    manager.release(lease)
    end = now_ns()
    return match.num_tokens, (start, end)


def _run_phases(manager: CacheManager, work: Work) -> tuple[int, tuple[int, ...]]:
    """Return the hit tokens and the clock before, between and after the phases."""
    prompt, tokens = work
    num_output = len(tokens) - len(prompt)
    start = now_ns()
    match = manager.match(prompt)
    matched = now_ns()
    lease = manager.admit(match)
    admitted = now_ns()
    manager.extend(lease, num_output)
    extended = now_ns()
    manager.publish(lease, tokens)
    published = now_ns()
    manager.release(lease)
    end = now_ns()
    return match.num_tokens, (start, matched, admitted, extended, published, end)
