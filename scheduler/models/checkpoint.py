"""Loads a Hugging Face checkpoint: model parameters from *.safetensors, and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from ...kernels.backends import target_device
from ...kvcache.copies.block_arrays import put_of
from ..errors import ConfigError
from .config import DTYPES, ModelConfig, load_config, parse_dtype
from .errors import (
    CheckpointFileError,
    MissingExtraError,
    TensorDtypeError,
    TensorMissingError,
    TensorShapeError,
    TensorUnexpectedError,
)
from .json_fields import as_object, read_object
from .tensor_parallel import model_mesh, tensor_sharding
from .transformer import LayerParams, Linear, Params

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"

_STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""`DTYPES`, by their names in safetensors."""


@dataclass(frozen=True)
class Model:
    """A loaded model: the first two arguments of ``forward``.

    Attributes:
        config: shapes and options.
        params: parameters.
        mesh: devices that share the model, as `shard_model` arranges them; None for JAX's default
            device.
    """

    config: ModelConfig
    params: Params
    mesh: Mesh | None = None


def load_model(
    directory: str | Path, dtype: DTypeLike = "auto", *, mesh: Mesh | None = None
) -> Model:
    """Load a Llama or Qwen3 model from a Hugging Face directory.

    Tensors are read one by one, converted to ``dtype`` on the host, and copied to the default
    device, so that the host holds one tensor at a time. With a mesh, each device gets its part.

    Args:
        directory: holds config.json, and model.safetensors or shards with
            model.safetensors.index.json, in float32, float16 or bfloat16.
        dtype: dtype of the parameters, of the computation and of the KV; see `model_dtype`.
        mesh: devices that share the model; see `shard_model`.

    Raises:
        TensorParallelError: if the model cannot be cut for these devices; nothing is read.
        CheckpointError: see ``radixkv.scheduler.models.errors``. All names and shapes are checked
            before the first tensor is read.
        ConfigError: for another dtype.
    """
    directory = Path(directory)
    config = load_config(directory)
    dtype = model_dtype(directory, dtype)
    mesh = None if mesh is None else model_mesh(config, mesh)
    with ExitStack() as stack:
        tensors = _open_tensors(directory, stack)
        _check_tensors(directory, config, tensors)

        def read(name: str) -> jax.Array:
            return tensors[name].read(dtype, tensor_sharding(config, mesh, name))

        return Model(config, build_params(config, read), mesh)


def shard_model(model: Model, mesh: Mesh) -> Model:
    """Return a model whose devices share it: each has a part of the heads and of the matrices.

    To load a model that is too large for one device, give the mesh to `load_model`.

    Args:
        model: from `load_model`.
        mesh: mesh with one axis, such as ``jax.make_mesh((4,), ("tp",))``. If there are more
            devices than KV heads, several devices hold the same KV.

    Raises:
        ConfigError: for a mesh with several axes.
        TensorParallelError: if heads or the feed-forward layer cannot be cut into equal parts.
    """
    mesh = model_mesh(model.config, mesh)
    return Model(model.config, shard_params(model.config, model.params, mesh), mesh)


def shard_params(config: ModelConfig, params: Params, mesh: Mesh | None) -> Params:
    """Return parameters on the mesh of their model; what lies there already is not copied."""
    if mesh is None:
        return params
    shardings = build_params(config, partial(tensor_sharding, config, mesh))
    placed: dict[int, jax.Array] = {}  # tied ones once

    def place(array: jax.Array, sharding: NamedSharding) -> jax.Array:
        if id(array) not in placed:
            is_placed = getattr(array, "sharding", None) == sharding
            placed[id(array)] = array if is_placed else put_of(sharding)(array, sharding)
        return placed[id(array)]

    result: Params = jax.tree.map(place, params, shardings)
    return result


def model_dtype(directory: str | Path, dtype: DTypeLike = "auto") -> np.dtype[Any]:
    """Return the dtype in which `load_model` loads a checkpoint.

    Args:
        directory: as for `load_model`.
        dtype: float32, bfloat16, float16, or "auto": float32 if JAX's default device is a CPU,
            otherwise the checkpoint's own dtype. That is ``dtype`` or ``torch_dtype`` in
            config.json, as in transformers, or else the dtype of the stored embedding.

    Raises:
        ConfigError: for another dtype.
        CheckpointError: if the checkpoint's own dtype is another, or cannot be read.
    """
    if isinstance(dtype, str) and dtype == "auto":
        is_cpu = target_device().platform == "cpu"
        return jnp.dtype("float32" if is_cpu else _own_dtype(Path(directory)))
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        given = dtype if found is None else found.name
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {given!r}")
    return found


def _own_dtype(directory: Path) -> str:
    path = directory / "config.json"
    if (named := parse_dtype(read_object(path), path)) is not None:
        return named
    name = "model.embed_tokens.weight"
    with ExitStack() as stack:
        tensors = _open_tensors(directory, stack)
        if name not in tensors:
            raise TensorMissingError(directory, name)
        stored = tensors[name].file.get_slice(name).get_dtype()
        if stored not in _STORED_DTYPES:
            raise TensorDtypeError(tensors[name].path, name, stored)
        return _STORED_DTYPES[stored]


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """Load ``tokenizer.json`` of a Hugging Face directory; return None if there is no such file.

    Raises:
        MissingExtraError: if the file exists, but the library ``tokenizers`` is not installed.
        CheckpointFileError: if the file is not a tokenizer.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError(path, "tokenizers", "text") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception if it cannot parse
        raise CheckpointFileError(path, f"not a tokenizer: {error}") from error


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a checkpoint, in order."""
    return dict(_each_tensor(config))


