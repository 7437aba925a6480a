"""The GPU benchmark, on tiny problems without a GPU: it must not fail on the day there is one."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from radixkv.kernels import tuning
from radixkv.kernels.paged_decode.config import DecodeConfig
from radixkv.kernels.paged_extend.config import ExtendConfig

from ..kernels.lowering import H100, lowered_for_h100, on_h100

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
gpu = import_module("gpu")
figures = import_module("gpu_steps.figures")
ours = import_module("gpu_steps.ours")
problems = import_module("gpu_steps.problems")
timing = import_module("gpu_steps.timing")
tools = import_module("gpu_steps.tools")
tune = import_module("gpu_steps.tune")
model = import_module("gpu_steps.model")
absent = import_module("gpu_steps.absent")
sys.path.remove(str(BENCHMARKS))

IN_A_PROCESS = ["check kv_write", "ceilings", "decode jax-cudnn-paged"]
PROGRAM = [sys.executable, str(BENCHMARKS / "gpu.py")]


def run_program(*options, path=None):
    """Run the command on tiny problems, with another PATH for tools if one is given."""
    environment = os.environ | ({} if path is None else {"PATH": str(path)})
    command = [*PROGRAM, "--dry-run", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_command(tmp_path):
    out = tmp_path / "out"
    done = run_program("--out", out, "--only", *IN_A_PROCESS)
    assert done.returncode == 0, done.stderr
    assert "| cases outside the error bound | <= 0 | 0 | pass |" in done.stdout
    assert "decode jax-cudnn-paged: no GPU" in done.stdout
    results = json.loads((out / "results.json").read_text())
    assert results["dry_run"] and results["versions"]["jax"]
    kinds = [next(iter(record)) for record in results["records"]]
    assert kinds == ["check"] * 4 + ["ceiling"] * 2 + ["absent"]
    assert done.stdout.endswith((out / "report.md").read_text())
    assert sorted(path.name for path in out.iterdir()) == ["report.md", "results.json"]


@pytest.mark.parametrize("out", [BENCHMARKS, BENCHMARKS / "results", None])
def test_results_are_not_written_into_the_checkout(out):
    done = run_program(*([] if out is None else ["--out", out]))
    assert done.returncode == 2
    message = f"--out must be a folder outside the checkout {BENCHMARKS.parent}, got {out}\n"
    assert done.stderr.endswith(message)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    done = run_program("--out", tmp_path / "file")
    assert done.returncode == 2
    assert "gpu.py: error: --out cannot be written: " in done.stderr


@pytest.mark.parametrize("step", [s.name for s in gpu.STEPS if s.name not in IN_A_PROCESS])
def test_every_step(step):
    clock: list[bool] = []
    records = list(gpu.records_of(step, True, lambda: clock.append(True)))
    assert len(clock) == 1
    operation, _, implementation = step.partition(" ")
    for record in records:
        json.dumps(record)
        assert "failed" not in record, record
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
    tuned_extend=("ragged",),
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


@pytest.mark.nightly
@pytest.mark.parametrize("operation", ["decode", "extend", "moves"])
def test_the_kernels_that_are_timed_are_lowered_for_an_h100(operation):
    timings = list(getattr(ours, operation)(LIKE_FULL, "mosaic"))
    assert len(timings) == {"decode": 3 * 2 + 1 + 5 + 1, "extend": 3, "moves": 2 * 3 + 1}[operation]
    with ThreadPoolExecutor(4) as pool:  # as on the GPU machine
        programs = list(pool.map(lowered, timings))
    assert all("mosaic_gpu_v2" in program for program in programs)


class TestModel:
    def test_an_engine_is_measured(self):
        [record] = model.model(problems.TINY.model, lambda: None)
        assert record["model"] == "bfloat16, 2 layers, 2 rows of 20 tokens, xla"
        assert min(record["tokens_per_s"], record["step_s"], record["alone_s"]) > 0
        text = gpu.report([record | {"step_s": 0.003, "alone_s": 0.002, "tokens_per_s": 9.0}])
        assert "9 tokens/s, 3.00 ms per step, of which the device waits for the host 1.00" in text

    def test_it_has_the_shapes_of_an_8b_model(self):
        shapes = model.random_model_shapes(problems.LLAMA_8B)
        assert 8.0e9 < sum(map(math.prod, shapes.values())) < 8.1e9

    def test_what_it_needs_may_be_absent(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "radixkv.scheduler.engine", None)
        with pytest.raises(absent.AbsentError, match=r"^radixkv.scheduler.engine is not installed"):
            list(model.model(problems.TINY.model, lambda: None))


def tuned_timings(what, monkeypatch):
    """The timings of a tuning step on an H100, with one configuration besides each rule's."""
    found: list = []
    monkeypatch.setattr(tune, "measure", lambda timings, *_: found.extend(timings))
    with on_h100():
        tune.tune(LIKE_FULL, what, None, quick=True)
    return found


