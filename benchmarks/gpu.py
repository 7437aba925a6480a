"""Measure the kernels on a GPU: one command, under 8 minutes, one JSON file and one report.

    python benchmarks/gpu.py --json results.json
    python benchmarks/gpu.py --json tuned.json --tune kernels/tuning_tables
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --json /tmp/x.json --dry-run

Steps run one after the other, the most important first. Each is a separate process with a time
limit, because a kernel may deadlock. Its programs are compiled first, on all cores, in a time of
their own. The JSON file is written after every step, so an interrupted run keeps its measurements.
The report lists peers that are not installed. If a step fails, the exit status is 1; also if a
kernel gives wrong results, and then its times are meaningless.

`--tune` times launch configurations of `paged_decode` instead, and writes those that are faster
than the rule into the folder. `--dry-run` runs the same program on tiny problems, on any machine. A
real run needs JAX with CUDA, and PyTorch and FlashInfer to compare with them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from gpu_steps.figures import table_of_figures, table_of_times
from gpu_steps.problems import FULL, TINY, Record
from gpu_steps.timing import measure

BUDGET_S = 460.0
COMPILE_S = 90.0
"""Limit of the time before the clock of a step starts."""


class Step(NamedTuple):
    """One measurement, run in a separate process."""

    name: str
    limit_s: float
    """Limit of the time on its clock, which starts when the programs that it times are compiled."""


STEPS = (
    Step("check paged_decode", 75),
    Step("check paged_extend", 75),
    Step("check moves", 40),
    Step("check kv_write", 30),
    Step("ceilings", 30),
    Step("decode mosaic", 75),
    Step("extend mosaic", 75),
    Step("moves mosaic", 60),
    Step("decode torch-cudnn", 40),
    Step("extend torch-cudnn", 40),
    Step("decode flashinfer", 40),
    Step("extend flashinfer", 40),
    Step("decode jax-cudnn-paged", 40),
    Step("decode xla", 50),
    Step("moves xla", 50),
    Step("decode jax-pallas-paged", 40),
    Step("extend xla", 50),
    Step("kernel_times mosaic", 30),  # last, because the profiler may fail
)
TUNING = (Step("tune 64", 150), Step("tune 16", 150), Step("tune 128", 150))
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "flashinfer-python")


def records_of(
    step: str, dry: bool, start_clock: Callable[[], object] = lambda: None
) -> Iterator[Record]:
    """Yield the records of one step; called in the step's process.

    Args:
        step: name of the step.
        dry: whether to take tiny problems.
        start_clock: called once, when all programs to time are compiled, or at the begin of a step
            that compiles as it goes.
    """
    sizes = TINY if dry else FULL
    operation, _, implementation = step.partition(" ")
    if operation == "ceilings":
        from gpu_steps.ours import ceilings

        start_clock()
        found = ceilings(sizes)
    elif operation == "tune":
        from gpu_steps.tune import tune

        found = measure(tune(sizes, int(implementation)), sizes, start_clock)
    elif operation == "check":
        from gpu_steps.correctness import check

        start_clock()
        found = check(implementation, dry)
    elif implementation in ("mosaic", "xla"):
        from gpu_steps import ours

        # A dry run has no Hopper GPU: it uses any backend.
        backend = None if dry and implementation == "mosaic" else implementation
        found = getattr(ours, operation)(sizes, backend)
        if operation == "kernel_times":
            start_clock()
        else:
            found = measure(found, sizes, start_clock)
    else:
        from gpu_steps.peers import PEERS, AbsentError

        start_clock()
        try:
            for record in PEERS[step](sizes):
                yield record | {"implementation": implementation}
        except AbsentError as reason:
            yield {"absent": step, "reason": str(reason)}
        return
    for record in found:
        yield record | {"implementation": implementation}


def run_step(command: list[str], limit_s: float, log: Path) -> str | None:
    """Run the command of a step and kill all it started; return the reason of a failure or None."""
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return None
    if code == -signal.SIGALRM:  # by its own clock
        return "stopped, because its measurements took too long"
    return f"exit status {code}: {log.read_text(errors='replace')[-1500:]}"


def machine() -> Record:
    """Describe the machine, the versions and the time."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        gpu = "none"
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": versions,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def run(steps: list[Step], target: Path, dry: bool, budget_s: float = BUDGET_S) -> list[Record]:
    """Run the steps within the budget; return their records and write them to `target`."""
    begin = time.monotonic()
    about = machine() | {"dry_run": dry}
    records: list[Record] = []
    for step in steps:
        left_s = budget_s - (time.monotonic() - begin)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows, log = Path(folder, "rows"), Path(folder, "log")
            rows.touch()
            command = [sys.executable, __file__, "--step", step.name, "--json", str(rows)]
            command += ["--limit", str(step.limit_s), *["--dry-run"] * dry]
            failure = "no time left"
            if left_s > 5:
                failure = run_step(command, min(COMPILE_S + step.limit_s, left_s), log)
            for line in rows.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut off while it was written
                    records.append(json.loads(line))
            if log.exists() and not dry:
                print(log.read_text(errors="replace")[-600:], end="")
        if failure is not None:
            records.append({"failed": step.name, "reason": failure})
        took = time.monotonic() - start
        print(f"{step.name}: {took:.0f} s{'' if failure is None else ': ' + failure}", flush=True)
        target.write_text(json.dumps(about | {"records": records}, indent=1) + "\n")
    return records


