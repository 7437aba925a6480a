"""Tiny random checkpoints, for tests and examples without a download."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from .checkpoint import tensor_shapes
from .config import Family, parse_config, parse_dtype

# At the usual 0.02, a random model repeats one token forever. At 0.2 its tokens vary, and the best
# logit exceeds the second by far more than float32 rounding, so tests can compare tokens.
_WEIGHT_STD = 0.2
_NORM_SPREAD = 0.3

_COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": _WEIGHT_STD,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "use_cache": True,
}

# Llama: a separate output matrix, and a context extended from 256 tokens, so that prompts of a few
# hundred tokens use all three frequency ranges.
# Qwen3: tied embeddings, and heads that together are wider than the residual stream.
_FAMILIES: dict[Family, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 16,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}


def make_tiny_checkpoint(
    directory: str | Path,
    family: Family = "llama",
    seed: int = 0,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Write a random model of under a million parameters: config.json and model.safetensors.

    The same arguments give the same bytes of every tensor, on every machine and numpy version.

    Args:
        directory: output directory; created if missing, and existing files are overwritten.
        family: "llama" (llama3 rope scaling) or "qwen3" (q/k-norm, tied embeddings).
        seed: seed of the weights.
        overrides: entries of config.json to replace; the value None removes an entry. The tensors
            have the dtype that ``torch_dtype`` names.

    Raises:
        UnsupportedModelError, CheckpointError: if no model can be loaded with the overrides.
    """
    directory = Path(directory)
    entries = {**_COMMON, **_FAMILIES[family], **(overrides or {})}
    entries = {key: value for key, value in entries.items() if value is not None}
    config = parse_config(entries, directory / "config.json")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    dtype = jnp.dtype(parse_dtype(entries, directory / "config.json") or "float32")
    tensors = {
        name: values.astype(dtype) for name, values in _random_tensors(tensor_shapes(config), seed)
    }
    # transformers rejects files without this metadata.
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    bits = np.random.PCG64(seed)
    for name, shape in shapes.items():
        # numpy keeps the raw stream of a bit generator stable, but not `normal` (NEP 19). A uniform
        # variable of the same standard deviation serves as well.
        raw = bits.random_raw(math.prod(shape))
        uniform = (raw >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0
        if name.endswith("norm.weight"):
            values = 1.0 + _NORM_SPREAD * uniform
        else:
            values = _WEIGHT_STD * math.sqrt(3.0) * uniform
        yield name, values.astype(np.float32).reshape(shape)
