from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from radixkv.kernels.backends import TargetDevice
from radixkv.scheduler.errors import ConfigError
from radixkv.scheduler.models import (
    DTYPES,
    CheckpointError,
    CheckpointFileError,
    MissingExtraError,
    TensorDtypeError,
    TensorMissingError,
    TensorShapeError,
    TensorUnexpectedError,
    UnsupportedModelError,
    checkpoint,
    load_model,
    load_tokenizer,
    make_tiny_checkpoint,
    model_dtype,
)
from radixkv.scheduler.models.weights_digest import weights_digest

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def tiny(tmp_path):
    make_tiny_checkpoint(tmp_path, "qwen3", 3)
    return tmp_path


def rewrite(directory, change):
    """Apply `change` to the dictionary of tensors and write it back."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def shard(directory):
    """Split the single file in two with an index, as transformers does."""
    single = directory / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    single.unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def assert_same_params(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_same_arguments_make_the_same_checkpoint(tmp_path):
    for folder, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_tiny_checkpoint(tmp_path / folder, "llama", seed)
    a, b, c = (load_file(tmp_path / folder / "model.safetensors") for folder in "abc")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not any(np.array_equal(a[name], c[name]) for name in a)
    assert sum(tensor.size for tensor in a.values()) < 1_000_000


def test_parameters_are_the_tensors_of_the_file(tiny):
    tensors = load_file(tiny / "model.safetensors")
    model = load_model(tiny)
    assert len(model.params.layers) == model.config.num_layers == 2
    layer = model.params.layers[1]
    np.testing.assert_array_equal(layer.q_proj.weight, tensors[Q_PROJ])
    np.testing.assert_array_equal(layer.q_norm, tensors["model.layers.1.self_attn.q_norm.weight"])
    assert layer.q_proj.bias is None
    num_values = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    tied = model.params.embedding.size
    assert num_values == sum(tensor.size for tensor in tensors.values()) + tied


def test_tied_embeddings_are_one_array(tiny, tmp_path):
    params = load_model(tiny).params
    assert params.lm_head.weight is params.embedding
    make_tiny_checkpoint(tmp_path / "llama")
    params = load_model(tmp_path / "llama").params
    assert not np.array_equal(params.lm_head.weight, params.embedding)


def test_tied_checkpoint_may_hold_the_output_matrix_and_old_rope_tensors(tiny):
    expected = load_model(tiny).params

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)

    rewrite(tiny, add)
    assert_same_params(load_model(tiny).params, expected)


def test_sharded_checkpoint_gives_the_same_parameters(tiny):
    expected = load_model(tiny).params
    shard(tiny)
    assert_same_params(load_model(tiny).params, expected)


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16])
def test_half_precision_checkpoint_loads_as_float32(tiny, stored):
    expected = jax.tree.map(
        lambda leaf: leaf.astype(stored).astype(jnp.float32), load_model(tiny).params
    )

    def convert(tensors):
        tensors.update({name: tensor.astype(stored) for name, tensor in tensors.items()})

    rewrite(tiny, convert)
    assert_same_params(load_model(tiny).params, expected)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that JAX's default device is a GPU."""
    device = TargetDevice("NVIDIA H200", "9.0", 132, "gpu")
    monkeypatch.setattr(checkpoint, "target_device", lambda: device)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("stored", DTYPES)
def test_auto_is_the_checkpoints_own_dtype_on_accelerators(tmp_path, gpu, key, stored):
    make_tiny_checkpoint(tmp_path, overrides={"torch_dtype": None, key: stored})
    assert model_dtype(tmp_path) == stored
    expected = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    model = load_model(tmp_path)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {stored}
    np.testing.assert_array_equal(model.params.embedding, expected)
    assert model_dtype(tmp_path, "float16") == "float16"


@pytest.mark.parametrize("stored", DTYPES)
def test_auto_is_float32_on_a_cpu(tmp_path, stored):
    make_tiny_checkpoint(tmp_path, overrides={"torch_dtype": stored})
    assert model_dtype(tmp_path) == "float32"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_model(tmp_path).params)} == {"float32"}


@pytest.mark.parametrize("stored", DTYPES)
def test_auto_reads_the_tensors_if_the_config_names_no_dtype(tiny, gpu, stored):
    def convert(tensors):
        tensors.update({name: tensor.astype(stored) for name, tensor in tensors.items()})

    rewrite(tiny, convert)
    path = tiny / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch_dtype": None}))
    assert model_dtype(tiny) == stored
    shard(tiny)
    assert model_dtype(tiny) == stored


