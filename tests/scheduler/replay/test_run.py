"""`run_replay` end to end on a short trace, and the input it rejects."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler import replay
from radixkv.scheduler.batching.preemption import PreemptMode
from radixkv.scheduler.replay import CostError, TraceError, bundled_trace_path, run, run_replay
from radixkv.scheduler.replay.report import ReplayReport
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig

from .conftest import SMALL_REAL_RUN

WriteLines = Callable[..., Path]


Calls = list[tuple[str, int, int]]

ROOMY = 24
"""Size of a pool without preemptions, so that the run must find a tighter one."""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReplayReport, Calls]:
    """A replay of a malformed line and 150 requests, and its progress calls."""
    calls: Calls = []
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_bytes(b"oops\n" + bundled_trace_path().read_bytes())
    report = run_replay(
        path,
        150,
        skip_malformed=True,
        simulation=SimulationConfig(
            num_blocks=5_000,
            host=HostConfig(60_000),
            storage_blocks=200_000,
            preempt="storage",
            reserve_tokens=0,
        ),
        real=dataclasses.replace(SMALL_REAL_RUN, tight_num_blocks=ROOMY),
        progress=lambda stage, done, total: calls.append((stage, done, total)),
    )
    return report, calls


def test_a_replay_passes(replayed: tuple[ReplayReport, Calls]) -> None:
    report, _ = replayed
    assert report.ok, report.text()
    assert len(report.trace.requests) == 150
    assert [line.line for line in report.trace.skipped] == [1]
    assert list(report.simulation.runs) == ["cache off", "cache on", "host tier", "storage"]
    assert report.simulation.runs["cache off"].hit_tokens == 0
    host = report.simulation.config.host
    assert host is not None and host.write == "through", "with storage, for the run without it too"
    assert report.simulation.runs["cache on"].hit_tokens > 0
    assert report.simulation.runs["cache on"].tiers is None
    assert report.simulation.runs["host tier"].host_hit_tokens > 0
    assert report.simulation.runs["host tier"].storage_hit_tokens == 0
    tiers = report.simulation.runs["storage"].tiers
    assert tiers is not None and tiers.storage is not None and tiers.storage.bytes_written > 0
    assert report.text().splitlines()[-1].startswith("PASS: ")
    json.dumps(report.to_json(), allow_nan=False)


def test_the_real_run_is_under_pressure(replayed: tuple[ReplayReport, Calls]) -> None:
    real = replayed[0].real.run
    assert [(check.verdict, check.name) for check in real.checks] == [
        ("PASS", "identical tokens"),
        ("PASS", "the tight pool preempts and evicts"),
        ("PASS", "preempted requests keep their KV on the host"),
        ("PASS", "hits reduce the prefill tokens computed"),
        ("PASS", "no compilation after warm-up"),
        ("PASS", "no block is leaked"),
    ], real
    reference, off, on, tiered = real.runs
    names = ["reference", "cache off", "cache on", "host tier"]
    assert [run.name for run in real.runs] == names
    assert reference.prefill_tokens == real.prompt_tokens
    assert reference.preemptions == reference.hit_tokens == off.hit_tokens == 0
    assert on.hit_tokens > 0 and on.num_blocks == off.num_blocks == tiered.num_blocks < ROOMY
    assert tiered.parked == tiered.resumed > 0 == on.parked
    assert tiered.bytes_to_host > 0


def test_every_stage_reports_progress_to_its_end(replayed: tuple[ReplayReport, Calls]) -> None:
    last = {stage: (done, total) for stage, done, total in replayed[1]}
    assert list(last) == [
        "hits",
        "two tiers",
        "simulation, cache off",
        "simulation, cache on",
        "simulation, host tier",
        "simulation, storage",
        "real run, reference: compiling",
        "real run, reference",
        "real run, cache off: compiling",
        "real run, cache off",
        "real run, cache on: compiling",
        "real run, cache on",
        "real run, host tier: compiling",
        "real run, host tier",
    ]
    assert all(done == total for done, total in last.values())


def test_bad_input_is_rejected_before_the_work(write_lines: WriteLines, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 1: is not JSON: "):
        run_replay(write_lines(b"oops"))
    with pytest.raises(CostError, match="no model 'gpt-5'"):
        run_replay(model="gpt-5")
    with pytest.raises(CostError, match="no GPU 'abacus'"):
        run_replay(gpu="abacus")
    with pytest.raises(CostError, match="llama3-70b does not fit"):
        run_replay(model="llama3-70b", gpu="h100")
    costs = tmp_path / "costs.json"
    costs.write_text('{"step": {"overhead_s": "soon"}}')
    with pytest.raises(
        CostError, match=r'step\.overhead_s must be a number below 1e30, got "soon"'
    ):
        run_replay(costs=costs)


def test_names_beside_a_cost_file_are_those_of_its_base(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"step": {"overhead_s": 0.01}}')
    with pytest.raises(CostError, match="no model 'gpt-5'"):
        run_replay(tmp_path / "missing", costs=costs, model="gpt-5")
    with pytest.raises(CostError, match="no GPU 'abacus'"):
        run_replay(tmp_path / "missing", costs=costs, gpu="abacus")


@pytest.mark.parametrize("preempt", ["recompute", "host", "storage"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_each_simulation_has_one_part_more_than_the_one_before(
    preempt: PreemptMode,
    prefix_cache: bool,
    write_lines: WriteLines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}
    configs: dict[str, SimulationConfig] = {}

    def simulate(_trace: Any, _costs: Any, config: SimulationConfig, _: Any, stage: str) -> None:
        configs[stage] = config

    monkeypatch.setattr(run, "simulate", simulate)
    monkeypatch.setattr(run, "run_real", lambda *_: None)
    config = SimulationConfig(
        num_blocks=5,
        prefix_cache=prefix_cache,
        host=HostConfig(7),
        storage_blocks=9,
        preempt=preempt,
    )
    run_replay(write_lines(line), simulation=config)
    device = dataclasses.replace(config, host=None, storage_blocks=None, preempt="recompute")
    storage = dataclasses.replace(config, prefix_cache=True, host=HostConfig(7, "through"))
    on_host: PreemptMode = "recompute" if preempt == "recompute" else "host"
    assert configs == {
        "simulation, cache off": dataclasses.replace(device, prefix_cache=False),
        "simulation, cache on": dataclasses.replace(device, prefix_cache=True),
        "simulation, host tier": dataclasses.replace(storage, storage_blocks=None, preempt=on_host),
        "simulation, storage": storage,
    }


def test_counting_hits_needs_no_jax() -> None:
    code = "import sys, radixkv.scheduler.replay as r; r.count_hits; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists() -> None:
    for name in replay.__all__:
        assert getattr(replay, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = replay.nothing
