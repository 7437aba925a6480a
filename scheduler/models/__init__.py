"""Llama and Qwen3 over a paged KV cache, loaded from a Hugging Face directory.

`transformer.py` is the model, as plain functions over arrays and `radixkv.kernels`; it is small
enough to copy. `checkpoint.py` loads its parameters, and `tiny.py` makes checkpoints for tests.
"""

from .checkpoint import Model, load_model, load_tokenizer, model_dtype, shard_model
from .config import DTYPES, ModelConfig, load_config
from .errors import (
    CheckpointError,
    CheckpointFileError,
    MissingExtraError,
    TensorDtypeError,
    TensorMissingError,
    TensorShapeError,
    TensorUnexpectedError,
    UnsupportedModelError,
)
from .rope import RopeConfig
from .tensor_parallel import TensorParallelError, tensor_parallel_mesh
from .tiny import make_tiny_checkpoint
from .transformer import Batch, LayerParams, Linear, Params, forward

__all__ = [
    "DTYPES",
    "Batch",
    "CheckpointError",
    "CheckpointFileError",
    "LayerParams",
    "Linear",
    "MissingExtraError",
    "Model",
    "ModelConfig",
    "Params",
    "RopeConfig",
    "TensorDtypeError",
    "TensorMissingError",
    "TensorParallelError",
    "TensorShapeError",
    "TensorUnexpectedError",
    "UnsupportedModelError",
    "forward",
    "load_config",
    "load_model",
    "load_tokenizer",
    "make_tiny_checkpoint",
    "model_dtype",
    "shard_model",
    "tensor_parallel_mesh",
]