def test_a_dtype_that_auto_cannot_use_is_refused(tiny, gpu):
    path = tiny / "config.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({**entries, "torch_dtype": "float64"}))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(tiny)
    assert str(caught.value) == (
        f"{path}: torch_dtype is 'float64', but only float32 or bfloat16 or float16 is supported"
    )
    del entries["torch_dtype"]
    path.write_text(json.dumps(entries))
    name = "model.embed_tokens.weight"
    rewrite(tiny, lambda tensors: tensors.update({name: np.zeros((1024, 128), np.int8)}))
    with pytest.raises(TensorDtypeError, match="has dtype I8, but only F32, F16 and BF16 are"):
        model_dtype(tiny)
    rewrite(tiny, lambda tensors: tensors.pop(name))
    with pytest.raises(TensorMissingError, match=f"no tensor '{name}'"):
        model_dtype(tiny)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [("int8", "'int8'"), (np.float64, "'float64'"), ("half a float", "'half a float'")],
)
def test_other_dtypes_are_refused(tiny, dtype, given):
    for function in (model_dtype, load_model):
        with pytest.raises(ConfigError) as caught:
            function(tiny, dtype)
        assert str(caught.value) == (
            f"dtype must be one of auto, float32, bfloat16, float16, got {given}"
        )


def test_bfloat16_is_kept_as_it_is(tiny):
    """What is computed with it is compared in `test_long_context`."""

    def convert(tensors):
        tensors.update({name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()})

    rewrite(tiny, convert)
    exact = load_model(tiny).params
    params = load_model(tiny, dtype=jnp.bfloat16).params
    for loaded, wide in zip(jax.tree.leaves(params), jax.tree.leaves(exact), strict=True):
        assert loaded.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
        np.testing.assert_array_equal(loaded.astype(jnp.float32), wide)


def test_a_single_file_comes_before_shards(tiny):
    """As in transformers: a model that was fine-tuned may lie over the shards of its base."""
    expected = load_model(tiny).params
    single = tiny / "model.safetensors"
    content = single.read_bytes()
    shard(tiny)
    for path in tiny.glob("model-*.safetensors"):
        save_file({name: each + 1 for name, each in load_file(path).items()}, path)
    single.write_bytes(content)
    jax.tree.map(np.testing.assert_array_equal, load_model(tiny).params, expected)


def test_missing_weights_are_refused(tiny):
    (tiny / "model.safetensors").unlink()
    with pytest.raises(CheckpointFileError) as caught:
        load_model(tiny)
    assert str(caught.value) == (
        f"{tiny}: neither model.safetensors nor model.safetensors.index.json"
    )


def test_missing_shard_is_refused(tiny):
    shard(tiny)
    lost = tiny / "model-00002-of-00002.safetensors"
    lost.unlink()
    with pytest.raises(CheckpointFileError) as caught:
        load_model(tiny)
    assert str(caught.value) == (
        f"{lost}: no such file, though model.safetensors.index.json names it"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "{",
            "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("[]", "expected a JSON object, got list"),
        ("{}", "no entry 'weight_map'"),
        ('{"weight_map": 3}', "weight_map must be an object, got 3"),
        ('{"weight_map": {"a": 3}}', "weight_map must name files in the same directory, got 3"),
        (
            '{"weight_map": {"a": null}}',
            "weight_map must name files in the same directory, got None",
        ),
        (
            '{"weight_map": {"a": "../a"}}',
            "weight_map must name files in the same directory, got '../a'",
        ),
        (
            '{"weight_map": {"a": "/a"}}',
            "weight_map must name files in the same directory, got '/a'",
        ),
        ('{"weight_map": {"a": ""}}', "weight_map must name files in the same directory, got ''"),
        (
            '{"weight_map": {"a": ".."}}',
            "weight_map must name files in the same directory, got '..'",
        ),
    ],
)
def test_broken_index_is_refused(tiny, content, problem):
    index = shard(tiny)
    index.write_text(content)
    with pytest.raises(CheckpointError) as caught:
        load_model(tiny)
    assert str(caught.value) == f"{index}: {problem}"


