"""`radixkv replay`."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler.cli import replay
from radixkv.scheduler.cli.options import replay as options
from radixkv.scheduler.cli.shared.output import ProgressBar
from radixkv.scheduler.replay import run as replay_run
from radixkv.scheduler.replay.engine_run.real_run import RealRunConfig
from radixkv.scheduler.replay.simulation import cost_model
from radixkv.scheduler.replay.simulation.cluster import ClusterConfig
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig


class FakeReport:
    """A report of which the test chooses the verdict."""

    def __init__(self, ok: bool) -> None:
        self.ok = ok

    def render(self) -> str:
        return "the report"

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok}


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake reports as pages."""
    monkeypatch.setattr(replay, "to_page", lambda report: f"<p>ok: {report.ok}, \u00b5s")


@pytest.mark.nightly
def test_a_real_replay_that_skips_a_malformed_line(
    radixkv: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_programs = partial(RealRunConfig, token_budget=16, max_running=2)
    monkeypatch.setattr(replay_run, "RealRunConfig", few_programs)
    trace.write_text(trace.read_text() + "{\n")
    path = tmp_path / "report.json"
    outcome = radixkv("replay", trace, "--skip-malformed", "--json", path)
    assert outcome.status == 0, outcome.stdout
    assert outcome.stdout.strip()
    assert outcome.stderr == ""
    assert isinstance(json.loads(path.read_text()), dict)


@pytest.mark.parametrize("is_last", [False, True])
def test_an_interrupt_ends_a_replay_also_without_its_exception(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    """Python may print and lose that."""

    def run_replay(*_: object, progress: Any, **__: object) -> FakeReport:
        progress("a stage", 0, 2)
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if not is_last:
            progress("a stage", 1, 2)
            raise AssertionError("it goes on")
        return FakeReport(True)

    monkeypatch.setattr(replay, "run_replay", run_replay)
    assert radixkv("replay", trace) == (130, "", "radixkv: interrupted\n")


def test_a_malformed_line_is_refused(radixkv: Any, trace: Path) -> None:
    trace.write_text(trace.read_text() + "{\n")
    outcome = radixkv("replay", trace)
    assert outcome.status == 2
    assert outcome.stderr.startswith(f"radixkv: {trace}, line 6: is not JSON: ")


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)], ids=["passed", "failed"])
def test_the_verdict_is_the_status(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch, ok: bool, status: int
) -> None:
    monkeypatch.setattr(replay, "run_replay", lambda *args, **options: FakeReport(ok))
    assert radixkv("replay", trace) == (status, "the report\n", "")
    alone = radixkv("replay", trace, "--json", "-")
    assert (alone.status, json.loads(alone.stdout)) == (status, {"ok": ok})


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_a_page_is_written_beside_the_text(
    radixkv: Any,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ok: bool,
    status: int,
) -> None:
    monkeypatch.setattr(replay, "run_replay", lambda *args, **options: FakeReport(ok))
    page = tmp_path / "report.html"
    assert radixkv("replay", trace, "--html", page) == (status, "the report\n", "")
    assert page.read_text("utf-8") == f"<p>ok: {ok}, \u00b5s"


def test_a_page_that_cannot_be_written_is_refused_at_once(
    radixkv: Any, trace: Path, tmp_path: Path
) -> None:
    outcome = radixkv("replay", trace, "--html", tmp_path)
    message = f"radixkv: --html {tmp_path}: expected a file, got a directory\n"
    assert (outcome.status, outcome.stderr) == (2, message)
    outcome = radixkv("replay", trace, "--html", "-")
    message = "radixkv: --html needs the name of a file, got -\n"
    assert (outcome.status, outcome.stderr) == (2, message)


def test_results_that_cannot_be_written_are_refused_at_once(
    radixkv: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch)
    message = f"radixkv: --json {tmp_path}: expected a file, got a directory\n"
    assert radixkv("replay", trace, "--json", tmp_path) == (2, "", message)
    assert calls == []


@pytest.mark.parametrize("is_quiet", [False, True])
def test_progress_is_shown_unless_told_to_be_quiet(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch, is_quiet: bool
) -> None:
    bars, shown = list[bool](), list[tuple[str, int, int]]()

    class Bar(ProgressBar):
        def __init__(self, quiet: bool) -> None:
            bars.append(quiet)
            super().__init__(quiet=True)

        def __call__(self, stage: str, done: int, total: int) -> None:
            shown.append((stage, done, total))

    def run_replay(*_: object, progress: Any, **__: object) -> FakeReport:
        progress("a stage", 1, 2)
        return FakeReport(True)

    monkeypatch.setattr(replay, "ProgressBar", Bar)
    monkeypatch.setattr(replay, "run_replay", run_replay)
    assert radixkv("replay", trace, *["--quiet"] * is_quiet).status == 0
    assert (bars, shown) == ([is_quiet], [("a stage", 1, 2)])


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def run_replay(*args: Any, progress: Any, **options: Any) -> FakeReport:
        calls.append((args, options))
        return FakeReport(ok=True)

    monkeypatch.setattr(replay, "run_replay", run_replay)
    return calls


