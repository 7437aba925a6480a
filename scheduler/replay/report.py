"""The report of a replay: tables and notes for a terminal, and the same figures as JSON."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..terminal.console import table, to_text, verdict_text
from .checks import Check
from .engine_run.checks import PassResult
from .engine_run.real_run import RealRun, RealRunConfig
from .hits.hit_curve import HitCurve
from .simulation.cluster import ClusterConfig, ClusterResult
from .simulation.cost_model import CostModel
from .simulation.latency import Latencies, Percentiles
from .simulation.simulated_storage import StorageCounts
from .simulation.single_node import SimulationConfig, SimulationResult
from .simulation.tier_links import TierCounts
from .trace import TOKENS_PER_HASH_ID, Trace

MAX_SKIPPED_SHOWN = 5
_NEARLY_ALL = 0.95
_NOTABLE_RATIO = 1.2


@dataclass(frozen=True, slots=True)
class SimulationSection:
    """Simulations of one node that differ in one setting each, by name."""

    costs: CostModel
    config: SimulationConfig
    runs: dict[str, SimulationResult]


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """Simulations of prefill and decode nodes that differ in one setting, by name; may be empty."""

    configs: dict[str, ClusterConfig]
    runs: dict[str, ClusterResult]


@dataclass(frozen=True, slots=True)
class RealSection:
    """The run of the real engine and its configuration."""

    config: RealRunConfig
    run: RealRun


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report as text.

    Attributes:
        name: Name for programs: trace, hits, simulation, apart, real_run or verdict.
        heading: Heading; may be empty.
        parts: Lines, tables and lists of checks, from top to bottom. "" is an empty line.
    """

    name: str
    heading: str
    parts: Sequence[str | Text | Table]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Results of a replay."""

    trace: Trace
    hits: HitCurve
    simulation: SimulationSection
    clusters: ClusterSection
    real: RealSection
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(check.ok for _, check in self.checks())

    def checks(self) -> list[tuple[str, Check]]:
        """Return every check with the section it belongs to."""
        checks = [("hits", check) for check in self.hits.checks]
        for name, run in self.simulation.runs.items():
            checks += [(f"simulation, {name}", check) for check in run.checks]
        for name, cluster in self.clusters.runs.items():
            checks += [(f"apart, {name}", check) for check in cluster.checks]
        return checks + [("real_run", check) for check in self.real.run.checks]

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON types under stable names; unknown values are null."""
        trace, simulation, real = self.trace, self.simulation, self.real
        return {
            "ok": self.ok,
            "wall_s": self.wall_s,
            "environment": environment(),
            "trace": {
                "name": trace.name,
                "requests": len(trace.requests),
                "input_tokens": trace.num_input_tokens,
                "output_tokens": trace.num_output_tokens,
                "out_of_order": trace.num_out_of_order,
                "skipped": [dataclasses.asdict(line) for line in trace.skipped],
            },
            "hits": {
                "tokens_per_block": TOKENS_PER_HASH_ID,
                "rows": [dataclasses.asdict(row) for row in self.hits.rows],
            },
            "simulation": {
                "costs": dataclasses.asdict(simulation.costs),
                "config": dataclasses.asdict(simulation.config),
                "runs": {name: _without_checks(run) for name, run in simulation.runs.items()},
            },
            "apart": {
                name: {
                    "config": dataclasses.asdict(self.clusters.configs[name]),
                    **_without_checks(run),
                }
                for name, run in self.clusters.runs.items()
            },
            "real_run": {"config": dataclasses.asdict(real.config), **_without_checks(real.run)},
            "checks": [
                {"section": section, **dataclasses.asdict(check)}
                for section, check in self.checks()
            ],
        }

    def summary(self) -> list[str]:
        """Say in plain sentences what the figures mean."""
        return list(_summary(self.hits, self.simulation))

    def sections(self) -> list[Section]:
        """Return the parts of the report below the summary."""
        made = [
            Section("trace", "", list(_trace_lines(self.trace))),
            _hits(self.hits),
            _simulations(self.simulation),
        ]
        if self.clusters.runs:
            made.append(_clusters(self.clusters, self.simulation.costs))
        return [*made, _real_run(self.real.run), Section("verdict", "", [self._verdict()])]

    def render(self) -> RenderableType:
        """Return the report for a Rich console: tables, and notes that fit its width."""
        lines: list[RenderableType] = [" ".join(self.summary())]
        for section in self.sections():
            if section.heading:
                lines += ["", Text(section.heading, style="bold")]
            lines += ["", *section.parts]
        return Group(*lines)

    def text(self) -> str:
        """Return the report as it is written to a file or a pipe."""
        return to_text(self.render())

    def _verdict(self) -> Text:
        verdicts = [check.verdict for _, check in self.checks()]
        failed, skipped = verdicts.count("FAIL"), verdicts.count("SKIP")
        word, count = "PASS", f"{len(verdicts) - skipped} checks"
        if failed:
            word, count = "FAIL", f"{failed} of {len(verdicts)} checks"
        if skipped:
            count += f", {skipped} skipped"
        return Text.assemble(verdict_text(word), f": {count}; {self.wall_s:.1f} s")


