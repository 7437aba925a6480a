"""`radixkv bench`: JSON, text and refusals of each benchmark."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from radixkv.scheduler.bench import step
from radixkv.scheduler.bench.start import bench_start

pytestmark = pytest.mark.usefixtures("no_collection")

COST_KEYS = {"us_per_request", "ns_per_block"}


def test_cache_json(radixkv: Any, trace: Path) -> None:
    outcome = radixkv(
        "bench", "cache", trace, "--block-size", 16, "--device-tokens", 16_000, "--json", "-"
    )
    assert (outcome.status, outcome.stderr) == (0, "")
    figures = json.loads(outcome.stdout)
    assert {*COST_KEYS, "hit_tokens", "hit_rate", "evicted_blocks", "clock_ns"} <= set(figures)
    assert set(figures["us_per_request"]) == {"median", "mean", "p99_9", "max"}
    assert set(figures["phases"]) == {"match", "admit", "extend", "publish", "release"}
    assert all(set(cost) == COST_KEYS for cost in figures["phases"].values())
    assert figures["trace"] == "trace.jsonl"
    assert figures["device_blocks"] == 1000
    assert figures["hit_tokens"] == 512 + 992


def test_cache_text_and_first_requests_only(radixkv: Any, trace: Path) -> None:
    outcome = radixkv(
        "bench", "cache", trace, "--block-size", 16, "--device-tokens", 16_000, "--requests", 2
    )
    assert outcome.status == 0
    assert (
        "trace.jsonl: 2 requests, 2,536 + 13 tokens; cache of 1,000 blocks of 16; "
        "token ids as int32\n"
    ) in outcome.stdout
    assert "hit 512 tokens (20.19%), evicted 0 blocks" in outcome.stdout
    assert "whole request" in outcome.stdout
    assert "us/request median" in outcome.stdout
    assert (
        outcome.stdout.index("mean") < outcome.stdout.index("p99.9") < outcome.stdout.index("max")
    )


@pytest.mark.parametrize("tokens", ["list", "int64", "int32"])
def test_cache_takes_every_form_of_tokens(radixkv: Any, trace: Path, tokens: str) -> None:
    sizes = ("--block-size", 16, "--device-tokens", 16_000)
    outcome = radixkv("bench", "cache", trace, *sizes, "--tokens", tokens, "--json", "-")
    assert (outcome.status, outcome.stderr) == (0, "")
    figures = json.loads(outcome.stdout)
    assert (figures["tokens"], figures["hit_tokens"]) == (tokens, 512 + 992)
    outcome = radixkv("bench", "cache", trace, *sizes, "--tokens", tokens)
    assert f"; token ids as {tokens}\n" in outcome.stdout


@pytest.mark.parametrize("tokens", ["lists", "int16", ""])
def test_cache_takes_no_other_form_of_tokens(radixkv: Any, trace: Path, tokens: str) -> None:
    sizes = ("--block-size", 16, "--device-tokens", 16_000)
    outcome = radixkv("bench", "cache", trace, *sizes, f"--tokens={tokens}")
    assert outcome.status == 2
    assert f"argument --tokens: invalid choice: '{tokens}' (choose from " in outcome.stderr


def test_cache_below_one_block_is_refused(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("bench", "cache", trace, "--block-size", 16, "--device-tokens", 15)
    assert outcome.status == 2
    assert outcome.stderr == (
        "radixkv: --device-tokens must be at least one block of 16 tokens, got 15\n"
    )


def test_cache_too_small_for_a_request_is_refused(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("bench", "cache", trace, "--block-size", 16, "--device-tokens", 1024)
    assert outcome.status == 2
    assert outcome.stderr == (
        "radixkv: request 1 has 1539 tokens and needs 97 blocks of 16, but the cache has 64\n"
    )


def test_evict_json(radixkv: Any) -> None:
    outcome = radixkv(
        *("bench", "evict", "--device-blocks", 64, "--evict", 16, "--chain", 8),
        *("--block-size", 2, "--json", "-"),
    )
    assert outcome.status == 0
    figures = json.loads(outcome.stdout)
    assert {"ms_per_call", "us_per_block", "calls"} <= set(figures)
    assert figures["calls"] == 9


def test_evict_text(radixkv: Any) -> None:
    outcome = radixkv("bench", "evict", "--device-blocks", 64, "--evict", 16, "--chain", 8)
    assert outcome.stdout.startswith("evict 16 of 64 blocks in leaves of 8: ")


def test_evict_more_than_the_pool_is_refused(radixkv: Any) -> None:
    outcome = radixkv("bench", "evict", "--device-blocks", 8, "--evict", 9, "--chain", 1)
    assert (outcome.status, outcome.stderr) == (
        2,
        "radixkv: cannot evict 9 blocks in a pool of 8\n",
    )


def test_decode_json(radixkv: Any) -> None:
    outcome = radixkv("bench", "decode", "--batch", 4, "--steps", 20, "--json", "-")
    assert outcome.status == 0
    figures = json.loads(outcome.stdout)
    assert {"batch", "steps", "us_per_request", "us_per_step"} <= set(figures)


def test_step_json_and_text(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "NUM_STEPS", 16)
    command = ("bench", "step", "--rows", 2, "--max-model-len", 100, "--device-ms", 0)
    figures = json.loads(radixkv(*command, "--depth", 1, "--waiting", 3, "--json", "-").stdout)
    assert {"host_us_per_step", "bytes_per_step", "idle_share"} <= set(figures)
    assert (figures["depth"], figures["waiting"], figures["prompt_tokens"]) == (1, 3, 64)
    assert radixkv(*command).stdout.startswith("2 rows, 2 steps in flight: the host takes ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (
                (f"--device-ms={given}",),
                "argument --device-ms: expected a number of milliseconds from 0 to 2000000, "
                f"got '{given}'",
            )
            for given in ("-1", "1e300", "inf", "nan")
        ),
        (("--waiting=-1",), "argument --waiting: expected an integer from 0 to 2147483647"),
        ((), "max_model_len 100 is less than 64 prompt tokens and 206 new ones"),
    ],
)
def test_a_wrong_step_is_refused(radixkv: Any, options: tuple[str, ...], message: str) -> None:
    outcome = radixkv("bench", "step", "--rows", 2, "--max-model-len", 100, *options)
    assert outcome.status == 2 and message in outcome.stderr


def test_decode_text(radixkv: Any) -> None:
    outcome = radixkv("bench", "decode", "--batch", 4, "--steps", 20)
    assert outcome.stdout.startswith("4 requests, 20 steps: ")


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many"])
def test_decode_steps_must_be_positive(radixkv: Any, value: str) -> None:
    outcome = radixkv("bench", "decode", f"--steps={value}")
    assert outcome.status == 2
    assert (
        f"argument --steps: expected an integer from 1 to 2147483647, got '{value}'"
        in outcome.stderr
    )


@pytest.mark.nightly
def test_start_counts_programs_and_the_cache_saves_cpu_time(radixkv: Any) -> None:
    """The number of programs does not depend on the number of layers."""
    outcome = radixkv("bench", "start", "--layers", 6, "--json", "-")
    assert (outcome.status, outcome.stderr) == (0, "")
    results = json.loads(outcome.stdout)
    assert set(results) >= {"layers", "programs", "cold_cpu_s", "warm_cpu_s"}
    assert results["layers"] == 6
    assert results["programs"] == 3 * (5 + 4) + 3
    assert 0 < results["warm_cpu_s"] < results["cold_cpu_s"]


def test_a_start_has_a_cache_of_its_own(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is empty at first, and nothing that the user has set for other programs changes it."""
    options = [name.upper() for name in jax.config.values if "_cache" in name]
    assert {"JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"} <= {*options}
    for name in (*options, "XLA_FLAGS"):
        monkeypatch.setenv(name, "of the user")
    found: list[list[str]] = []
    directories: set[Path] = set()

    def run(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        assert [name for name in env if env[name] == "of the user"] == ["XLA_FLAGS"]
        assert os.environ.keys() - env.keys() <= {*options}
        assert env["JAX_ENABLE_COMPILATION_CACHE"] == "true"
        cache = Path(env["JAX_COMPILATION_CACHE_DIR"])
        directories.add(cache)
        found.append([each.name for each in cache.iterdir()])
        (cache / f"program {len(found)}").touch()
        return subprocess.CompletedProcess([], 0, "30", "")

    monkeypatch.setattr(subprocess, "run", run)
    outcome = radixkv("bench", "start", "--layers", 1, "--json", "-")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert json.loads(outcome.stdout)["programs"] == 30
    assert found == [[], ["program 1"]]
    [directory] = directories
    assert not directory.exists()


def test_a_start_costs_the_cpu_time_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"user": 1.0, "system": 0.5}  # of earlier processes
    costs = iter([(3.0, 1.0), (1.0, 0.25)])

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        user, system = next(costs)
        spent["user"] += user
        spent["system"] += system
        return subprocess.CompletedProcess([], 0, "30", "")

    def usage(who: int) -> SimpleNamespace:
        assert who == resource.RUSAGE_CHILDREN
        return SimpleNamespace(ru_utime=spent["user"], ru_stime=spent["system"])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(resource, "getrusage", usage)
    results = bench_start(3)
    assert (results["layers"], results["programs"]) == (3, 30)
    assert (results["cold_cpu_s"], results["warm_cpu_s"]) == (4.0, 1.25)


def test_a_start_that_fails_says_why(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"^the engine did not start: "):
        radixkv("bench", "start", "--layers", 1)