def test_options_reach_the_replay(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch)
    radixkv("replay")
    radixkv("replay", trace, "--requests", 3, "--model", "m", "--gpu", "g", "--costs", "c.json")
    radixkv("replay", trace, "--skip-malformed")
    none = {"skip_malformed": False, "model": None, "gpu": None, "costs": None}
    named = {"skip_malformed": False, "model": "m", "gpu": "g", "costs": Path("c.json")}
    simulation = SimulationConfig()
    assert calls == [
        ((None, None), {**none, "simulation": simulation, "clusters": {}}),
        ((trace, 3), {**named, "simulation": simulation, "clusters": {}}),
        (
            (trace, None),
            {**none, "skip_malformed": True, "simulation": simulation, "clusters": {}},
        ),
    ]


def test_tier_options_reach_the_simulation(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch)
    radixkv("replay", trace, "--device-blocks", 50, "--host-blocks", 70)
    radixkv(*("replay", trace, "--host-blocks", 70, "--host-write", "through", "--preempt", "host"))
    stored = ("--storage-blocks", 80, "--preempt", "storage")
    radixkv("replay", trace, "--host-blocks", 70, *stored, "--prefill", 1, "--decode", 1)
    assert [options["simulation"] for _, options in calls] == [
        SimulationConfig(num_blocks=50, host=HostConfig(70)),
        SimulationConfig(host=HostConfig(70, "through"), preempt="host"),
        SimulationConfig(host=HostConfig(70), storage_blocks=80, preempt="storage"),
    ]
    nodes = calls[-1][1]["clusters"]["reserve 512"].node
    assert nodes == SimulationConfig()


@pytest.mark.parametrize(
    ("option", "needs"),
    [
        (("--preempt", "host"), "--preempt host needs --host-blocks"),
        (("--preempt", "storage"), "--preempt storage needs --host-blocks"),
        (("--host-write", "back"), "--host-write needs --host-blocks"),
        (("--storage-blocks", "7"), "--storage-blocks needs --host-blocks"),
        (
            ("--preempt", "storage", "--host-blocks", "7"),
            "--preempt storage needs --storage-blocks",
        ),
    ],
)
def test_tier_options_need_a_tier(
    radixkv: Any, trace: Path, option: tuple[str, ...], needs: str
) -> None:
    outcome = radixkv("replay", trace, *option)
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {needs}\n")


def test_storage_of_no_blocks_is_refused(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("replay", trace, "--host-blocks", 7, "--storage-blocks", 0)
    assert outcome.status == 2
    assert (
        "argument --storage-blocks: expected an integer from 1 to 2147483647, got '0'"
        in outcome.stderr
    )


def test_prefill_and_decode_nodes_reach_the_replay(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch)
    radixkv("replay", trace, "--prefill", 2, "--decode", 1, "--device-blocks", 50)
    late = ("--reserve", "7", "--allocate", "prefill_complete", "--host-blocks", 9)
    radixkv("replay", trace, "--prefill", 1, "--decode", 3, *late)
    assert [options["clusters"] for _, options in calls] == [
        {
            f"reserve {name}": ClusterConfig(
                2, 1, SimulationConfig(num_blocks=50, reserve_tokens=tokens)
            )
            for name, tokens in (("none", 0), ("512", 512), ("no_evict", None))
        },
        {
            "reserve 7": ClusterConfig(
                1, 3, SimulationConfig(reserve_tokens=7), order="prefill_complete"
            )
        },
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prefill", 1), "--prefill and --decode need each other"),
        (("--decode", 1), "--prefill and --decode need each other"),
        (("--reserve", "none"), "--reserve needs --prefill"),
        (("--allocate", "early"), "--allocate needs --prefill"),
    ],
)
def test_options_of_nodes_need_nodes(
    radixkv: Any, trace: Path, options: tuple[object, ...], message: str
) -> None:
    outcome = radixkv("replay", trace, *options)
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


@pytest.mark.parametrize("mode", ["some", "-1", "0"])
def test_an_unknown_reservation_is_refused(radixkv: Any, trace: Path, mode: str) -> None:
    outcome = radixkv("replay", trace, "--prefill", 1, "--decode", 1, f"--reserve={mode}")
    wanted = "expected none, no_evict or an integer from 1 to 2147483647"
    assert outcome.status == 2
    assert f"argument --reserve: {wanted}, got {mode!r}" in outcome.stderr


@pytest.mark.parametrize("option", ["--model", "--gpu"])
def test_an_unknown_name_is_refused(radixkv: Any, trace: Path, option: str) -> None:
    outcome = radixkv("replay", trace, option, "no-such-thing")
    assert outcome.status == 2
    assert "no-such-thing" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_missing_costs_are_refused(radixkv: Any, trace: Path, tmp_path: Path) -> None:
    outcome = radixkv("replay", trace, "--costs", tmp_path / "none.json")
    assert outcome.status == 2
    assert "none.json" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_help_lists_the_models_and_the_gpus(radixkv: Any) -> None:
    assert set(options.MODELS) == set(cost_model.MODELS)
    assert set(options.GPUS) == set(cost_model.GPUS)
    assert (options.MODELS[0], options.DEFAULT_GPU) == (
        cost_model.DEFAULT_MODEL,
        cost_model.DEFAULT_GPU,
    )
    text = " ".join(radixkv("replay", "--help").stdout.split())
    models = "llama3-8b or llama3-70b or qwen3-8b or qwen3-32b (default: llama3-8b)"
    assert f"simulate the costs of this model: {models}" in text
    gpus = "a100 or h100 or h200, or several, as h100x4 (default: h200x2)"
    assert f"simulate the costs of this GPU: {gpus}" in text
