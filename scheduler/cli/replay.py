"""`radixkv replay`: replay a trace and check the results."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ..replay import run_replay
from ..replay.simulation.cluster import ClusterConfig
from ..replay.simulation.single_node import SimulationConfig
from .errors import BadInputError
from .options import check_sizes, host_tier
from .output import check_destination, emit
from .progress import ProgressLine


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the report, and return 1 if one of its checks failed."""
    check_destination(arguments.json)
    check_sizes(arguments)
    host = host_tier(arguments)
    preempt, storage_blocks = arguments.preempt, arguments.storage_blocks
    if host is None:
        if preempt != "recompute":
            raise BadInputError(f"--preempt {preempt} needs --host-blocks")
        if storage_blocks is not None:
            raise BadInputError("--storage-blocks needs --host-blocks")
    if preempt == "storage" and storage_blocks is None:
        raise BadInputError("--preempt storage needs --storage-blocks")
    simulation = SimulationConfig(
        num_blocks=arguments.device_blocks,
        host=host,
        storage_blocks=storage_blocks,
        preempt=preempt,
    )
    clusters = _clusters(arguments, simulation)
    with ProgressLine(quiet=arguments.quiet) as progress:
        report = run_replay(
            None if arguments.trace is None else Path(arguments.trace),
            arguments.requests,
            skip_malformed=arguments.skip_malformed,
            model=arguments.model,
            gpu=arguments.gpu,
            costs=None if arguments.costs is None else Path(arguments.costs),
            simulation=simulation,
            clusters=clusters,
            progress=progress,
        )
    emit(arguments.json, report.to_json(), report.render)
    return 0 if report.ok else 1


def _clusters(
    arguments: argparse.Namespace, simulation: SimulationConfig
) -> dict[str, ClusterConfig]:
    """List the clusters to simulate, by what is reserved on their decode nodes."""
    num_prefill, num_decode = arguments.prefill, arguments.decode
    if (num_prefill is None) != (num_decode is None):
        raise BadInputError("--prefill and --decode need each other")
    if num_prefill is None:
        for option in ("reserve", "allocate"):
            if getattr(arguments, option) is not None:
                raise BadInputError(f"--{option} needs --prefill and --decode")
        return {}
    modes = ("none", "512", "no_evict") if arguments.reserve is None else (arguments.reserve,)
    node = dataclasses.replace(simulation, host=None, storage_blocks=None, preempt="recompute")
    tokens: dict[str, int | None] = {"none": 0, "no_evict": None}
    return {
        f"reserve {mode}": ClusterConfig(
            num_prefill,
            num_decode,
            dataclasses.replace(node, reserve_tokens=tokens[mode] if mode in tokens else int(mode)),
            arguments.allocate or "early",
        )
        for mode in modes
    }
