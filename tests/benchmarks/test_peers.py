"""The comparison with other managers: its workloads, its command, and our side of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
workloads = import_module("peer_workloads")
sys.path.remove(str(BENCHMARKS))


def peers(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "peers.py"), *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    first, second = (list(workloads.requests_of(name, 50)) for _ in range(2))
    assert len(first) == len(second) == 50
    for one, other in zip(first, second, strict=True):
        assert one.tokens.dtype == np.int32
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (
            one.prompt.tolist() == other.prompt.tolist() == one.tokens[: len(one.prompt)].tolist()
        )
    assert len(list(workloads.requests_of(name, None))) == 2_000


def test_short_chats_have_the_lengths_that_they_promise() -> None:
    chats = list(workloads.short_chats(500))
    assert all(50 <= len(chat.prompt) <= 500 for chat in chats)
    assert all(50 <= len(chat.tokens) - len(chat.prompt) <= 200 for chat in chats)
    beginnings = {tuple(chat.prompt[:32].tolist()) for chat in chats if len(chat.prompt) > 32}
    assert len(beginnings) <= 100


def test_an_agent_continues_one_before_it() -> None:
    requests = [work.tokens.tolist() for work in workloads.agents(100)]
    root = requests[0][:2_000]
    for position, tokens in enumerate(requests):
        assert tokens[:-24] in [root, *requests[:position]]
    assert [len(work.tokens) - len(work.prompt) for work in islice(workloads.agents(2), 2)] == [
        8,
        8,
    ]


@pytest.mark.parametrize("tokens", ["own", "list"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_run_of_ours_prints_its_figures(tokens: str, block_size: int) -> None:
    done = peers(
        *("tree", "--requests", 20, "--pool-tokens", 4_000, "--run", "radixkv"),
        *("--tokens", tokens, "--block-size", block_size),
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert figures["us_per_request"] > 0
    shared = 2_000 // block_size * block_size
    assert figures["hit_tokens"] >= 19 * shared


def test_the_table_names_what_was_run_and_what_is_missing(tmp_path: Path) -> None:
    for peer in ("torch", "vllm"):
        (tmp_path / peer).with_suffix(".py").write_text("raise ImportError('it is hidden')")
    options = ("--rounds", 1, "--tokens", "list", "--managers", "vLLM KVCacheManager")
    done = peers("short", "--requests", 20, *options, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    command = "python benchmarks/peers.py short --pool-tokens 150000 --requests 20 --tokens list"
    assert f"- Command: `{command} --rounds 1 --managers 'vLLM KVCacheManager'`" in done.stdout
    assert "Pool of 150,000 tokens:" in done.stdout and "| radixkv | " in done.stdout
    assert "- Missing: vLLM KVCacheManager (it is hidden). To get it: `pip" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["long"], "long is neither a trace nor one of: short, tree"),
        (["short", "--rounds", "0"], "argument --rounds: expected a positive integer, got '0'"),
        (["short", "--block-size", "x"], "argument --block-size: expected a positive integer"),
        (["short", "--pool-tokens", "15"], "a pool of 15 tokens has no block"),
        (["short", "--tokens", "int16"], "argument --tokens: invalid choice: 'int16'"),
        (["short", "--managers", "x"], "argument --managers: invalid choice: 'x'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], text: str) -> None:
    done = peers(*arguments)
    assert done.returncode == 2
    assert text in done.stderr and not done.stdout
