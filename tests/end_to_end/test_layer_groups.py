"""Prefill nodes send groups of layers while they compute the next: the tokens are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler import ConfigError
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.engine.programs import layers_of
from radixkv.scheduler.models import load_model, make_tiny_checkpoint
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport

from .cluster import TIMING, Cluster
from .conftest import SIZES, complete, fresh
from .test_engine import SAMPLED

NUM_LAYERS = 5
PROMPTS = [[5 + i, *range(40, 40 + 17 * i)] for i in range(5)]
PATIENT = replace(TIMING, silence_s=1e6, transfer_s=1e7)  # the clock counts polls


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of so many layers that a CPU computes them one by one."""
    directory: Path = tmp_path_factory.mktemp("deep")
    make_tiny_checkpoint(directory, overrides={"num_hidden_layers": NUM_LAYERS})
    return Engine(load_model(directory), block_size=4, **SIZES)


def cluster_of(engine: Engine, num_groups: int, **prefill: Any) -> Cluster:
    options: dict[str, Any] = {"num_groups": num_groups, "timing": PATIENT}
    cluster = Cluster(engine, prefill=options | prefill, decode=options)
    groups = [layers_of(NUM_LAYERS, group, num_groups) for group in range(num_groups)]
    cluster.p._runner._programs._groups = groups  # those of the engine, which knows of none
    return cluster


@pytest.mark.slow
@pytest.mark.parametrize("order", ["early", "prefill_complete"])
def test_tokens_do_not_depend_on_the_groups(deep: Engine, order: str) -> None:
    expected = complete(fresh(deep), PROMPTS, 8, SAMPLED)
    num_bytes = set()
    for num_groups in (1, 4, NUM_LAYERS):
        cluster = cluster_of(deep, num_groups, order=order)
        for _ in range(2):  # then with hits on both nodes
            assert cluster.complete(PROMPTS, 8, SAMPLED) == expected
        num_bytes.add(cluster.bytes_on_the_wire())
        assert cluster.front.close()
    assert len(num_bytes) == 1, "no byte is sent twice"


@pytest.mark.slow
def test_a_group_is_offered_before_the_results_of_the_step_are_read(
    deep: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, events = cluster_of(deep, 4), list[str]()
    runner, sender = cluster.p._runner, cluster.p._sender
    read, offer = runner.read, sender.offer

    def spy_read() -> list[int]:
        events.append("read")
        return read()

    def spy_offer(given: Any) -> None:
        events.append(f"group {given.group}")
        offer(given)

    monkeypatch.setattr(runner, "read", spy_read)
    monkeypatch.setattr(sender, "offer", spy_offer)
    cluster.complete([PROMPTS[1]], 2)  # one chunk
    assert events == ["group 0", "group 1", "group 2", "read", "group 3"]


@pytest.mark.parametrize("role", [PrefillEngine, DecodeEngine], ids=["prefill", "decode"])
def test_more_groups_than_layers_are_refused(model: Any, role: Any) -> None:
    sizes = {"block_size": 4, "num_blocks": 8, "token_budget": 8, "max_running": 1}
    transport = InProcessTransport(InProcessExchange())
    given = {"epoch": 1, "now": 0.0, "timing": TIMING, "max_model_len": 32, "num_groups": 3}
    with pytest.raises(ConfigError, match="num_groups must be at most the model's 2 layers, got 3"):
        role(model("llama"), transport, **given, **sizes)


def test_groups_are_of_nearly_equal_size_and_cover_all_layers() -> None:
    for num_layers in range(1, 12):
        for num_groups in range(1, num_layers + 1):
            parts = [layers_of(num_layers, group, num_groups) for group in range(num_groups)]
            layers = [layer for part in parts for layer in range(num_layers)[part]]
            assert layers == list(range(num_layers))
            sizes = {part.stop - part.start for part in parts}
            assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
