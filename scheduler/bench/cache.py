"""CPU time of whole requests of a trace in the cache manager.

The requests run one after the other: match, admit, extend by the output, publish, release. Tokens
are made outside the timed spans. The trace runs three times, each time on a new manager that gets
the same calls. The first pass grows the process, so its times include page faults; it is reported
separately. The second pass times each request as one span. The third times each phase, because
reading the clock between phases would add to the cost of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...kvcache import CacheManager
from ...kvcache.tokens import Int32Array
from ..replay.trace import TraceRequest
from .timing import Nanoseconds, clock_cost_ns, now_ns, quiet_heap, us_summary
from .workload import WorkloadError, expand

TokenForm: TypeAlias = Literal["list", "int64", "int32"]
"""Form in which the manager is given the tokens."""

_Given: TypeAlias = list[int] | npt.NDArray[np.signedinteger]

_FORMS: Final[dict[TokenForm, Callable[[Int32Array], _Given]]] = {
    "list": lambda tokens: tokens.tolist(),
    "int64": lambda tokens: tokens.astype(np.int64),
    "int32": lambda tokens: tokens,
}

TOKEN_FORMS: Final = tuple(_FORMS)

PHASES = ("match", "admit", "extend", "publish", "release")


def bench_cache(
    requests: Sequence[TraceRequest],
    *,
    block_size: int,
    num_blocks: int,
    tokens: TokenForm = "int32",
) -> dict[str, Any]:
    """Time the requests on three new managers, and return the results for JSON.

    Args:
        requests: At least one request; no two run at the same time.
        block_size: Tokens per block.
        num_blocks: Number of blocks in the pool.
        tokens: Form in which the manager is given the tokens. It converts what is not int32 at
            every call, within the timed spans.

    Raises:
        WorkloadError: There is no request, or one needs more blocks than the pool has.
    """
    lengths = [request.input_length + request.output_length for request in requests]
    _check_sizes(lengths, block_size, num_blocks)
    clock_ns = clock_cost_ns()
    give = _FORMS[tokens]
    first = _time(_run_whole, requests, num_blocks, block_size, give)
    second = _time(_run_whole, requests, num_blocks, block_size, give)
    assert second.counts == first.counts, f"expected {first.counts}, got {second.counts}"
    third = _time(_run_phases, requests, num_blocks, block_size, give)
    assert third.counts == first.counts, f"expected {first.counts}, got {third.counts}"
    blocks = sum(-(-length // block_size) for length in lengths)
    prompt_tokens = sum(request.input_length for request in requests)
    phases = third.spans_ns - clock_ns
    return {
        "requests": len(requests),
        "tokens": tokens,
        "block_size": block_size,
        "device_blocks": num_blocks,
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(request.output_length for request in requests),
        "blocks": blocks,
        "hit_tokens": first.counts.hit_tokens,
        "hit_rate": round(first.counts.hit_tokens / prompt_tokens, 6),
        "evicted_blocks": first.counts.evicted_blocks,
        "clock_ns": clock_ns,
        **_cost(second.spans_ns[:, 0] - clock_ns, blocks),
        "first_pass_us_per_request": us_summary(first.spans_ns[:, 0] - clock_ns),
        "phases": {name: _cost(phases[:, column], blocks) for column, name in enumerate(PHASES)},
    }


def _cost(spans_ns: Nanoseconds, blocks: int) -> dict[str, Any]:
    return {
        "us_per_request": us_summary(spans_ns),
        "ns_per_block": round(float(spans_ns.sum()) / blocks, 3),
    }


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
    """Counts of a pass, equal in all passes."""

    hit_tokens: int
    evicted_blocks: int


class _Pass(NamedTuple):
    """Results of a pass; its spans, int64[requests, n], include the cost of the clock."""

    spans_ns: Nanoseconds
    counts: _Counts


def _time(
    run: Callable[[CacheManager, _Given, _Given], tuple[int, tuple[int, ...]]],
    requests: Sequence[TraceRequest],
    num_blocks: int,
    block_size: int,
    give: Callable[[Int32Array], _Given],
) -> _Pass:
    """Run the requests on a new manager."""
    manager = CacheManager(num_blocks, block_size)
    hit_tokens = 0
    rows = []
    with quiet_heap():
        for work in expand(requests):
            hit, readings = run(manager, give(work.prompt), give(work.tokens))
            hit_tokens += hit
            rows.append(readings)
    readings_ns = np.array(rows, dtype=np.int64)
    spans_ns = readings_ns[:, 1:] - readings_ns[:, :-1]
    return _Pass(spans_ns, _Counts(hit_tokens, manager.stats().evicted_blocks))


def _run_whole(
    manager: CacheManager, prompt: _Given, tokens: _Given
) -> tuple[int, tuple[int, ...]]:
    """Run one request; return its hit tokens and the times before and after."""
    num_output = len(tokens) - len(prompt)
    start = now_ns()
    match = manager.match(prompt)
    lease = manager.admit(match)
    manager.extend(lease, num_output)
    manager.publish(lease, tokens)
    manager.release(lease)
    end = now_ns()
    return match.num_tokens, (start, end)


def _run_phases(
    manager: CacheManager, prompt: _Given, tokens: _Given
) -> tuple[int, tuple[int, ...]]:
    """Run one request; return its hit tokens and the times around each phase."""
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
