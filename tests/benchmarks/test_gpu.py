"""The GPU benchmark, on tiny problems without a GPU: it must not fail on the day there is one."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
gpu = import_module("gpu")
figures = import_module("gpu_steps.figures")
sys.path.remove(str(BENCHMARKS))

IN_A_PROCESS = ["check kv_write", "ceilings", "decode jax-cudnn-paged"]


def test_the_command(tmp_path):
    target = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", "--json", str(target)]
    done = subprocess.run(
        [*command, "--only", *IN_A_PROCESS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "| cases outside the error bound | <= 0 | 0 | pass |" in done.stdout
    assert "decode jax-cudnn-paged: no GPU" in done.stdout
    results = json.loads(target.read_text())
    assert results["dry_run"] and results["versions"]["jax"]
    kinds = [next(iter(record)) for record in results["records"]]
    assert kinds == ["check"] * 4 + ["ceiling"] * 2 + ["absent"]


@pytest.mark.parametrize("step", [s.name for s in gpu.STEPS if s.name not in IN_A_PROCESS])
def test_every_step(step):
    records = list(gpu.records_of(step, True))
    operation, _, implementation = step.partition(" ")
    for record in records:
        json.dumps(record)
        if "absent" in record:
            assert record["reason"] in ("not installed", "no GPU")
        elif operation == "check":
            assert record["ok"], record
        elif "operation" in record:
            assert record["implementation"] == implementation
            assert figures.rate(record) > 0
    assert records
    assert figures.table_of_times(records) and figures.table_of_figures(records)


def test_the_limits_fit_a_loan_of_ten_minutes():
    assert gpu.BUDGET_S < 8 * 60
    assert sum(step.limit_s for step in gpu.STEPS[:8]) <= gpu.BUDGET_S  # checks, and ours


def test_a_step_that_hangs_is_stopped(tmp_path):
    hang = [sys.executable, "-c", "while True: pass"]
    assert gpu.run_step(hang, 0.5, tmp_path / "log") == "stopped after 0 s"


def test_a_step_that_fails_says_why(tmp_path):
    fail = [sys.executable, "-c", "raise SystemExit('no such kernel')"]
    reason = gpu.run_step(fail, 60, tmp_path / "log")
    assert reason == "exit status 1: no such kernel\n"


def test_a_run_out_of_time_keeps_what_it_has(tmp_path, capsys):
    target = tmp_path / "results.json"
    records = gpu.run([gpu.STEPS[0]], target, dry=True, budget_s=0)
    assert records == [{"failed": "check paged_decode", "reason": "no time left"}]
    assert json.loads(target.read_text())["records"] == records
    assert "FAILED: check paged_decode: no time left" in gpu.report(records)
    assert "no time left" in capsys.readouterr().out


def time_of(by, seconds, operation="decode", name="64 x 4096", block_size=64, **work):
    about = {"operation": operation, "implementation": by, "point": name}
    return about | {"block_size": block_size, "seconds": seconds} | (work or {"bytes": 2.0})


def test_figures():
    records = [
        {"ceiling": "copy", "rate": 2.0, "unit": "B/s"},
        {"check": "kv_write", "case": "k", "error": 1.0, "bound": 0.0, "ok": False},
        time_of("mosaic", 1.25),
        time_of("mosaic", 1.3, block_size=16),
        time_of("flashinfer", 1.5),
        time_of("mosaic", 2.0, "extend", "8192 new", flops=1e15),
        time_of("torch-cudnn", 2.5, "extend", "8192 new", flops=1e15),
    ]
    found = {each.name: each for each in figures.figures(records)}
    verdicts = {name: each.verdict for name, each in found.items() if each.got is not None}
    assert verdicts == {
        "cases outside the error bound": "FAIL",
        "decode 64 x 4096: share of copy bandwidth": "FAIL",
        "decode 64 x 4096: speed beside flashinfer": "pass",
        "decode 64 x 4096: time in blocks of 16 / 64": "pass",
        "extend 8192 new: TFLOP/s": "pass",
        "extend 8192 new: share of cuDNN's rate": "pass",
    }
    assert found["decode 64 x 4096: share of copy bandwidth"].got == pytest.approx(0.8)
    assert "WRONG: kv_write, k: error 1" in gpu.report(records)
