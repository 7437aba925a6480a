"""Measure the kernels on a GPU: one command, under 10 minutes, one JSON file and one report.

    python benchmarks/gpu.py --out FOLDER
    python benchmarks/gpu.py --out FOLDER --tune
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --out /tmp/dry --dry-run

All that a run writes is in FOLDER: `results.json`, `report.md`, and the folder `tuning_tables`.

Steps run one after the other, the most important first. Each is a separate process with a time
limit, because a kernel may deadlock, and inherits the time that those before it have left. Its
programs are compiled first, on all cores, in a time of their own. The files are written after every
step, so an interrupted run keeps its measurements. The report lists peers and tools that are not
installed, and programs that failed. If anything failed, the exit status is 1; also if a kernel
gives wrong results, and then its times are meaningless.

`--tune` times launch configurations instead, and makes a table of those that are faster than the
rule. `--dry-run` runs the same program on tiny problems, on any machine. A real run needs JAX with
CUDA; the model also xxhash and safetensors; the comparisons PyTorch and FlashInfer; the counters
ncu, and the memory checks compute-sanitizer.
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
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from gpu_steps.absent import AbsentError
from gpu_steps.figures import table_of_figures, table_of_times, text_of_counters, text_of_tuning
from gpu_steps.problems import FULL, TINY, TINY_TUNED, Record
from gpu_steps.timing import measure

BUDGET_S = 540.0
CHECKOUT = Path(__file__).resolve().parents[1]


class Step(NamedTuple):
    """One measurement, run in a separate process."""

    name: str
    limit_s: float
    """Limit of the time on its clock, which starts when the programs that it times are compiled."""
    compile_s: float = 90.0
    """Limit of the time before."""


STEPS = (
    Step("check paged_decode", 75),
    Step("check paged_extend", 75),
    Step("check moves", 40),
    Step("check kv_write", 30),
    Step("check latent_decode", 20),
    Step("ceilings", 30),
    Step("decode mosaic", 75),
    Step("extend mosaic", 75),
    Step("moves mosaic", 60),
    Step("model", 60, 150),
    Step("counters", 60),
    Step("decode torch-cudnn", 40),
    Step("extend torch-cudnn", 40),
    Step("decode flashinfer", 40),
    Step("extend flashinfer", 40),
    Step("decode jax-cudnn-paged", 40),
    Step("decode xla", 50),
    Step("moves xla", 50),
    Step("decode jax-pallas-paged", 40),
    Step("extend xla", 50),
    Step("memory_checks", 60),
    Step("kernel_times mosaic", 30),  # last, because the profiler may fail
)
TUNING = (
    Step("tune decode 64", 60, 150),
    Step("tune extend 64", 60, 150),
    Step("tune decode 16", 60, 150),
    Step("tune extend 16", 60, 150),
    Step("tune decode kinds", 60, 150),
    Step("tune extend kinds", 60, 150),
    Step("tune decode 128", 60, 150),
    Step("tune extend 128", 60, 150),
)
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
    operation, _, implementation = step.partition(" ")
    try:
        for record in _records_of(operation, implementation, dry, start_clock):
            yield record | ({"implementation": implementation} if implementation else {})
    except AbsentError as reason:
        yield {"absent": step, "reason": str(reason)}


def _records_of(
    operation: str, implementation: str, dry: bool, start_clock: Callable[[], object]
) -> Iterator[Record]:
    sizes = TINY if dry else FULL
    # A dry run has no Hopper GPU: it uses any backend.
    backend = None if dry and implementation == "mosaic" else implementation
    if operation in ("counters", "memory_checks"):
        from gpu_steps import tools

        start_clock()
        arguments = ["--rows", os.devnull, *["--dry-run"] * (dry or operation == "memory_checks")]
        command = [sys.executable, __file__, *arguments, "--step"]
        return getattr(tools, operation)(command)
    if operation == "ceilings":
        from gpu_steps.ours import ceilings

        return ceilings(sizes, start_clock)
    if operation == "launch":
        from gpu_steps.ours import launch

        return launch(sizes, implementation, None if dry else "mosaic")
    if operation == "model":
        from gpu_steps.model import model

        return model(sizes.model, start_clock)
    if operation == "tune":
        from gpu_steps.tune import tune

        return tune(TINY_TUNED if dry else FULL, implementation, start_clock, quick=dry)
    if operation == "check":
        from gpu_steps.correctness import check

        start_clock()
        return check(implementation, dry)
    if implementation in ("mosaic", "xla"):
        from gpu_steps import ours

        found = getattr(ours, operation)(sizes, backend)
        if operation == "kernel_times":
            start_clock()
            return found
        return measure(found, sizes, start_clock)
    from gpu_steps.peers import PEERS

    start_clock()
    return PEERS[f"{operation} {implementation}"](sizes)


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


def run(steps: Sequence[Step], folder: Path, dry: bool, budget_s: float = BUDGET_S) -> list[Record]:
    """Run the steps within the budget; return their records and write them into the folder."""
    begin = time.monotonic()
    about = machine() | {"dry_run": dry}
    records: list[Record] = []
    spare_s = 0.0
    for step in steps:
        start = time.monotonic()
        left_s = budget_s - (start - begin)
        limit_s = step.limit_s + spare_s
        with tempfile.TemporaryDirectory() as scratch:
            rows, log = Path(scratch, "rows"), Path(scratch, "log")
            rows.touch()
            command = [sys.executable, __file__, "--step", step.name, "--rows", str(rows)]
            command += ["--limit", str(limit_s), *["--dry-run"] * dry]
            failure = "no time left"
            if left_s > 5:
                failure = run_step(command, min(step.compile_s + limit_s, left_s), log)
            for line in rows.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut off while it was written
                    records.append(json.loads(line))
            if log.exists() and not dry:
                print(log.read_text(errors="replace")[-600:], end="")
        if failure is not None:
            records.append({"failed": step.name, "reason": failure})
        took = time.monotonic() - start
        spare_s = max(0.0, limit_s - took)
        print(f"{step.name}: {took:.0f} s{'' if failure is None else ': ' + failure}", flush=True)
        (folder / "results.json").write_text(
            json.dumps(about | {"records": records}, indent=1) + "\n"
        )
        (folder / "report.md").write_text(report(records) + "\n")
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
        elif "model" in record:
            step_s, alone_s = record["step_s"], record["alone_s"]
            parts.append(
                f"model of {record['model']}: {record['tokens_per_s']:.0f} tokens/s,"
                f" {1e3 * step_s:.2f} ms per step, of which the device waits for the host"
                f" {1e3 * (step_s - alone_s):.2f} ms"
            )
        elif "counters_of" in record:
            parts.append(text_of_counters(record))
        elif record.get("rule"):
            parts.append(text_of_tuning(record, records))
        elif "left_out" in record:
            parts.append(f"left out: {record['left_out']}: {_first_line(record)}")
        elif "absent" in record:
            parts.append(f"{record['absent']}: {record['reason']}")
        elif "failed" in record:
            parts.append(f"FAILED: {record['failed']}: {_last_line(record)}")
    return "\n\n".join(parts)


def _first_line(record: Record) -> str:
    return str((record["reason"].splitlines() or [""])[0])


def _last_line(record: Record) -> str:
    return str((record["reason"].splitlines() or [""])[-1])


def has_failed(records: list[Record]) -> bool:
    """Whether a step or a program failed, or gave a wrong result."""
    return any("failed" in record or not record.get("ok", True) for record in records)


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends the program before the first step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for all results")
    parser.add_argument("--dry-run", action="store_true", help="tiny problems, on any machine")
    parser.add_argument("--tune", action="store_true", help="time launch configurations")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names, or beginnings of them")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        return options
    if options.out is None or options.out.resolve().is_relative_to(CHECKOUT):
        parser.error(f"--out must be a folder outside the checkout {CHECKOUT}, got {options.out}")
    known = TUNING if options.tune else STEPS
    wanted = tuple(options.only or ("",))
    options.steps = [step for step in known if step.name.startswith(wanted)]
    if unknown := [each for each in wanted if not any(s.name.startswith(each) for s in known)]:
        names = ", ".join(step.name for step in known)
        parser.error(f"--only: no step begins with {unknown[0]!r}; the steps are {names}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").touch()
    except OSError as failure:
        parser.error(f"--out cannot be written: {failure}")
    return options


def main() -> int:
    """Run the program, or one of its steps."""
    options = parse_options()
    if options.step:

        def start_clock() -> None:
            # Its default action ends the process, whatever hangs in it. 0 sets no limit.
            signal.setitimer(signal.ITIMER_REAL, options.limit)

        with options.rows.open("a") as rows:
            for record in records_of(options.step, options.dry_run, start_clock):
                print(json.dumps(record), file=rows, flush=True)
        return 0
    records = run(options.steps, options.out, options.dry_run)
    if options.tune:
        from gpu_steps.tune import tables_of

        folder = options.out / "tuning_tables"
        folder.mkdir(exist_ok=True)
        for name, text in tables_of(records, machine()).items():
            (folder / name).write_text(text)
            print(folder / name)
    print(report(records))
    return int(has_failed(records))


if __name__ == "__main__":
    sys.exit(main())
