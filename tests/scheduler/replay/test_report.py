"""The report: its text, its failed checks, and its JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler.replay.checks import Check
from radixkv.scheduler.replay.engine_run.checks import PassResult
from radixkv.scheduler.replay.engine_run.real_run import RealRun, RealRunConfig
from radixkv.scheduler.replay.hits.counts import HitCounts
from radixkv.scheduler.replay.hits.hit_curve import HitRow, measure_hit_curve
from radixkv.scheduler.replay.report import (
    ClusterSection,
    RealSection,
    ReplayReport,
    SimulationSection,
    short,
)
from radixkv.scheduler.replay.simulation.cluster import ClusterConfig, simulate_cluster
from radixkv.scheduler.replay.simulation.cost_model import named_costs
from radixkv.scheduler.replay.simulation.latency import Latencies, Percentiles
from radixkv.scheduler.replay.simulation.simulated_node import RoleResult
from radixkv.scheduler.replay.simulation.simulated_storage import StorageCounts
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig, simulate
from radixkv.scheduler.replay.simulation.tier_links import TierCounts
from radixkv.scheduler.replay.trace import SkippedLine, Trace
from radixkv.scheduler.terminal.console import to_text


def words(text: str) -> str:
    """The text without line breaks and alignment."""
    return " ".join(text.split())


def at_width(report: ReplayReport, width: int) -> list[str]:
    """The lines of the report in a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(report.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def pass_result(name: str, prefill_tokens: int) -> PassResult:
    return PassResult(name, 72, 900, prefill_tokens, 64, 5, 40, 0, 1.25)


TIERED_RUN = dataclasses.replace(
    pass_result("host tier", 2000),
    host_hit_tokens=1_696,
    parked=19,
    resumed=18,
    bytes_to_host=1_941_504,
    bytes_to_device=1_277_952,
)


@pytest.fixture(scope="module")
def report(bundled_trace: Trace) -> ReplayReport:
    """A report of the first 20 requests, with a made-up real run."""
    skipped = tuple(SkippedLine(line, f"reason {line}") for line in range(1, 8))
    trace = Trace(bundled_trace.requests[:20], skipped, "mine.jsonl")
    costs, config = named_costs(), SimulationConfig()
    apart = ClusterConfig(2, 1)
    cluster = simulate_cluster(trace, costs, apart)
    real = RealRun(
        requests=20,
        prompt_tokens=4000,
        output_tokens=300,
        runs=(pass_result("reference", 4000), pass_result("cache on", 3000), TIERED_RUN),
        checks=(
            Check("identical tokens", True, "300 output tokens, 2 times"),
            Check("the tight pool preempts and evicts", True, "not exercised", skipped=True),
        ),
    )
    return ReplayReport(
        trace,
        measure_hit_curve(trace, (50,)),
        SimulationSection(costs, config, {"cache on": simulate(trace, costs, config)}),
        ClusterSection({"reserve none": apart}, {"reserve none": cluster}),
        RealSection(RealRunConfig(), real),
        wall_s=12.34,
    )


def test_the_text_has_every_section_check_and_skipped_line(report: ReplayReport) -> None:
    text = report.text()
    lines = text.splitlines()
    assert any(line.startswith("mine.jsonl: 20 requests, ") for line in lines)
    assert "7 malformed lines were skipped:" in lines
    assert "  line 5: reason 5" in lines and "  line 6: reason 6" not in lines
    assert "  and 2 more" in lines
    for heading in (
        "a. HITS",
        "b. SIMULATION: llama3-8b on h200x2",
        "PREFILL AND DECODE APART: 2 prefill and 1 decode nodes, each h200x2",
        "c. REAL RUN: 20 requests",
    ):
        assert heading in text
    flat = words(text)
    assert "A decode node grants blocks before the prompt is computed (early)." in flat
    for label in ("time to first token, s", "goodput, requests/s", "preemptions", "no limit"):
        assert label in text
    for _, check in report.checks():
        assert check.name in flat and check.detail in flat
    assert "SKIP the tight pool preempts and evicts: not exercised" in flat
    for row in (
        "hit on the host 0 0 1,696",
        "parked / resumed 0 / 0 0 / 0 19 / 18",
        "copied to the host, MB 0.0 0.0 1.9",
        "copied to the device, MB 0.0 0.0 1.3",
    ):
        assert row in flat
    assert lines[-1] == "PASS: 9 checks, 1 skipped; 12.3 s"
    assert all(len(line) <= 100 for line in lines), [line for line in lines if len(line) > 100]


def test_the_report_mentions_an_unsorted_trace(report: ReplayReport) -> None:
    trace = report.trace
    assert report.to_json()["trace"]["out_of_order"] == 0
    first, *others = trace.requests
    mixed = dataclasses.replace(report, trace=dataclasses.replace(trace, requests=(*others, first)))
    assert mixed.to_json()["trace"]["out_of_order"] == 1
    line = (
        "1 requests are earlier than the line above them: hits follow the lines, the simulation "
        "follows the timestamps."
    )
    assert line in words(mixed.text())
    assert line not in words(report.text())


def test_the_report_explains_refused_requests(report: ReplayReport) -> None:
    assert "are refused" not in report.text()
    section = report.simulation
    config = dataclasses.replace(section.config, num_blocks=20)
    runs = {"cache on": simulate(report.trace, section.costs, config)}
    assert runs["cache on"].refused
    small = dataclasses.replace(report, simulation=dataclasses.replace(section, runs=runs))
    line = "Requests with more than 320 tokens, prompt and output, do not fit it and are refused."
    assert line in words(small.text())


def test_a_failed_check_fails_the_report(report: ReplayReport) -> None:
    assert report.ok
    broken = Check("identical tokens", False, "cache on: request 3 differs at output token 7")
    real = dataclasses.replace(report.real.run, checks=(broken,))
    failed = dataclasses.replace(report, real=RealSection(RealRunConfig(), real))
    assert not failed.ok
    assert f"FAIL {broken.name}: {broken.detail}" in words(failed.text())
    assert failed.text().splitlines()[-1] == "FAIL: 1 of 9 checks; 12.3 s"
    assert failed.to_json()["ok"] is False


def test_a_terminal_shows_verdicts_in_colour(report: ReplayReport) -> None:
    console = Console(file=io.StringIO(), width=80, color_system="standard", force_terminal=True)
    broken = dataclasses.replace(report.real.run, checks=(Check("tokens", False, "they differ"),))
    for each in (report, dataclasses.replace(report, real=RealSection(RealRunConfig(), broken))):
        console.print(each.render(), markup=False, highlight=False)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b[1;32mPASS\x1b[0m  LRU <= Belady" in text
    assert "\x1b[1;33mSKIP\x1b[0m  the tight pool" in text
    assert "\x1b[1;31mFAIL\x1b[0m  tokens: they differ" in text
    assert "\x1b[1;32mPASS\x1b[0m: 9 checks, 1 skipped; 12.3 s" in text
    assert "\x1b[1;31mFAIL\x1b[0m: 1 of 9 checks; 12.3 s" in text
    assert "\x1b[1ma. HITS: blocks of 512 tokens" in text
    assert "\x1b" not in report.text()


def test_the_json_is_complete_and_has_no_nan(report: ReplayReport) -> None:
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(document) == {
        "ok",
        "wall_s",
        "environment",
        "trace",
        "hits",
        "simulation",
        "apart",
        "real_run",
        "checks",
    }
    assert document["ok"] is True
    assert set(document["environment"]) == {"versions", "python", "platform", "cpu_count"}
    assert document["trace"]["requests"] == 20
    assert document["trace"]["skipped"][0] == {"line": 1, "reason": "reason 1"}
    assert [row["num_blocks"] for row in document["hits"]["rows"]] == [50, None]
    assert document["hits"]["rows"][1]["counts"]["hit_rate"] <= 1
    assert document["simulation"]["costs"]["model"]["name"] == "llama3-8b"
    assert document["simulation"]["config"]["slo_ttft_s"] == 30.0
    assert document["simulation"]["runs"]["cache on"]["finished"] == 20
    assert set(document["simulation"]["runs"]["cache on"]["latencies"]["ttft_s"]) == {
        "p50",
        "p90",
        "p99",
    }
    assert document["apart"]["reserve none"]["config"]["num_prefill"] == 2
    assert document["apart"]["reserve none"]["finished"] == 20
    assert document["real_run"]["config"]["seed"] == 0
    runs = document["real_run"]["runs"]
    assert [run["name"] for run in runs] == ["reference", "cache on", "host tier"]
    assert [run["bytes_to_host"] for run in runs] == [0, 0, 1_941_504]
    assert document["checks"][-1] == {
        "section": "real_run",
        "name": "the tight pool preempts and evicts",
        "ok": True,
        "detail": "not exercised",
        "skipped": True,
    }


def test_a_real_run_without_requests(report: ReplayReport) -> None:
    check = Check("identical tokens", True, "no request is shorter than 320 tokens", skipped=True)
    empty = RealSection(RealRunConfig(), RealRun(0, 0, 0, (), (check,)))
    text = dataclasses.replace(report, real=empty).text()
    assert "c. REAL RUN: 0 requests" in text
    assert f"SKIP {check.name}: {check.detail}" in words(text)


def test_a_host_tier_has_its_rows(report: ReplayReport) -> None:
    costs = named_costs()
    config = SimulationConfig(num_blocks=3_000, host=HostConfig(20_000, "back"), preempt="host")
    without = dataclasses.replace(config, host=None, preempt="recompute")
    runs = {
        "cache on": simulate(report.trace, costs, without),
        "host tier": simulate(report.trace, costs, config),
    }
    tiered = dataclasses.replace(report, simulation=SimulationSection(costs, config, runs))
    text = tiered.text()
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    counts = runs["host tier"].tiers
    assert counts is not None
    assert rows["copied to the host, GB"].split()[-2:] == [
        "-",
        f"{counts.bytes_to_host / 1e9:,.1f}",
    ]
    for label in (
        "hit on the host",
        "parked / resumed",
        "copied to the device, GB",
        "blocks demoted",
        "blocks promoted",
        "blocks dropped by the host",
        "idle, waiting for a copy, s",
    ):
        assert label in rows
    line = (
        "The host tier has 20,000 blocks (write: back; preempted requests: host) and 102.4 GB/s "
        "each way."
    )
    assert line in words(text)
    assert "PASS no host block is leaked (host tier): " in words(text)
    assert [line for line in text.splitlines() if len(line) > 100] == []
    document = json.loads(json.dumps(tiered.to_json(), allow_nan=False))["simulation"]
    assert document["config"]["host"] == {"num_blocks": 20_000, "write": "back", "hits": 0}
    assert document["runs"]["cache on"]["tiers"] is None
    assert document["runs"]["host tier"]["tiers"] == dataclasses.asdict(counts)


def test_storage_has_its_rows(report: ReplayReport) -> None:
    costs = named_costs()
    host = HostConfig(4_000, "through")
    config = SimulationConfig(num_blocks=3_000, host=host, storage_blocks=90_000, preempt="storage")
    without = dataclasses.replace(config, storage_blocks=None, preempt="host")
    runs = {
        "cache off": simulate(
            report.trace, costs, SimulationConfig(num_blocks=3_000, prefix_cache=False)
        ),
        "cache on": simulate(report.trace, costs, SimulationConfig(num_blocks=3_000)),
        "host tier": simulate(report.trace, costs, without),
        "storage": simulate(report.trace, costs, config),
    }
    tiered = dataclasses.replace(report, simulation=SimulationSection(costs, config, runs))
    text = tiered.text()
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert runs["storage"].tiers is not None
    counts = runs["storage"].tiers.storage
    assert counts is not None and counts.bytes_written > 0
    cells = rows["written to storage, GB"].split()[-4:]
    assert cells == ["-", "-", "-", f"{counts.bytes_written / 1e9:,.1f}"]
    for label in (
        "hit in storage",
        "read from storage, GB",
        "blocks evicted from storage",
        "blocks past their deadline",
    ):
        assert label in rows
    line = "Storage has 90,000 blocks, written at 5.6 GB/s and read at 10.4 GB/s."
    assert line in text.splitlines()
    assert [line for line in text.splitlines() if len(line) > 100] == []
    narrow = at_width(tiered, 80)
    assert max(map(len, narrow)) <= 80
    assert set(" ".join(narrow).split()) - set("─" * n for n in range(101)) <= set(text.split()), (
        "a word is broken"
    )
    document = json.loads(json.dumps(tiered.to_json(), allow_nan=False))["simulation"]
    assert document["config"]["storage_blocks"] == 90_000
    assert document["runs"]["host tier"]["tiers"]["storage"] is None
    assert document["runs"]["storage"]["tiers"]["storage"] == dataclasses.asdict(counts)
    assert document["runs"]["storage"]["storage_hit_tokens"] == runs["storage"].storage_hit_tokens


def with_latencies(report: ReplayReport, **figures: tuple[float, float]) -> ReplayReport:
    """The report with runs of these median times to first token and goodputs."""
    run = report.simulation.runs["cache on"]
    runs = {
        name.replace("_", " "): dataclasses.replace(
            run,
            latencies=dataclasses.replace(
                run.latencies,
                ttft_s=Percentiles(ttft_s, 99.0, 99.0),
                goodput_requests_per_s=goodput,
            ),
        )
        for name, (ttft_s, goodput) in figures.items()
    }
    return dataclasses.replace(report, simulation=dataclasses.replace(report.simulation, runs=runs))


def test_the_text_begins_with_a_summary(report: ReplayReport) -> None:
    cached = with_latencies(report, cache_off=(31.34, 1.19), cache_on=(22.2, 2.4))
    assert words(cached.text())[:162] == (
        "With the prefix cache, the median time to first token falls from 31.3 to 22.2 s and "
        "goodput rises from 1.19 to 2.40 requests/s (2.0 times). Of the prompt blocks, "
    )
    assert (
        "Times are estimates from a cost model of llama3-8b on h200x2. mine.jsonl: 20 requests"
    ) in words(cached.text())
    tiers = with_latencies(
        report, cache_off=(5.0, 1.0), cache_on=(5.0, 1.1), host_tier=(4.0, 1.2), storage=(3.0, 1.3)
    )
    assert (
        "With the prefix cache, the median time to first token stays at 5.00 s and goodput rises "
        "from 1.00 to 1.10 requests/s. Adding the host tier brings them to 4.00 s and 1.20 "
        "requests/s. Adding storage brings them to 3.00 s and 1.30 requests/s."
    ) in words(tiers.text())


def test_the_summary_names_a_sufficient_cache_size(
    bundled_trace: Trace, report: ReplayReport
) -> None:
    curve = dataclasses.replace(report, hits=measure_hit_curve(bundled_trace, (10_000, 20_000)))
    assert (
        "Of the prompt blocks, 21.2% repeat an earlier prefix; a cache of 20,000 blocks of 512 "
        "tokens finds 100% of these."
    ) in words(curve.text())


@pytest.mark.parametrize(("found", "is_enough"), [(94, False), (95, True)])
def test_a_sufficient_cache_finds_nearly_all(
    report: ReplayReport, found: int, is_enough: bool
) -> None:
    rows = (
        HitRow(1_006, HitCounts(7, 400, found, 1, found / 400, 0), 1, 100, None),
        HitRow(None, HitCounts(7, 400, 100, 1, 0.25, 0), 1, 100, None),
    )
    made = dataclasses.replace(report, hits=dataclasses.replace(report.hits, rows=rows))
    end = "; a cache of 1,006 blocks of 512 tokens finds 95% of these." if is_enough else "."
    assert made.summary()[-2] == f"Of the prompt blocks, 25.0% repeat an earlier prefix{end}"


@pytest.mark.parametrize(
    ("off", "on", "end"), [(1.0, 1.19, ""), (1.0, 1.2, " (1.2 times)"), (0.0, 1.2, "")]
)
def test_a_goodput_that_is_notably_better_is_so_many_times_the_other(
    report: ReplayReport, off: float, on: float, end: str
) -> None:
    made = with_latencies(report, cache_off=(5.0, off), cache_on=(5.0, on))
    change = f"goodput rises from {off:.2f} to {on:.2f} requests/s{end}."
    assert made.summary()[0].endswith(change)


LATENCIES = Latencies(
    ttft_s=Percentiles(0.126, 9.98, 12.345),
    tpot_s=Percentiles(0.0123, 0.456, 7.8912),
    end_to_end_s=Percentiles(99.94, 123.4, 4_567.8),
    slo_ttft_s=1.0,
    slo_tpot_s=0.025,
    slo_attainment=0.1234,
    goodput_requests_per_s=5.678,
)
LATENCY_ROWS = {
    "time to first token, s": "0.13/9.98/12.3",
    "time per output token, ms": "12.3/456/7891",
    "end to end, s": "99.9/123/4568",
    "goodput, requests/s": "5.68",
    "requests within the SLO": "12.3%",
}


def rows_of(report: ReplayReport, name: str) -> dict[str, str]:
    """The rows of the table of a section whose last column is the only one, or the last."""
    [section] = [each for each in report.sections() if each.name == name]
    lines = to_text(section.parts[0]).splitlines()
    cells = [re.split(r"  +", line.strip()) for line in lines]
    return {each[0]: each[-1] for each in cells if len(each) > 1}


def test_each_figure_of_a_simulation_is_in_its_row(report: ReplayReport) -> None:
    storage = StorageCounts(
        storage_blocks=1, used_blocks=2, evicted_blocks=3_001, late_blocks=4_001,
        bytes_written=5_100_000_000, bytes_read=6_200_000_000, busy_writing_s=7, busy_reading_s=8,
    )  # fmt: skip
    tiers = TierCounts(
        host_blocks=1, demoted_blocks=2_002, promoted_blocks=3_002, dropped_blocks=4_002,
        parked=5_002, resumed=6_002, bytes_to_host=7_100_000_000, bytes_to_device=8_200_000_000,
        busy_to_host_s=9, busy_to_device_s=10, waited_s=11.254, storage=storage,
    )  # fmt: skip
    run = dataclasses.replace(
        report.simulation.runs["cache on"],
        refused=1_003, prompt_tokens=10_000, hit_tokens=2_050, host_hit_tokens=1_140,
        storage_hit_tokens=330, recomputed_tokens=4_003, preemptions=5_003, steps=6_003,
        mean_budget_use=0.614, num_blocks=7_003, mean_occupancy=0.816, peak_occupancy=0.924,
        evicted_blocks=8_003, simulated_s=9_003.26, latencies=LATENCIES,
        scheduler_us_per_step=321.4, tiers=tiers,
    )  # fmt: skip
    config = SimulationConfig(slo_tpot_s=0.025, slo_ttft_s=2.5)
    section = dataclasses.replace(report.simulation, config=config, runs={"all": run})
    made = dataclasses.replace(report, simulation=section)
    assert rows_of(made, "simulation") == {
        **LATENCY_ROWS,
        "prompt tokens hit": "2,050 (20%)",
        "hit on the host": "1,140 (11%)",
        "hit in storage": "330 (3%)",
        "prompt tokens computed": f"{run.computed_tokens:,}",
        "preemptions": "5,003",
        "tokens recomputed": "4,003",
        "parked / resumed": "5,002 / 6,002",
        "copied to the host, GB": "7.1",
        "copied to the device, GB": "8.2",
        "blocks demoted": "2,002",
        "blocks promoted": "3,002",
        "blocks dropped by the host": "4,002",
        "idle, waiting for a copy, s": "11.25",
        "written to storage, GB": "5.1",
        "read from storage, GB": "6.2",
        "blocks evicted from storage": "3,001",
        "blocks past their deadline": "4,001",
        "pool in use, mean / peak": "82% / 92%",
        "blocks evicted": "8,003",
        "requests refused": "1,003",
        "simulated time, s": "9,003.3",
        "steps": "6,003",
        "token budget in use, mean": "61%",
        "scheduler, us CPU per step": "321",
    }
    flat = words(made.text())
    assert "SLO: first token within 2.5 s, then 25 ms per token. The pool has 7,003 blocks" in flat
    assert "1.00 ms" not in flat and "checks" not in made.to_json()["simulation"]["runs"]["all"]


def test_each_figure_of_nodes_is_in_its_row(report: ReplayReport) -> None:
    run = dataclasses.replace(
        report.clusters.runs["reserve none"],
        refused=1_004, prompt_tokens=10_000, hit_tokens=2_004, own_tokens=3_004, sent_blocks=5,
        sent_bytes=4.2e9, busy_refusals=5_004, preemptions=6_004, recomputed_tokens=7_004,
        prefill=RoleResult(8_004, 0.114, 0.224, 0.334, 5),
        decode=RoleResult(9_004, 0.446, 0.556, 0.666, 6),
        simulated_s=10_004.14, latencies=LATENCIES, scheduler_us_per_step=432.1,
    )  # fmt: skip
    clusters = dataclasses.replace(report.clusters, runs={"all": run})
    assert rows_of(dataclasses.replace(report, clusters=clusters), "apart") == {
        **LATENCY_ROWS,
        "prompt tokens hit on P": "2,004 (20.0%)",
        "prompt tokens hit on D": "3,004 (30.0%)",
        "sent from P to D, GB": "4.2",
        "retries, no room on D": "5,004",
        "preemptions": "6,004",
        "tokens recomputed": "7,004",
        "time in steps, P / D": "11% / 45%",
        "pool in use on D, mean / peak": "56% / 67%",
        "requests refused": "1,004",
        "simulated time, s": "10,004.1",
        "steps, P / D": "8,004 / 9,004",
        "scheduler, us CPU per step": "432",
    }


def test_each_figure_of_the_real_run_is_in_its_row(report: ReplayReport) -> None:
    run = PassResult(
        "all", num_blocks=1_005, steps=2_005, prefill_tokens=3_005, hit_tokens=4_005,
        preemptions=5_005, evicted_blocks=6_005, compilations=7_005, wall_s=8.26,
        host_hit_tokens=9_005, parked=10_005, resumed=11_005, recomputed_tokens=12_005,
        bytes_to_host=13_100_000, bytes_to_device=14_200_000,
    )  # fmt: skip
    real = dataclasses.replace(report.real, run=dataclasses.replace(report.real.run, runs=(run,)))
    assert rows_of(dataclasses.replace(report, real=real), "real_run") == {
        "blocks": "1,005",
        "steps": "2,005",
        "prefill tokens": "3,005",
        "hit tokens": "4,005",
        "hit on the host": "9,005",
        "preemptions": "5,005",
        "parked / resumed": "10,005 / 11,005",
        "blocks evicted": "6,005",
        "copied to the host, MB": "13.1",
        "copied to the device, MB": "14.2",
        "compiled after warm-up": "7,005",
        "time, s": "8.3",
    }


@given(st.floats(0.1, 999.4))
@example(9.994)
@example(9.996)
@example(99.94)
@example(99.96)
def test_a_short_number_has_three_digits(value: float) -> None:
    shown = short(value)
    assert len(shown.replace(".", "")) == 3
    assert float(shown) == pytest.approx(value, abs=0.0051 if value < 10 else value / 180)


def test_each_figure_of_the_hits_is_in_its_row(report: ReplayReport) -> None:
    rows = (
        HitRow(1_006, HitCounts(7, 400, 100, 2_006, 0.25, 4_006), 1, 3_006, None),
        HitRow(None, HitCounts(7, 400, 160, 5_006, 0.4, 7_006), 2, 6_006, None),
    )
    made = dataclasses.replace(report, hits=dataclasses.replace(report.hits, rows=rows))
    [section] = [each for each in made.sections() if each.name == "hits"]
    table = [line.split() for line in to_text(section.parts[0]).splitlines()]
    assert table[2:] == [
        ["1,006", "100", "25.0%", "62.5%", "3,006", "2,006", "4,006"],
        ["no", "limit", "160", "40.0%", "100.0%", "6,006", "5,006", "7,006"],
    ]
    flat = words(made.text())
    assert "a cache without a limit: 160 of 400 requested blocks had been seen before" in flat
    assert "Of the prompt blocks, 40.0% repeat an earlier prefix." in flat
