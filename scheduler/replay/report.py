"""The report of a replay: the same facts as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from .checks import Check
from .cost_model import CostModel
from .hit_curve import HitCurve
from .latency import Percentiles
from .real_run import RealRun, RealRunConfig
from .simulation import SimulationConfig, SimulationResult
from .trace import TOKENS_PER_HASH_ID, Trace

MAX_SKIPPED_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SimulationSection:
    """Simulations of one trace that differ in one setting, by name."""

    costs: CostModel
    config: SimulationConfig
    runs: dict[str, SimulationResult]


@dataclass(frozen=True, slots=True)
class RealSection:
    """The real run and what it was configured with."""

    config: RealRunConfig
    run: RealRun


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found; `ok` is whether every check held."""

    trace: Trace
    hits: HitCurve
    simulation: SimulationSection
    real: RealSection
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(check.ok for _, check in self.checks())

    def checks(self) -> list[tuple[str, Check]]:
        """Every check, with the section it belongs to."""
        checks = [("hits", check) for check in self.hits.checks]
        for name, run in self.simulation.runs.items():
            checks += [(f"simulation, {name}", check) for check in run.checks]
        return checks + [("real_run", check) for check in self.real.run.checks]

    def to_json(self) -> dict[str, Any]:
        """Everything, in JSON's own types and stable names; what is not known is null."""
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
            "real_run": {"config": dataclasses.asdict(real.config), **_without_checks(real.run)},
            "checks": [
                {"section": section, **dataclasses.asdict(check)}
                for section, check in self.checks()
            ],
        }

    def text(self) -> str:
        """The report for a terminal of 100 columns."""
        lines = [
            *_trace_lines(self.trace),
            *_hit_lines(self.hits),
            *_simulation_lines(self.simulation),
            *_real_lines(self.real),
        ]
        lines += ["", self._verdict()]
        return "\n".join(lines)

    def _verdict(self) -> str:
        verdicts = [check.verdict for _, check in self.checks()]
        failed, skipped = verdicts.count("FAIL"), verdicts.count("SKIP")
        parts = [f"PASS: {len(verdicts) - skipped} checks"]
        if failed:
            parts = [f"FAIL: {failed} of {len(verdicts)} checks"]
        if skipped:
            parts.append(f"{skipped} skipped")
        return f"{', '.join(parts)}; {self.wall_s:.1f} s"


def environment() -> dict[str, Any]:
    """What the figures were measured with."""
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


def _without_checks(result: SimulationResult | RealRun) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    del fields["checks"]
    return fields


# ------------------------------------------------------------------------------------------ text


def _trace_lines(trace: Trace) -> Iterator[str]:
    yield (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.num_input_tokens:,} input and "
        f"{trace.num_output_tokens:,} output tokens"
    )
    if trace.skipped:
        yield f"  {len(trace.skipped):,} malformed lines were skipped:"
        for skipped in trace.skipped[:MAX_SKIPPED_SHOWN]:
            yield f"    line {skipped.line}: {skipped.reason}"
        if len(trace.skipped) > MAX_SKIPPED_SHOWN:
            yield f"    and {len(trace.skipped) - MAX_SKIPPED_SHOWN:,} more"


def _hit_lines(curve: HitCurve) -> Iterator[str]:
    ideal = curve.rows[-1].counts
    yield from (
        "",
        f"a. HITS: blocks of {TOKENS_PER_HASH_ID} tokens found in a cache of each size",
        "",
    )
    table = [("blocks", "hits", "hit rate", "of ideal", "Belady", "evicted", "refused")]
    for row in curve.rows:
        counts = row.counts
        table.append(
            (
                "no limit" if row.num_blocks is None else f"{row.num_blocks:,}",
                f"{counts.hit_blocks:,}",
                f"{counts.hit_rate:.1%}",
                f"{counts.hit_blocks / ideal.hit_blocks:.1%}" if ideal.hit_blocks else "-",
                f"{row.belady_hit_blocks:,}",
                f"{counts.evicted_blocks:,}",
                f"{row.refused:,}",
            )
        )
    yield from _table(table)
    yield ""
    yield (
        f"   Of {ideal.blocks:,} blocks asked for, {ideal.hit_blocks:,} had been seen before: "
        f"the ideal."
    )
    yield "   Belady evicts with knowledge of the future; no policy of this kind can do better."
    yield from _check_lines(curve.checks)


