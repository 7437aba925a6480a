"""The section of a replay report about prefill and decode nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..cluster.result import ClusterConfig, ClusterResult
from ..simulation.cost_model import CostModel
from .format import (
    check_lines,
    latency_rows,
    table,
)


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """Simulations of one trace over nodes that differ in one setting, by name; maybe none."""

    costs: CostModel
    configs: dict[str, ClusterConfig]
    runs: dict[str, ClusterResult]


def cluster_lines(section: ClusterSection) -> Iterator[str]:
    """Tabulate the simulations, a column each."""
    runs = section.runs
    if not runs:
        return
    costs, config = section.costs, next(iter(section.configs.values()))
    first = next(iter(runs.values()))
    yield from (
        "",
        f"   PREFILL AND DECODE APART: {config.num_prefill} prefill and {config.num_decode} decode "
        f"nodes, each {costs.gpu.name}",
        "",
    )
    yield from table([("", *runs), *_rows(list(runs.values()))])
    yield ""
    yield (
        f"   Each node has {first.num_blocks:,} blocks of {config.node.block_size} tokens, and "
        f"{costs.network_bytes_per_s / 1e9:,.1f} GB/s to the others. Blocks"
    )
    when = "before" if config.order == "early" else "when"
    yield f"   on a decode node are granted {when} the prompt is computed ({config.order})."
    for name, run in runs.items():
        yield from check_lines(run.checks, suffix=f" ({name})")


def _rows(results: Sequence[ClusterResult]) -> Iterator[Sequence[str]]:
    def row(label: str, cell: Callable[[ClusterResult], str]) -> Sequence[str]:
        return (label, *map(cell, results))

    yield from latency_rows([r.latencies for r in results])
    yield row("prompt tokens hit on P", lambda r: _of_prompts(r, r.hit_tokens))
    yield row("prompt tokens hit on D", lambda r: _of_prompts(r, r.own_tokens))
    yield row("sent from P to D, GB", lambda r: f"{r.sent_bytes / 1e9:,.1f}")
    yield row("no room on D, tried again", lambda r: f"{r.busy_refusals:,}")
    yield row("preemptions", lambda r: f"{r.preemptions:,}")
    yield row("tokens computed again", lambda r: f"{r.recomputed_tokens:,}")
    yield row("time in steps, P / D", lambda r: f"{r.prefill.busy:.0%} / {r.decode.busy:.0%}")
    yield row(
        "pool in use on D, mean / peak",
        lambda r: f"{r.decode.mean_occupancy:.0%} / {r.decode.peak_occupancy:.0%}",
    )
    yield row("requests refused", lambda r: f"{r.refused:,}")
    yield row("simulated time, s", lambda r: f"{r.simulated_s:,.1f}")
    yield row("steps, P / D", lambda r: f"{r.prefill.steps:,} / {r.decode.steps:,}")
    yield row("scheduler, us CPU per step", lambda r: f"{r.scheduler_us_per_step:.0f}")


def _of_prompts(result: ClusterResult, num_tokens: int) -> str:
    return f"{num_tokens:,} ({num_tokens / max(result.prompt_tokens, 1):.1%})"