def report(records: list[Record]) -> str:
    """Return all results of a run as Markdown."""
    wrong = [record for record in records if "check" in record and not record["ok"]]
    parts = [table_of_times(records), table_of_figures(records)]
    for record in wrong:
        parts.append(f"WRONG: {record['check']}, {record['case']}: error {record['error']:.2g}")
    for record in records:
        if "ceiling" in record:
            parts.append(f"{record['ceiling']}: {record['rate'] / 1e12:.2f} T{record['unit']}")
        elif "kernels_of" in record and record["seconds"] is not None:
            parts.append(f"kernels of {record['kernels_of']}: {1e6 * record['seconds']:.1f} us")
        elif "absent" in record:
            parts.append(f"{record['absent']}: {record['reason']}")
        elif "failed" in record:
            parts.append(f"FAILED: {record['failed']}: {record['reason'].splitlines()[-1]}")
    return "\n\n".join(parts)


def main() -> int:
    """Run the program, or one of its steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="for the records")
    parser.add_argument("--dry-run", action="store_true", help="tiny problems, on any machine")
    parser.add_argument("--tune", type=Path, metavar="FOLDER", help="write tuning tables there")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names, or beginnings of them")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:

        def start_clock() -> None:
            # Its default action ends the process, whatever hangs in it.
            signal.setitimer(signal.ITIMER_REAL, options.limit)

        with options.json.open("a") as rows:
            for record in records_of(options.step, options.dry_run, start_clock):
                print(json.dumps(record), file=rows, flush=True)
        return 0
    wanted = tuple(options.only or ("",))
    known = TUNING if options.tune else STEPS
    steps = [step for step in known if step.name.startswith(wanted)]
    if unknown := [each for each in wanted if not any(s.name.startswith(each) for s in known)]:
        names = ", ".join(step.name for step in known)
        parser.error(f"--only: no step begins with {unknown[0]!r}; the steps are {names}")
    records = run(steps, options.json, options.dry_run)
    if options.tune:
        from gpu_steps.tune import tables_of

        options.tune.mkdir(exist_ok=True)
        for name, text in tables_of(records, machine()).items():
            (options.tune / name).write_text(text)
            print(options.tune / name)
        return int(any("failed" in record for record in records))
    print(report(records))
    return int(any("failed" in record or not record.get("ok", True) for record in records))


if __name__ == "__main__":
    sys.exit(main())
