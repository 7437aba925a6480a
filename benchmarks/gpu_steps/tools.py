"""NVIDIA's tools, where they are installed: hardware counters (ncu) and a memory checker.

Each runs one of the program's own steps in a process below it.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from .absent import AbsentError
from .problems import Record

COUNTED = ("decode", "decode int8", "extend", "copy")
"""Problems whose kernel is profiled; see `ours.launch`."""
KERNELS = "mosaic_gpu_kernel"
"""Part of the name of all Mosaic kernels on the device."""
LAUNCHES = 4
"""Launches that are profiled, of which the longest counts; `extend` has two kernels."""
FOLDERS = "/usr/local"
"""Folder of the CUDA toolkits, in which tools are looked for that are not on the PATH."""
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats")
COUNTERS = {
    "seconds": r"gpu__time_duration\.sum",
    "dram": r"(gpu__)?dram__?throughput\.avg\.pct_of_peak_sustained_elapsed",
    "tensor": r"sm__(inst_executed_)?pipe_tensor.*\.avg\.pct_of_peak_sustained_active",
    "stalls": r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio",
}
_UNIT = {"ns": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "nsecond": 1e-9}
CHECKED = ("paged_decode", "paged_extend", "latent_decode", "kv_write", "moves")


def counters(step: Sequence[str]) -> Iterator[Record]:
    """Yield the counters of the longest launch of each problem in `COUNTED`.

    Args:
        step: command that runs a step, whose name is appended.
    """
    ncu = _find("ncu")
    for problem in COUNTED:
        command = [ncu, "--clock-control", "none", "--csv", "--page", "raw"]
        command += ["--kernel-name", f"regex:{KERNELS}", "--launch-count", str(LAUNCHES)]
        for section in SECTIONS:
            command += ["--section", section]
        done = _run([*command, *step, f"launch {problem}"])
        launches = parse_counters(done.stdout)
        if not launches:
            raise AbsentError(f"ncu gave no counters: {_end(done)}")
        found = [evaluate(metrics) | {"metrics": metrics} for metrics in launches]
        longest = max(found, key=lambda record: record["seconds"] or 0.0)
        yield {"counters_of": problem} | longest


def parse_counters(text: str) -> list[dict[str, tuple[float, str]]]:
    """Value and unit of each metric, of each launch, in the output of ``ncu --csv --page raw``."""
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), None)
    if head is None:
        return []
    names, *rows = csv.reader(line for line in lines[head:] if line.startswith('"'))
    launches = []
    for row in rows[1:]:
        found = {}
        for name, unit, value in zip(names, rows[0], row, strict=False):
            number = value.replace(",", "")
            if "__" in name and re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", number):
                found[name] = float(number), unit
        launches.append(found)
    return launches


def evaluate(metrics: dict[str, tuple[float, str]]) -> Record:
    """The time, the shares of the ceilings in percent, and the three longest stalls.

    The stalls are in cycles per instruction issued.
    """
    record: Record = {"seconds": None, "dram": None, "tensor": None}
    stalls = {}
    for name, (value, unit) in metrics.items():
        if stall := re.search(COUNTERS["stalls"], name):
            stalls[stall[1]] = value
        elif re.search(COUNTERS["seconds"], name):
            record["seconds"] = value * _UNIT.get(unit, 1.0)
        for share in ("dram", "tensor"):
            if re.search(COUNTERS[share], name):
                record[share] = max(value, record[share] or 0.0)
    longest = sorted(stalls, key=lambda name: -stalls[name])[:3]
    return record | {"stalls": {name: stalls[name] for name in longest}}


def memory_checks(step: Sequence[str]) -> Iterator[Record]:
    """Run the correctness checks on tiny problems under the memory checker.

    Args:
        step: command that runs a step, whose name is appended.
    """
    checker = _find("compute-sanitizer")
    options = ["--tool", "memcheck", "--report-api-errors", "no"]
    for kernel in CHECKED:
        done = _run([checker, *options, *step, f"check {kernel}"])
        summary = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
        if summary is None:
            raise AbsentError(f"compute-sanitizer gave no summary: {_end(done)}")
        errors = float(summary[1])
        if errors:
            print(done.stdout[:3000])
        yield {
            "check": "memory accesses",
            "case": kernel,
            "error": errors,
            "bound": 0.0,
            "ok": errors == 0,
        }


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace")


def _find(tool: str) -> str:
    found = shutil.which(tool)
    for folder in sorted(Path(FOLDERS).glob("cuda*/bin")):
        found = found or shutil.which(tool, path=str(folder))
    if found is None:
        raise AbsentError("not installed")
    return found


def _end(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stdout + done.stderr).split())[-600:]