def _each_tensor(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    def linear(
        name: str, out_width: int, in_width: int, bias: bool
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out_width, in_width)
        if bias:
            yield f"{name}.bias", (out_width,)

    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield from linear(f"{layer}.self_attn.q_proj", q_width, hidden, config.attention_bias)
        yield from linear(f"{layer}.self_attn.k_proj", kv_width, hidden, config.attention_bias)
        yield from linear(f"{layer}.self_attn.v_proj", kv_width, hidden, config.attention_bias)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, q_width, config.attention_bias)
        if config.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield from linear(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        yield from linear(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        yield from linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


@dataclass(frozen=True)
class _Tensor:
    """A tensor in an open file, not read yet."""

    path: Path
    name: str
    file: Any  # safetensors' `safe_open` has no public type

    def read(self, dtype: DTypeLike, sharding: NamedSharding | None) -> jax.Array:
        values: np.ndarray = self.file.get_tensor(self.name)
        array: jax.Array = put_of(sharding)(values.astype(dtype), sharding)
        return array


def _open_tensors(directory: Path, stack: ExitStack) -> dict[str, _Tensor]:
    """Open the single file or every shard; `stack` closes the handles."""
    index_path = directory / _INDEX_FILE
    if (directory / _SINGLE_FILE).exists():
        paths = [directory / _SINGLE_FILE]
    elif index_path.exists():
        paths = [directory / name for name in _shard_names(index_path)]
    else:
        raise CheckpointFileError(directory, f"neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    tensors: dict[str, _Tensor] = {}
    for path in paths:
        try:
            # "numpy" reads bfloat16 as well, because jax registers that dtype with numpy.
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except FileNotFoundError:
            raise CheckpointFileError(
                path, f"no such file, though {_INDEX_FILE} names it"
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointFileError(path, f"not a safetensors file: {error}") from error
        names = file.keys()  # the handle itself is not iterable
        tensors.update({name: _Tensor(path, name, file) for name in names})
    return tensors


def _shard_names(index_path: Path) -> list[str]:
    names = as_object(read_object(index_path), index_path, "weight_map").values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            problem = f"weight_map must name files in the same directory, got {name!r}"
            raise CheckpointFileError(index_path, problem)
    if not names:
        raise CheckpointFileError(index_path, "no entry 'weight_map'")
    return sorted(set(names))


def _check_tensors(directory: Path, config: ModelConfig, tensors: Mapping[str, _Tensor]) -> None:
    expected = set()
    for name, shape in _each_tensor(config):  # one by one: the file may name any number of layers
        if name not in tensors:
            raise TensorMissingError(directory, name)
        expected.add(name)
        tensor = tensors[name]
        header = tensor.file.get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise TensorShapeError(tensor.path, name, header.get_shape(), shape)
        if header.get_dtype() not in _STORED_DTYPES:
            raise TensorDtypeError(tensor.path, name, header.get_dtype())
    unexpected = [name for name in tensors if name not in expected and not _is_redundant(name)]
    if unexpected:
        raise TensorUnexpectedError(directory, sorted(unexpected))


def _is_redundant(name: str) -> bool:
    # Old checkpoints store the rope frequencies, and some store a tied output matrix twice.
    return name.endswith(".rotary_emb.inv_freq") or name == "lm_head.weight"


def build_params(config: ModelConfig, read: Callable[[str], Any]) -> Params:
    """Make the parameters of the tensors that `read` returns, by the names of `tensor_shapes`."""
    names = tensor_shapes(config)

    def linear(name: str) -> Linear:
        bias = read(f"{name}.bias") if f"{name}.bias" in names else None
        return Linear(read(f"{name}.weight"), bias)

    def layer(name: str) -> LayerParams:
        return LayerParams(
            attention_norm=read(f"{name}.input_layernorm.weight"),
            q_proj=linear(f"{name}.self_attn.q_proj"),
            k_proj=linear(f"{name}.self_attn.k_proj"),
            v_proj=linear(f"{name}.self_attn.v_proj"),
            o_proj=linear(f"{name}.self_attn.o_proj"),
            q_norm=read(f"{name}.self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=read(f"{name}.self_attn.k_norm.weight") if config.qk_norm else None,
            mlp_norm=read(f"{name}.post_attention_layernorm.weight"),
            gate_proj=linear(f"{name}.mlp.gate_proj"),
            up_proj=linear(f"{name}.mlp.up_proj"),
            down_proj=linear(f"{name}.mlp.down_proj"),
        )

    embedding = read("model.embed_tokens.weight")
    return Params(
        embedding=embedding,
        layers=tuple(layer(f"model.layers.{index}") for index in range(config.num_layers)),
        norm=read("model.norm.weight"),
        lm_head=Linear(embedding) if config.tie_embeddings else linear("lm_head"),
    )
