"""The Llama and Qwen3 forward pass over a paged KV cache, as plain functions.

A step computes T tokens: the chunks of up to B requests, concatenated. A row is the chunk of one
request::

    tokens      [ 17 | 4 9 2 6 | 31 8 5 | 0 0 0 0 ]     T = 12: three rows, the rest is padding
    positions   [ 40 | 0 1 2 3 | 16 17 18 | 0 0 0 0 ]   position in the sequence of the request
    slots       [ 88 | 32 33 34 35 | -1 49 50 | -1 ... ] where to write KV: block * block_size +
                                                        offset; negative: do not write (padding, or
                                                        a shared block that already holds it)
    q_starts    [ 0, 1, 5, 0 ]    q_lengths  [ 1, 4, 3, 0 ]     B = 4: the last row is padding
    kv_lengths  [ 41, 4, 19, 0 ]  logit_rows [ 0, 4, 7, 0 ]     index in tokens of each last token

Each layer writes its KV before attention, so a chunk reads its own tokens from the cache. How a
prompt is split into chunks does not change the result.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ...kernels import kv_write, paged_decode, paged_extend
from ...kernels.backends import target_device
from .config import ModelConfig
from .rope import rope_tables, rotate
from .tensor_parallel import KV_HEADS, SECOND_AXIS, WHOLE, ModelMesh, by_second_axis, on_all

Pool = Float[Array, "blocks kv_heads block_size head_dim"]
Pools = tuple[Pool, ...]
Rope = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]


class Batch(NamedTuple):
    """The tokens of one step and the places of their KV; see the diagram of the module.

    Attributes:
        tokens: ``[T]`` token ids.
        positions: ``[T]`` position of each token in its request.
        slots: ``[T]`` ``block * block_size + offset`` of its KV; negative writes nothing.
        block_tables: ``[B, P]`` block ids of each row; entries past its length are not read.
        kv_lengths: ``[B]`` tokens of the row after this step, including the chunk; 0 = padding row.
        q_lengths: ``[B]`` tokens of the row in this step.
        q_starts: ``[B]`` index in ``tokens`` of the first token of the row.
        logit_rows: ``[B]`` index in ``tokens`` of the token whose logits are returned.

    All are int32.
    """

    tokens: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    slots: Int32[Array, " tokens"]
    block_tables: Int32[Array, "rows width"]
    kv_lengths: Int32[Array, " rows"]
    q_lengths: Int32[Array, " rows"]
    q_starts: Int32[Array, " rows"]
    logit_rows: Int32[Array, " rows"]


class Linear(NamedTuple):
    """A matrix ``[out, in]``, as in checkpoints, and a bias ``[out]`` or None."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None = None


class LayerParams(NamedTuple):
    """Parameters of one layer; ``q_norm`` and ``k_norm`` are None for families without them."""

    attention_norm: Float[Array, " hidden"]
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Float[Array, " head_dim"] | None
    k_norm: Float[Array, " head_dim"] | None
    mlp_norm: Float[Array, " hidden"]
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


class Params(NamedTuple):
    """Parameters of the model; with tied embeddings ``lm_head.weight`` is ``embedding`` itself."""

    embedding: Float[Array, "vocab hidden"]
    layers: tuple[LayerParams, ...]
    norm: Float[Array, " hidden"]
    lm_head: Linear


def forward(
    config: ModelConfig,
    params: Params,
    batch: Batch,
    k_pools: Pools,
    v_pools: Pools,
    *,
    decode: bool = False,
    mesh: ModelMesh | None = None,
) -> tuple[Float[Array, "rows vocab"], Pools, Pools]:
    """Run one step: write the KV of its tokens into the pools, and return logits.

    The function is pure. If you jit it with static ``config`` and ``decode`` and donated pools, the
    writes are in place. Matrix products use the dtype of the parameters (float32 at full precision,
    on GPUs as well); norms, softmax and rotation use float32.

    Args:
        config: shapes of the model.
        params: parameters, all of one dtype.
        batch: tokens of the step.
        k_pools: key pool of each layer, ``[num_blocks + 1, kv_heads, block_size, head_dim]``.
        v_pools: value pool of each layer, of the same shape.
        decode: use the decode kernel; every row must be one token (T = B, row i is token i).
        mesh: `Model.mesh` of a model on several devices; static, too.

    Returns:
        float32 logits ``[B, vocab]`` (finite but meaningless for padding rows), and the new pools.
    """
    x, rope = embed(config, params.embedding, batch, mesh=mesh)
    x, k_pools, v_pools = compute_layers(
        config, params.layers, batch, x, rope, k_pools, v_pools, decode=decode, mesh=mesh
    )
    logits = compute_logits(config, params.norm, params.lm_head, batch, x, mesh=mesh)
    return logits, k_pools, v_pools


def embed(
    config: ModelConfig,
    embedding: Float[Array, "vocab hidden"],
    batch: Batch,
    *,
    mesh: ModelMesh | None,
) -> tuple[Float[Array, "tokens hidden"], Rope]:
    """Return the residual stream before the first layer, and the rope tables of all layers."""
    rope = rope_tables(config.rope, config.head_dim, batch.positions)
    return on_all(mesh, embedding[batch.tokens]), rope