def _simulation_lines(section: SimulationSection) -> Iterator[str]:
    costs, config, runs = section.costs, section.config, section.runs
    first = next(iter(runs.values()))
    yield from (
        "",
        f"b. SIMULATION: {costs.model.name} on {costs.gpu.name}, at the trace's timestamps",
        "",
    )
    rows: list[tuple[str, list[str]]] = []

    def add(label: str, cells: Iterator[str]) -> None:
        rows.append((label, list(cells)))

    results = list(runs.values())
    add("time to first token, s", (_percentiles(r.latencies.ttft_s, 1) for r in results))
    add("time per further token, ms", (_percentiles(r.latencies.tpot_s, 1e3) for r in results))
    add("end to end, s", (_percentiles(r.latencies.end_to_end_s, 1) for r in results))
    add("goodput, requests/s", (f"{r.latencies.goodput_requests_per_s:.2f}" for r in results))
    add("requests within the SLO", (f"{r.latencies.slo_attainment:.1%}" for r in results))
    add("prompt tokens hit", (f"{r.hit_tokens:,} ({_rate(r)})" for r in results))
    add("prompt tokens computed", (f"{r.prompt_tokens - r.hit_tokens:,}" for r in results))
    add("preemptions", (f"{r.preemptions:,}" for r in results))
    add("tokens computed again", (f"{r.recomputed_tokens:,}" for r in results))
    add(
        "pool in use, mean / peak",
        (f"{r.mean_occupancy:.0%} / {r.peak_occupancy:.0%}" for r in results),
    )
    add("blocks evicted", (f"{r.evicted_blocks:,}" for r in results))
    add("requests refused", (f"{r.refused:,}" for r in results))
    add("simulated time, s", (f"{r.simulated_s:,.1f}" for r in results))
    add("steps", (f"{r.steps:,}" for r in results))
    add("token budget in use, mean", (f"{r.mean_budget_use:.0%}" for r in results))
    add("scheduler, us CPU per step", (f"{r.scheduler_us_per_step:.0f}" for r in results))
    yield from _table([("", *runs), *((label, *cells) for label, cells in rows)])
    yield ""
    yield "   Times are p50 / p90 / p99. Manager and scheduler are real; the GPU is a roofline,"
    yield (
        f"   at {costs.step.flops_efficiency:.0%} of peak FLOP/s, "
        f"{costs.step.bandwidth_efficiency:.0%} of bandwidth, "
        f"{costs.step.overhead_s * 1e3:g} ms a step. An estimate for planning, not a benchmark."
    )
    yield (
        f"   SLO: first token within {config.slo_ttft_s:g} s, then {config.slo_tpot_s * 1e3:g} ms "
        f"a token. The pool has {first.num_blocks:,} blocks of {config.block_size} tokens."
    )
    for name, run in runs.items():
        yield from _check_lines(run.checks, suffix=f" ({name})")


def _real_lines(section: RealSection) -> Iterator[str]:
    run = section.run
    yield from (
        "",
        f"c. REAL RUN: {run.requests} requests, scaled down, through the engine and a tiny model",
        "",
    )
    table = [
        (
            "",
            "blocks",
            "steps",
            "prefill tokens",
            "hit tokens",
            "preemptions",
            "evicted",
            "compiled",
            "s",
        )
    ]
    for engine in run.runs:
        table.append(
            (
                engine.name,
                f"{engine.num_blocks:,}",
                f"{engine.steps:,}",
                f"{engine.prefill_tokens:,}",
                f"{engine.hit_tokens:,}",
                f"{engine.preemptions:,}",
                f"{engine.evicted_blocks:,}",
                f"{engine.compilations:,}",
                f"{engine.wall_s:.1f}",
            )
        )
    yield from _table(table)
    yield ""
    yield (
        f"   {run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens, three times: "
        f"with room for all, then in a"
    )
    yield "   pool that must preempt, and evict. compiled: programs compiled after warm-up."
    yield from _check_lines(run.checks)


def _check_lines(checks: Sequence[Check], suffix: str = "") -> Iterator[str]:
    for check in checks:
        yield f"   {check.verdict}  {check.name}{suffix}: {check.detail}"


def _percentiles(values: Percentiles | None, scale: float) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{value * scale:.2f}" for value in (values.p50, values.p90, values.p99))


def _rate(result: SimulationResult) -> str:
    return f"{result.hit_tokens / max(result.prompt_tokens, 1):.1%}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align cells: the first column to the left, the others to the right, a rule below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield f"   {'  '.join(cells)}".rstrip()
        if index == 0:
            yield f"   {'  '.join('-' * width for width in widths)}"
