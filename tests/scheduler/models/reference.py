"""Llama and Qwen3 in float64 NumPy, written from their definition: the oracle of `forward`.

Angles alone are rounded to float32, as transformers rounds them: far from the start of a text, the
rounding of an angle is larger than that of all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixkv.scheduler.models import ModelConfig, RopeConfig
from radixkv.scheduler.models.transformer import LayerParams, Linear, Params

Float64 = npt.NDArray[np.float64]


def wide(array: object) -> Float64:
    """The numbers of an array of any dtype, exactly."""
    return np.asarray(array).astype(np.float64)


def logits_at(
    config: ModelConfig, params: Params, tokens: Sequence[int], positions: Sequence[int]
) -> Float64:
    """Return the logits `[len(positions), vocab]` after the tokens up to each position.

    The last layer attends at these positions alone, so that one layer may have a long text.
    """
    x = wide(params.embedding)[np.asarray(tokens)]
    everywhere = np.arange(len(tokens))
    for number, layer in enumerate(params.layers):
        is_last = number == len(params.layers) - 1
        x = _layer(config, layer, x, np.asarray(positions) if is_last else everywhere)
    return _norm(x, params.norm, config.rms_norm_eps) @ wide(params.lm_head.weight).T


def cos_and_sin(
    rope: RopeConfig, head_dim: int, positions: npt.NDArray[np.int64]
) -> tuple[Float64, Float64]:
    """Return cosine and sine `[positions, head_dim // 2]` of the angles, which are float32."""
    angles = np.outer(positions, frequencies(rope, head_dim))
    angles = angles.astype(np.float32).astype(np.float64)
    return np.cos(angles), np.sin(angles)


def frequencies(rope: RopeConfig, head_dim: int) -> Float64:
    """Return the radians per token `[head_dim // 2]`, which are float32."""
    exact = [_frequency(rope, 2 * pair / head_dim) for pair in range(head_dim // 2)]
    return np.asarray(exact, np.float32).astype(np.float64)


def _frequency(rope: RopeConfig, exponent: float) -> float:
    """Radians per token of a pair of dimensions, extended as the family says."""
    frequency = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "default":
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < rope.original_max_positions / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_max_positions / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def rotated(x: Float64, cos: Float64, sin: Float64) -> Float64:
    """Rotate each pair (i, i + head_dim / 2) of `[tokens, heads, head_dim]`, as complex numbers."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _norm(x: Float64, weight: object, eps: float) -> Float64:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * wide(weight)


def _linear(layer: Linear, x: Float64) -> Float64:
    bias = 0.0 if layer.bias is None else wide(layer.bias)
    return x @ wide(layer.weight).T + bias


def _layer(
    config: ModelConfig, layer: LayerParams, x: Float64, rows: npt.NDArray[np.int64]
) -> Float64:
    """The residual stream after one layer, at the positions `rows` alone."""
    h = _norm(x, layer.attention_norm, config.rms_norm_eps)
    q = _linear(layer.q_proj, h[rows]).reshape(len(rows), config.num_heads, -1)
    k = _linear(layer.k_proj, h).reshape(len(x), config.num_kv_heads, -1)
    v = _linear(layer.v_proj, h).reshape(len(x), config.num_kv_heads, -1)
    if config.qk_norm:
        q = _norm(q, layer.q_norm, config.rms_norm_eps)
        k = _norm(k, layer.k_norm, config.rms_norm_eps)
    q = rotated(q, *cos_and_sin(config.rope, config.head_dim, rows))
    k = rotated(k, *cos_and_sin(config.rope, config.head_dim, np.arange(len(x))))
    unseen = np.arange(len(x)) > rows[:, None]
    attended = np.zeros_like(q)
    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        logits = q[:, head] @ k[:, kv_head].T / math.sqrt(config.head_dim)
        logits[unseen] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        attended[:, head] = weights @ v[:, kv_head] / weights.sum(-1, keepdims=True)
    x = x[rows] + _linear(layer.o_proj, attended.reshape(len(rows), -1))
    h = _norm(x, layer.mlp_norm, config.rms_norm_eps)
    gate = _linear(layer.gate_proj, h)
    gated = gate / (1 + np.exp(-gate)) * _linear(layer.up_proj, h)
    return x + _linear(layer.down_proj, gated)