def compute_layers(
    config: ModelConfig,
    layers: tuple[LayerParams, ...],
    batch: Batch,
    x: Float[Array, "tokens hidden"],
    rope: Rope,
    k_pools: Pools,
    v_pools: Pools,
    *,
    decode: bool,
    mesh: ModelMesh | None,
) -> tuple[Float[Array, "tokens hidden"], Pools, Pools]:
    """Compute some layers: return the residual stream after them, and their new pools."""
    new_k_pools, new_v_pools = [], []
    for layer, k_pool, v_pool in zip(layers, k_pools, v_pools, strict=True):
        x, k_pool, v_pool = compute_layer(
            config, layer, batch, x, rope, k_pool, v_pool, decode=decode, mesh=mesh
        )
        new_k_pools.append(k_pool)
        new_v_pools.append(v_pool)
    return x, tuple(new_k_pools), tuple(new_v_pools)


def compute_layer(
    config: ModelConfig,
    layer: LayerParams,
    batch: Batch,
    x: Float[Array, "tokens hidden"],
    rope: Rope,
    k_pool: Pool,
    v_pool: Pool,
    *,
    decode: bool,
    mesh: ModelMesh | None,
) -> tuple[Float[Array, "tokens hidden"], Pool, Pool]:
    """Compute one layer: return the residual stream after it, and its new pools."""
    h = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
    q, k, v = _project_qkv(config, layer, h)
    q, k = rotate(q, *rope), rotate(k, *rope)
    attend = partial(_write_and_attend, config.head_dim**-0.5, decode)
    if mesh is not None:
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(WHOLE, SECOND_AXIS, *[KV_HEADS] * 4),
            out_specs=(SECOND_AXIS, KV_HEADS, KV_HEADS),
            check_vma=False,  # JAX has no references that vary, and kernels write in place
        )
    attended, k_pool, v_pool = attend(batch, q, k, v, k_pool, v_pool)
    attended = attended.astype(x.dtype).reshape(x.shape[0], -1)
    x = x + on_all(mesh, linear(layer.o_proj, attended))
    h = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
    gate = jax.nn.silu(linear(layer.gate_proj, h))
    inner = by_second_axis(mesh, gate * linear(layer.up_proj, h))
    return x + on_all(mesh, linear(layer.down_proj, inner)), k_pool, v_pool


def compute_logits(
    config: ModelConfig,
    norm: Float[Array, " hidden"],
    lm_head: Linear,
    batch: Batch,
    x: Float[Array, "tokens hidden"],
    *,
    mesh: ModelMesh | None,
) -> Float[Array, "rows vocab"]:
    """Return the float32 logits of each row, from the residual stream after the last layer."""
    logits = _matmul(lm_head.weight, rms_norm(x[batch.logit_rows], norm, config.rms_norm_eps))
    if mesh is not None and config.vocab_size % mesh.size == 0:
        logits = by_second_axis(mesh, logits)  # or XLA would gather the matrix, not the logits
    return on_all(mesh, logits)


def rms_norm(
    x: Float[Array, "*rows width"], weight: Float[Array, " width"], eps: float
) -> Float[Array, "*rows width"]:
    """Scale each row to a root mean square of 1 in float32, and multiply by ``weight``."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


def linear(layer: Linear, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
    """Multiply by a matrix and add its bias, accumulating in float32."""
    y = _matmul(layer.weight, x)
    if layer.bias is not None:
        y = y + layer.bias.astype(jnp.float32)
    return y.astype(x.dtype)


def _matmul(weight: Float[Array, "out in"], x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
    num_rows = len(x)
    if num_rows == 1 and x.dtype == jnp.bfloat16 and target_device().platform == "cpu":
        # For a single row, XLA on CPU converts the matrix to float32, which takes ten times as
        # long as the product of two.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    product = jnp.einsum(
        "ri,oi->ro",
        x,
        weight,
        # Without HIGHEST, GPUs multiply float32 as TF32, with 10 bits of mantissa.
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product[:num_rows]


def _project_qkv(
    config: ModelConfig, layer: LayerParams, h: Float[Array, "tokens hidden"]
) -> tuple[
    Float[Array, "tokens q_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    num_tokens = h.shape[0]
    q = linear(layer.q_proj, h).reshape(num_tokens, config.num_heads, config.head_dim)
    k = linear(layer.k_proj, h).reshape(num_tokens, config.num_kv_heads, config.head_dim)
    v = linear(layer.v_proj, h).reshape(num_tokens, config.num_kv_heads, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
        k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
    return q, k, v


def _write_and_attend(
    sm_scale: float,
    decode: bool,
    batch: Batch,
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pool: Pool,
    v_pool: Pool,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Pool, Pool]:
    """Write the KV of the tokens, and attend, with the heads of one device."""
    k_pool, v_pool = kv_write(
        k.astype(k_pool.dtype), v.astype(v_pool.dtype), batch.slots, k_pool, v_pool
    )
    tables, lengths = batch.block_tables, batch.kv_lengths
    if decode:
        attended = paged_decode(q, k_pool, v_pool, tables, lengths, sm_scale=sm_scale)
    else:
        rows = tables, lengths, batch.q_lengths, batch.q_starts
        attended = paged_extend(q, k_pool, v_pool, *rows, sm_scale=sm_scale)
    return attended, k_pool, v_pool
