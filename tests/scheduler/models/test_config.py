from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import RadixKVError
from radixkv.scheduler.models import (
    CheckpointError,
    CheckpointFileError,
    RopeConfig,
    UnsupportedModelError,
    load_config,
    make_tiny_checkpoint,
)
from radixkv.scheduler.models.config import parse_config, parse_dtype
from radixkv.scheduler.models.rope import inverse_frequencies

from ...tokenizers import SPECIAL, add_tokenizer

PATH = Path("config.json")
# What Qwen3-0.6B says, as published.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_qwen3_entries_are_read():
    config = parse_config(QWEN3, PATH)
    assert config.family == "qwen3" and config.qk_norm and config.tie_embeddings
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 8, 128)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (28, 1024, 151936)
    assert config.rope == RopeConfig(1_000_000.0)
    assert config.max_positions == 40960
    assert config.eos_token_ids == (151645,)
    assert not config.attention_bias and not config.mlp_bias


@pytest.mark.parametrize(
    "entry", ["architectures", "partial_rotary_factor", "rope_scaling", "rope_theta"]
)
def test_a_null_is_a_default(entry):
    entries = {key: value for key, value in LLAMA.items() if key != entry}
    assert parse_config({**entries, entry: None}, PATH) == parse_config(entries, PATH)


def test_llama_entries_that_are_left_out_take_their_defaults():
    config = parse_config(LLAMA, PATH)
    assert config.family == "llama" and not config.qk_norm and not config.tie_embeddings
    assert (config.num_kv_heads, config.head_dim) == (32, 64)
    assert config.rope == RopeConfig(10_000.0)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_the_projections_have_the_biases_of_their_family(attention_bias, mlp_bias):
    """The feed-forward layers of Qwen3 have none, whatever the file says, as in transformers."""
    entries = {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    llama, qwen3 = (parse_config({**base, **entries}, PATH) for base in (LLAMA, QWEN3))
    assert (llama.attention_bias, llama.mlp_bias) == (attention_bias, mlp_bias)
    assert (qwen3.attention_bias, qwen3.mlp_bias) == (attention_bias, False)


@pytest.mark.parametrize("value", [0, 1, 2, [], [0], [0, 1], [2, 0]])
def test_the_end_tokens_are_those_of_the_checkpoint(value, tmp_path):
    """Zero is a token, too, in both files; only an empty list gives none."""
    given = (value,) if isinstance(value, int) else tuple(value)
    assert parse_config({**LLAMA, "eos_token_id": value}, PATH).eos_token_ids == given
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_config(tmp_path).eos_token_ids == (given or (5,))


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_parameters": {"rope_theta": 500_000.0, **LLAMA3_ROPE}},
    ],
)
def test_old_and_new_spelling_of_rope_mean_the_same(entries):
    config = parse_config({**LLAMA, **entries}, PATH)
    assert config.rope == RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"rope_type": "default"}, RopeConfig(500_000.0)),
        ({"type": "linear", "factor": 4.0}, RopeConfig(500_000.0, "linear", 4.0)),
        (  # both, of which the newer one counts
            {"type": "default", "rope_type": "linear", "factor": 4.0},
            RopeConfig(500_000.0, "linear", 4.0),
        ),
        (LLAMA3_ROPE, RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)),
    ],
)
def test_every_kind_of_rope_has_the_theta_of_the_config(scaling, rope):
    assert parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}, PATH).rope == rope


def test_the_newer_settings_of_rope_come_before_the_older_ones():
    older = {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}
    assert parse_config({**LLAMA, **older, **newer}, PATH).rope == RopeConfig(2e4, "linear", 8.0)
    newer["rope_parameters"]["rope_theta"] = 5e5
    assert parse_config({**LLAMA, **older, **newer}, PATH).rope == RopeConfig(5e5, "linear", 8.0)


def test_linear_rope_divides_every_frequency():
    plain = inverse_frequencies(RopeConfig(10_000.0), 64)
    scaled = inverse_frequencies(RopeConfig(10_000.0, "linear", 4.0), 64)
    assert plain.dtype == np.float32 and plain.shape == (32,) and plain[0] == 1.0
    np.testing.assert_allclose(scaled, plain / 4.0, rtol=1e-6)


