"""The whole replay: hits, simulation, real run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from ..preemption import PreemptMode
from .cluster.cluster import simulate_cluster
from .cluster.result import ClusterConfig
from .engine_run.engine_run import RealRunConfig, run_real
from .hits.hit_curve import measure_hit_curve
from .hits.tier_law import check_two_tier_law
from .progress import Progress, no_progress
from .report.cluster_section import ClusterSection
from .report.report import ReplayReport
from .report.sections import RealSection, SimulationSection
from .simulation.cost_model import load_costs, named_costs
from .simulation.simulation import SimulationConfig, simulate
from .trace import bundled_trace_path, read_trace


def run_replay(
    trace_path: Path | None = None,
    num_requests: int | None = None,
    *,
    skip_malformed: bool = False,
    model: str | None = None,
    gpu: str | None = None,
    costs: Path | None = None,
    simulation: SimulationConfig | None = None,
    clusters: Mapping[str, ClusterConfig] | None = None,
    real: RealRunConfig | None = None,
    progress: Progress = no_progress,
) -> ReplayReport:
    """Replay a trace in three ways and check each.

    Args:
        trace_path: a Mooncake-format trace; None for the one in the package.
        num_requests: replay only so many of its first requests; None for all.
        skip_malformed: leave malformed lines out instead of refusing the file.
        model, gpu: names of `cost_model.MODELS` and `GPUS` to simulate; None for the defaults.
        costs: a JSON file of figures that replace theirs.
        simulation, real: set-ups of the simulated and of the real engine; None for the defaults.
            With a host tier, the simulation runs without it too; so it does with storage.
        clusters: prefill and decode nodes to simulate besides, by name.
        progress: told how far it is.

    Raises:
        TraceError: the trace cannot be read or has a malformed line.
        CostError: an unknown name, a malformed cost file, or a model too large for the GPU.
    """
    started = time.perf_counter()
    cost_model = named_costs(model, gpu) if costs is None else load_costs(costs, model, gpu)
    simulation, real = simulation or SimulationConfig(), real or RealRunConfig()
    if simulation.host is not None:  # one policy for the runs with and without storage
        host = simulation.host.with_policy(storage=simulation.storage_blocks is not None)
        simulation = dataclasses.replace(simulation, host=host)
    cost_model.num_blocks(simulation.block_size)  # refuse at once, not after the hits
    trace = read_trace(trace_path or bundled_trace_path(), num_requests, skip_malformed)
    hits = measure_hit_curve(trace, progress=progress)
    law = check_two_tier_law(trace, progress=progress)
    hits = dataclasses.replace(hits, checks=(*hits.checks, law))
    runs = {
        name: simulate(trace, cost_model, config, progress, f"simulation, {name}")
        for name, config in _compared(simulation).items()
    }
    apart = {
        name: simulate_cluster(trace, cost_model, config, progress, f"apart, {name}")
        for name, config in (clusters or {}).items()
    }
    real_run = run_real(trace, real, progress)
    return ReplayReport(
        trace,
        hits,
        SimulationSection(cost_model, simulation, runs),
        ClusterSection(cost_model, dict(clusters or {}), apart),
        RealSection(real, real_run),
        time.perf_counter() - started,
    )


def _compared(simulation: SimulationConfig) -> dict[str, SimulationConfig]:
    """List the set-ups that are compared, each with more than the one before."""
    device = dataclasses.replace(simulation, host=None, storage_blocks=None, preempt="recompute")
    configs = {
        "cache off": dataclasses.replace(device, prefix_cache=False),
        "cache on": dataclasses.replace(device, prefix_cache=True),
    }
    tiered = dataclasses.replace(simulation, prefix_cache=True)
    if simulation.host is not None:
        preempt: PreemptMode = "recompute" if simulation.preempt == "recompute" else "host"
        configs["host tier"] = dataclasses.replace(tiered, storage_blocks=None, preempt=preempt)
    if simulation.storage_blocks is not None:
        configs["storage"] = tiered
    return configs
