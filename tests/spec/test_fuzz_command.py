"""`radixkv fuzz`: what it finds, shows and refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from radixkv.scheduler.cli import fuzz as fuzz_command
from radixkv.scheduler.cli.main import main
from radixkv.scheduler.fuzz import campaign
from radixkv.scheduler.fuzz.campaign import CampaignConfig, CampaignResult, run_campaign
from radixkv.spec import CacheSubject
from radixkv.spec.harness import hypothesis_engine
from radixkv.spec.harness.findings.trace_file import read_trace_file
from radixkv.spec.harness.subjects import WHATS

from . import toys

TOYS = Path(toys.__file__)


class Outcome(NamedTuple):
    """What one command did."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def fuzz(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command in this process."""

    def run(*options: object) -> Outcome:
        status = main(["fuzz", *map(str, options)])
        return Outcome(status, *capsys.readouterr())

    return run


def leaky() -> str:
    return f"{TOYS}:Leaky"


# Ours


@pytest.mark.parametrize("what", ["cache", "handoff", "pool", "scheduler", "tiers"])
def test_ours_keeps_every_rule(fuzz: Any, what: str) -> None:
    outcome = fuzz("--what", what, "--steps", 2_000, "--seed", 0)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert re.fullmatch(r"ok: 2,\d{3} steps, .* steps/s, seed 0\n", outcome.stdout)


@pytest.mark.parametrize("depth", ["api", "events", "full"])
def test_depths(fuzz: Any, depth: str) -> None:
    assert fuzz("--steps", 1_000, "--depth", depth, "--seed", 5).status == 0


def test_hypothesis(fuzz: Any) -> None:
    outcome = fuzz("--engine", "hypothesis", "--steps", 500, "--json", "-")
    assert outcome.status == 0
    figures = json.loads(outcome.stdout)
    assert set(figures) == {"steps", "cases", "wall_s", "interrupted", "situations"}
    assert 500 <= figures["steps"] <= 551 and figures["situations"]["admitted"] > 3


def test_each_hypothesis_test_of_a_run_has_a_seed_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hypothesis_engine, "CASES_AT_ONCE", 2)
    with_seed, seeds = vars(hypothesis_engine)["with_seed"], list[int]()

    def note(seed: int) -> Any:
        seeds.append(seed)
        return with_seed(seed)

    monkeypatch.setattr(hypothesis_engine, "with_seed", note)
    hypothesis_engine.run(CacheSubject(toys.Plain), 3, 200, 10)
    assert seeds[0] == 3 and len(set(seeds)) == len(seeds) > 5


def test_seconds(fuzz: Any) -> None:
    outcome = fuzz("--seconds", "0.01")
    assert outcome.status == 0 and outcome.stdout.startswith("ok: ")


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ((), (None, 10.0)),
        (("--seconds", 0), (None, None)),  # until it is interrupted
        (("--seconds", 0.01), (None, 0.01)),
        (("--seconds", 3600), (None, 3600.0)),
        (("--steps", 7), (7, None)),
    ],
)
def test_the_limits_of_a_campaign(
    fuzz: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    limits: tuple[int | None, float | None],
) -> None:
    given = []

    def run(
        config: CampaignConfig, *, num_steps: int | None, seconds: float | None, num_jobs: int
    ) -> CampaignResult:
        given.append((num_steps, seconds))
        return CampaignResult()

    monkeypatch.setattr(fuzz_command, "run_campaign", run)
    assert fuzz(*options).status == 0
    assert given == [limits]


def test_jobs_do_the_same_as_one(fuzz: Any, tmp_path: Path) -> None:
    figures = []
    for jobs in (1, 2):
        path = tmp_path / f"{jobs}.json"
        outcome = fuzz("--steps", 3_000, "--seed", 7, "--jobs", jobs, "--json", path)
        assert outcome.status == 0, outcome.stderr
        figures.append(json.loads(path.read_text()))
    assert figures[0]["steps"] == figures[1]["steps"]
    assert figures[0]["situations"] == figures[1]["situations"]


# Theirs