def test_llama3_rope_keeps_high_frequencies_and_divides_low_ones():
    rope = RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    ratio = inverse_frequencies(RopeConfig(500_000.0), 128) / inverse_frequencies(rope, 128)
    periods = 8192 * inverse_frequencies(RopeConfig(500_000.0), 128) / (2 * np.pi)
    np.testing.assert_allclose(ratio[periods > 4.0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[periods < 1.0], 32.0, rtol=1e-6)
    between = ratio[(periods > 1.0) & (periods < 4.0)]
    assert len(between) > 0 and ((between > 1.0) & (between < 32.0)).all()
    assert (np.diff(between) > 0).all()


def test_generation_config_gives_the_end_tokens(tmp_path):
    make_tiny_checkpoint(tmp_path)
    assert load_config(tmp_path).eos_token_ids == (1,)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert load_config(tmp_path).eos_token_ids == (1, 7)
    path.write_text(json.dumps({"do_sample": True}))
    assert load_config(tmp_path).eos_token_ids == (1,)


@given(
    of_config=st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), unique=True),
    of_generation=st.none() | st.integers(0, 3),
    number=st.integers(0, 3),
    is_object=st.booleans(),
)
def test_the_tokenizers_end_token_is_one_more(
    tmp_path_factory, of_config, of_generation, number, is_object
):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": of_config}))
    if of_generation is not None:
        entries = {"eos_token_id": of_generation}
        (directory / "generation_config.json").write_text(json.dumps(entries))
    others = load_config(directory).eos_token_ids
    name = SPECIAL[number]
    add_tokenizer(directory, eos_token={"content": name} if is_object else name)
    expected = others if number in others else (*others, number)
    assert load_config(directory).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [
        ({}, {"added_tokens": [{"content": "</s>", "id": 5}]}),
        ({"eos_token": 5}, {"added_tokens": [{"content": 5, "id": 5}]}),
        ({"eos_token": {"id": 5}}, {"added_tokens": [{"content": None, "id": 5}]}),
        ({"eos_token": "</s>"}, {}),
        ({"eos_token": "</s>"}, {"added_tokens": None}),
        ({"eos_token": "</s>"}, {"added_tokens": ["</s>", {"content": "<s>", "id": 5}]}),
        ({"eos_token": "</s>"}, {"added_tokens": [{"content": "</s>"}]}),
        ({"eos_token": "</s>"}, {"added_tokens": [{"content": "</s>", "id": True}]}),
        (None, {"added_tokens": [{"content": "</s>", "id": 5}]}),
        ({"eos_token": "</s>"}, None),
    ],
)
def test_a_tokenizer_may_have_no_end_token(tmp_path, config, tokenizer):
    make_tiny_checkpoint(tmp_path)
    for name, entries in (("tokenizer_config.json", config), ("tokenizer.json", tokenizer)):
        if entries is not None:
            (tmp_path / name).write_text(json.dumps(entries))
    assert load_config(tmp_path).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            {"model_type": "gpt2"},
            "config.json: model_type is 'gpt2', but only llama or qwen3 is supported",
        ),
        (
            {"model_type": None},
            "config.json: model_type is None, but only llama or qwen3 is supported",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "config.json: architectures is ['LlamaForSequenceClassification'], "
            "but only LlamaForCausalLM is supported",
        ),
        (
            {"hidden_act": "gelu"},
            "config.json: hidden_act is 'gelu', but only 'silu' is supported",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "config.json: quantization_config is 'fp8', but only none is supported",
        ),
        (
            {"use_sliding_window": True},
            "config.json: use_sliding_window is True, but only False is supported",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "config.json: rope type is 'yarn', but only default, linear or llama3 is supported",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "config.json: rope type is 'dynamic', but only default, linear or llama3 is supported",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "config.json: partial_rotary_factor is 0.5, but only 1.0 is supported",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "config.json: partial_rotary_factor is 0.25, but only 1.0 is supported",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.75},
            "config.json: partial_rotary_factor is 0.75, but only 1.0 is supported",
        ),
    ],
)
def test_unsupported_models_are_refused(entries, text):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config({**LLAMA, **entries}, PATH)
    assert str(caught.value) == text
    assert isinstance(caught.value, RadixKVError)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"hidden_size": None}, "config.json: no entry 'hidden_size'"),
        ({"max_position_embeddings": None}, "config.json: no entry 'max_position_embeddings'"),
        (
            {"vocab_size": 0},
            "config.json: vocab_size must be an integer of at least 1, got 0",
        ),
        (
            {"num_hidden_layers": "16"},
            "config.json: num_hidden_layers must be an integer of at least 1, got '16'",
        ),
        (
            {"num_key_value_heads": 5},
            "config.json: num_attention_heads must be a multiple of num_key_value_heads 5, got 32",
        ),
        ({"head_dim": 63}, "config.json: head_dim must be even, got 63"),
        (
            {"eos_token_id": "</s>"},
            "config.json: eos_token_id must be token ids, got '</s>'",
        ),
        (
            {"eos_token_id": [1, True]},
            "config.json: eos_token_id must be token ids, got [1, True]",
        ),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "config.json: rope type 'linear' needs the setting 'factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": None}},
            "config.json: rope type 'linear' needs the setting 'factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "config.json: rope type 'llama3' needs the setting 'low_freq_factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
            "config.json: factor must be a number above 0, got 'x'",
        ),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4.0}},
            "config.json: low_freq_factor must be below high_freq_factor 4.0, got 4.0",
        ),
        ({"rope_parameters": [1]}, "config.json: rope_parameters must be an object, got [1]"),
        (
            {"rms_norm_eps": float("inf")},
            "config.json: rms_norm_eps must be a number above 0, got inf",
        ),
    ],
)
def test_invalid_entries_are_refused(entries, text):
    with pytest.raises(CheckpointError) as caught:
        parse_config({**LLAMA, **entries}, PATH)
    assert str(caught.value) == text


