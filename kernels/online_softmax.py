"""Attention over one chunk of KV at a time, and the running softmax that joins the chunks.

The jnp kernels share this file. Axes, in einsum letters:

    w  independent work items (a row of the batch with one chunk of its KV)
    h  KV heads        r  queries that share a KV head (times tokens, in extend)
    c  tokens of the chunk, in position order        d  head_dim

Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867); as in FlashAttention.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .argument_checks import (
    check_positive,
    check_sinks,
    check_window,
)

# A finite stand-in for -inf: the difference of two of them is 0, not NaN.
LOWEST = float(np.finfo(np.float32).min) / 2

# Values are halved when loaded, and `finish` makes up for it, exactly: see `load_chunk` for why.
V_FACTOR = 0.5


class AttentionOptions(NamedTuple):
    """What is compiled into an attention kernel (hashable)."""

    sm_scale: float
    soft_cap: float | None
    window: int | None


class SoftmaxState(NamedTuple):
    """A softmax in progress: sums over the tokens seen so far, relative to `exp(peak)`."""

    weighted: Float[Array, "*queries head_dim"]
    """Sum of `exp(logit - peak) * v * V_FACTOR`, f32."""
    peak: Float[Array, "*queries"]
    """Largest logit seen, f32; `LOWEST` when none was."""
    total: Float[Array, "*queries"]
    """Sum of `exp(logit - peak)`, f32; 0 exactly when no token was visible."""


def check_options(
    sm_scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,
    num_q_heads: int,
) -> AttentionOptions:
    """Check the keyword arguments that the attention kernels share; sinks are an array operand."""
    check_positive("sm_scale", sm_scale)
    check_positive("soft_cap", soft_cap)
    check_window(window)
    check_sinks(sinks, num_q_heads)
    cap = None if soft_cap is None else float(soft_cap)
    return AttentionOptions(float(sm_scale), cap, window)


def empty_state(shape: tuple[int, ...], head_dim: int) -> SoftmaxState:
    """State in which no token has been seen, for queries of the given leading shape."""
    return SoftmaxState(
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.full(shape, LOWEST, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def fence(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The same arrays, computed before anything that uses one of them."""
    fenced: tuple[Array, ...] = lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]
    return fenced


def load_chunk(
    pool: Float[Array, "blocks kv_heads block_size head_dim"],
    ids: Int[Array, "w n"],
    factor: float,
    scales: Float[Array, "blocks kv_heads"] | None = None,
) -> Float[Array, "w kv_heads n*block_size head_dim"]:
    """Gather the blocks `ids` head-major, as f32 times `factor`: a head's tokens are one matrix.

    A quantised pool has a scale for each (block, head); it is a factor too.

    Each (block, head) tile of the pool is contiguous; seen as a row of a matrix it is copied whole:

        row = id * kv_heads + head        |- head 0 of id -|- head 1 of id -| ...
        column = offset * head_dim + dim

    An id outside the pool is moved to the nearest block in it.
    """
    num_blocks, kv_heads, block_size, head_dim = pool.shape
    ids = jnp.clip(ids, 0, num_blocks - 1)
    tiles = ids[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    rows = pool.reshape(num_blocks * kv_heads, block_size * head_dim)
    # Workarounds for XLA's CPU backend, each measured. The first fence keeps a conversion of the
    # whole bfloat16 pool from being lifted out of the caller's loop. A float32 gather alone is
    # slow, fused with a product it is not; the second fence keeps slower work out of that fusion.
    rows, tiles = fence((rows, tiles))
    factors: float | Array = factor
    if scales is not None:
        factors = factor * scales.reshape(-1).at[tiles].get(mode="promise_in_bounds")[..., None]
    chunk = rows.at[tiles].get(mode="promise_in_bounds").astype(jnp.float32) * factors
    (chunk,) = fence((chunk,))
    return chunk.reshape(ids.shape[0], kv_heads, ids.shape[1] * block_size, head_dim)


def attend_chunk(
    q: Float[Array, "w h r d"],
    k: Float[Array, "w h c d"],
    v: Float[Array, "w h c d"],
    visible: Bool[Array, "w #r c"],
    written: Bool[Array, "w c"],
    options: AttentionOptions,
) -> SoftmaxState:
    """Softmax state of queries `q` (f32) over one chunk.

    Args:
        q: Queries.
        k: Keys, f32, already times `sm_scale`.
        v: Values, f32, already times `V_FACTOR`.
        visible: Which tokens each query may see.
        written: Tokens that some query may see. The values of the others may be NaN, and
            0 * NaN is NaN: they are zeroed, a weight of zero is not enough.
        options: Scale (already applied), soft cap and window (already in `visible`).
    """
    # HIGHEST: a GPU would round f32 operands to tf32 otherwise.
    # K on the left: XLA's CPU backend multiplies this order faster for few queries.
    logits = jnp.einsum("whcd,whrd->whrc", k, q, precision=lax.Precision.HIGHEST)
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    seen = visible[:, None]
    logits = jnp.where(seen, logits, LOWEST)
    peak = logits.max(axis=-1)
    weights = jnp.where(seen, jnp.exp(logits - peak[..., None]), 0.0)
    v = jnp.where(written[:, None, :, None], v, 0.0)
    weighted = jnp.einsum("whrc,whcd->whrd", weights, v, precision=lax.Precision.HIGHEST)
    return SoftmaxState(weighted, peak, weights.sum(axis=-1))


def rescale(state: SoftmaxState, peak: Float[Array, "*queries"]) -> SoftmaxState:
    """The same state relative to another peak, at least its own."""
    factor = jnp.exp(state.peak - peak)
    return SoftmaxState(state.weighted * factor[..., None], peak, state.total * factor)


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """State over the tokens of `a` and of `b`."""
    peak = jnp.maximum(a.peak, b.peak)
    a, b = rescale(a, peak), rescale(b, peak)
    return SoftmaxState(a.weighted + b.weighted, peak, a.total + b.total)


def merge_into_rows(
    state: SoftmaxState, part: SoftmaxState, rows: Int[Array, " w"]
) -> SoftmaxState:
    """Merge part `i` into row `rows[i]` of `state`; a row may occur often, or be out of range."""
    peak = state.peak.at[rows].max(part.peak, mode="drop")
    # A part without a row is dropped below, whatever peak it gets here.
    part = rescale(part, peak.at[rows].get(mode="clip"))
    state = rescale(state, peak)
    weighted = state.weighted.at[rows].add(part.weighted, mode="drop")
    return SoftmaxState(weighted, peak, state.total.at[rows].add(part.total, mode="drop"))


def finish(
    state: SoftmaxState, sinks: Float[Array, "#*queries"] | None
) -> tuple[Float[Array, "*queries head_dim"], Float[Array, "*queries"]]:
    """Attention output and the natural log of its denominator; 0 and -inf where nothing was seen.

    A sink is a logit without a value: it only adds to the denominator.
    """
    empty = state.total == 0  # not `> 0`: NaN in, NaN out
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), state.peak.shape)
        state = rescale(state, jnp.maximum(state.peak, sinks))
        state = state._replace(total=state.total + jnp.exp(sinks - state.peak))
    total = jnp.where(empty, 1.0, state.total)
    out = jnp.where(empty[..., None], 0.0, state.weighted / (V_FACTOR * total[..., None]))
    return out, jnp.where(empty, -jnp.inf, state.peak + jnp.log(total))