@pytest.mark.parametrize("engine", ["random", "hypothesis"])
def test_a_finding(fuzz: Any, tmp_path: Path, engine: str) -> None:
    json_path, svg_path = tmp_path / "found.json", tmp_path / "found.svg"
    outcome = fuzz(
        *("--target", leaky(), "--engine", engine, "--json", json_path, "--svg", svg_path),
        *("--seed", 0),
    )
    assert (outcome.status, outcome.stderr) == (1, "")
    lines = outcome.stdout.splitlines()
    sentence = "When all requests have ended, all blocks are available."
    assert lines[0] == f"D1 drained-pool-is-whole: {sentence}"
    assert lines[2].startswith("with num_blocks=3, block_size=")
    assert any(line.endswith("# breaks D1 drained-pool-is-whole: 2 of 3 blocks can be had")
               for line in lines)  # fmt: skip
    assert "before the last call:" in lines
    assert lines[-1].startswith("failed: D1 drained-pool-is-whole: ") and lines[-1].endswith(
        "seed 0"
    )
    file = read_trace_file(json_path)
    assert (file.what, file.target, file.depth) == ("cache", leaky(), "api")
    assert len(file.finding.trace) <= 4
    assert svg_path.read_text().startswith("<svg ")

    again = fuzz("--replay", json_path)
    assert again.status == 1
    assert again.stdout.splitlines()[:-1] == lines[:-1]
    assert again.stdout.splitlines()[-1].endswith(f" steps of {json_path}")
    repaired = fuzz("--replay", json_path, "--target", f"{TOYS}:Plain")
    assert (repaired.status, repaired.stdout[:4]) == (0, "ok: ")


def test_a_finding_as_json_alone(fuzz: Any) -> None:
    outcome = fuzz("--target", leaky(), "--json", "-")
    assert outcome.status == 1
    assert json.loads(outcome.stdout)["rule"] == "D1 drained-pool-is-whole"


def test_a_finding_of_one_of_many_jobs(fuzz: Any) -> None:
    outcome = fuzz("--target", leaky(), "--jobs", 2)
    assert outcome.status == 1 and "D1 drained-pool-is-whole" in outcome.stdout


def test_what_comes_up_once_only_is_shown_as_it_was_found(fuzz: Any, tmp_path: Path) -> None:
    (tmp_path / "fickle_toy.py").write_text(
        TOYS.read_text()
        + "\nclass Fickle(Plain):\n    found = False\n\n    def release(self, name):\n"
        + "        if Fickle.found:\n            return super().release(name)\n"
        + "        Fickle.found = True\n        del self.tables[name]\n"
    )
    outcome = fuzz("--target", f"{tmp_path / 'fickle_toy.py'}:Fickle")
    assert outcome.status == 1
    assert "A replay of this trace breaks no rule: the target is not deterministic." in (
        outcome.stdout
    )


def test_a_module_of_the_working_directory(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toys_of_the_fuzz_command.py").write_text(TOYS.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert fuzz("--target", "toys_of_the_fuzz_command:Plain", "--steps", 500).status == 0


# What is refused


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nothing", "expected package.module:factory or path/to/file.py:factory"),
        (":x", "expected package.module:factory or path/to/file.py:factory"),
        ("no_such_module:x", "there is no module no_such_module"),
        ("json.nothing:x", "there is no module json.nothing"),
        ("json:nothing", "json has no nothing"),
        ("no/such/file.py:x", "there is no file no/such/file.py"),
        (f"{TOYS}:NUMBER", f"NUMBER in {TOYS} cannot be called, it is 3"),
        (f"{TOYS}:Plain.nothing", f"{TOYS} has no Plain.nothing"),
        (f"{TOYS}:Silent", "Silent has no method admit; it needs admit(name, tokens, namespace) "
         "-> hit tokens, or None if there are too few blocks"),
    ],
)  # fmt: skip
def test_a_wrong_target(fuzz: Any, target: str, text: str) -> None:
    outcome = fuzz("--target", target)
    assert outcome == (2, "", f"radixkv: --target {target}: {text}\n")


def test_a_target_that_is_wrong_in_another_process(fuzz: Any) -> None:
    target = f"{TOYS}:Silent"
    outcome = fuzz("--target", target, "--jobs", 2)
    assert outcome.status == 2
    assert outcome.stderr.startswith(f"radixkv: --target {target}: Silent has no method admit; ")


def test_a_factory_that_takes_other_arguments(fuzz: Any) -> None:
    outcome = fuzz("--target", f"{TOYS}:needs_three")
    assert outcome.status == 2 and outcome.stderr.count("\n") == 1
    assert "raised TypeError: needs_three() missing 1 required positional argument" in (
        outcome.stderr
    )