ODD_VALUES = [None, "x", -1, 0, 1.5, True, 10**400, float("nan"), [], [None], {}, {"a": 1}]


@pytest.mark.parametrize("value", ODD_VALUES, ids=[repr(value)[:8] for value in ODD_VALUES])
def test_an_entry_of_any_kind_is_taken_or_refused_by_type(value):
    for key in (*LLAMA, "architectures", "quantization_config", "rope_parameters", "rope_theta"):
        try:
            config = parse_config({**LLAMA, key: value}, PATH)
        except CheckpointError as error:
            assert str(error).startswith("config.json: ")
        else:
            hash(config)


def test_missing_and_broken_files_are_refused(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointFileError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == f"{path}: no such file"
    assert caught.value.path == path
    path.write_text("[1]")
    with pytest.raises(CheckpointFileError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == f"{path}: expected a JSON object, got list"
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointFileError) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{path}: not JSON: ")
    path.write_text("{")
    with pytest.raises(CheckpointFileError) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{path}: not JSON: ")


def test_files_that_cannot_be_read_are_refused(tmp_path):
    make_tiny_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(CheckpointFileError) as caught:
        load_config(tmp_path / "config.json")
    path = tmp_path / "config.json" / "config.json"
    assert str(caught.value) == f"{path}: cannot be read: [Errno 20] Not a directory: '{path}'"
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / name
        path.unlink(missing_ok=True)
        path.mkdir()
        with pytest.raises(CheckpointFileError) as caught:
            load_config(tmp_path)
        assert str(caught.value) == f"{path}: cannot be read: [Errno 21] Is a directory: '{path}'"
        path.rmdir()
        path.write_text('{"eos_token": "</s>"}')
    assert load_config(tmp_path).eos_token_ids == (1,)


COUNTS = [
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
]


@pytest.mark.parametrize("value", [True, 0, -1, 2.0, "2", [2]], ids=repr)
@pytest.mark.parametrize("key", COUNTS)
def test_what_is_no_count_is_refused(key, value):
    text = f"config.json: {key} must be an integer of at least 1, got {value!r}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(text)}$"):
        parse_config({**QWEN3, key: value}, PATH)


@pytest.mark.parametrize("value", [True, 0, -1, float("inf"), float("nan"), "2", [2]], ids=repr)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_what_is_no_positive_number_is_refused(key, value):
    text = f"config.json: {key} must be a number above 0, got {value!r}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(text)}$"):
        parse_config({**QWEN3, key: value}, PATH)


def test_heads_without_a_size_have_that_of_their_family():
    entries = {"hidden_size": 1024, "num_attention_heads": 16}
    assert parse_config({**LLAMA, **entries}, PATH).head_dim == 64
    assert parse_config({**QWEN3, **entries, "head_dim": None}, PATH).head_dim == 128


def test_the_name_is_of_all_that_affects_kv():
    config = parse_config(QWEN3, PATH)
    names = {config.name}
    for field in fields(config):
        value = getattr(config, field.name)
        others = {"family": "llama", "rope": RopeConfig(2.0), "eos_token_ids": (1, 2)}
        if field.name not in others:
            others[field.name] = not value if isinstance(value, bool) else value + 1
        names.add(replace(config, **{field.name: others[field.name]}).name)
    assert len(names) == len(fields(config)), "all but the end tokens change it"


def test_the_dtype_has_its_newer_name_if_there_are_two():
    assert parse_dtype({"torch_dtype": "float32"}, PATH) == "float32"
    assert parse_dtype({"torch_dtype": "float32", "dtype": "bfloat16"}, PATH) == "bfloat16"
    assert parse_dtype({}, PATH) is None
