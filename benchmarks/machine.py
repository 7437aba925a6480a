"""The machine and the versions that the figures of a benchmark depend on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine(*versions: str) -> str:
    """Return date, processor, load and versions on one line."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    python = f"Python {platform.python_version()}"
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {processor()}, {os.cpu_count()} cores, "
        f"load average {load}; {', '.join([python, *versions])}"
    )


def processor() -> str:
    """Return the name of the CPU, or its architecture if the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed(distribution: str) -> str:
    """Return the version of a distribution, or "(source tree)" if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(source tree)"
