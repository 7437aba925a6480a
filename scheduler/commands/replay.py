"""`radixkv replay`: replay a trace and check the results."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..replay import run_replay
from ..replay.simulation import SimulationConfig
from .errors import BadInputError
from .options import host_tier
from .output import check_destination, emit
from .progress import ProgressLine


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the report, and return 1 if one of its checks failed."""
    check_destination(arguments.json)
    host = host_tier(arguments)
    if arguments.preempt != "recompute" and host is None:
        raise BadInputError(f"--preempt {arguments.preempt} needs --host-blocks")
    simulation = SimulationConfig(
        num_blocks=arguments.device_blocks, host=host, preempt=arguments.preempt
    )
    with ProgressLine(quiet=arguments.quiet) as progress:
        report = run_replay(
            None if arguments.trace is None else Path(arguments.trace),
            arguments.requests,
            skip_malformed=arguments.skip_malformed,
            model=arguments.model,
            gpu=arguments.gpu,
            costs=None if arguments.costs is None else Path(arguments.costs),
            simulation=simulation,
            progress=progress,
        )
    emit(arguments.json, report.to_json(), report.text)
    return 0 if report.ok else 1