@pytest.mark.parametrize("num_layers", [3, 10**9, 10**30])
def test_more_layers_than_the_file_has_are_refused_at_the_first(tiny, num_layers):
    path = tiny / "config.json"
    config = json.loads(path.read_text())
    first = config["num_hidden_layers"]
    assert first < num_layers
    path.write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    with pytest.raises(TensorMissingError) as caught:
        load_model(tiny)
    assert str(caught.value) == (f"{tiny}: no tensor 'model.layers.{first}.input_layernorm.weight'")


def test_a_directory_in_place_of_weights_is_refused(tiny):
    shard(tiny)
    path = tiny / "model-00002-of-00002.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointFileError) as caught:
        load_model(tiny)
    assert str(caught.value).startswith(f"{path}: not a safetensors file: ")


def test_broken_weights_are_refused(tiny):
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointFileError) as caught:
        load_model(tiny)
    assert str(caught.value).startswith(f"{path}: not a safetensors file: ")


def test_missing_tensor_is_refused(tiny):
    rewrite(tiny, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(TensorMissingError) as caught:
        load_model(tiny)
    assert str(caught.value) == f"{tiny}: no tensor '{Q_PROJ}'"
    assert caught.value.name == Q_PROJ


def test_wrong_shape_is_refused(tiny):
    rewrite(tiny, lambda tensors: tensors.update({Q_PROJ: np.zeros((128, 128), np.float32)}))
    with pytest.raises(TensorShapeError) as caught:
        load_model(tiny)
    assert str(caught.value) == (
        f"{tiny / 'model.safetensors'}: tensor '{Q_PROJ}' has shape [128, 128], "
        "but config.json calls for [256, 128]"
    )
    assert caught.value.shape == (128, 128) and caught.value.expected == (256, 128)


def test_quantised_tensor_is_refused(tiny):
    rewrite(tiny, lambda tensors: tensors.update({Q_PROJ: np.zeros((256, 128), np.int8)}))
    with pytest.raises(TensorDtypeError) as caught:
        load_model(tiny)
    assert str(caught.value) == (
        f"{tiny / 'model.safetensors'}: tensor '{Q_PROJ}' has dtype I8, "
        "but only F32, F16 and BF16 are supported"
    )


def test_biases_that_the_configuration_does_not_know_are_refused(tiny):
    names = [f"model.layers.{layer}.self_attn.q_proj.bias" for layer in (0, 1)]
    rewrite(tiny, lambda tensors: tensors.update({n: np.zeros(256, np.float32) for n in names}))
    with pytest.raises(TensorUnexpectedError) as caught:
        load_model(tiny)
    assert str(caught.value) == (
        f"{tiny}: 2 tensors that config.json does not account for, the first is '{names[0]}'"
    )
    assert caught.value.names == tuple(names)


def test_tiny_refuses_overrides_that_cannot_be_loaded_and_writes_nothing(tmp_path):
    with pytest.raises(UnsupportedModelError, match="hidden_act is 'gelu'"):
        make_tiny_checkpoint(tmp_path / "x", overrides={"hidden_act": "gelu"})
    assert not (tmp_path / "x").exists()


def test_tokenizer_is_loaded_where_there_is_one(tiny):
    assert load_tokenizer(tiny) is None
    vocabulary = {"hello": 0, "world": 1}
    Tokenizer(models.WordLevel(vocabulary, unk_token="hello")).save(str(tiny / "tokenizer.json"))
    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    assert tokenizer.encode("world").ids == [1]


def test_tokenizer_without_its_library_names_the_extra(tiny, monkeypatch):
    (tiny / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError) as caught:
        load_tokenizer(tiny)
    assert str(caught.value) == (
        f"{tiny / 'tokenizer.json'}: reading it needs the library 'tokenizers': "
        "pip install 'radixkv[text]'"
    )
    assert caught.value.extra == "text"


def test_broken_tokenizer_is_refused(tiny):
    path = tiny / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointFileError) as caught:
        load_tokenizer(tiny)
    assert str(caught.value).startswith(f"{path}: not a tokenizer: ")


@pytest.mark.parametrize("name", ["model-{}", "{}", "shard_{}.of_3", "pytorch_model.{}"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_digest_is_of_every_shard_whatever_its_name(tmp_path, place, name):
    """The index of a checkpoint may name any files."""
    digests = set()
    for changed in (False, True):
        for number in range(3):
            content = b"changed" if changed and number == place else b"weights"
            (tmp_path / f"{name.format(number)}.safetensors").write_bytes(content)
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 2
