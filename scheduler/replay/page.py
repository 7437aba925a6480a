"""The report of a replay as one HTML page with charts.

The page needs nothing else: it opens from disk, loads nothing, and runs no script. The charts are
SVG in the colours of its style sheet, so they follow the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from .charts import Bar, Line, bar_chart, line_chart
from .hits.hit_curve import HitCurve
from .report import ReplayReport, Section, environment, short
from .simulation.cluster import ClusterResult
from .simulation.single_node import SimulationResult
from .trace import TOKENS_PER_HASH_ID

_STYLE: Final = Path(__file__).parents[1] / "data" / "report.css"


def to_page(report: ReplayReport) -> str:
    """Return the report as an HTML page."""
    title = escape(f"radixkv replay: {report.trace.name}")
    lead, *more = (escape(sentence) for sentence in report.summary())
    versions = environment()["versions"]
    made_with = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{title}</title>\n<style>{_STYLE.read_text('utf-8')}</style>\n</head>\n<body>\n<main>",
            f'<h1>{title}</h1>\n<p class="lead">{lead}</p>\n<p>{" ".join(more)}</p>',
            *(part for section in report.sections() for part in _section(report, section)),
            f"<footer>{escape(made_with)}; Python {escape(environment()['python'])}; "
            f"{escape(environment()['platform'])}</footer>\n</main>\n</body>\n</html>\n",
        ]
    )


def _section(report: ReplayReport, section: Section) -> Iterator[str]:
    if section.heading:
        yield f"<h2>{escape(section.heading)}</h2>"
    charts: tuple[str, ...] = ()
    if section.name == "hits":
        charts = tuple(_hit_charts(report.hits))
    elif section.name == "simulation":
        runs = report.simulation.runs
        charts = (*_latency_charts(runs), _source_chart(runs))
    elif section.name == "apart":
        charts = tuple(_latency_charts(report.clusters.runs))
    if charts:
        yield '<div class="charts">'
        yield from charts
        yield "</div>"
    for part in section.parts:
        if isinstance(part, Table):
            yield from _table(part)
        elif isinstance(part, Text):
            word, colon, rest = part.plain.partition(":")
            yield f"<p>{_cell('span', word)}{colon}{escape(rest)}</p>"
        elif part:
            yield f"<p>{escape(part)}</p>"


def _table(table: Table) -> Iterator[str]:
    kind = "figures" if table.show_header else "checks"
    yield f'<div class="table"><table class="{kind}">'
    if table.show_header:
        yield f"<tr>{''.join(_cell('th', column.header) for column in table.columns)}</tr>"
    for row in zip(*(column.cells for column in table.columns), strict=True):
        yield f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>"
    yield "</table></div>"


def _cell(tag: str, content: object) -> str:
    text = str(content)
    verdict = f' class="{text.lower()}"' if text in ("PASS", "FAIL", "SKIP") else ""
    return f"<{tag}{verdict}>{escape(text)}</{tag}>"


# --------------------------------------------------------------------------------------- charts


def _hit_charts(curve: HitCurve) -> Iterator[str]:
    """Draw the rows with a limit; the row without one is a level line."""
    *rows, ideal = curve.rows
    sizes = [row.num_blocks for row in rows if row.num_blocks is not None]
    if len(sizes) < 2:
        return
    blocks = max(ideal.counts.blocks, 1)
    yield line_chart(
        f"Hit rate by cache size in blocks of {TOKENS_PER_HASH_ID} tokens",
        sizes,
        [
            Line("no limit", "d", [ideal.counts.hit_rate] * len(sizes)),
            Line("Belady", "b", [row.belady_hit_blocks / blocks for row in rows]),
            Line("radixkv", "a", [row.counts.hit_rate for row in rows]),
        ],
    )


def _latency_charts(
    runs: Mapping[str, SimulationResult] | Mapping[str, ClusterResult],
) -> Iterator[str]:
    latencies = {name: run.latencies for name, run in runs.items()}
    yield bar_chart(
        "Time to first token, s",
        [
            Bar(f"{name}, {word}", [(colour, value)], short(value))
            for name, each in latencies.items()
            if each.ttft_s is not None
            for word, colour in (("p50", "a"), ("p90", "b"), ("p99", "c"))
            for value in [getattr(each.ttft_s, word)]
        ],
    )
    yield bar_chart(
        "Goodput, requests/s",
        [
            Bar(name, [("a", value)], short(value))
            for name, each in latencies.items()
            for value in [each.goodput_requests_per_s]
        ],
    )


def _source_chart(runs: Mapping[str, SimulationResult]) -> str:
    bars = []
    for name, run in runs.items():
        counts = {
            "device": run.hit_tokens,
            "host": run.host_hit_tokens,
            "storage": run.storage_hit_tokens,
            "computed": run.computed_tokens,
        }
        hit_rate = 1 - run.computed_tokens / max(run.prompt_tokens, 1)
        parts = list(zip("abcd", counts.values(), strict=True))
        bars.append(Bar(name, parts, f"{hit_rate:.0%} hit"))
    return bar_chart("Prompt tokens by source", bars, zip(counts, "abcd", strict=True))
