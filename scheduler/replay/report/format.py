"""How a replay report shows checks, distributions and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..checks import Check
from ..simulation.latency import Latencies, Percentiles


def check_lines(checks: Sequence[Check], suffix: str = "") -> Iterator[str]:
    """Show each check and its verdict."""
    for check in checks:
        yield f"   {check.verdict}  {check.name}{suffix}: {check.detail}"


def latency_rows(results: Sequence[Latencies]) -> Iterator[Sequence[str]]:
    """Show what users feel: a row for each figure, with a cell for each simulation."""
    yield "time to first token, s", *[_percentiles(r.ttft_s, 1) for r in results]
    yield "time per further token, ms", *[_percentiles(r.tpot_s, 1e3) for r in results]
    yield "end to end, s", *[_percentiles(r.end_to_end_s, 1) for r in results]
    yield "goodput, requests/s", *[f"{r.goodput_requests_per_s:.2f}" for r in results]
    yield "requests within the SLO", *[f"{r.slo_attainment:.1%}" for r in results]


def _percentiles(values: Percentiles | None, scale: float) -> str:
    """Show p50/p90/p99 in another unit; four of them fit on a line."""
    if values is None:
        return "-"
    return "/".join(_short(value * scale) for value in (values.p50, values.p90, values.p99))


def _short(value: float) -> str:
    """Three digits or more: columns are narrow."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align cells: the first column to the left, the others to the right, a rule below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield f"   {'  '.join(cells)}".rstrip()
        if index == 0:
            yield f"   {'  '.join('-' * width for width in widths)}"
