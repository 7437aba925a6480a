"""The report as an HTML page: complete, self-contained, and safe whatever the trace is called."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler.replay.charts import WIDTH, Bar, Line, bar_chart, line_chart
from radixkv.scheduler.replay.checks import Check
from radixkv.scheduler.replay.engine_run.real_run import RealRun, RealRunConfig
from radixkv.scheduler.replay.hits.counts import HitCounts
from radixkv.scheduler.replay.hits.hit_curve import HitRow, measure_hit_curve
from radixkv.scheduler.replay.page import to_page
from radixkv.scheduler.replay.report import (
    ClusterSection,
    RealSection,
    ReplayReport,
    SimulationSection,
)
from radixkv.scheduler.replay.simulation.cluster import ClusterConfig, simulate_cluster
from radixkv.scheduler.replay.simulation.cost_model import named_costs
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig, simulate
from radixkv.scheduler.replay.trace import Trace

_VOID = {"meta"}


class _Page(HTMLParser):
    """The text, the tags and the attributes of a page. Every tag must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


@pytest.fixture(scope="module")
def report(bundled_trace: Trace) -> ReplayReport:
    """A report of 20 requests with every section, a failed check and a skipped one."""
    trace = Trace(bundled_trace.requests[:20], (), "a <script>alert('&')</script>.jsonl")
    costs, off = named_costs(), SimulationConfig(num_blocks=3_000, prefix_cache=False)
    on = SimulationConfig(num_blocks=3_000)
    tiered = SimulationConfig(num_blocks=3_000, host=HostConfig(20_000, "back"), preempt="host")
    configs = {"cache off": off, "cache on": on, "host tier": tiered}
    runs = {name: simulate(trace, costs, config) for name, config in configs.items()}
    apart = ClusterConfig(2, 1)
    checks = (
        Check("identical tokens", False, "request 3 differs"),
        Check("the tight pool preempts and evicts", True, "not exercised", skipped=True),
    )
    return ReplayReport(
        trace,
        measure_hit_curve(trace, (50, 100, 200)),
        SimulationSection(costs, tiered, runs),
        ClusterSection(
            {"reserve none": apart}, {"reserve none": simulate_cluster(trace, costs, apart)}
        ),
        RealSection(RealRunConfig(), RealRun(0, 0, 0, (), checks)),
        wall_s=12.34,
    )


def test_the_page_has_all_of_the_report(report: ReplayReport) -> None:
    page = _Page(to_page(report))
    assert page.open == []
    for sentence in report.summary():
        assert sentence in page.text
    words = " ".join(report.text().replace("─", "").split())
    assert set(words.split()) <= set(page.text.split()) | {"FAIL:"}
    for chart in (
        "Hit rate by cache size in blocks of 512 tokens",
        "Time to first token, s",
        "Goodput, requests/s",
        "Prompt tokens by source",
    ):
        assert chart in page.text
    assert page.tags.count("figure") == 6
    run = report.simulation.runs["cache on"]
    assert run.latencies.ttft_s is not None
    assert f"cache on, p90 {run.latencies.ttft_s.p90:.2f} " in page.text
    assert f"cache on {run.latencies.goodput_requests_per_s:.2f} " in page.text


def test_the_page_loads_and_runs_nothing(report: ReplayReport) -> None:
    text = to_page(report)
    page = _Page(text)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert not {"src", "href", "srcset", "action"} & page.attributes
    assert not [name for name in page.attributes if name.startswith("on")]
    assert (
        "url(" not in text
        and "@import" not in text
        and "http" not in text.replace("http-equiv", "")
    )
    assert "default-src 'none'" in text
    assert "a <script>alert('&')</script>.jsonl" in page.text


def test_the_page_shows_verdicts_in_colour_and_in_both_themes(report: ReplayReport) -> None:
    text = to_page(report)
    assert '<td class="pass">PASS</td>' in text
    assert '<td class="fail">FAIL</td>' in text
    assert '<td class="skip">SKIP</td>' in text
    assert '<p><span class="fail">FAIL</span>: 1 of ' in text
    assert "@media (prefers-color-scheme: dark)" in text


def test_one_cache_size_makes_no_line(report: ReplayReport) -> None:
    one = dataclasses.replace(report, hits=measure_hit_curve(report.trace, (50,)))
    assert "Hit rate by cache size" not in to_page(one)


def _charts(report: ReplayReport) -> dict[str, ET.Element]:
    """The charts of the page by their headings, those of nodes apart left out."""
    one = dataclasses.replace(report, clusters=ClusterSection({}, {}))
    figures = re.findall(r"<figure>.*?</figure>", to_page(one), re.DOTALL)
    return {re.findall(r"<figcaption>(.*?)<", each)[0]: _svg(each) for each in figures}