def environment() -> dict[str, Any]:
    """Return the versions and the machine that the figures were measured with."""
    versions: dict[str, str | None] = {}
    for package in ("radixkv", "numpy", "jax", "jaxlib"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def _without_checks(result: SimulationResult | ClusterResult | RealRun) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    del fields["checks"]
    return fields


# ------------------------------------------------------------------------------ sections as text


def _trace_lines(trace: Trace) -> Iterator[str]:
    yield (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.num_input_tokens:,} input and "
        f"{trace.num_output_tokens:,} output tokens"
    )
    if trace.num_out_of_order:
        yield (
            f"{trace.num_out_of_order:,} requests are earlier than the line above them: hits "
            "follow the lines, the simulation follows the timestamps."
        )
    if trace.skipped:
        yield f"{len(trace.skipped):,} malformed lines were skipped:"
        for skipped in trace.skipped[:MAX_SKIPPED_SHOWN]:
            yield f"  line {skipped.line}: {skipped.reason}"
        if len(trace.skipped) > MAX_SKIPPED_SHOWN:
            yield f"  and {len(trace.skipped) - MAX_SKIPPED_SHOWN:,} more"


def _summary(curve: HitCurve, simulation: SimulationSection) -> Iterator[str]:
    medians = {
        name: (run.latencies.ttft_s.p50, run.latencies.goodput_requests_per_s)
        for name, run in simulation.runs.items()
        if run.latencies.ttft_s is not None
    }
    if "cache off" in medians and "cache on" in medians:
        (ttft_off, goodput_off), (ttft_on, goodput_on) = medians["cache off"], medians["cache on"]
        ratio = goodput_on / goodput_off if goodput_off else 1.0
        times = f" ({ratio:.1f} times)" if ratio >= _NOTABLE_RATIO else ""
        yield (
            "With the prefix cache, the median time to first token "
            f"{_change(ttft_off, ttft_on, 's')} and goodput "
            f"{_change(goodput_off, goodput_on, 'requests/s')}{times}."
        )
        for name, tier in (("host tier", "the host tier"), ("storage", "storage")):
            if name in medians:
                ttft_s, goodput = medians[name]
                yield (
                    f"Adding {tier} brings them to {short(ttft_s)} s and {short(goodput)} "
                    "requests/s."
                )
    ideal = curve.rows[-1].counts
    sentence = f"Of the prompt blocks, {ideal.hit_rate:.1%} repeat an earlier prefix"
    enough = next(
        row for row in curve.rows if row.counts.hit_blocks >= _NEARLY_ALL * ideal.hit_blocks
    )
    if enough.num_blocks is not None and ideal.hit_blocks:
        sentence += (
            f"; a cache of {enough.num_blocks:,} blocks of {TOKENS_PER_HASH_ID} tokens finds "
            f"{enough.counts.hit_blocks / ideal.hit_blocks:.0%} of these"
        )
    yield f"{sentence}."
    yield (
        f"Times are estimates from a cost model of {simulation.costs.model.name} on "
        f"{simulation.costs.gpu.name}."
    )


