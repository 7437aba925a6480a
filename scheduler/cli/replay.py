"""`radixkv replay`: replay a trace and check the results."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ..replay import run_replay
from ..replay.page import to_page
from ..replay.simulation.cluster import ClusterConfig
from ..replay.simulation.single_node import SimulationConfig
from ..terminal.interrupts import remember_interrupts
from .errors import BadInputError
from .options.common import NO_EVICT, check_memory, check_needs, check_tiers, host_tier
from .shared.output import ProgressBar, check_destination, emit


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the report, and return 1 if a check failed."""
    check_destination(arguments.json)
    check_destination(arguments.html, "--html")
    check_memory(arguments)
    check_tiers(arguments, "--storage-blocks")
    simulation = SimulationConfig(
        num_blocks=arguments.device_blocks,
        host=host_tier(arguments),
        storage_blocks=arguments.storage_blocks,
        preempt=arguments.preempt,
    )
    clusters = _clusters(arguments, simulation)
    with ProgressBar(quiet=arguments.quiet) as bar, remember_interrupts() as is_interrupted:

        def progress(stage: str, done: int, total: int) -> None:
            if is_interrupted():
                raise KeyboardInterrupt
            bar(stage, done, total)

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
    if is_interrupted():
        raise KeyboardInterrupt
    if arguments.html is not None:
        Path(arguments.html).write_text(to_page(report), encoding="utf-8")
    emit(arguments.json, report.to_json(), report.render())
    return 0 if report.ok else 1


def _clusters(
    arguments: argparse.Namespace, simulation: SimulationConfig
) -> dict[str, ClusterConfig]:
    """Return the clusters to simulate, one per value of --reserve."""
    num_prefill, num_decode = arguments.prefill, arguments.decode
    if (num_prefill is None) != (num_decode is None):
        raise BadInputError("--prefill and --decode need each other")
    check_needs(arguments, "--prefill", "--reserve", "--allocate")
    if num_prefill is None:
        return {}
    modes = ("none", 512, NO_EVICT) if arguments.reserve is None else (arguments.reserve,)
    node = dataclasses.replace(simulation, host=None, storage_blocks=None, preempt="recompute")
    tokens: dict[str | int, int | None] = {"none": 0, NO_EVICT: None}
    return {
        f"reserve {mode}": ClusterConfig(
            num_prefill,
            num_decode,
            dataclasses.replace(node, reserve_tokens=tokens[mode] if mode in tokens else int(mode)),
            arguments.allocate or "early",
        )
        for mode in modes
    }