def test_each_line_of_the_hits_has_its_rates(report: ReplayReport) -> None:
    rows = (
        HitRow(1_000, HitCounts(7, 400, 100, 2, 0.25, 4), 1, 140, None),
        HitRow(2_500, HitCounts(7, 400, 120, 2, 0.3, 4), 1, 150, None),
        HitRow(None, HitCounts(7, 400, 158, 2, 0.395, 4), 1, 158, None),
    )
    made = dataclasses.replace(report, hits=dataclasses.replace(report.hits, rows=rows))
    svg = _charts(made)["Hit rate by cache size in blocks of 512 tokens"]
    dots = [(dot.get("class"), dot.findtext("title")) for dot in svg.iter("circle")]
    assert dots == [
        ("d", "no limit: 39.5% at 1,000"),
        ("d", "no limit: 39.5% at 2,500"),
        ("b", "Belady: 35.0% at 1,000"),
        ("b", "Belady: 37.5% at 2,500"),
        ("a", "radixkv: 25.0% at 1,000"),
        ("a", "radixkv: 30.0% at 2,500"),
    ]
    assert [text.text for text in svg.iter("text")] == ["0%", "20%", "40%", "1k", "2,500"]


def test_each_bar_of_the_prompts_has_its_sources(report: ReplayReport) -> None:
    run = dataclasses.replace(
        report.simulation.runs["cache on"],
        prompt_tokens=10_000,
        hit_tokens=2_000,
        host_hit_tokens=1_000,
        storage_hit_tokens=500,
    )
    section = dataclasses.replace(report.simulation, runs={"all": run})
    svg = _charts(dataclasses.replace(report, simulation=section))["Prompt tokens by source"]
    assert [rect.get("class") for rect in svg.iter("rect")] == list("abcd")
    widths = [float(rect.get("width", "")) for rect in svg.iter("rect")]
    expected = [255 * num_tokens / 10_000 for num_tokens in (2_000, 1_000, 500, 6_500)]
    assert widths == pytest.approx(expected, abs=0.06)
    assert [text.text for text in svg.iter("text")] == ["all", "35% hit"]


def test_a_run_that_finished_nothing_has_no_time_to_first_token(report: ReplayReport) -> None:
    run = report.simulation.runs["cache on"]
    nothing = dataclasses.replace(run.latencies, ttft_s=None, goodput_requests_per_s=0.0)
    runs = {"some": run, "none": dataclasses.replace(run, latencies=nothing)}
    section = dataclasses.replace(report.simulation, runs=runs)
    charts = _charts(dataclasses.replace(report, simulation=section))
    times = [text.text for text in charts["Time to first token, s"].iter("text")]
    assert times[::2] == ["some, p50", "some, p90", "some, p99"]
    rates = [text.text for text in charts["Goodput, requests/s"].iter("text")]
    assert rates[::2] == ["some", "none"] and rates[3] == "0.00"


_VALUES = st.floats(0, 1e9) | st.just(0.0)


@given(st.lists(st.lists(_VALUES, min_size=1, max_size=4), max_size=6))
def test_bars_have_the_lengths_of_their_values(values: list[list[float]]) -> None:
    bars = [Bar("<b>", list(zip("abcd", each, strict=False)), "a & b") for each in values]
    svg = _svg(bar_chart("a < b", bars, [("<one>", "a")]))
    widths = [float(rect.get("width", "")) for rect in svg.iter("rect")]
    most = max((sum(each) for each in values), default=0.0)
    expected = [value / most * 255 if most else 0 for each in values for value in each]
    assert widths == pytest.approx(expected, abs=0.06)
    for rect in svg.iter("rect"):
        assert float(rect.get("x", "")) + float(rect.get("width", "")) <= WIDTH - 95
    assert [text.text for text in svg.iter("text")] == ["<b>", "a & b"] * len(values)


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=6, unique=True).map(sorted), st.data())
def test_lines_stay_within_their_chart(xs: list[int], data: st.DataObject) -> None:
    rates = st.lists(st.floats(0, 1), min_size=len(xs), max_size=len(xs))
    lines = [Line(name, name, data.draw(rates)) for name in "ab"]
    svg = _svg(line_chart("title", xs, lines))
    height = float(svg.get("viewBox", "").split()[3])
    points = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in svg.iter("circle")]
    assert len(points) == 2 * len(xs)
    for line, drawn in zip(lines, (points[: len(xs)], points[len(xs) :]), strict=True):
        assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
        assert all(0 <= x <= WIDTH and 10 <= y <= height - 30 for x, y in drawn)
        best = max(range(len(xs)), key=line.values.__getitem__)
        assert drawn[best][1] == min(y for _, y in drawn)


def _svg(figure: str) -> ET.Element:
    svg = ET.fromstring(figure).find("svg")
    assert svg is not None
    return svg