def _change(before: float, after: float, unit: str) -> str:
    old, new = short(before), short(after)
    if old == new:
        return f"stays at {new} {unit}"
    return f"{'rises' if after > before else 'falls'} from {old} to {new} {unit}"


def _hits(curve: HitCurve) -> Section:
    ideal = curve.rows[-1].counts
    rows = table(
        ("blocks", "hits", "hit rate", "of ideal", "Belady", "evicted", "refused"),
        [
            (
                "no limit" if row.num_blocks is None else f"{row.num_blocks:,}",
                f"{row.counts.hit_blocks:,}",
                f"{row.counts.hit_rate:.1%}",
                f"{row.counts.hit_blocks / ideal.hit_blocks:.1%}" if ideal.hit_blocks else "-",
                f"{row.belady_hit_blocks:,}",
                f"{row.counts.evicted_blocks:,}",
                f"{row.counts.refused:,}",
            )
            for row in curve.rows
        ],
    )
    note = (
        f"The ideal is a cache without a limit: {ideal.hit_blocks:,} of {ideal.blocks:,} requested "
        "blocks had been seen before. Belady evicts with knowledge of the future; no policy under "
        "the same rules can hit more."
    )
    heading = f"a. HITS: blocks of {TOKENS_PER_HASH_ID} tokens found in a cache of each size"
    return Section("hits", heading, [rows, "", note, _check_list(curve.checks)])


def _simulations(section: SimulationSection) -> Section:
    costs, runs = section.costs, section.runs
    heading = (
        f"b. SIMULATION: {costs.model.name} on {costs.gpu.name}, at the timestamps of the trace"
    )
    rows = table(("", *runs), _simulation_rows(list(runs.values())))
    checks = [_check_list(run.checks, f" ({name})") for name, run in runs.items()]
    return Section("simulation", heading, [rows, "", *_simulation_notes(section), *checks])


def _simulation_notes(section: SimulationSection) -> Iterator[str]:
    costs, config, runs = section.costs, section.config, section.runs
    first = next(iter(runs.values()))
    yield (
        "Times are p50/p90/p99. Manager and scheduler are real; the GPU is a roofline model, at "
        f"{costs.step.flops_efficiency:.0%} of peak FLOP/s, "
        f"{costs.step.bandwidth_efficiency:.0%} of bandwidth, and "
        f"{costs.step.overhead_s * 1e3:g} ms of overhead per step. Use it for planning, not as a "
        "benchmark."
    )
    yield (
        f"SLO: first token within {config.slo_ttft_s:g} s, then {config.slo_tpot_s * 1e3:g} ms "
        f"per token. The pool has {first.num_blocks:,} blocks of {config.block_size} tokens."
    )
    if any(run.refused for run in runs.values()):
        room = first.num_blocks * config.block_size
        yield (
            f"Requests with more than {room:,} tokens, prompt and output, do not fit it and are "
            "refused."
        )
    if config.host is not None:
        yield (
            f"The host tier has {config.host.num_blocks:,} blocks (write: {config.host.write}; "
            f"preempted requests: {config.preempt}) and {costs.host_bytes_per_s / 1e9:,.1f} GB/s "
            "each way. Copies run beside the steps; only a request that needs one waits for it."
        )
    if config.storage_blocks is not None:
        yield (
            f"Storage has {config.storage_blocks:,} blocks, written at "
            f"{costs.storage_write_bytes_per_s / 1e9:,.1f} GB/s and read at "
            f"{costs.storage_read_bytes_per_s / 1e9:,.1f} GB/s."
        )


