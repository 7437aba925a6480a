"""`ModelConfig`: the config.json of a checkpoint, validated and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from .errors import CheckpointError, UnsupportedModelError
from .json_fields import as_count, as_object, as_positive, read_object
from .rope import RopeConfig, parse_rope

Family = Literal["llama", "qwen3"]

_ARCHITECTURES: dict[Family, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


DTYPES: Final = ("float32", "bfloat16", "float16")
"""Names of the dtypes in which a model can be stored and loaded."""


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and options of a decoder-only transformer; hashable, for static use in `jax.jit`.

    Attributes:
        family: "llama" or "qwen3".
        vocab_size, hidden_size, intermediate_size: widths of the logits, the residual stream, and
            the feed-forward layer.
        num_layers, num_heads, num_kv_heads, head_dim: shape of the attention. ``num_heads *
            head_dim`` may differ from ``hidden_size``.
        rms_norm_eps: epsilon of the norms.
        rope: rotary embedding.
        max_positions: longest sequence that the model supports, in tokens.
        tie_embeddings: whether the output matrix is the embedding matrix.
        attention_bias, mlp_bias: whether the projections have biases.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        eos_token_ids: tokens that end a text, for ``Request.stop_token_ids``.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Family, and a digest of all fields that affect KV: all but the end tokens."""
        config = replace(self, eos_token_ids=())
        return f"{self.family} {sha256(repr(config).encode()).hexdigest()}"

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of a token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def load_config(directory: str | Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face directory, and what else names end tokens.

    These are ``generation_config.json``, and ``tokenizer_config.json`` with ``tokenizer.json``, if
    present.

    Raises:
        CheckpointFileError: if config.json is missing, or a file is not a JSON object.
        UnsupportedModelError: for other architectures, activations or rope types, and for quantised
            weights.
        CheckpointError: if an entry is missing or invalid.
    """
    path = Path(directory) / "config.json"
    config = parse_config(read_object(path), path)
    end_tokens = config.eos_token_ids
    generation_path = path.with_name("generation_config.json")
    if generation_path.exists():
        # Chat models list more end tokens here than in config.json.
        end_tokens = _end_tokens(read_object(generation_path), generation_path) or end_tokens
    # Some have that of their base model there, and only the tokenizer has their own.
    others = [each for each in _tokenizers_end_tokens(path.parent) if each not in end_tokens]
    return replace(config, eos_token_ids=(*end_tokens, *others))


def parse_config(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """Convert the entries of a config.json to a `ModelConfig`.

    Args:
        config: the parsed file.
        path: the file, for error messages.

    Raises:
        UnsupportedModelError, CheckpointError: as `load_config`.
    """
    family = _family(config, path)
    _refuse_unsupported(config, path)
    num_heads = as_count(config, path, "num_attention_heads")
    num_kv_heads = as_count(config, path, "num_key_value_heads", num_heads)
    hidden_size = as_count(config, path, "hidden_size")
    default_dim = hidden_size // num_heads if family == "llama" else 128
    head_dim = as_count(config, path, "head_dim", default_dim)
    if num_heads % num_kv_heads != 0:
        raise CheckpointError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads "
            f"{num_kv_heads}, got {num_heads}"
        )
    if head_dim % 2 != 0:
        raise CheckpointError(f"{path}: head_dim must be even, got {head_dim}")
    return ModelConfig(
        family=family,
        vocab_size=as_count(config, path, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=as_count(config, path, "intermediate_size"),
        num_layers=as_count(config, path, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=as_positive(config, path, "rms_norm_eps", 1e-6),
        rope=parse_rope(config, path),
        max_positions=as_count(config, path, "max_position_embeddings"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=_end_tokens(config, path),
    )


def parse_dtype(config: Mapping[str, Any], path: Path) -> str | None:
    """Return the dtype of the weights that a config.json names, or None if it names none.

    Raises:
        UnsupportedModelError: for a dtype that is not in `DTYPES`.
    """
    for key in ("dtype", "torch_dtype"):  # the name in transformers 5, and before
        if (name := config.get(key)) is not None:
            if name not in DTYPES:
                raise UnsupportedModelError(path, key, name, " or ".join(DTYPES))
            return str(name)
    return None


def _family(config: Mapping[str, Any], path: Path) -> Family:
    model_type = config.get("model_type")
    for family, architecture in _ARCHITECTURES.items():
        if model_type == family:
            # Classifiers have the same model_type, but other heads.
            architectures = config.get("architectures") or [architecture]
            if not isinstance(architectures, list) or architecture not in architectures:
                raise UnsupportedModelError(path, "architectures", architectures, architecture)
            return family
    raise UnsupportedModelError(path, "model_type", model_type, " or ".join(_ARCHITECTURES))


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(path, "hidden_act", activation, "'silu'")
    if config.get("quantization_config") is not None:
        method = as_object(config, path, "quantization_config").get("quant_method")
        raise UnsupportedModelError(path, "quantization_config", method, "none")
    if config.get("use_sliding_window", False):
        raise UnsupportedModelError(path, "use_sliding_window", True, "False")


def _end_tokens(config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in tokens):
        raise CheckpointError(f"{path}: eos_token_id must be token ids, got {value!r}")
    return tuple(tokens)


def _tokenizers_end_tokens(directory: Path) -> list[int]:
    """Return the id of the tokenizer's end token, if its files have one."""
    config_path, path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (config_path.exists() and path.exists()):
        return []
    end = read_object(config_path).get("eos_token")
    name = end.get("content") if isinstance(end, dict) else end
    added = read_object(path).get("added_tokens") if isinstance(name, str) else None
    return [
        each["id"]
        for each in (added if isinstance(added, list) else ())
        if isinstance(each, dict) and each.get("content") == name and type(each.get("id")) is int
    ]
