"""The sections of a replay report, as lines for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..engine_run.engine_run import RealRun, RealRunConfig
from ..hits.hit_curve import HitCurve
from ..simulation.cost_model import CostModel
from ..simulation.simulated_storage import StorageCounts
from ..simulation.simulation import SimulationConfig, SimulationResult
from ..simulation.tier_links import TierCounts
from ..trace import TOKENS_PER_HASH_ID, Trace
from .format import (
    check_lines,
    latency_rows,
    table,
)

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


def trace_lines(trace: Trace) -> Iterator[str]:
    """Say what was replayed, and what was left out."""
    yield (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.num_input_tokens:,} input and "
        f"{trace.num_output_tokens:,} output tokens"
    )
    if trace.num_out_of_order:
        yield (
            f"  {trace.num_out_of_order:,} are earlier than the line above: hits go by the lines, "
            "the simulation by timestamps"
        )
    if trace.skipped:
        yield f"  {len(trace.skipped):,} malformed lines were skipped:"
        for skipped in trace.skipped[:MAX_SKIPPED_SHOWN]:
            yield f"    line {skipped.line}: {skipped.reason}"
        if len(trace.skipped) > MAX_SKIPPED_SHOWN:
            yield f"    and {len(trace.skipped) - MAX_SKIPPED_SHOWN:,} more"


def hit_lines(curve: HitCurve) -> Iterator[str]:
    """Tabulate the hits by capacity."""
    ideal = curve.rows[-1].counts
    yield from (
        "",
        f"a. HITS: blocks of {TOKENS_PER_HASH_ID} tokens found in a cache of each size",
        "",
    )
    rows = [("blocks", "hits", "hit rate", "of ideal", "Belady", "evicted", "refused")]
    for row in curve.rows:
        counts = row.counts
        rows.append(
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
    yield from table(rows)
    yield ""
    yield (
        f"   Of {ideal.blocks:,} blocks asked for, {ideal.hit_blocks:,} had been seen before: "
        f"the ideal."
    )
    yield "   Belady evicts with knowledge of the future; no policy of this kind can do better."
    yield from check_lines(curve.checks)


def simulation_lines(section: SimulationSection) -> Iterator[str]:
    """Tabulate the simulations, a column each."""
    costs, config, runs = section.costs, section.config, section.runs
    first = next(iter(runs.values()))
    yield from (
        "",
        f"b. SIMULATION: {costs.model.name} on {costs.gpu.name}, at the trace's timestamps",
        "",
    )
    rows = _simulation_rows(list(runs.values()))
    yield from table([("", *runs), *rows])
    yield ""
    yield "   Times are p50/p90/p99. Manager and scheduler are real; the GPU is a roofline,"
    yield (
        f"   at {costs.step.flops_efficiency:.0%} of peak FLOP/s, "
        f"{costs.step.bandwidth_efficiency:.0%} of bandwidth, "
        f"{costs.step.overhead_s * 1e3:g} ms a step. An estimate for planning, not a benchmark."
    )
    yield (
        f"   SLO: first token within {config.slo_ttft_s:g} s, then {config.slo_tpot_s * 1e3:g} ms "
        f"a token. The pool has {first.num_blocks:,} blocks of {config.block_size} tokens."
    )
    if any(run.refused for run in runs.values()):
        room = first.num_blocks * config.block_size
        yield f"   Refused is what has more tokens than all of it, prompt and output: {room:,}."
    if config.host is not None:
        yield (
            f"   The host tier has {config.host.num_blocks:,} blocks (write: {config.host.write}; "
            f"preempted requests: {config.preempt}),"
        )
        yield (
            f"   and {costs.host_bytes_per_s / 1e9:,.1f} GB/s each way. Copies run beside the "
            f"steps; only who needs one waits."
        )
    if config.storage_blocks is not None:
        yield (
            f"   Storage has {config.storage_blocks:,} blocks; "
            f"{costs.storage_write_bytes_per_s / 1e9:,.1f} GB/s are written and "
            f"{costs.storage_read_bytes_per_s / 1e9:,.1f} GB/s read."
        )
    for name, run in runs.items():
        yield from check_lines(run.checks, suffix=f" ({name})")


def _simulation_rows(results: Sequence[SimulationResult]) -> Iterator[Sequence[str]]:
    def row(label: str, cell: Callable[[SimulationResult], str]) -> Sequence[str]:
        return (label, *map(cell, results))

    yield from latency_rows([r.latencies for r in results])
    yield row("prompt tokens hit", lambda r: _of_prompts(r, r.hit_tokens))
    if any(r.tiers for r in results):
        yield row("hit on the host", lambda r: _of_prompts(r, r.host_hit_tokens))
    if any(map(_storage, results)):
        yield row("hit in storage", lambda r: _of_prompts(r, r.storage_hit_tokens))
    yield row("prompt tokens computed", lambda r: f"{r.computed_tokens:,}")
    yield row("preemptions", lambda r: f"{r.preemptions:,}")
    yield row("tokens computed again", lambda r: f"{r.recomputed_tokens:,}")
    if any(r.tiers for r in results):
        for label, cell in _TIER_ROWS:
            yield (label, *("-" if r.tiers is None else cell(r.tiers) for r in results))
    if any(map(_storage, results)):
        for label, show in _STORAGE_ROWS:
            yield (label, *("-" if (s := _storage(r)) is None else show(s) for r in results))
    yield row(
        "pool in use, mean / peak", lambda r: f"{r.mean_occupancy:.0%} / {r.peak_occupancy:.0%}"
    )
    yield row("blocks evicted", lambda r: f"{r.evicted_blocks:,}")
    yield row("requests refused", lambda r: f"{r.refused:,}")
    yield row("simulated time, s", lambda r: f"{r.simulated_s:,.1f}")
    yield row("steps", lambda r: f"{r.steps:,}")
    yield row("token budget in use, mean", lambda r: f"{r.mean_budget_use:.0%}")
    yield row("scheduler, us CPU per step", lambda r: f"{r.scheduler_us_per_step:.0f}")


_TIER_ROWS: Sequence[tuple[str, Callable[[TierCounts], str]]] = (
    ("parked / resumed", lambda t: f"{t.parked:,} / {t.resumed:,}"),
    ("copied to the host, GB", lambda t: f"{t.bytes_to_host / 1e9:,.1f}"),
    ("copied to the device, GB", lambda t: f"{t.bytes_to_device / 1e9:,.1f}"),
    ("blocks demoted", lambda t: f"{t.demoted_blocks:,}"),
    ("blocks promoted", lambda t: f"{t.promoted_blocks:,}"),
    ("blocks dropped by the host", lambda t: f"{t.dropped_blocks:,}"),
    ("idle for want of a copy, s", lambda t: f"{t.waited_s:.2f}"),
)

_STORAGE_ROWS: Sequence[tuple[str, Callable[[StorageCounts], str]]] = (
    ("written to storage, GB", lambda s: f"{s.bytes_written / 1e9:,.1f}"),
    ("read from storage, GB", lambda s: f"{s.bytes_read / 1e9:,.1f}"),
    ("blocks evicted there", lambda s: f"{s.evicted_blocks:,}"),
    ("blocks past their deadline", lambda s: f"{s.late_blocks:,}"),
)


def _storage(result: SimulationResult) -> StorageCounts | None:
    return None if result.tiers is None else result.tiers.storage


def real_lines(section: RealSection) -> Iterator[str]:
    """Tabulate the passes of the real run."""
    run = section.run
    yield from (
        "",
        f"c. REAL RUN: {run.requests} requests, scaled down, through the engine and a tiny model",
        "",
    )
    rows = [
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
        rows.append(
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
    yield from table(rows)
    yield ""
    yield (
        f"   {run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens in each: with "
        f"room for all, then in a"
    )
    yield "   pool that must preempt, and evict. compiled: programs compiled after warm-up."
    for engine in run.runs:
        if engine.bytes_to_host:
            yield (
                f"   {engine.name}: {engine.parked:,} parked and {engine.resumed:,} resumed, "
                f"{engine.host_hit_tokens:,} tokens hit on the host,"
            )
            yield (
                f"   {engine.bytes_to_host / 1e6:,.1f} MB copied to it and "
                f"{engine.bytes_to_device / 1e6:,.1f} MB back."
            )
    yield from check_lines(run.checks)


def _of_prompts(result: SimulationResult, num_tokens: int) -> str:
    return f"{num_tokens:,} ({num_tokens / max(result.prompt_tokens, 1):.0%})"