class TestTuning:
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_there_are_configurations_to_time(self, head_dim):
        decode = tune.decode_rules.choose_config(64, 8, head_dim, 2, 132)
        extend = tune.extend_rules.choose_config(head_dim, 132)
        assert set(tune.decode_configs(decode, head_dim)) - {decode}
        assert set(tune.extend_configs(extend, head_dim)) - {extend}

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("what", "problems_timed"),
        [("decode 64", 2), ("decode kinds", 5), ("extend 16", 1), ("extend kinds", 5)],
    )
    def test_what_is_timed_is_lowered_for_an_h100(self, what, problems_timed, monkeypatch):
        timings = tuned_timings(what, monkeypatch)
        assert len(timings) == 2 * problems_timed
        assert [timing.record["rule"] for timing in timings] == [True, False] * problems_timed
        assert [timing.may_fail for timing in timings] == [False, True] * problems_timed
        assert {timing.record["device_kind"] for timing in timings} == {H100.device_kind}
        assert len({timing.record["tuned"] for timing in timings}) == problems_timed
        for each in timings[:2] if "kinds" in what else timings:  # a second or two for each
            assert "mosaic_gpu_v2" in lowered(each)

    @pytest.mark.parametrize("operation", ["decode", "extend"])
    def test_the_kernels_look_up_what_is_written(self, operation, monkeypatch):
        tuned = tuned_timings(f"{operation} kinds", monkeypatch)[::2]
        asked = set()

        class Table:
            def get(self, key):
                asked.add(key)

        monkeypatch.setattr(tuning, "_table", lambda kernel, device: Table())
        point = "8 x 1024" if operation == "decode" else "ragged"
        for kind, each in zip(LIKE_FULL.kinds, tuned, strict=True):
            if operation == "decode":
                public = ours.decode_timing(LIKE_FULL, "mosaic", 64, point, [1024] * 8, kind)
            else:
                rows = LIKE_FULL.extend[point]
                public = ours.extend_timing(LIKE_FULL, "mosaic", 64, point, rows, kind)
            with on_h100():
                shared, calls = jax.eval_shape(public.make)
                jax.eval_shape(public.function, *shared, *calls[0])
            entry = {k: v for k, v in each.record["entry"].items() if k != "config"}
            assert tuning._key(entry) in asked

    def test_tables_are_written_below_the_folder(self, tmp_path):
        done = run_program("--out", tmp_path, "--tune", "--only", "tune decode 64")
        assert done.returncode == 0, done.stderr
        table = json.loads((tmp_path / "tuning_tables" / "cpu.json").read_text())
        assert table["device_kind"] == "cpu" and table["measured"]["python"]
        for entry in table["paged_decode"]:
            DecodeConfig(**entry["config"])
        assert "us by the rule, " in done.stdout

    def test_a_configuration_of_another_output_is_left_out(self, monkeypatch):
        """As is one that cannot be compiled; if it is that of the rule, the step has failed."""
        wrong = iter([1.0, 1.5, 1.0])

        def timings(sizes, block_size, kind, quick):
            for number, factor in enumerate(wrong):

                def function(x, factor=factor, number=number):
                    if number == 2:
                        raise ValueError("too much shared memory")
                    return factor * x

                record = {"tuned": "p", "rule": number == 0, "config": number}
                make = lambda: ((), [(jnp.ones(3),)])  # noqa: E731
                yield timing.Timing(record, function, make, may_fail=number > 0)

        monkeypatch.setattr(tune, "_decode", timings)
        first, second, third = tune.tune(problems.TINY, "decode 64", lambda: None)
        assert first["seconds"] > 0
        reason = "ValueError: the output differs from that of the rule by 0.5"
        assert second == {"left_out": "1", "reason": reason}
        assert third == {"left_out": "2", "reason": "ValueError: too much shared memory"}
        assert not gpu.has_failed([first, second, third])
        assert "left out: 1: ValueError: the output differs" in gpu.report([second])

    def test_only_what_beats_the_rule_has_an_entry(self):
        def record(seconds, rule, rows=512, kernel="paged_decode"):
            entry = {"block_size": 64, "rows": rows, "tokens": 4096, "config": {"programs": rule}}
            about = {"tuned": str(rows), "device_kind": "NVIDIA H100 80GB HBM3", "kernel": kernel}
            return about | {"seconds": seconds, "rule": rule, "entry": entry}

        records = [record(1.0, True), record(0.9, False), record(0.95, False)]
        records += [
            record(1.0, True, 64),
            record(0.99, False, 64),
            {"failed": "tune 16", "reason": "no time left"},
        ]
        records += [record(1.0, True, 8, "paged_extend"), record(0.9, False, 8, "paged_extend")]
        tables = tune.tables_of(records, {"time": "now"})
        assert list(tables) == ["nvidia_h100_80gb_hbm3.json"]
        table = json.loads(tables["nvidia_h100_80gb_hbm3.json"])
        assert table["device_kind"] == "NVIDIA H100 80GB HBM3"
        assert table["paged_decode"] == [records[1]["entry"]]
        assert table["paged_extend"] == [records[-1]["entry"]]
        assert tuning.file_name(table["device_kind"]) in tables
        text = gpu.report(records)
        assert "512: 1000000.0 us by the rule, 900000.0 us with {'programs': False}, of 3" in text

    def test_an_entry_makes_a_configuration(self, monkeypatch):
        for what in ("decode 64", "extend 64"):
            for each in tuned_timings(what, monkeypatch):
                config = each.record["entry"]["config"]
                made = DecodeConfig(**config) if "decode" in what else ExtendConfig(132, **config)
                assert made.stages >= 2