def _simulation_rows(results: Sequence[SimulationResult]) -> Iterator[Sequence[str]]:
    storage = [None if r.tiers is None else r.tiers.storage for r in results]
    yield from _latency_rows([r.latencies for r in results])
    yield _row("prompt tokens hit", lambda r: _of_prompts(r, r.hit_tokens), results)
    if any(r.tiers for r in results):
        yield _row("hit on the host", lambda r: _of_prompts(r, r.host_hit_tokens), results)
    if any(storage):
        yield _row("hit in storage", lambda r: _of_prompts(r, r.storage_hit_tokens), results)
    yield _row("prompt tokens computed", lambda r: f"{r.computed_tokens:,}", results)
    yield _row("preemptions", lambda r: f"{r.preemptions:,}", results)
    yield _row("tokens recomputed", lambda r: f"{r.recomputed_tokens:,}", results)
    if any(r.tiers for r in results):
        for label, tier_cell in _TIER_ROWS:
            yield _row(label, tier_cell, [r.tiers for r in results])
    if any(storage):
        for label, storage_cell in _STORAGE_ROWS:
            yield _row(label, storage_cell, storage)
    yield _row(
        "pool in use, mean / peak",
        lambda r: f"{r.mean_occupancy:.0%} / {r.peak_occupancy:.0%}",
        results,
    )
    yield _row("blocks evicted", lambda r: f"{r.evicted_blocks:,}", results)
    yield _row("requests refused", lambda r: f"{r.refused:,}", results)
    yield _row("simulated time, s", lambda r: f"{r.simulated_s:,.1f}", results)
    yield _row("steps", lambda r: f"{r.steps:,}", results)
    yield _row("token budget in use, mean", lambda r: f"{r.mean_budget_use:.0%}", results)
    yield _row("scheduler, us CPU per step", lambda r: f"{r.scheduler_us_per_step:.0f}", results)


_TIER_ROWS: Sequence[tuple[str, Callable[[TierCounts], str]]] = (
    ("parked / resumed", lambda t: f"{t.parked:,} / {t.resumed:,}"),
    ("copied to the host, GB", lambda t: f"{t.bytes_to_host / 1e9:,.1f}"),
    ("copied to the device, GB", lambda t: f"{t.bytes_to_device / 1e9:,.1f}"),
    ("blocks demoted", lambda t: f"{t.demoted_blocks:,}"),
    ("blocks promoted", lambda t: f"{t.promoted_blocks:,}"),
    ("blocks dropped by the host", lambda t: f"{t.dropped_blocks:,}"),
    ("idle, waiting for a copy, s", lambda t: f"{t.waited_s:.2f}"),
)

_STORAGE_ROWS: Sequence[tuple[str, Callable[[StorageCounts], str]]] = (
    ("written to storage, GB", lambda s: f"{s.bytes_written / 1e9:,.1f}"),
    ("read from storage, GB", lambda s: f"{s.bytes_read / 1e9:,.1f}"),
    ("blocks evicted from storage", lambda s: f"{s.evicted_blocks:,}"),
    ("blocks past their deadline", lambda s: f"{s.late_blocks:,}"),
)


def _clusters(section: ClusterSection, costs: CostModel) -> Section:
    runs = section.runs
    config, first = next(iter(section.configs.values())), next(iter(runs.values()))
    heading = (
        f"PREFILL AND DECODE APART: {config.num_prefill} prefill and {config.num_decode} decode "
        f"nodes, each {costs.gpu.name}"
    )
    when = "before" if config.order == "early" else "when"
    note = (
        f"Each node has {first.num_blocks:,} blocks of {config.node.block_size} tokens, and "
        f"{costs.network_bytes_per_s / 1e9:,.1f} GB/s to the others. A decode node grants blocks "
        f"{when} the prompt is computed ({config.order})."
    )
    rows = table(("", *runs), _cluster_rows(list(runs.values())))
    checks = [_check_list(run.checks, f" ({name})") for name, run in runs.items()]
    return Section("apart", heading, [rows, "", note, *checks])


def _cluster_rows(results: Sequence[ClusterResult]) -> Iterator[Sequence[str]]:
    yield from _latency_rows([r.latencies for r in results])
    yield _row("prompt tokens hit on P", lambda r: _of_prompts(r, r.hit_tokens, 1), results)
    yield _row("prompt tokens hit on D", lambda r: _of_prompts(r, r.own_tokens, 1), results)
    yield _row("sent from P to D, GB", lambda r: f"{r.sent_bytes / 1e9:,.1f}", results)
    yield _row("retries, no room on D", lambda r: f"{r.busy_refusals:,}", results)
    yield _row("preemptions", lambda r: f"{r.preemptions:,}", results)
    yield _row("tokens recomputed", lambda r: f"{r.recomputed_tokens:,}", results)
    yield _row(
        "time in steps, P / D", lambda r: f"{r.prefill.busy:.0%} / {r.decode.busy:.0%}", results
    )
    yield _row(
        "pool in use on D, mean / peak",
        lambda r: f"{r.decode.mean_occupancy:.0%} / {r.decode.peak_occupancy:.0%}",
        results,
    )
    yield _row("requests refused", lambda r: f"{r.refused:,}", results)
    yield _row("simulated time, s", lambda r: f"{r.simulated_s:,.1f}", results)
    yield _row("steps, P / D", lambda r: f"{r.prefill.steps:,} / {r.decode.steps:,}", results)
    yield _row("scheduler, us CPU per step", lambda r: f"{r.scheduler_us_per_step:.0f}", results)


