"""`radixkv fuzz`: each option reaches the campaign, and each figure of it the user."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.scheduler.cli import fuzz as fuzz_command
from radixkv.scheduler.cli.main import main
from radixkv.scheduler.fuzz import campaign
from radixkv.scheduler.fuzz.campaign import (
    DEFAULT_TARGETS,
    STEPS_PER_RUN,
    CampaignConfig,
    CampaignResult,
    run_campaign,
    run_part,
)
from radixkv.spec import CacheSubject
from radixkv.spec.harness import hypothesis_engine, random_engine
from radixkv.spec.harness.engine import Finding
from radixkv.spec.harness.findings.known import MET
from radixkv.spec.harness.findings.trace_file import TraceFile, read_trace_file
from radixkv.spec.harness.random_engine import Run
from radixkv.spec.harness.subjects import WHATS, SubjectOptions, What

from . import toys

LEAKY = f"{Path(toys.__file__)}:Leaky"


class Campaigns:
    """Notes what the command asks for, and has a result."""

    def __init__(self) -> None:
        self.result: CampaignResult | Exception = CampaignResult()

    def __call__(self, config: CampaignConfig, **limits: Any) -> CampaignResult:
        self.config, self.limits = config, limits
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def campaigns(monkeypatch: pytest.MonkeyPatch) -> Campaigns:
    noted = Campaigns()
    monkeypatch.setattr(fuzz_command, "run_campaign", noted)
    return noted


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ([], {}),
        (["--depth", "events"], {"depth": "events"}),
        (["--target", LEAKY], {"target": LEAKY, "depth": "api"}),
        (["--target", "radixkv.scheduler.fuzz.targets:cache", "--depth", "full"], {}),
        (["--engine", "hypothesis"], {"engine": "hypothesis"}),
        (["--seed", 7], {"seed": 7}),
        (["--seed", 0], {"seed": 0}),
        (["--block-sizes", 2, 3, "--pool-sizes", 5, "--known", "S2", "A3"],
         {"options": SubjectOptions((2, 3), (5,), ("S2", "A3"))}),
        *((["--what", what], {"what": what, "target": DEFAULT_TARGETS[what]}) for what in WHATS),
    ],
)  # fmt: skip
def test_each_option_reaches_the_campaign(
    options: list[object], config: dict[str, Any], campaigns: Campaigns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    bounds: list[int] = []

    def randbelow(bound: int) -> int:
        bounds.append(bound)
        return 11

    monkeypatch.setattr(secrets, "randbelow", randbelow)
    assert main(["fuzz", *map(str, options)]) == 0
    assert campaigns.config == CampaignConfig(**{"seed": 11, **config})
    assert campaigns.limits["num_jobs"] == 1
    assert bounds == ([] if "seed" in config else [1 << 31])


def test_jobs_reach_the_campaign(campaigns: Campaigns) -> None:
    assert main(["fuzz", "--jobs", "256", "--steps", "5"]) == 0
    assert campaigns.limits == {"num_steps": 5, "seconds": None, "num_jobs": 256}


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_figures_of_a_campaign_are_told(
    interrupted: bool, campaigns: Campaigns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    situations = Counter({"rare": 1, "often": 3})
    campaigns.result = CampaignResult(1_234, 1_012, 2.00049, None, situations, interrupted)
    path = tmp_path / "figures.json"
    status = main(["fuzz", "--seed", "5", "--json", str(path)])
    assert status == (130 if interrupted else 0)
    word = "interrupted" if interrupted else "ok"
    told = f"{word}: 1,234 steps, 1,012 cases, 617 steps/s, seed 5\n"
    assert capsys.readouterr().out == told
    figures = {"steps": 1_234, "cases": 1_012, "wall_s": 2.0, "interrupted": interrupted,
               "situations": {"often": 3, "rare": 1}}  # fmt: skip
    assert path.read_text() == json.dumps(figures, indent=1) + "\n"
    campaigns.result = CampaignResult(1_234, 12)
    assert main(["fuzz", "--seed", "5"]) == 0
    assert capsys.readouterr().out == "ok: 1,234 steps, 12 cases, 0 steps/s, seed 5\n"


def test_known_findings_that_were_met_are_told(
    campaigns: Campaigns, capsys: pytest.CaptureFixture[str]
) -> None:
    met = Counter({f"{MET}S2 x": 1_200, f"{MET}A3 y": 1, "admitted": 7})
    for options, situations, told in (
        (["--known", "S2"], met, "\nknown findings met: A3 y (1 times), S2 x (1,200 times)\n"),
        (["--known", "S2"], Counter({"admitted": 7}), "\nknown findings met: none\n"),
        ([], met, "\n"),
    ):
        campaigns.result = CampaignResult(situations=situations)
        assert main(["fuzz", "--seed", "5", *options]) == 0
        assert capsys.readouterr().out == f"ok: 0 steps, 0 cases, 0 steps/s, seed 5{told}"


@pytest.mark.parametrize("known", [[], ["S2"]])
def test_a_finding_is_written_with_its_origin_and_shrunk_if_it_comes_up_again(
    known: list[str], campaigns: Campaigns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_blocks": 4, "block_size": 1, "max_running": 2, "alphabet": 1}
    trace: list[list[Any]] = [["submit", "r1", [1, 1, 1, 1], 0, 0], ["admit", "r1"], ["drain"]]
    path = tmp_path / "found.json"
    options = ["--target", LEAKY, "--seed", "5", "--json", str(path)]
    options += ["--known", *known] if known else []
    for rule, is_shrunk in (("D1 drained-pool-is-whole", True), ("S1 no-leak", False)):
        finding = Finding(rule, "once", sizes, trace)
        campaigns.result = CampaignResult(1_000, 3, 0.5, finding)
        assert main(["fuzz", *options]) == 1
        file = read_trace_file(path)
        assert (file.what, file.target, file.depth) == ("cache", LEAKY, "api")
        assert file.known == tuple(known) and (file.finding != finding) == is_shrunk
        out = capsys.readouterr().out
        assert f"\nfailed: {rule}: 1,000 steps, 3 cases, 2,000 steps/s, seed 5\n" in out
        assert ("A replay of this trace breaks no rule" in out) != is_shrunk


def test_a_replayed_finding_is_shown_as_it_is_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_blocks": 4, "block_size": 1, "max_running": 2, "alphabet": 1}
    trace: list[list[Any]] = [["submit", "r7", [1, 1, 1, 1], 0, 0], ["admit", "r7"], ["drain"]]
    finding = Finding("D1 drained-pool-is-whole", "", sizes, trace)
    path, again = tmp_path / "found.json", tmp_path / "again.json"
    path.write_text(TraceFile(finding, "cache", LEAKY, known=("S2",)).text())
    assert main(["fuzz", "--replay", str(path), "--json", str(again)]) == 1
    written = read_trace_file(again)
    shown, file = written.finding, read_trace_file(path)
    assert replace(written, finding=finding) == replace(file, finding=finding)
    assert (shown.rule, shown.config, shown.trace) == (finding.rule, sizes, trace)
    assert "    admit(r7)\n" in capsys.readouterr().out


class Replays:
    """Notes what a replay of a file is made of, and finds nothing or a broken rule."""

    def __init__(self, patch: pytest.MonkeyPatch, finding: Finding | None = None) -> None:
        self.made: list[Any] = []
        self.finding = finding
        patch.setattr(fuzz_command, "load_subject", self.load_subject)
        patch.setattr(fuzz_command, "replay_file", lambda subject, file: self.finding)

    def load_subject(self, *given: Any) -> Any:
        self.made.append(given)
        return CacheSubject(toys.Leaky)


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("is_option", [False, True])
def test_a_replay_is_of_what_its_file_says_or_else_an_option(
    what: What, is_option: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option goes before the file, and the file before the defaults."""
    replays = Replays(monkeypatch)
    path = tmp_path / "found.json"
    finding, other = Finding("D1 x", "", {}, [["drain"]]), "tiers" if what == "pool" else "pool"
    path.write_text(TraceFile(finding, other if is_option else what).text())
    options = ["--what", what] if is_option else []
    assert main(["fuzz", "--replay", str(path), *options]) == 0
    assert replays.made == [(what, DEFAULT_TARGETS[what], "api", SubjectOptions())]


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ([], ("found.py:Of", "events", ("S2", "A3"))),
        (["--target", "given.py:Of"], ("given.py:Of", "events", ("S2", "A3"))),
        (["--depth", "full"], ("found.py:Of", "full", ("S2", "A3"))),
        (["--depth", "api"], ("found.py:Of", "api", ("S2", "A3"))),
        (["--known", "C1"], ("found.py:Of", "events", ("C1",))),
    ],
)
def test_each_option_reaches_a_replay_and_what_it_writes(
    options: list[str], made: tuple[str, Any, tuple[str, ...]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    sizes = {"num_blocks": 4, "block_size": 1, "max_running": 2, "alphabet": 1}
    trace: list[list[Any]] = [["submit", "r1", [1, 1, 1, 1], 0, 0], ["admit", "r1"], ["drain"]]
    finding = Finding("D1 drained-pool-is-whole", "again", sizes, trace)
    replays = Replays(monkeypatch, finding)
    file = TraceFile(replace(finding, why="once"), "cache", "found.py:Of", "events", ("S2", "A3"))
    Path("found.json").write_text(file.text())
    more = ["--json", "again.json", "--svg", "again.svg"]
    assert main(["fuzz", "--replay", "found.json", *options, *more]) == 1
    target, depth, known = made
    assert replays.made == [("cache", target, depth, SubjectOptions(known=known))]
    assert read_trace_file(Path("again.json")) == TraceFile(finding, "cache", *made)
    assert Path("again.svg").read_text().startswith("<svg ")
    out = capsys.readouterr().out
    assert out.endswith("\nfailed: D1 drained-pool-is-whole: 3 steps of found.json\n")


@pytest.mark.parametrize("is_of", ["option", "file"])
def test_only_a_cache_is_replayed_at_a_depth(
    is_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replays = Replays(monkeypatch)
    path = tmp_path / "found.json"
    what: What = "cache" if is_of == "option" else "tiers"
    path.write_text(TraceFile(Finding("D1 x", "", {}, []), what).text())
    more = ["--what", "tiers"] if is_of == "option" else []
    assert main(["fuzz", "--replay", str(path), "--depth", "full", *more]) == 2
    assert "--depth: only a cache has depths, not tiers" in capsys.readouterr().err
    assert not replays.made


@pytest.mark.parametrize("option", ["json", "svg", "script"])
def test_where_nothing_can_be_written_nothing_is_run(
    option: str, campaigns: Campaigns, capsys: pytest.CaptureFixture[str]
) -> None:
    campaigns.result = AssertionError("it ran")
    assert main(["fuzz", f"--{option}", "no/such/folder/file"]) == 2
    told = f"--{option} no/such/folder/file: the directory no/such/folder does not exist\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize("error", [AttributeError("no x"), TypeError("no x")])
def test_an_error_is_the_targets_if_there_is_one(
    error: Exception, campaigns: Campaigns, capsys: pytest.CaptureFixture[str]
) -> None:
    campaigns.result = error
    assert main(["fuzz", "--target", LEAKY]) == 2
    told = f"radixkv: --target {LEAKY}: the factory made no adapter of a cache: no x\n"
    assert capsys.readouterr().err == told
    with pytest.raises(type(error), match="no x"):
        fuzz_command.run(SimpleNamespace(  # type: ignore[arg-type]
            json=None, svg=None, script=None, engine="random", replay=None, what=None, target=None,
            depth=None, seed=1, block_sizes=[], pool_sizes=[], known=[], seconds=None, steps=1,
            jobs=1,
        ))  # fmt: skip


# The campaign


def test_runs_have_all_steps_and_numbers_in_order() -> None:
    for num_steps in (1, 999, 1_000, 1_001, 2_500):
        parts = list(campaign._parts(1_000, num_steps))
        assert [number for number, _ in parts] == list(range(len(parts)))
        assert sum(steps for _, steps in parts) == num_steps
        assert all(steps == 1_000 for _, steps in parts[:-1]) and parts[-1][1] > 0
    assert list(islice(campaign._parts(10, None), 3)) == [(0, 10), (1, 10), (2, 10)]


@pytest.mark.parametrize(
    ("engine", "module"), [("random", random_engine), ("hypothesis", hypothesis_engine)]
)
def test_each_run_has_a_seed_of_its_own_that_follows_from_that_of_the_campaign(
    engine: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []

    def run(subject: Any, seed: int, num_steps: int) -> Run:
        given.append((seed, num_steps))
        return Run(0, None, Counter(), 0)

    monkeypatch.setattr(module, "run", run)
    for seed in (1, 1, 2):
        for number in range(3):
            run_part(CampaignConfig(engine=engine, seed=seed), number, 50 + number)
    assert [num_steps for _, num_steps in given] == [50, 51, 52] * 3
    assert given[:3] == given[3:6] and len({seed for seed, _ in given}) == 6
    assert all(0 <= seed < 1 << 31 for seed, _ in given)
    given.clear()
    for seed, number in ((1, 11), (11, 1)):
        run_part(CampaignConfig(engine=engine, seed=seed), number, 50)
    assert given[0] != given[1], "the digits of both numbers do not run together"


def runs(patch: pytest.MonkeyPatch, made: Callable[[int, int], Run]) -> list[tuple[int, int]]:
    """Let each run of a campaign be what a function makes; return their numbers and steps."""
    done: list[tuple[int, int]] = []

    def run(config: CampaignConfig, number: int, num_steps: int) -> Run:
        done.append((number, num_steps))
        return made(number, num_steps)

    patch.setattr(campaign, "run_part", run)
    return done


def test_a_campaign_adds_its_runs_until_a_rule_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Finding("first", "", {}, [])

    def made(number: int, num_steps: int) -> Run:
        found = first if number == 2 else None
        return Run(num_steps + 5, found, Counter({"met": number}), 4)

    done = runs(monkeypatch, made)
    result = run_campaign(CampaignConfig(), num_steps=1_500)
    assert done == [(0, 1_000), (1, 500)] and not result.interrupted
    assert (result.num_steps, result.num_cases, result.finding) == (1_510, 8, None)
    done.clear()
    result = run_campaign(CampaignConfig())
    assert [number for number, _ in done] == [0, 1, 2] and result.finding is first
    assert result.situations == {"met": 3} and result.num_cases == 12
    result.add(Run(1, Finding("second", "", {}, []), Counter(), 1))
    assert result.finding is first
    done.clear()
    run_campaign(CampaignConfig(engine="hypothesis"), num_steps=6_000)
    assert done == [(0, STEPS_PER_RUN["hypothesis"]), (1, 1_000)]


def test_a_campaign_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def made(number: int, num_steps: int) -> Run:
        now[0] += 2.0
        return Run(num_steps, None, Counter(), 1)

    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: now[0]))
    done = runs(monkeypatch, made)
    for seconds, num_runs in ((6.0, 3), (5.0, 3), (0.5, 1)):
        done.clear()
        result = run_campaign(CampaignConfig(), seconds=seconds)
        assert (len(done), result.wall_s) == (num_runs, 2.0 * num_runs)


class Pool:
    """Stands for a pool of processes; its futures end one at a time, the last one first."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.open: dict[Future[Run], Run] = {}
        self.most = 0
        self.ended: dict[str, Any] = {}

    def __call__(self, num_jobs: int, context: Any) -> Pool:
        assert context.get_start_method() == "spawn"
        self.num_jobs = num_jobs
        return self

    def submit(self, function: Any, *given: Any) -> Future[Run]:
        assert function is campaign.run_part and not self.ended
        _, number, num_steps = given
        self.given.append(given)
        found = Finding(f"of {number}", "", {}, []) if number == 9 else None
        future: Future[Run] = Future()
        self.open[future] = Run(num_steps, found, Counter({f"run {number}": 1}), 1)
        self.most = max(self.most, len(self.open))
        return future

    def wait(self, pending: set[Future[Run]], timeout: float, when: str) -> Any:
        assert pending == self.open.keys() and (0 < timeout < 1, when) == (True, FIRST_COMPLETED)
        future, run = self.open.popitem()
        future.set_result(run)
        return {future}, pending - {future}

    def shutdown(self, **given: Any) -> None:
        assert not self.ended
        self.ended = given


@pytest.mark.parametrize("num_jobs", [2, 3])
def test_jobs_have_a_few_parts_each_and_all_of_them_are_counted(
    num_jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_parts in (1, 2 * num_jobs - 1, 2 * num_jobs, 2 * num_jobs + 1, 9):
        pool, config = Pool(), CampaignConfig(seed=num_parts)
        monkeypatch.setattr(campaign, "ProcessPoolExecutor", pool)
        monkeypatch.setattr(campaign, "wait", pool.wait)
        num_steps = 1_000 * num_parts - 1
        result = run_campaign(config, num_steps=num_steps, num_jobs=num_jobs)
        parts = [(config, *part) for part in campaign._parts(1_000, num_steps)]
        assert pool.given == parts and pool.num_jobs == num_jobs and not pool.open
        assert pool.most == min(num_parts, 2 * num_jobs)
        assert (result.num_steps, result.num_cases, result.finding) == (num_steps, num_parts, None)
        assert result.situations == {f"run {number}": 1 for number in range(num_parts)}
        assert pool.ended == {"wait": True, "cancel_futures": True}
    pool = Pool()
    monkeypatch.setattr(campaign, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(campaign, "wait", pool.wait)
    result = run_campaign(CampaignConfig(), num_jobs=num_jobs)
    assert result.finding is not None and result.finding.rule == "of 9"
    assert pool.open and pool.ended, "what is not needed is cancelled"