NCU = """==PROF== Connected to process 7
some output
"ID","Process ID","Kernel Name","gpu__time_duration.sum","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio","smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio"
"","","","us","%","%","inst","inst","inst","inst"
"0","7","a_mosaic_gpu_kernel","3.5","10.0","1.0","1","1","1","1"
"1","7","b_mosaic_gpu_kernel","1,234.5","91.2","33.3","2.5","0.5","7","n/a"
"""  # noqa: E501


def make_tool(folder, name, text, status=0):
    """A tool that runs its command, and prints a text."""
    tool = folder / name
    tool.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"start = sys.argv.index({sys.executable!r})\n"
        "subprocess.run(sys.argv[start:], check=True)\n"
        f"print({text!r}); sys.exit({status})\n"
    )
    tool.chmod(0o755)


class TestTools:
    def test_counters(self, tmp_path):
        make_tool(tmp_path, "ncu", NCU)
        done = run_program("--out", tmp_path / "out", "--only", "counters", path=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        records = json.loads((tmp_path / "out" / "results.json").read_text())["records"]
        assert [record["counters_of"] for record in records] == list(tools.COUNTED)
        line = "1234.5 us, DRAM 91 %, tensor cores 33 %, cycles of stalls per instruction: "
        assert f"counters of extend: {line}gmma 7.0, barrier 2.5, wait 0.5\n" in done.stdout

    @pytest.mark.parametrize("problem", tools.COUNTED)
    def test_each_problem_that_is_counted_is_launched(self, problem):
        [record] = gpu.records_of(f"launch {problem}", True)
        assert record["operation"] == problem.split(" ")[0]

    def test_counters_that_the_profiler_does_not_give(self):
        [metrics] = tools.parse_counters('"ID","a__b"\n"","%"\n"0","3"\n')
        assert metrics == {"a__b": (3.0, "%")}
        record = {"counters_of": "copy"} | tools.evaluate(metrics)
        line = "an unknown time, DRAM unknown, tensor cores unknown, cycles of stalls per"
        assert f"counters of copy: {line} instruction: unknown" in gpu.report([record])

    @pytest.mark.parametrize(
        ("step", "tool", "text"),
        [
            ("counters", "ncu", "ncu gave no counters: ==ERROR== no permission"),
            ("memory_checks", "compute-sanitizer", "compute-sanitizer gave no summary: no device"),
        ],
    )
    def test_a_tool_that_cannot_work_is_absent(self, step, tool, text, tmp_path, monkeypatch):
        printed = text.split(": ")[1]
        make_tool(tmp_path, tool, printed, status=1)
        monkeypatch.setenv("PATH", str(tmp_path))
        command = [sys.executable, "-c", "pass"]
        with pytest.raises(absent.AbsentError, match=f"^{text}"):
            list(getattr(tools, step)(command))

    @pytest.mark.parametrize("step", ["counters", "memory_checks"])
    def test_a_tool_may_be_absent(self, step, monkeypatch):
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(tools, "FOLDERS", "/nowhere")
        assert list(gpu.records_of(step, True)) == [{"absent": step, "reason": "not installed"}]

    @pytest.mark.parametrize("errors", [0, 3])
    def test_memory_checks(self, errors, tmp_path, monkeypatch, capsys):
        text = f"========= ERROR SUMMARY: {errors} errors"
        make_tool(tmp_path, "compute-sanitizer", text)
        monkeypatch.setenv("PATH", str(tmp_path))
        records = list(tools.memory_checks([sys.executable, "-c", "pass"]))
        assert [record["case"] for record in records] == list(tools.CHECKED)
        assert [record["ok"] for record in records] == [errors == 0] * len(records)
        assert gpu.has_failed(records) == bool(errors)
        assert bool(errors) == (text in capsys.readouterr().out)


def test_the_limits_fit_a_loan_of_ten_minutes():
    assert gpu.BUDGET_S < 9.5 * 60
    assert sum(step.limit_s for step in gpu.STEPS[:10]) <= gpu.BUDGET_S  # checks, and ours
    assert sum(step.limit_s for step in gpu.TUNING) <= gpu.BUDGET_S


def test_a_step_inherits_the_time_that_earlier_ones_left(tmp_path, monkeypatch, capsys):
    """And what a step takes beyond its limit, as for compiling, is no loan."""
    limits = []
    now = iter([0, 0, 10, 10, 190, 190, 200])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(now))

    def run_step(command, limit_s, log):
        limits.append((float(command[command.index("--limit") + 1]), limit_s))

    monkeypatch.setattr(gpu, "run_step", run_step)
    gpu.run([gpu.Step("a", 30), gpu.Step("b", 40), gpu.Step("c", 50, 5)], tmp_path, True, 260)
    # The first left 20 s; the second took 180 of 60; 70 are left of the budget for the third.
    assert limits == [(30, 120), (60, 150), (50, 55)]


