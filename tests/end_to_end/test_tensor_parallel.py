"""Models on several devices: the same tokens, the same cache, and who may not be cut."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh

from radixkv.kvcache import CountError
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.errors import ConfigError
from radixkv.scheduler.models import (
    Batch,
    ModelConfig,
    TensorParallelError,
    forward,
    load_config,
    load_model,
    make_tiny_checkpoint,
    shard_model,
    tensor_parallel_mesh,
)
from radixkv.scheduler.models.tensor_parallel import (
    KV_HEADS,
    SECOND_AXIS,
    model_mesh,
    split_devices,
    tensor_sharding,
)

from ..kernels.lowering import H100, shaped
from .conftest import assert_nothing_leaked, complete
from .on_mesh import MODEL, PROMPTS, SAMPLED, SIZES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_tiny_checkpoint(made, overrides=MODEL)
    return made


@pytest.fixture(scope="module")
def config(directory: Path) -> ModelConfig:
    return load_config(directory)


# Several devices, in a process that has them


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return on_mesh(request.param)


def on_mesh(*arguments: str) -> dict[str, Any]:
    """Return what the program prints, in a process with eight devices."""
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.on_mesh", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.nightly
def test_several_devices_serve_as_one_does(found):
    one = found["1"]
    assert one["hits"] > 0 and one["preemptions"] > 0
    for number in ("2", "4", "8"):
        several = found[number]
        assert several["outputs"] == one["outputs"], number
        assert several["devices"] == int(number)
        assert (several["hits"], several["preemptions"]) == (one["hits"], one["preemptions"])
        assert several["parked"] > 0
        assert several["compilations"] == [0, 0, 0]
    for record, expected in zip(found["8"]["adjusted"], one["adjusted"], strict=True):
        assert (record is None) == (expected is None)
        if record is not None:
            assert record == pytest.approx(expected, abs=1e-4)


@pytest.mark.nightly
def test_blocks_in_storage_do_not_depend_on_the_number_of_devices(found):
    expected = found["1"]["outputs"][0]
    loaded = {name: run for name, run in found.items() if " to " in name}
    assert len(loaded) == 16
    assert {run["loaded"] for run in loaded.values()} == {found["1 to 1"]["loaded"]}
    assert found["1 to 1"]["loaded"] > 0
    assert [name for name, run in loaded.items() if run["outputs"] != expected] == []


@pytest.mark.nightly
def test_what_a_step_costs(found):
    """The control plane does not see the devices; XLA sends sums of rows, and no matrix."""
    assert found["1"]["steps"]["collectives"] == []
    for number in ("1", "2", "4", "8"):
        steps = found[number]["steps"]
        assert steps["in place"]
        for rows in ("1 rows", "4 rows"):
            assert steps[rows]["ours"] <= 1.2 * found["1"]["steps"][rows]["ours"]
    for number in ("2", "4", "8"):
        kinds = [kind for kind, _ in found[number]["steps"]["collectives"]]
        # The embedding, and attention and feed-forward of the only layer; then the logits.
        assert sorted(kinds) == ["all-gather", *["all-reduce"] * 3]
        largest = max(size for _, size in found[number]["steps"]["collectives"])
        assert largest <= SIZES["token_budget"] * MODEL["vocab_size"]


@pytest.mark.nightly
def test_nodes_of_different_numbers_of_devices(found):
    assert found["nodes"]["outputs"] == found["1"]["outputs"][0]
    assert found["nodes"]["compilations"] == [0, 0]


@pytest.mark.nightly
def test_a_part_is_whole_on_one_device_and_comes_from_any(found):
    for number in ("1", "2", "4", "8"):
        parts = found[number]["parts"]
        assert parts["equal"], number
        assert {tuple(devices) for devices in parts["devices"]} == {(0,)}, number
        assert parts["compilations"] == 0, number


@pytest.mark.nightly
def test_query_heads_apart_from_their_kv_heads_are_found():
    """The bug: queries are cut by copies first, which differs only if KV heads are copied."""
    outputs = on_mesh("llama", "copies first")
    assert outputs["4"] == outputs["1"] != outputs["8"]


# One device


def test_a_mesh_of_one_device(directory):
    model = load_model(directory)
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_model_len": 40, **SIZES}
    alone, meshed = Engine(model, **sizes), Engine(model, **sizes, mesh=tensor_parallel_mesh(1))
    for _ in range(2):
        assert complete(meshed, PROMPTS, 12, SAMPLED) == complete(alone, PROMPTS, 12, SAMPLED)
    runner = meshed._runner
    assert runner.model.mesh is not None
    assert all(isinstance(pool.sharding, NamedSharding) for pool in runner.arrays.keys)
    stats = meshed.stats()
    assert stats.compilations_after_warm_up == 0
    assert stats.attention_reason == alone.stats().attention_reason
    assert stats.num_devices == 1
    # New weights go where the old ones are.
    params = jax.tree.map(lambda leaf: -leaf, model.params)
    for engine in (alone, meshed):
        engine.reset_cache(params=params)
    assert complete(meshed, PROMPTS, 12) == complete(alone, PROMPTS, 12)
    assert meshed.stats().compilations_after_warm_up == 0
    assert_nothing_leaked(meshed)


def test_weights_that_lie_right_are_not_copied(directory):
    model = load_model(directory, mesh=tensor_parallel_mesh(1))
    again = shard_model(model, tensor_parallel_mesh(1))
    assert again.mesh == model.mesh
    for before, after in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True
    ):
        assert before.unsafe_buffer_pointer() == after.unsafe_buffer_pointer()


def test_tied_weights_stay_tied(tmp_path):
    make_tiny_checkpoint(tmp_path, "qwen3", overrides=MODEL)
    params = shard_model(load_model(tmp_path), tensor_parallel_mesh(1)).params
    assert params.lm_head.weight is params.embedding


@pytest.mark.parametrize("decode", [True, False])
def test_gpus_run_the_hopper_kernels_on_their_heads(tmp_path, decode):
    """Lowered for four H100, two of which hold each KV head; a program of XLA has none of these."""
    make_tiny_checkpoint(tmp_path, overrides={"head_dim": 128, "num_hidden_layers": 1})
    model = load_model(tmp_path, "bfloat16")
    axes = ("heads", "copies")
    mesh = AbstractMesh((2, 2), axes, (AxisType.Auto,) * 2, abstract_device=H100)
    row: Any = shaped((4,), "int32")
    tables: Any = shaped((4, 4), "int32")
    batch = Batch(row, row, row, tables, row, row, row, row)
    pools = (shaped((16, 2, 64, 128), "bfloat16"),)
    params = jax.tree.map(lambda leaf: shaped(leaf.shape, "bfloat16"), model.params)

    step = partial(forward, model.config, decode=decode, mesh=mesh)
    with use_abstract_mesh(mesh):
        traced = jax.jit(step).trace(params, batch, pools, pools)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 2  # writes and attends


# Who may be cut


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    devices=st.integers(1, 16),
    inner=st.integers(1, 4),
    vocab=st.integers(1, 64),
)
def test_each_device_has_the_kv_of_its_query_heads(config, kv_heads, group, devices, inner, vocab):
    config = replace(
        config,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=16 * inner,
        vocab_size=vocab,
    )
    fits = not (
        config.num_heads % devices
        or config.intermediate_size % devices
        or (kv_heads % devices and devices % kv_heads)
    )
    if not fits:
        with pytest.raises(TensorParallelError):
            split_devices(config, devices)
        return
    sizes = split_devices(config, devices)
    assert sizes[0] * sizes[1] == devices
    queries = places(sizes, SECOND_AXIS, config.num_heads)
    keys = places(sizes, KV_HEADS, kv_heads)
    for of_queries, of_keys in zip(queries, keys, strict=True):
        assert {head // group for head in of_queries} == set(of_keys)
        # A kernel takes the groups in order.
        first = of_keys[0]
        local = len(of_queries) // len(of_keys)
        assert [head // group - first for head in of_queries] == [
            place // local for place in range(len(of_queries))
        ]
    check_parts(config, sizes)


def check_parts(config: ModelConfig, sizes: tuple[int, int]) -> None:
    """Each device has an equal part of each tensor: the smallest that the mesh allows."""
    mesh = AbstractMesh(sizes, ("heads", "copies"), (AxisType.Auto,) * 2)
    devices = sizes[0] * sizes[1]
    of_words = devices if config.vocab_size % devices == 0 else 1
    words, queries, keys = config.vocab_size, 2 * config.num_heads, 2 * config.num_kv_heads
    for name, shape, parts in (
        ("embed_tokens.weight", (words, 4), of_words),
        ("lm_head.weight", (words, 4), of_words),
        ("q_proj.weight", (queries, 4), devices),
        ("q_proj.bias", (queries,), devices),
        ("k_proj.weight", (keys, 4), sizes[0]),
        ("v_proj.bias", (keys,), sizes[0]),
        ("o_proj.weight", (4, queries), devices),
        ("o_proj.bias", (4,), 1),
        ("gate_proj.weight", (config.intermediate_size, 4), devices),
        ("down_proj.weight", (4, config.intermediate_size), devices),
        ("norm.weight", (4,), 1),
    ):
        sharding = tensor_sharding(config, mesh, f"model.{name}")
        assert sharding is not None
        part = sharding.shard_shape(shape)  # refuses unequal parts
        assert math.prod(part) * parts == math.prod(shape), name


def places(sizes: tuple[int, int], spec: Any, heads: int) -> list[list[int]]:
    """Heads of each device, in the order of the devices of the mesh."""
    mesh = AbstractMesh(sizes, ("heads", "copies"), (AxisType.Auto,) * 2)
    part = NamedSharding(mesh, spec).shard_shape((1, heads, 1))[1]
    axes = spec[1] if isinstance(spec[1], tuple) else (spec[1],)
    found = []
    for place in np.ndindex(sizes):
        number = 0
        for axis in axes:
            index = ("heads", "copies").index(axis)
            number = number * sizes[index] + place[index]
        found.append(list(range(number * part, (number + 1) * part)))
    return found


@pytest.mark.parametrize(
    ("devices", "change", "message"),
    [
        (3, {}, "a mesh of 3 devices needs a multiple of 3, got num_heads 8"),
        (16, {}, "a mesh of 16 devices needs a multiple of 16, got num_heads 8"),
        (
            4,
            {"intermediate_size": 258},
            "a mesh of 4 devices needs a multiple of 4, got intermediate_size 258",
        ),
        (
            4,
            {"num_heads": 12, "num_kv_heads": 6},
            "a mesh of 4 devices needs a multiple or a divisor of 4, got num_kv_heads 6",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(config, devices, change, message):
    with pytest.raises(TensorParallelError, match=f"^{re.escape(message)}$") as refused:
        split_devices(replace(config, **change), devices)
    error = refused.value
    assert isinstance(error, ConfigError)
    assert error.num_devices == devices
    assert message.endswith(f"{error.name} {error.number}")


def test_a_mesh_of_several_axes_is_refused(config):
    message = "mesh must have one axis, of devices that share a model, got tp 2, other 4"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        model_mesh(config, Mesh(np.full((2, 4), jax.devices()[0]), ("tp", "other")))
    one = Mesh(np.full((1, 1), jax.devices()[0]), ("data", "tp"))
    assert dict(model_mesh(config, one).shape) == {"heads": 1, "copies": 1}


@pytest.mark.parametrize("number", [2, 9])
def test_too_few_devices_are_refused(number):
    message = f"a mesh of {number} devices needs as many in this process, got devices 1"
    with pytest.raises(TensorParallelError, match=f"^{message}$"):
        tensor_parallel_mesh(number)


def test_a_mesh_of_no_device_is_refused():
    with pytest.raises(CountError, match=r"^num_devices must be at least 1, got 0$"):
        tensor_parallel_mesh(0)
