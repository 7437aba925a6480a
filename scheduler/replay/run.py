"""The whole replay of a trace: hit curve, simulations, and the run of the real engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from ..batching.preemption import PreemptMode
from .engine_run.real_run import RealRunConfig, run_real
from .hits.hit_curve import measure_hit_curve
from .hits.tier_law import check_two_tier_law
from .progress import Progress, no_progress
from .report import ClusterSection, RealSection, ReplayReport, SimulationSection
from .simulation.cluster import ClusterConfig, simulate_cluster
from .simulation.cost_model import load_costs, named_costs
from .simulation.single_node import SimulationConfig, simulate
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
    """Replay a trace: count its hits, simulate a server, run the real engine, and check all three.

    Args:
        trace_path: A trace in Mooncake's format; None for the trace in the package.
        num_requests: Number of requests to replay, from the first; None for all.
        skip_malformed: Skip malformed lines instead of rejecting the file.
        model, gpu: Names in ``cost_model.MODELS`` and ``GPUS`` to simulate; None for the defaults.
        costs: A JSON file of figures that override theirs.
        simulation, real: Configurations of the simulated and the real engine; None for the
            defaults. With a host tier, the simulation also runs without it; likewise with storage.
        clusters: Clusters of prefill and decode nodes to simulate too, by name.
        progress: Called with the progress.

    Raises:
        TraceError: The trace cannot be read or has a malformed line.
        CostError: A name is unknown, the cost file is malformed, or the model does not fit the GPU.
    """
    started = time.perf_counter()
    cost_model = named_costs(model, gpu) if costs is None else load_costs(costs, model, gpu)
    simulation, real = simulation or SimulationConfig(), real or RealRunConfig()
    if simulation.host is not None:  # one write policy for the runs with and without storage
        host = simulation.host.with_policy(storage=simulation.storage_blocks is not None)
        simulation = dataclasses.replace(simulation, host=host)
    cost_model.num_blocks(simulation.block_size)  # a CostError now, not after the hit curve
    trace = read_trace(trace_path or bundled_trace_path(), num_requests, skip_malformed)
    hits = measure_hit_curve(trace, progress=progress)
    law = check_two_tier_law(trace, progress=progress)
    hits = dataclasses.replace(hits, checks=(*hits.checks, law))
    runs = {
        name: simulate(trace, cost_model, config, progress, f"simulation, {name}")
        for name, config in _variants(simulation).items()
    }
    cluster_runs = {
        name: simulate_cluster(trace, cost_model, config, progress, f"apart, {name}")
        for name, config in (clusters or {}).items()
    }
    real_run = run_real(trace, real, progress)
    return ReplayReport(
        trace,
        hits,
        SimulationSection(cost_model, simulation, runs),
        ClusterSection(dict(clusters or {}), cluster_runs),
        RealSection(real, real_run),
        time.perf_counter() - started,
    )


def _variants(simulation: SimulationConfig) -> dict[str, SimulationConfig]:
    """Return the configurations to compare, each with one tier more than the one before."""
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
