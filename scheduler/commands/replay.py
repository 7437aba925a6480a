"""`radixkv replay`: replay a trace and check the results."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..replay import run_replay
from .output import check_destination, emit
from .progress import ProgressLine


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the report, and return 1 if one of its checks failed."""
    check_destination(arguments.json)
    with ProgressLine(quiet=arguments.quiet) as progress:
        report = run_replay(
            None if arguments.trace is None else Path(arguments.trace),
            arguments.requests,
            skip_malformed=arguments.skip_malformed,
            model=arguments.model,
            gpu=arguments.gpu,
            costs=None if arguments.costs is None else Path(arguments.costs),
            progress=progress,
        )
    emit(arguments.json, report.to_json(), report.text)
    return 0 if report.ok else 1
