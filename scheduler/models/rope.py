"""Rotary position embedding (RoPE): settings in config.json, frequencies, and rotation.

Source: transformers' `modeling_rope_utils.py` (the settings and the llama3 formula), and
Su et al., RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int32

from .errors import CheckpointError, UnsupportedModelError
from .json_fields import as_object, as_positive

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeConfig:
    """Settings of the rotary embedding.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: "default" (unscaled), "linear" (all frequencies divided by `factor`) or "llama3"
            (only the low frequencies divided by `factor`, with a smooth transition).
        factor: factor by which the context was extended ("linear", "llama3").
        low_freq_factor, high_freq_factor: bounds of the transition, in periods per original context
            ("llama3").
        original_max_positions: length of the context before extension, in tokens ("llama3").
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def parse_rope(config: Mapping[str, Any], path: Path) -> RopeConfig:
    """Read the rope settings of a config.json of transformers 5 or older.

    Args:
        config: the parsed file: `rope_parameters` (new), or `rope_theta` and `rope_scaling` (old).
        path: the file, for error messages.

    Raises:
        UnsupportedModelError: for another rope type, or partial rotation of the heads.
        CheckpointError: if a setting that the rope type needs is missing or invalid.
    """
    settings = as_object(config, path, "rope_parameters") or as_object(config, path, "rope_scaling")
    theta = as_positive(
        settings, path, "rope_theta", as_positive(config, path, "rope_theta", 10_000.0)
    )
    kind = settings.get("rope_type", settings.get("type", "default"))
    rotary_factor = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary_factor not in (None, 1.0):
        raise UnsupportedModelError(path, "partial_rotary_factor", rotary_factor, "1.0")

    def setting(key: str) -> float:
        if settings.get(key) is None:
            raise CheckpointError(f"{path}: rope type {kind!r} needs the setting {key!r}")
        return as_positive(settings, path, key, 1.0)

    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", setting("factor"))
    if kind == "llama3":
        factor, low, high = map(setting, ("factor", "low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise CheckpointError(
                f"{path}: low_freq_factor must be below high_freq_factor {high}, got {low}"
            )
        original = int(setting("original_max_position_embeddings"))
        return RopeConfig(theta, "llama3", factor, low, high, original)
    raise UnsupportedModelError(path, "rope type", kind, "default, linear or llama3")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """Return the angle per position of each pair of dimensions of a head.

    Returns:
        float32 `[head_dim // 2]`, in radians per token, highest frequency first.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        # `keep` is 0 below low_freq_factor periods per original context, and 1 from
        # high_freq_factor on: training covered those periods, so they are not scaled.
        periods = rope.original_max_positions * frequencies / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = np.clip((periods - low) / (high - low), 0.0, 1.0)
        frequencies = keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies.astype(np.float32)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int32[Array, " tokens"]
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """Return cosine and sine of each token's angles, float32 `[tokens, head_dim // 2]`."""
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate each pair (i, i + head_dim / 2) of every head by its token's angle, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
