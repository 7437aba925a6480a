"""Measure the CPU cost of the cache manager and print a Markdown table.

Run:
    python benchmarks/control_plane.py TRACE [--requests N] [--rounds R]

Each figure comes from `radixkv bench` in a new process. Every round measures all rows, so that a
slow moment of the machine does not affect one row alone. The table has the median over the rounds
and their range in brackets.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe_machine, installed

CLI = [sys.executable, "-m", "radixkv.scheduler.cli.main"]


@dataclass(frozen=True)
class Row:
    """A row of the table: its label, the command to show, and the function that measures it."""

    label: str
    unit: str
    command: list[str]
    measure: Callable[[], float]


def main() -> None:
    """Measure every row, round by round, and print the table."""
    arguments = parse_arguments()
    rows = make_rows(arguments.trace, arguments.requests)
    figures: dict[str, list[float]] = {row.label: [] for row in rows}
    for round_number in range(1, arguments.rounds + 1):
        for row in rows:
            print(f"round {round_number} of {arguments.rounds}: {row.label}", file=sys.stderr)
            figures[row.label].append(row.measure())
    words = ["python", "benchmarks/control_plane.py", arguments.trace.name]
    for option in ("requests", "rounds"):
        if getattr(arguments, option) is not None:
            words += [f"--{option}", str(getattr(arguments, option))]
    versions = [f"{name} {installed(name)}" for name in ("radixkv", "numpy")]
    print(f"- Command: `{shlex.join(words)}`\n- Measured: {describe_machine(*versions)}")
    print("\n| Measured | Median over rounds [range] | Command |\n| --- | --- | --- |")
    for row in rows:
        values = figures[row.label]
        # Show the name of the trace without its directory on this machine.
        words = [
            arguments.trace.name if word == str(arguments.trace) else word for word in row.command
        ]
        print(
            f"| {row.label} | {median(values):.4g} [{min(values):.4g} to {max(values):.4g}] "
            f"{row.unit} | `{shlex.join(words)}` |"
        )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="a Mooncake trace, .jsonl")
    parser.add_argument("--requests", type=int, help="replay only the first N requests")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"argument --rounds: expected a positive integer, got {arguments.rounds}")
    return arguments


def make_rows(trace: Path, requests: int | None) -> list[Row]:
    """Return the rows to measure."""
    first = [] if requests is None else ["--requests", str(requests)]
    rows = []
    for device_tokens in (3_000_000, 30_000_000):
        sizes = ["--block-size", "16", "--device-tokens", str(device_tokens)]
        rows.append(
            bench_row(
                f"a request's whole life, cache of {device_tokens // 10**6}M tokens (mean)",
                "us/request",
                ["cache", str(trace), *sizes, *first],
                lambda results: results["us_per_request"]["mean"],
            )
        )
    for num_blocks in (100_000, 1_000_000):
        for evict, chain in ((16, 8), (10_000, 8), (10_000, 1)):
            sizes = ["--device-blocks", str(num_blocks), "--evict", str(evict)]
            rows.append(
                bench_row(
                    f"evict {evict:,} of {num_blocks:,} blocks in leaves of {chain}",
                    "ms/call",
                    ["evict", *sizes, "--chain", str(chain)],
                    lambda results: results["ms_per_call"],
                )
            )
    rows.append(
        bench_row(
            "grow a batch of 256 by one token (mean)",
            "us/request",
            ["decode", "--batch", "256", "--steps", "256"],
            lambda results: results["us_per_request"]["mean"],
        )
    )
    importing = "import radixkv.kvcache"
    rows.append(
        Row(
            "start Python and import radixkv.kvcache (elapsed)",
            "ms",
            ["python", "-c", importing],
            lambda: elapsed_ms([sys.executable, "-c", importing]),
        )
    )
    rows.append(
        Row(
            "start Python and print the help (elapsed)",
            "ms",
            ["radixkv", "--help"],
            lambda: elapsed_ms([*CLI, "--help"]),
        )
    )
    return rows


def bench_row(
    label: str, unit: str, command: list[str], read: Callable[[Mapping[str, Any]], float]
) -> Row:
    """Make a row from a `radixkv bench` command and one figure of its JSON."""

    def measure() -> float:
        finished = subprocess.run(
            [*CLI, "bench", *command, "--json", "-"], check=True, stdout=subprocess.PIPE
        )
        return read(json.loads(finished.stdout))

    return Row(label, unit, ["radixkv", "bench", *command], measure)


def elapsed_ms(command: list[str], repeats: int = 5) -> float:
    """Return the median duration of a process, from start to end."""
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times_s.append(time.perf_counter() - start_s)
    return 1000 * median(times_s)


if __name__ == "__main__":
    main()