def _real_run(run: RealRun) -> Section:
    heading = (
        f"c. REAL RUN: {run.requests} requests, scaled down, through the engine and a tiny model"
    )
    rows = table(("", *(each.name for each in run.runs)), _real_rows(run.runs))
    note = (
        f"Each pass has {run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens. The "
        "reference has room for all requests; the other pools are so small that requests are "
        "preempted and blocks evicted."
    )
    return Section("real_run", heading, [rows, "", note, _check_list(run.checks)])


def _real_rows(passes: Sequence[PassResult]) -> Iterator[Sequence[str]]:
    yield _row("blocks", lambda p: f"{p.num_blocks:,}", passes)
    yield _row("steps", lambda p: f"{p.steps:,}", passes)
    yield _row("prefill tokens", lambda p: f"{p.prefill_tokens:,}", passes)
    yield _row("hit tokens", lambda p: f"{p.hit_tokens:,}", passes)
    yield _row("hit on the host", lambda p: f"{p.host_hit_tokens:,}", passes)
    yield _row("preemptions", lambda p: f"{p.preemptions:,}", passes)
    yield _row("parked / resumed", lambda p: f"{p.parked:,} / {p.resumed:,}", passes)
    yield _row("blocks evicted", lambda p: f"{p.evicted_blocks:,}", passes)
    yield _row("copied to the host, MB", lambda p: f"{p.bytes_to_host / 1e6:,.1f}", passes)
    yield _row("copied to the device, MB", lambda p: f"{p.bytes_to_device / 1e6:,.1f}", passes)
    yield _row("compiled after warm-up", lambda p: f"{p.compilations:,}", passes)
    yield _row("time, s", lambda p: f"{p.wall_s:.1f}", passes)


# ------------------------------------------------------------------------------ cells and rows

_Result = TypeVar("_Result")


def _row(
    label: str, cell: Callable[[_Result], str], results: Iterable[_Result | None]
) -> Sequence[str]:
    return (label, *("-" if result is None else cell(result) for result in results))


def _latency_rows(results: Sequence[Latencies]) -> Iterator[Sequence[str]]:
    yield _row("time to first token, s", lambda r: _percentiles(r.ttft_s, 1), results)
    yield _row("time per output token, ms", lambda r: _percentiles(r.tpot_s, 1e3), results)
    yield _row("end to end, s", lambda r: _percentiles(r.end_to_end_s, 1), results)
    yield _row("goodput, requests/s", lambda r: f"{r.goodput_requests_per_s:.2f}", results)
    yield _row("requests within the SLO", lambda r: f"{r.slo_attainment:.1%}", results)


def _percentiles(values: Percentiles | None, scale: float) -> str:
    if values is None:
        return "-"
    return "/".join(short(value * scale) for value in (values.p50, values.p90, values.p99))


def short(value: float) -> str:
    """Format with three digits, or all of an integer: four sets of percentiles share a line."""
    # 9.996 has its three digits in "10.0", not in "10.00".
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def _of_prompts(result: SimulationResult | ClusterResult, num_tokens: int, digits: int = 0) -> str:
    return f"{num_tokens:,} ({num_tokens / max(result.prompt_tokens, 1):.{digits}%})"


def _check_list(checks: Iterable[Check], suffix: str = "") -> Table:
    """List each check with its verdict; long lines wrap beside the verdict."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        grid.add_row(verdict_text(check.verdict), f"{check.name}{suffix}: {check.detail}")
    return grid