def test_a_program_that_fails_does_not_take_the_others_with_it():
    def fail(x):
        raise ValueError("cannot be compiled")

    make = lambda: ((jnp.ones(2),), [(), ()])  # noqa: E731
    about = {"operation": "decode", "point": "1 x 1", "block_size": 64, "bytes": 1.0}
    timings = [timing.Timing(about, fail, make), timing.Timing(about, lambda x: x + 1, make)]
    failed, measured = timing.measure(timings, problems.TINY)
    assert failed == {"failed": "decode, 1 x 1, 64", "reason": "ValueError: cannot be compiled"}
    assert measured["seconds"] > 0
    assert gpu.has_failed([failed, measured]) and not gpu.has_failed([measured])
    assert "FAILED: decode, 1 x 1, 64: ValueError: cannot be compiled" in gpu.report([failed])


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
    command = [sys.executable, str(program), "--step", "s", "--limit", "0.01", "--rows", str(rows)]
    reason = gpu.run_step(command, 300, tmp_path / "log")
    assert reason == "stopped, because its measurements took too long"
    assert json.loads(rows.read_text()) == {"first": "s"}


def test_a_failed_step_is_an_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu, "STEPS", [gpu.Step("decode nothing", 60)])
    assert gpu.main() == 1
    [record] = json.loads((tmp_path / "results.json").read_text())["records"]
    assert record["failed"] == "decode nothing"
    assert "FAILED: decode nothing: KeyError: 'decode nothing'" in capsys.readouterr().out


def test_an_unknown_step_is_refused(tmp_path, monkeypatch, capsys):
    command = ["gpu.py", "--out", str(tmp_path / "out"), "--only", "ceilings", "decod-mosaic"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu.main()
    names = ", ".join(step.name for step in gpu.STEPS)
    message = f"--only: no step begins with 'decod-mosaic'; the steps are {names}\n"
    assert capsys.readouterr().err.endswith(message)
    assert not (tmp_path / "out").exists()


def test_a_run_out_of_time_keeps_what_it_has(tmp_path, capsys):
    records = gpu.run([gpu.STEPS[0]], tmp_path, dry=True, budget_s=0)
    assert records == [{"failed": "check paged_decode", "reason": "no time left"}]
    assert json.loads((tmp_path / "results.json").read_text())["records"] == records
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
