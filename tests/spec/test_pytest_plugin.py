"""The pytest plugin, in pytest runs of their own."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.spec.adapters import load_target
from radixkv.spec.harness import random_engine, subjects
from radixkv.spec.harness.engine import Finding
from radixkv.spec.harness.findings import program, shrink, trace_file
from radixkv.spec.harness.findings.trace_file import TraceFile, read_trace_file
from radixkv.spec.harness.pytest_plugin import LARGEST_TRACE
from radixkv.spec.harness.random_engine import Run
from radixkv.spec.harness.subjects import SubjectOptions

from . import toys

pytest_plugins = ["pytester"]

TOYS = Path(toys.__file__).read_text()

# By its module's name, whether or not the entry point is installed: then that one is blocked.
PLUGIN = ("-p", "no:radixkv", "-p", "radixkv.spec.harness.pytest_plugin", "-p", "no:cacheprovider")


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*PLUGIN, *options)


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    (pytester.path / "toys.py").write_text(TOYS)
    return pytester.path


def spec(folder: Path, text: str) -> None:
    (folder / "kvspec.toml").write_text(text)


def test_a_right_manager_passes(pytester: pytest.Pytester, folder: Path) -> None:
    spec(folder, 'target = "toys.py:Plain"\nsteps = 2000\n')
    result = run(pytester, "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvspec.toml::fuzz PASSED*"])
    assert not list(folder.glob("*.trace.json"))


def test_a_wrong_one_fails_and_leaves_a_trace_that_fails_until_it_is_repaired(
    pytester: pytest.Pytester, folder: Path
) -> None:
    spec(folder, 'target = "toys.py:Leaky"\n')
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "D1 drained-pool-is-whole: When all requests have ended, all blocks are available.",
            "with num_blocks=3, *",
            "*drain()    # breaks D1 drained-pool-is-whole: 2 of 3 blocks can be had",
            "before the last call:",
            "written to *.trace.json; seed *",
        ]
    )
    assert "Traceback" not in result.stdout.str() and "pytest_plugin.py" not in result.stdout.str()
    (path,) = folder.glob("*.trace.json")
    assert read_trace_file(path).target == "toys.py:Leaky"

    run(pytester, "--kv-seed", "1").assert_outcomes(failed=2)
    run(pytester, "--kv-target", "toys.py:Plain").assert_outcomes(passed=len(traces(folder)) + 1)


def traces(folder: Path) -> list[Path]:
    return list(folder.glob("*.trace.json"))


def test_tables_are_tests_of_their_own(pytester: pytest.Pytester, folder: Path) -> None:
    spec(
        folder, '[right]\ntarget = "toys.py:Plain"\nsteps = 9\n[wrong]\ntarget = "toys.py:Leaky"\n'
    )
    result = run(pytester, "-v", "--kv-scale", "100")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["kvspec.toml::right PASSED*", "kvspec.toml::wrong FAILED*", "D1 drained-pool-is-whole: *"]
    )
    run(pytester, "-k", "right", "--kv-scale", "0.1").stdout.fnmatch_lines(
        ["*kvspec.toml: steps must be at least 1, got 0"]
    )


def test_tables_with_the_same_mistake_have_a_trace_each(
    pytester: pytest.Pytester, folder: Path
) -> None:
    (folder / "toys.py").write_text(f"{TOYS}\nclass Other(Leaky):\n    pass\n")
    targets = ["toys.py:Leaky", "toys.py:Other"]
    spec(folder, "".join(f'[table{i}]\ntarget = "{each}"\n' for i, each in enumerate(targets)))
    run(pytester, "--kv-seed", "1").assert_outcomes(failed=2)
    found = [read_trace_file(path) for path in traces(folder)]
    assert sorted(file.target for file in found) == targets
    assert found[0].finding == found[1].finding


def test_each_run_has_a_new_seed_and_a_failure_names_it(
    pytester: pytest.Pytester, folder: Path
) -> None:
    spec(folder, 'target = "toys.py:Leaky"\n')
    seeds = [seed_of(run(pytester)) for _ in range(2)]
    assert seeds[0] != seeds[1]
    before = traces(folder)
    assert seed_of(run(pytester, "--kv-seed", seeds[0])) == seeds[0]
    assert traces(folder) == before, "the same seed finds the same trace"
    first = run(pytester, "-v").stdout.str()
    assert first.index("::replay FAILED") < first.index("::fuzz FAILED"), "traces come first"


def seed_of(result: pytest.RunResult) -> str:
    """Return the seed that the report of a failure names.

    pytest repeats the report in its short summary where the environment variable CI is set.
    """
    [line] = {line for line in result.stdout.lines if line.startswith("written to ")}
    return line.split()[-1]


def test_options_override_the_file(pytester: pytest.Pytester, folder: Path) -> None:
    spec(folder, 'target = "toys.py:Leaky"\nsteps = 0\nseed = 3\n')
    result = run(pytester)
    result.stdout.fnmatch_lines(["*kvspec.toml: steps must be at least 1, got 0"])
    run(pytester, "--kv-steps", "20000").stdout.fnmatch_lines(["D1 drained-pool-is-whole: *"])
    result = run(pytester, "--kv-steps", "100", "--kv-depth", "full")
    result.stdout.fnmatch_lines(
        ["*kvspec.toml: Leaky has no method report_to; it needs report_to(events) -> None: *"]
    )


@pytest.mark.parametrize(
    ("keys", "options", "made", "ran"),
    [
        ("", (), ("cache", "api", (), (), ()), (20_000, None)),
        ('depth = "full"\nsteps = 90\nseed = 0\nblock_sizes = [2, 3]\npool_sizes = [5]\n'
         'known = ["S2", "A3"]', (), ("cache", "full", (2, 3), (5,), ("S2", "A3")), (90, 0)),
        ('what = "tiers"', (), ("tiers", "api", (), (), ()), (20_000, None)),
        ('depth = "full"\nsteps = 90\nseed = 7',
         ("--kv-depth", "events", "--kv-steps", "30", "--kv-seed", "8", "--kv-scale", "2.5"),
         ("cache", "events", (), (), ()), (75, 8)),
        ("steps = 3", ("--kv-scale", "0.5", "--kv-seed", "0"), ("cache", "api", (), (), ()),
         (1, 0)),
    ],
)  # fmt: skip
def test_each_key_and_option_reaches_the_run(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch,
    keys: str, options: tuple[str, ...], made: tuple[Any, ...], ran: tuple[int, int | None],
) -> None:  # fmt: skip
    noted: list[Any] = []

    def make_subject(what: str, factory: Any, depth: str, options: SubjectOptions) -> str:
        noted.append((what, depth, options.block_sizes, options.pool_sizes, options.known))
        return "a subject"

    def run_engine(subject: str, seed: int, num_steps: int) -> Run:
        noted.append((subject, num_steps, seed))
        return Run(num_steps, None, Counter(), 1)

    monkeypatch.setattr(subjects, "make_subject", make_subject)
    monkeypatch.setattr(random_engine, "run", run_engine)
    monkeypatch.setattr("secrets.randbelow", lambda bound: bound - 1)
    spec(folder, f'target = "toys.py:Plain"\n{keys}\n')
    run(pytester, *options).assert_outcomes(passed=1)
    num_steps, seed = ran
    assert noted == [made, ("a subject", num_steps, 2**31 - 1 if seed is None else seed)]


@pytest.mark.parametrize(
    ("keys", "options", "made"),
    [
        ("", (), ("cache", "api", ())),
        ('what = "tiers"\ndepth = "events"\nknown = ["S2", "A3"]', (),
         ("tiers", "events", ("S2", "A3"))),
        ('depth = "full"', ("--kv-depth", "events"), ("cache", "events", ())),
    ],
)  # fmt: skip
def test_a_trace_lies_beside_its_file_and_is_replayed_on_what_it_is_of(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, keys: str,
    options: tuple[str, ...], made: tuple[str, str, tuple[str, ...]],
) -> None:  # fmt: skip
    """The folder of a kvspec.toml is not the one in which pytest runs."""
    noted: list[Any] = []

    def make_subject(what: str, factory: Any, depth: str, options: SubjectOptions) -> str:
        noted.append((what, depth, options.known))
        assert Path(inspect.getfile(inspect.unwrap(factory))) == below / "toys.py"
        return "a subject"

    finding = Finding("D1 x", "found", {"num_blocks": 3}, [["drain"]])
    monkeypatch.setattr(subjects, "make_subject", make_subject)
    monkeypatch.setattr(random_engine, "run", lambda *_: Run(1, finding, Counter(), 1))
    monkeypatch.setattr(shrink, "shrink", lambda subject, found: replace(found, why="shrunk"))
    monkeypatch.setattr(program, "to_program", lambda found, subject: f"{subject}: {found.why}")
    (below := pytester.path / "below").mkdir()
    (below / "toys.py").write_text(TOYS)
    spec(below, f'target = "toys.py:Plain"\n{keys}\n')
    result = run(pytester, *options)
    result.assert_outcomes(failed=1)
    (path,) = traces(below)
    result.stdout.fnmatch_lines(["a subject: shrunk", f"written to {path}; seed *"])
    what, depth, known = made
    shrunk = replace(finding, why="shrunk")
    assert read_trace_file(path) == TraceFile(shrunk, what, "toys.py:Plain", depth, known)

    replayed: list[Any] = []

    def replay_file(*given: Any) -> Finding | None:
        replayed.append(given)
        return None if len(replayed) == 1 else replace(finding, why="again")

    monkeypatch.setattr(trace_file, "replay_file", replay_file)
    run(pytester, str(path)).assert_outcomes(passed=1)
    result = run(pytester, str(path))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["a subject: again"])
    assert replayed == [("a subject", read_trace_file(path))] * 2
    run(pytester, str(path), "--kv-depth", "full")
    assert noted == [made, made, made, (what, "full", known)]


def test_only_expected_failures_are_told_without_a_traceback(
    pytester: pytest.Pytester, folder: Path
) -> None:
    toys = f"{TOYS}\nclass Odd(Plain):\n    promises = property(lambda self: 1 / 0)\n"
    (folder / "toys.py").write_text(toys)
    spec(folder, 'target = "toys.py:Odd"\n')
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ZeroDivisionError: *", "*kvspec.toml::fuzz*"])
    assert "cache_target.py" in result.stdout.str()


def test_known_findings_and_sizes(pytester: pytest.Pytester, folder: Path) -> None:
    text = 'target = "toys.py:Leaky"\nblock_sizes = [4]\npool_sizes = [2]\nsteps = 2000\n'
    spec(folder, text)  # with two blocks, none is lost
    run(pytester).assert_outcomes(passed=1)
    spec(folder, text.replace("[2]", "[5]"))
    result = run(pytester)
    result.stdout.fnmatch_lines(["D1 *", "with num_blocks=5, block_size=4"])
    (path,) = traces(folder)
    trace = json.loads(path.read_text())
    assert "known" not in trace
    path.unlink()
    spec(folder, text.replace("[2]", "[5]") + 'known = ["D1"]\n')
    result = run(pytester)
    result.stdout.fnmatch_lines(["D2 *"])
    (path,) = traces(folder)
    assert json.loads(path.read_text())["known"] == ["D1"], "a replay does not judge it either"
    path.unlink()
    spec(folder, text.replace("[2]", "[5]") + 'known = ["D1", "D2", "A8"]\n')
    run(pytester).assert_outcomes(passed=1)
    for known, outcome in (([], {"failed": 1}), (["D1", "D2", "A8"], {"passed": 1})):
        path.write_text(json.dumps({**trace, "known": known}))
        run(pytester, path.name).assert_outcomes(**outcome)


def test_a_module_is_found_in_the_working_directory(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my_toys_of_the_plugin.py").write_text(TOYS)
    spec(folder, 'target = "my_toys_of_the_plugin:Plain"\nsteps = 500\n')
    run(pytester).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("target =", "kvspec.toml: not TOML: Invalid value (at end of document)"),
        ("", "kvspec.toml: no target: give one in the file, or --kv-target"),
        ('tarket = "a:b"',
         "kvspec.toml: no such key: tarket (of target, what, depth, steps, seed, block_sizes, "
         "pool_sizes, known)"),
        ('steps = 9\n[mine]\ntarget = "a:b"',
         "kvspec.toml: no such key: mine (of target, what, depth, steps, seed, block_sizes, "
         "pool_sizes, known)"),
        ('target = "a:b"\nknown = "S2"',
         "kvspec.toml: known must be a list of strings, got 'S2'"),
        ('target = "a:b"\nblock_sizes = [1.5]',
         "kvspec.toml: block_sizes must be a list of integers, got [[]1.5]"),
        ('target = "toys.py:Plain"\nblock_sizes = [4, 0]',
         "kvspec.toml: block_sizes must be positive integers, got [[]4, 0]"),
        ('target = "toys.py:Plain"\nwhat = "pool"\npool_sizes = [4]',
         "kvspec.toml: pool_sizes: only caches have sizes to choose from, not pool"),
        ('target = "toys.py:Plain"\nknown = ["S99"]', "kvspec.toml: known: there is no rule 'S99'"),
        ('target = "a:b"\nsteps = "1"', "kvspec.toml: steps must be an integer, got '1'"),
        ("target = 3", "kvspec.toml: target must be a string, got 3"),
        ('target = "a:b"\n[cache]\nsteps = 1', "kvspec.toml: no such key: cache (of *"),
        ('target = "a:b"\nseed = true', "kvspec.toml: seed must be an integer, got True"),
        ('target = "no_module_of_this_name:x"',
         "kvspec.toml: there is no module no_module_of_this_name"),
        ('target = "toys.py:Nothing"', "kvspec.toml: *toys.py has no Nothing"),
        ('target = "toys.py:NUMBER"', "kvspec.toml: NUMBER in *toys.py cannot be called, it is 3"),
        ('target = "toys.py:Plain"\nwhat = "disk"',
         "kvspec.toml: what must be one of cache, *, tiers, got 'disk'"),
        ('target = "toys.py:Plain"\ndepth = "deep"',
         "kvspec.toml: depth must be one of api, events, full, got 'deep'"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_in_one_line(
    pytester: pytest.Pytester, folder: Path, text: str, error: str
) -> None:
    spec(folder, text)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{error}"])
    assert "Traceback" not in result.stdout.str()


WORDS = ("rule", "config", "trace")


def test_traces_of_other_tools_are_left_alone(pytester: pytest.Pytester, folder: Path) -> None:
    (folder / "chrome.trace.json").write_text(json.dumps({"traceEvents": []}))
    (folder / "pyproject.toml").write_text('target = "toys.py:Plain"\n')
    for lacks in WORDS:
        document = {word: "" for word in WORDS if word != lacks}
        (folder / f"without_{lacks}.trace.json").write_text(json.dumps(document))
    start = json.dumps(dict.fromkeys(WORDS, ""))
    for name in ("large.trace.json", "largest.trace.json"):
        more = LARGEST_TRACE - len(start) + (name == "large.trace.json")
        (folder / name).write_text(start + " " * more)
    run(pytester).assert_outcomes(failed=1)
    run(pytester, "largest.trace.json").assert_outcomes(failed=1)


def test_only_whole_names_are_those_of_our_files(pytester: pytest.Pytester, folder: Path) -> None:
    for name in ("my_kvspec.toml", "kvspec.toml.orig", "kvspec.tom"):
        (folder / name).write_text("target =")
    for name in ("a.trace.json.orig", "trace.json", "a_trace.json", "a.traces.json"):
        (folder / name).write_text(json.dumps(dict.fromkeys(WORDS, "")))
    run(pytester).assert_outcomes()


def test_a_file_that_is_no_text_is_told(pytester: pytest.Pytester, folder: Path) -> None:
    (folder / "kvspec.toml").write_bytes(b'target = "\xff"')
    (folder / "a.trace.json").write_bytes(b'{"rule": "\xff", "config": {}, "trace": []}')
    result = run(pytester)
    result.assert_outcomes(failed=2)
    for told in ("a.trace.json: not JSON", "kvspec.toml: not TOML"):
        result.stdout.fnmatch_lines([f"*{told}: 'utf-8' codec can't decode *"])


@pytest.mark.parametrize(
    ("trace", "options", "made"),
    [
        ({}, (), ("cache", "toys.py:Plain", "api", ())),
        ({"what": "tiers", "depth": "full", "known": ["S2", "A3"]}, (),
         ("tiers", "toys.py:Plain", "full", ("S2", "A3"))),
        ({"depth": "full"}, ("--kv-depth", "events"), ("cache", "toys.py:Plain", "events", ())),
        ({"what": "pool"}, ("--kv-target", "toys.py:Leaky", "--kv-steps", "1", "--kv-seed", "2"),
         ("pool", "toys.py:Leaky", "api", ())),
    ],
)  # fmt: skip
def test_all_that_a_trace_says_reaches_its_replay(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch,
    trace: dict[str, Any], options: tuple[str, ...], made: tuple[Any, ...],
) -> None:  # fmt: skip
    noted: list[Any] = []

    def make_subject(what: str, factory: Any, depth: str, options: SubjectOptions) -> str:
        noted.append((what, factory, depth, options.known))
        assert options == SubjectOptions(known=options.known)
        return "a subject"

    def replay_file(subject: str, file: TraceFile) -> None:
        noted.append((subject, file.finding.trace))

    monkeypatch.setattr(subjects, "make_subject", make_subject)
    monkeypatch.setattr(trace_file, "replay_file", replay_file)
    monkeypatch.setattr(load_target, "load_target", lambda target: target)
    (inner := folder / "inner").mkdir()
    (inner / "toys.py").write_text(TOYS)
    document = {"format": 1, "rule": "D1 x", "why": "", "config": {}, "trace": [["drain"]],
                "target": "toys.py:Plain", **trace}  # fmt: skip
    (inner / "a.trace.json").write_text(json.dumps(document))
    run(pytester, *options).assert_outcomes(passed=1)
    what, target, depth, known = made
    assert noted == [(what, f"{inner}/{target}", depth, known), ("a subject", [["drain"]])]


def test_a_trace_that_is_malformed_is_told(pytester: pytest.Pytester, folder: Path) -> None:
    (folder / "a.trace.json").write_text('{"rule": "", "config": {}, "trace": []}')
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(['*a.trace.json: not a trace: it has no "format": 1'])


def test_a_trace_without_a_target_needs_the_option(pytester: pytest.Pytester, folder: Path) -> None:
    sizes = {"num_blocks": 3, "block_size": 1, "max_running": 1, "alphabet": 1}
    document = {"format": 1, "rule": "D1 x", "why": "", "config": sizes, "trace": [["drain"]]}
    (folder / "a.trace.json").write_text(json.dumps(document))
    result = run(pytester)
    result.stdout.fnmatch_lines(["*a.trace.json: no target: give one in the file, or --kv-target"])
    run(pytester, "--kv-target", "toys.py:Plain").assert_outcomes(passed=1)


def test_the_plugin_is_listed_and_loads_nothing_more_than_it_needs() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import radixkv.spec.harness.pytest_plugin\n"
        "print(sorted(name.split('.')[0] for name in set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy = {"numpy", "jax", "hypothesis"}
    assert heavy.isdisjoint(eval(done.stdout))
    assert "radixkv.spec.harness.cache.world" not in done.stdout
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"radixkv": "radixkv.spec.harness.pytest_plugin"}
