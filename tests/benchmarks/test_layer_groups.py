"""`benchmarks/layer_groups.py` on a prompt of 8,192 tokens and a link of 10 GB/s."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from radixkv.scheduler.replay.simulation.cost_model import named_costs

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
layer_groups = import_module("layer_groups")
sys.path.remove(BENCHMARKS)

COSTS = named_costs("llama3-8b", "h200")
ALONE_S = 8192 * COSTS.model.kv_bytes_per_token / 10e9


def waits_s(num_groups: int) -> float:
    """Return the time between the first token on P and the start on D."""
    clock = layer_groups.HandoffClock(COSTS, 8192, 8192, num_groups, 10e9)
    clock.run()
    assert clock.computed_s == pytest.approx(step_s())
    return float(clock.started_s - clock.computed_s)


def step_s() -> float:
    """Return the time of the step that computes the prompt."""
    return COSTS.step_s(8192, 8192, 8192 * 8192 / 2)


@pytest.mark.parametrize("num_groups", [1, 4, 32])
def test_all_but_the_last_group_is_hidden(num_groups: int) -> None:
    assert waits_s(num_groups) == pytest.approx(ALONE_S / num_groups, rel=0.01)
