"""The hit curve: hits at several capacities, compared with the LRU oracle and Belady."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import Check
from ..progress import Progress, no_progress
from ..trace import Trace
from .counts import HitCounts, run_manager, summarize
from .oracles import belady, lru_oracle, num_distinct_blocks, prefix_paths

CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
"""Capacities in blocks of 512 tokens; those at which nothing would be evicted are left out."""


@dataclass(frozen=True, slots=True)
class HitRow:
    """Hits at one capacity.

    Attributes:
        num_blocks: The capacity; None for no limit, which is the ideal.
        counts: Counts of the real manager.
        oracle_hit_blocks: Hits of block-by-block leaf LRU, the manager's documented policy.
        belady_hit_blocks: Hits of optimal eviction, an upper bound for every policy.
        first_difference: The first request (from 0) whose hits differ from the oracle's, or None.
    """

    num_blocks: int | None
    counts: HitCounts
    oracle_hit_blocks: int
    belady_hit_blocks: int
    first_difference: str | None


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Rows by ascending capacity, the last without a limit, and the checks on them."""

    rows: tuple[HitRow, ...]
    checks: tuple[Check, ...]


def measure_hit_curve(
    trace: Trace, capacities: Sequence[int] = CAPACITIES, progress: Progress = no_progress
) -> HitCurve:
    """Pass a trace through the manager and both oracles, at each capacity and with no limit."""
    paths = prefix_paths(trace)
    distinct = num_distinct_blocks(trace)
    limits = [capacity for capacity in sorted(set(capacities)) if capacity < distinct]
    total = (len(limits) + 1) * len(paths)
    rows: list[HitRow] = []
    for limit in [*limits, None]:
        done_before = len(rows) * len(paths)
        num_blocks = distinct if limit is None else limit

        def on_request(done: int, done_before: int = done_before) -> None:
            progress("hits", done_before + done, total)

        run = run_manager(trace, num_blocks, on_request)
        oracle = lru_oracle(paths, num_blocks)
        difference = next(
            (
                f"request {index}: manager {hit} blocks, oracle {expected}"
                for index, (hit, expected) in enumerate(zip(run.hits, oracle, strict=True))
                if hit != expected
            ),
            None,
        )
        best = belady(paths, num_blocks)
        counts = summarize(trace, run)
        rows.append(HitRow(limit, counts, sum(oracle), best, difference))
    return HitCurve(tuple(rows), (_check_oracle(rows, len(paths)), _check_order(rows)))


def _check_oracle(rows: Sequence[HitRow], num_requests: int) -> Check:
    name = "hits of every request equal the LRU oracle's"
    for row in rows:
        if row.first_difference is not None:
            return Check(name, False, f"{_capacity(row)}: {row.first_difference}")
    return Check(name, True, f"{num_requests:,} requests at {len(rows)} capacities")


def _check_order(rows: Sequence[HitRow]) -> Check:
    name = "LRU <= Belady <= ideal"
    ideal = rows[-1].counts.hit_blocks
    for row in rows:
        if not row.counts.hit_blocks <= row.belady_hit_blocks <= ideal:
            numbers = f"{row.counts.hit_blocks:,}, {row.belady_hit_blocks:,}, {ideal:,}"
            return Check(name, False, f"{_capacity(row)}: {numbers}")
    return Check(name, True, f"at {len(rows)} capacities")


def _capacity(row: HitRow) -> str:
    return "no limit" if row.num_blocks is None else f"{row.num_blocks:,} blocks"
