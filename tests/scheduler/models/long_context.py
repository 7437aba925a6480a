"""A text of more than 32,768 tokens, and what a model of one layer says of it in one step.

Its KV depends on no attention, so the step writes all of it and attends at a few positions alone.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.scheduler.models import Batch, ModelConfig, RopeConfig, transformer
from radixkv.scheduler.models.transformer import LayerParams, Linear, Params

from . import reference

BLOCK_SIZE: Final = 64
EDGES: Final = (256, 4096, 32_768)
LENGTH: Final = EDGES[-1] + BLOCK_SIZE
POSITIONS: Final = (1, *(edge + d for edge in EDGES for d in (-1, 0, 1)), LENGTH - 1)
FAMILIES: Final = ("llama", "qwen3")


def make_config(family: Any) -> ModelConfig:
    """One layer, with the rotation of its family."""
    settings = {
        "llama": RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        "qwen3": RopeConfig(1_000_000.0),
    }
    return ModelConfig(
        family, 64, 32, 32, 1, 2, 1, 16, 1e-6, settings[family], LENGTH, qk_norm=family == "qwen3"
    )


@functools.cache
def problem(family: str) -> tuple[ModelConfig, Params, list[int], np.ndarray]:
    """Config, parameters that bfloat16 holds exactly, the text, and the logits in float64.

    The logits of attention have a standard deviation of about 3, so that a query sees a few
    tokens of all, and an angle that is off changes them.
    """
    config = make_config(family)
    rng = np.random.default_rng(5)

    def exact(*shape: int, std: float) -> Any:
        return jnp.asarray(rng.standard_normal(shape) * std, jnp.bfloat16).astype(jnp.float32)

    def matrix(out: int, into: int, gain: float = 1.0) -> Linear:
        return Linear(exact(out, into, std=gain * into**-0.5))

    gain = 3**0.5
    normed = config.qk_norm
    norm = exact(16, std=0.1) + jnp.bfloat16(gain).astype(jnp.float32) if normed else None
    norm = None if norm is None else norm.astype(jnp.bfloat16).astype(jnp.float32)
    scale = 1.0 if normed else gain
    layer = LayerParams(
        jnp.ones(32), matrix(32, 32, scale), matrix(16, 32, scale), matrix(16, 32),
        matrix(32, 32, 2.0), norm, norm, jnp.ones(32), matrix(32, 32), matrix(32, 32),
        matrix(32, 32),
    )  # fmt: skip
    params = Params(exact(64, 32, std=1.0), (layer,), jnp.ones(32), matrix(64, 32))
    tokens = rng.integers(0, 64, LENGTH).tolist()
    return config, params, tokens, reference.logits_at(config, params, tokens, POSITIONS)


def step(family: str, dtype: str, module: ModuleType = transformer) -> np.ndarray:
    """Logits at `POSITIONS`, by one step over the whole text; each row is two tokens of it."""
    config, params, tokens, _ = problem(family)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    blocks = np.random.default_rng(0).permutation(LENGTH // BLOCK_SIZE) + 1
    everywhere = np.arange(LENGTH)
    last = np.array(POSITIONS)
    batch = Batch(
        np.array(tokens), everywhere,
        blocks[everywhere // BLOCK_SIZE] * BLOCK_SIZE + everywhere % BLOCK_SIZE,
        np.tile(blocks, (len(last), 1)), last + 1, np.full(len(last), 2), last - 1, last,
    )  # fmt: skip
    batch = Batch(*(jnp.asarray(each, jnp.int32) for each in batch))
    pools = (jnp.full((len(blocks) + 1, 1, BLOCK_SIZE, 16), 7.0, dtype),)
    logits, *pools = jax.jit(module.forward, static_argnums=0)(config, params, batch, pools, pools)
    assert logits.dtype == jnp.float32 and all(each.dtype == dtype for (each,) in pools)
    return np.asarray(logits, np.float64)


def error(family: str, dtype: str, module: ModuleType = transformer) -> float:
    """The largest relative error of the logits of a position."""
    expected = problem(family)[-1]
    difference = np.linalg.norm(step(family, dtype, module) - expected, axis=-1)
    return float((difference / np.linalg.norm(expected, axis=-1)).max())
