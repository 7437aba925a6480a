"""The GPU benchmark, on tiny problems without a GPU: it must not fail on the day there is one."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jax
import pytest

from radixkv.kernels import tuning
from radixkv.kernels.paged_decode.config import DecodeConfig, choose_config

from ..kernels.lowering import H100, lowered_for_h100, on_h100

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
gpu = import_module("gpu")
figures = import_module("gpu_steps.figures")
ours = import_module("gpu_steps.ours")
problems = import_module("gpu_steps.problems")
timing = import_module("gpu_steps.timing")
tune = import_module("gpu_steps.tune")
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
    clock: list[bool] = []
    records = list(gpu.records_of(step, True, lambda: clock.append(True)))
    assert len(clock) == 1
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


LIKE_FULL = replace(
    problems.FULL,
    decode=((8, 1024), (1, 2048)),
    mixed={"1 x 4096 + 7 x 100": (4096, *[100] * 7)},
    extend={"ragged": (problems.Row(9, 100), problems.Row(64, 0))},
    moved_blocks=(8,),
    moved_pools=2,
    written_tokens=64,
    pool_tokens=16384,
    calls=2,
)


def lowered(timing) -> str:
    """The program of a timing, lowered for an H100."""
    shared, calls = jax.eval_shape(timing.make)
    if timing.is_in_place:
        program = lambda state, calls: [timing.function(state, *call) for call in calls]  # noqa: E731
    else:
        program = lambda shared, calls: [timing.function(*shared, *call) for call in calls]  # noqa: E731
    return lowered_for_h100(program, shared, calls)


@pytest.mark.parametrize("operation", ["decode", "extend", "moves"])
def test_the_kernels_that_are_timed_are_lowered_for_an_h100(operation):
    timings = list(getattr(ours, operation)(LIKE_FULL, "mosaic"))
    assert len(timings) == {"decode": 3 * 2 + 1 + 4, "extend": 3, "moves": 2 * 3 + 1}[operation]
    with ThreadPoolExecutor(4) as pool:  # as on the GPU machine
        programs = list(pool.map(lowered, timings))
    assert all("mosaic_gpu_v2" in program for program in programs)


class TestTuning:
    def test_every_block_size_has_tilings_to_time(self):
        assert all(len(tune.without_spills(size)) >= 3 for size in problems.FULL.block_sizes)

    def test_what_is_timed_is_lowered_for_an_h100(self, monkeypatch):
        # Each configuration takes about a second.
        monkeypatch.setattr(tune, "without_spills", lambda block_size: [(64, 4)])
        with on_h100():
            timings = list(tune.tune(LIKE_FULL, 64))
        assert all("mosaic_gpu_v2" in lowered(timing) for timing in timings)
        records = [timing.record for timing in timings]
        rules = [DecodeConfig(**r["entry"]["config"]) for r in records if r["rule"]]
        assert rules == [
            choose_config(8, 8, 128, 1024, 2, 132),
            choose_config(1, 8, 128, 2048, 2, 132),
        ]
        assert len(records) == 2 * (1 + 3)  # the rule; its splits, half and twice as many
        assert {record["device_kind"] for record in records} == {H100.device_kind}

    def test_only_what_beats_the_rule_has_an_entry(self):
        def record(seconds, rule, rows=512):
            entry = {"block_size": 64, "rows": rows, "tokens": 4096, "config": {"splits": rule}}
            about = {"tuned": "64 x 4096", "device_kind": "NVIDIA H100 80GB HBM3"}
            return about | {"seconds": seconds, "rule": rule, "entry": entry}

        records = [record(1.0, True), record(0.9, False), record(0.95, False)]
        records += [record(1.0, True, 64), record(0.99, False, 64), {"failed": "tune 16"}]
        tables = tune.tables_of(records, {"time": "now"})
        assert list(tables) == ["nvidia_h100_80gb_hbm3.json"]
        table = json.loads(tables["nvidia_h100_80gb_hbm3.json"])
        assert table["device_kind"] == "NVIDIA H100 80GB HBM3"
        assert table["paged_decode"] == [records[1]["entry"]]
        assert tuning.file_name(table["device_kind"]) in tables


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


def test_the_time_of_the_compilers_is_not_that_of_the_measurements(tmp_path):
    """The clock of a step starts when its programs are compiled, and ends it whatever hangs."""
    program = tmp_path / "step.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu\n"
        "def records_of(step, dry, start_clock):\n"
        "    yield {'first': step}\n"
        "    start_clock()\n"
        "    while True: pass\n"
        "gpu.records_of = records_of; gpu.main()\n"
    )
    rows = tmp_path / "rows"
    command = [sys.executable, str(program), "--step", "s", "--limit", "0.01", "--json", str(rows)]
    reason = gpu.run_step(command, 300, tmp_path / "log")
    assert reason == "stopped, because its measurements took too long"
    assert json.loads(rows.read_text()) == {"first": "s"}


def test_a_failed_step_is_an_exit_status(tmp_path, monkeypatch, capsys):
    target = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--json", str(target)])
    monkeypatch.setattr(gpu, "STEPS", [gpu.Step("decode nothing", 60)])
    assert gpu.main() == 1
    [record] = json.loads(target.read_text())["records"]
    assert record["failed"] == "decode nothing"
    assert "FAILED: decode nothing: KeyError: 'decode nothing'" in capsys.readouterr().out


def test_an_unknown_step_is_refused(tmp_path, monkeypatch, capsys):
    target = tmp_path / "results.json"
    command = ["gpu.py", "--json", str(target), "--only", "ceilings", "decod-mosaic"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu.main()
    names = ", ".join(step.name for step in gpu.STEPS)
    message = f"--only: no step begins with 'decod-mosaic'; the steps are {names}\n"
    assert capsys.readouterr().err.endswith(message)
    assert not target.exists()


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
        time_of("mosaic", 1.2, name="34 x 4096"),
        time_of("mosaic", 2.0, "extend", "8192 new", flops=1e15),
        time_of("mosaic", 2.0, "extend", "128 new, 32k cached", flops=5e14),
        time_of("torch-cudnn", 2.5, "extend", "8192 new", flops=1e15),
    ]
    found = {each.name: each for each in figures.figures(records)}
    verdicts = {name: each.verdict for name, each in found.items() if each.got is not None}
    assert verdicts == {
        "cases outside the error bound": "FAIL",
        "decode 64 x 4096: share of copy bandwidth": "FAIL",
        "decode 34 x 4096: share of copy bandwidth": "FAIL",
        "decode 64 x 4096: speed beside flashinfer": "pass",
        "decode 64 x 4096: time in blocks of 16 / 64": "pass",
        "extend 8192 new: TFLOP/s": "pass",
        "extend 128 new, 32k cached: TFLOP/s": "FAIL",
        "extend 8192 new: share of cuDNN's rate": "pass",
    }
    assert not any("cudnn" in name for name in found if name.startswith("decode"))  # it did not run
    assert found["decode 64 x 4096: share of copy bandwidth"].got == pytest.approx(0.8)
    assert "WRONG: kv_write, k: error 1" in gpu.report(records)