@pytest.mark.parametrize("engine", ["random", "hypothesis"])
def test_a_manager_that_fails_in_a_new_world(fuzz: Any, tmp_path: Path, engine: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(
        "from tests.spec.toys import Plain\n"
        "class Broken(Plain):\n"
        "    def available(self): raise KeyError('blocks')\n"
    )
    outcome = fuzz("--target", f"{path}:Broken", "--engine", engine, "--steps", 100)
    assert (outcome.status, outcome.stdout) == (2, "")
    start = rf"radixkv: --target {re.escape(str(path))}:Broken: a new world of {{.*}} breaks S4 "
    assert re.fullmatch(rf"{start}.*KeyError.*\n", outcome.stderr), outcome.stderr


def test_a_process_that_dies(fuzz: Any, tmp_path: Path) -> None:
    path = tmp_path / "dying_toy.py"
    path.write_text("import os\n\ndef make(*sizes):\n    os._exit(3)\n")
    outcome = fuzz("--target", f"{path}:make", "--jobs", 2)
    assert outcome == (
        2,
        "",
        "radixkv: a process of --jobs ended unexpectedly; run without --jobs to see why\n",
    )


def test_a_pool_that_is_none(fuzz: Any, tmp_path: Path) -> None:
    path = tmp_path / "half_a_pool.py"
    path.write_text(
        "class Half:\n    def __init__(self, num_blocks): pass\n"
        "    allocate = recycle = reset = lambda self, *given: [1][:given[0]]\n"
    )
    outcome = fuzz("--what", "pool", "--target", f"{path}:Half", "--seed", 0)
    assert outcome == (
        2,
        "",
        f"radixkv: --target {path}:Half: the factory made no adapter of a pool: "
        "'Half' object has no attribute 'free_ids'\n",
    )


def test_a_module_that_cannot_be_imported(fuzz: Any, tmp_path: Path) -> None:
    path = tmp_path / "broken_toy.py"
    path.write_text("1 / 0")
    outcome = fuzz("--target", f"{path}:x")
    assert outcome == (
        2,
        "",
        f"radixkv: --target {path}:x: importing {path} raised ZeroDivisionError: division by "
        "zero\n",
    )
    path.write_text("import no_such_module_either")
    outcome = fuzz("--target", f"{path}:x")
    assert "raised ModuleNotFoundError: No module named 'no_such_module_either'" in outcome.stderr
    path.write_text("raise SystemExit(0)")  # no success
    outcome = fuzz("--target", f"{path}:x")
    assert outcome[0] == 2 and outcome.stderr.endswith("broken_toy.py raised SystemExit: 0\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--seconds", "-1"],
         "argument --seconds: expected a number of seconds from 0 to 2000000, got '-1'"),
        (["--seconds", "x"],
         "argument --seconds: expected a number of seconds from 0 to 2000000, got 'x'"),
        (["--steps", "0"], "argument --steps: expected an integer from 1 to 2147483647, got '0'"),
        (["--jobs", "0"], "argument --jobs: expected an integer from 1 to 256, got '0'"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--steps", "1", "--seconds", "1"],
         "argument --seconds: not allowed with argument --steps"),
        (["--engine", "atheris"], "argument --engine: invalid choice: 'atheris'"),
        (["--what", "scheduler", "--block-sizes", "4"],
         "block_sizes: only caches have sizes to choose from, not scheduler"),
        (["--what", "tiers", "--depth", "events"], "--depth: only a cache has depths, not tiers"),
        (["--json", "no/such/folder/a.json"],
         "--json no/such/folder/a.json: the directory no/such/folder does not exist"),
        (["--svg", "no/such/folder/a.svg"],
         "--svg no/such/folder/a.svg: the directory no/such/folder does not exist"),
        (["--svg", "-"], "--svg needs the name of a file, got -"),
        (["--script", "-"], "--script needs the name of a file, got -"),
        (["--replay", "no_such.json"], "no_such.json: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_options(fuzz: Any, options: list[str], text: str) -> None:
    outcome = fuzz(*options)
    assert outcome.status == 2 and outcome.stdout == ""
    assert outcome.stderr.startswith(f"radixkv: {text}") and outcome.stderr.count("\n") == 1


def test_a_foreign_target_needs_no_package() -> None:
    """With ``pip install --no-deps``, the command works for all but our own managers."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['jax', 'numpy', 'rich', 'xxhash']));"
        "from radixkv.scheduler.cli.main import main;"
        f"sys.exit(main(['fuzz', '--target', {leaky()!r}, '--steps', '2000']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "") and "failed: D1" in done.stdout


SIZES = {"num_blocks": 3, "block_size": 1, "max_running": 1, "alphabet": 1}
GOOD = {"format": 1, "rule": "D1 x", "why": "", "config": SIZES, "trace": [["drain"]]}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, 'not a trace: it has no "format": 1'),
        ({**GOOD, "trace": 1}, '"trace" must be a list'),
        (
            {**GOOD, "what": "disk"},
            f"\"what\" must be one of {', '.join(WHATS)}, got 'disk'",
        ),
        ({**GOOD, "target": "no_such_module:x"}, "there is no module no_such_module"),
        ({**GOOD, "depth": "x"}, "\"depth\" must be one of api, events, full, got 'x'"),
        ({**GOOD, "trace": [["fly"]]},
         "operation 1, [\"fly\"], fits no world of a cache: KeyError('fly')"),
        ({**GOOD, "config": {}},
         "the configuration fits no world of a cache: KeyError('block_size')"),
    ],
)  # fmt: skip
def test_a_malformed_trace(fuzz: Any, tmp_path: Path, document: Any, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    assert fuzz("--replay", path) == (2, "", f"radixkv: {path}: {text}\n")


def test_a_trace_without_a_target_is_ours(fuzz: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD))
    outcome = fuzz("--replay", path)
    assert outcome == (0, f"ok: 1 steps of {path}\n", "")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--seed", 0], "--replay draws nothing: leave out --seed"),
        (["--engine", "hypothesis", "--jobs", 2],
         "--replay draws nothing: leave out --engine, --jobs"),
        (["--block-sizes", 1, "--pool-sizes", 3],
         "--replay draws nothing: leave out --block-sizes, --pool-sizes"),
        (["--what", "pool", "--depth", "api"], "--depth: only a cache has depths, not pool"),
    ],
)  # fmt: skip
def test_a_replay_ignores_no_option(
    fuzz: Any, tmp_path: Path, options: list[object], text: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD))
    assert fuzz("--replay", path, *options) == (2, "", f"radixkv: {text}\n")


def test_a_replay_finds_the_adapter_beside_the_trace(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_beside.py").write_text(TOYS.read_text())
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**GOOD, "target": "adapter_beside.py:Plain"}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert fuzz("--replay", path).stdout == f"ok: 1 steps of {path}\n"
    absent = fuzz("--replay", path, "--target", "adapter_beside.py:Plain")
    assert absent.stderr.endswith(": there is no file adapter_beside.py\n")


def test_hypothesis_that_is_not_installed(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = fuzz("--engine", "hypothesis")
    assert outcome == (
        2,
        "",
        "radixkv: --engine hypothesis needs Hypothesis: pip install hypothesis\n",
    )


# The campaign


def test_an_interrupt_ends_with_a_summary(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = campaign.run_part
    finished: list[Any] = []

    def run_part(*arguments: Any) -> Any:
        if len(finished) == 2:
            raise KeyboardInterrupt
        finished.append(real(*arguments))
        return finished[-1]

    monkeypatch.setattr(campaign, "run_part", run_part)
    outcome = fuzz("--seconds", 0)
    assert (outcome.status, outcome.stderr) == (130, "")
    num_steps = sum(run.num_steps for run in finished)
    assert outcome.stdout.startswith(f"interrupted: {num_steps:,} steps, ")


def test_an_interrupt_of_several_jobs_waits_for_a_safe_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of `wait`, it could leave locked what the end of the jobs needs."""
    real: Any = vars(campaign)["wait"]
    waited: list[object] = []

    def wait(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        waited.append(real(*arguments))
        return waited[-1]

    monkeypatch.setattr(campaign, "wait", wait)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        result = run_campaign(CampaignConfig(), num_steps=4_000, num_jobs=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.interrupted, len(waited)) == (True, 1)


def test_an_endless_soak_of_several_jobs_ends_with_the_keyboard() -> None:
    program = (
        "import sys; from radixkv.scheduler.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    target = f"{TOYS}:Plain"
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-u", "-c", SOAK + program),
            *("fuzz", "--seconds", "0", "--jobs", "2", "--target", target),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "a part is done\n"
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert stdout.splitlines()[-1].startswith("interrupted: ")
    assert stderr == ""


SOAK = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from radixkv.scheduler.fuzz import campaign
add = campaign.CampaignResult.add
def tell(report, *arguments):
    add(report, *arguments)
    if report.num_cases == arguments[0].num_cases:
        print("a part is done")
campaign.CampaignResult.add = tell
"""


def test_a_run_has_a_new_seed_and_prints_it(fuzz: Any, tmp_path: Path) -> None:
    seeds = [fuzz("--steps", 200).stdout.split()[-1] for _ in range(2)]
    assert seeds[0] != seeds[1]
    told = []
    for name in ("first", "again"):
        path = tmp_path / name
        assert fuzz("--steps", 2_000, "--seed", seeds[0], "--json", path).status == 0
        told.append(json.loads(path.read_text())["situations"])
    assert told[0] == told[1]


def test_equal_seeds_are_equal_cases_and_others_are_not() -> None:
    first, again, other = (
        run_campaign(CampaignConfig(seed=seed), num_steps=2_000).situations for seed in (1, 1, 2)
    )
    assert first == again != other


def test_help_is_quick_to_load() -> None:
    program = (
        "import sys; from radixkv.scheduler.cli.main import main; main(['fuzz', '--help'])\n"
        "assert {'numpy', 'jax', 'hypothesis', 'radixkv.spec'}.isdisjoint(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--target package.module:factory" in done.stdout
