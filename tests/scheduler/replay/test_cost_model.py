"""Cost model: the roofline by hand, and every error about names and cost files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from radixkv.kvcache.errors import RadixKVError
from radixkv.scheduler.replay.simulation.cost_model import (
    GPUS,
    MODELS,
    CostError,
    CostModel,
    GpuCosts,
    ModelCosts,
    StepCosts,
    attention_pairs,
    load_costs,
    named_costs,
)
from radixkv.scheduler.request import Request
from radixkv.scheduler.step_plan import Chunk, DecodeRows, StepPlan

# One layer of width 4: 10 parameters of 2 bytes, KV of 2 * 1 * 1 * 4 * 2 = 16 bytes a token.
MODEL = ModelCosts("toy", parameters=10, layers=1, heads=1, kv_heads=1, head_dim=4)


def toy(flops_per_s: float, bytes_per_s: float, count: int = 1) -> CostModel:
    gpu = GpuCosts("toy", flops_per_s, bytes_per_s, memory_bytes=1000, count=count)
    return CostModel(MODEL, gpu, StepCosts(0.5, 0.5, overhead_s=3.0, memory_fraction=0.5))


def test_a_compute_bound_step_by_hand() -> None:
    # Positions 2, 3, 4: n = 5, p = 2, (25 - 4) / 2 pairs.
    assert attention_pairs(2, 5) == 10.5
    flops = 2 * 10 * 3 + 4 * 1 * 4 * 10.5  # 228
    assert toy(100.0, 1e9).step_s(3, 5, 10.5) == pytest.approx(flops / 50 + 3)
    assert toy(100.0, 1e9, count=2).step_s(3, 5, 10.5) == pytest.approx(flops / 100 + 3)


def test_a_memory_bound_step_by_hand() -> None:
    # Weights once, KV of 5 tokens read, of 3 written.
    moved = 20 + (5 + 3) * 16  # 148
    assert toy(1e9, 100.0).step_s(3, 5, 10.5) == pytest.approx(moved / 50 + 3)


@pytest.mark.parametrize("costs", [toy(100.0, 1e9), toy(1e9, 100.0)], ids=["compute", "memory"])
@given(
    starts=st.lists(st.integers(0, 9), max_size=3),
    chunks=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=3),
)
@example(starts=[2**31 - 2] * 3, chunks=[])  # their sum is not an int32
def test_a_step_costs_what_its_tokens_attend_to(
    costs: CostModel, starts: list[int], chunks: list[tuple[int, int]]
) -> None:
    """Counted token by token; a decode token is a chunk of one."""
    assume(starts or chunks)
    request, plan = Request("r", [1], 1), StepPlan()
    rows = np.array(starts, np.int32)
    plan.add_decode(DecodeRows([request] * len(starts), rows, rows))
    for start, length in chunks:
        plan.add_prefill(Chunk(request, start, length))
    all_chunks = [*((start, 1) for start in starts), *chunks]
    num_tokens = sum(length for _, length in all_chunks)
    context = sum(start + length for start, length in all_chunks)
    # A token at position s attends to s others, and counts itself as a half.
    pairs = sum(s + 0.5 for start, length in all_chunks for s in range(start, start + length))
    assert costs.plan_s(plan) == pytest.approx(costs.step_s(num_tokens, context, pairs))


def test_the_pool_fills_the_memory_beside_the_weights() -> None:
    # 1000 bytes, half usable: 500 - 20 = 480 bytes are 30 tokens are 7 blocks of 4.
    assert toy(1, 1).num_blocks(4) == 7
    assert toy(1, 1, count=2).num_blocks(4) == 15


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(CostError) as error:
        named_costs("llama3-70b", "h100").num_blocks(16)
    assert str(error.value) == (
        "llama3-70b does not fit: its weights are 141.2 GB, "
        "and h100 has 72.0 GB usable (try h100x2)"
    )
    with pytest.raises(CostError, match=r"and h100x1 has 72\.0 GB usable \(try h100x2\)"):
        named_costs("llama3-70b", "h100x1").num_blocks(16)


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_twice_as_many_gpus_are_proposed(count: int) -> None:
    costs = named_costs("llama3-70b", f"h100x{count}")
    large = dataclasses.replace(costs, model=dataclasses.replace(costs.model, parameters=1e15))
    with pytest.raises(CostError, match=rf"\(try h100x{2 * count}\)$"):
        large.num_blocks(16)


def test_llama3_8b_kv_is_128_kib_a_token() -> None:
    assert named_costs("llama3-8b", "h100").model.kv_bytes_per_token == 131_072
    assert MODELS["llama3-70b"].kv_bytes_per_token == 327_680


def test_bandwidths_scale_with_the_number_of_gpus() -> None:
    assert named_costs(gpu="a100").host_bytes_per_s == pytest.approx(0.8 * 32e9)
    assert named_costs(gpu="h200x4").host_bytes_per_s == pytest.approx(4 * 0.8 * 64e9)
    assert named_costs(gpu="h200x4").storage_write_bytes_per_s == pytest.approx(4 * 0.8 * 3.5e9)
    assert named_costs(gpu="h200x4").storage_read_bytes_per_s == pytest.approx(4 * 0.8 * 6.5e9)


def test_names() -> None:
    costs = named_costs("qwen3-32b", "h200x8")
    assert (costs.model.name, costs.gpu.name, costs.gpu.count) == ("qwen3-32b", "h200x8", 8)
    assert named_costs(None, "a100").gpu == GPUS["a100"]
    with pytest.raises(
        RadixKVError,
        match=r"^no model 'gpt-5'; known: llama3-8b, llama3-70b, qwen3-8b, qwen3-32b$",
    ):
        named_costs("gpt-5", None)


@pytest.mark.parametrize("name", ["tpu", "h100x0", "h100x", "x4", "h100x-1", "h100x2x2"])
def test_unknown_gpus(name: str) -> None:
    with pytest.raises(CostError) as error:
        named_costs(None, name)
    assert str(error.value) == (
        f"no GPU {name!r}; known: a100, h100, h200, each also as 'h100x2' for several"
    )


def test_a_file_overrides_any_figure(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    figures = {
        "model": {"name": "mine", "parameters": 7_600_000_000, "layers": 28},
        "gpu": {"bytes_per_s": 3e12, "count": 4},
        "step": {"overhead_s": 0, "flops_efficiency": 0.61},
    }
    path.write_text(json.dumps(figures))
    costs = load_costs(path, "qwen3-8b", "h100")
    assert (costs.model.name, costs.model.parameters, costs.model.layers) == ("mine", 7.6e9, 28)
    assert costs.model.heads == MODELS["qwen3-8b"].heads
    assert (costs.gpu.bytes_per_s, costs.gpu.count, costs.gpu.flops_per_s) == (3e12, 4, 989e12)
    assert costs.step == StepCosts(flops_efficiency=0.61, overhead_s=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object with model, gpu and step"),
        ('{"gpus": {}}', "has no section 'gpus'; known: model, gpu, step"),
        ('{"gpu": "h100"}', 'gpu must be a JSON object, got "h100"'),
        (
            '{"step": {"mfu": 1}}',
            "step has no figure 'mfu'; known: "
            "flops_efficiency, bandwidth_efficiency, overhead_s, memory_fraction, "
            "host_link_efficiency, network_efficiency, message_s, storage_efficiency, lookup_s",
        ),
        ('{"model": {"name": 1}}', "model.name must be a string, got 1"),
        ('{"model": {"layers": 1.5}}', "model.layers must be an integer, got 1.5"),
        ('{"model": {"layers": true}}', "model.layers must be a number below 1e30, got true"),
        ('{"gpu": {"count": 0}}', "gpu.count must be above 0, got 0"),
        ('{"gpu": {"bytes_per_s": NaN}}', "gpu.bytes_per_s must be a number below 1e30, got NaN"),
        ('{"gpu": {"count": 1e99}}', "gpu.count must be a number below 1e30, got 1e+99"),
        ('{"step": {"overhead_s": -1}}', "step.overhead_s must be above 0, got -1"),
        ('{"step": {"memory_fraction": 1.1}}', "step.memory_fraction must be at most 1, got 1.1"),
        (
            '{"step": {"host_link_efficiency": 2}}',
            "step.host_link_efficiency must be at most 1, got 2",
        ),
        ('{"gpu": {"host_bytes_per_s": 0}}', "gpu.host_bytes_per_s must be above 0, got 0"),
    ],
)  # fmt: skip
def test_a_malformed_cost_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostError) as error:
        load_costs(path)
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("section", "figure"),
    [
        (section, field.name)
        for section, kind in (("model", ModelCosts), ("gpu", GpuCosts), ("step", StepCosts))
        for field in dataclasses.fields(kind)
        if field.name != "name"
    ],
)
def test_each_figure_has_its_limits(tmp_path: Path, section: str, figure: str) -> None:
    """A time may be 0, and a fraction is at most 1; any other figure is above 0."""
    path = tmp_path / "costs.json"

    def is_taken(value: int) -> bool:
        path.write_text(json.dumps({section: {figure: value}}))
        try:
            costs = load_costs(path)
        except CostError:
            return False
        assert getattr(getattr(costs, section), figure) == value
        return True

    is_time = figure.endswith("_s") and not figure.endswith("_per_s")
    is_fraction = section == "step" and not is_time
    taken = [value for value in (-1, 0, 1, 2) if is_taken(value)]
    assert taken == [*[0] * is_time, 1, *[2] * (not is_fraction)]


def test_a_cost_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"costs\.json: cannot be read: No such file or directory"):
        load_costs(tmp_path / "costs.json")
    (tmp_path / "costs.json").write_bytes(b"{")
    with pytest.raises(CostError, match=r"costs\.json: is not JSON: Expecting property name"):
        load_costs(tmp_path / "costs.json")
