"""Attention over one chunk of KV at a time, and the online softmax that merges the chunks.

The jnp backends use it. Axes, as einsum letters::

    w  work items (a row of the batch with one chunk of its KV)
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

from .argument_checks import check_positive, check_sinks, check_window

# Used instead of -inf: the difference of two of them is 0, not NaN.
LOWEST = float(np.finfo(np.float32).min) / 2

# Values are multiplied by it when loaded (see `load_chunk`); `finalize` divides by it, exactly.
V_FACTOR = 0.5


class AttentionOptions(NamedTuple):
    """Static options of an attention kernel (hashable)."""

    sm_scale: float
    soft_cap: float | None
    window: int | None


class SoftmaxState(NamedTuple):
    """An online softmax in progress: sums over the tokens seen so far, relative to `exp(peak)`."""

    weighted: Float[Array, "*queries head_dim"]
    """Sum of `exp(logit - peak) * v * V_FACTOR`, float32."""
    peak: Float[Array, "*queries"]
    """Largest logit seen, float32; `LOWEST` if none."""
    total: Float[Array, "*queries"]
    """Sum of `exp(logit - peak)`, float32; exactly 0 if no token was visible."""


def check_options(
    sm_scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,
    num_q_heads: int,
) -> AttentionOptions:
    """Check the options that the attention kernels share; return the static ones."""
    check_positive("sm_scale", sm_scale)
    check_positive("soft_cap", soft_cap)
    check_window(window)
    check_sinks(sinks, num_q_heads)
    cap = None if soft_cap is None else float(soft_cap)
    return AttentionOptions(float(sm_scale), cap, window)


def empty_state(shape: tuple[int, ...], head_dim: int) -> SoftmaxState:
    """Initial state, for queries of the given leading shape."""
    return SoftmaxState(
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.full(shape, LOWEST, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def optimization_barrier(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """`lax.optimization_barrier` with types: all arrays are computed before any of them is used."""
    same: tuple[Array, ...] = lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]
    return same


def load_chunk(
    pool: Float[Array, "blocks kv_heads block_size head_dim"],
    ids: Int[Array, "w n"],
    factor: float,
    scales: Float[Array, "blocks kv_heads"] | None = None,
) -> Float[Array, "w kv_heads n*block_size head_dim"]:
    """Gather the blocks `ids` in float32, times `factor`; the tokens of a head form one matrix.

    A quantised pool is also multiplied by its scale of each (block, head). Ids are clipped to the
    pool. Each (block, head) tile of the pool is contiguous, so it is gathered as one matrix row::

        row = id * kv_heads + head        |- head 0 of id -|- head 1 of id -| ...
        column = offset * head_dim + dim
    """
    num_blocks, kv_heads, block_size, head_dim = pool.shape
    ids = jnp.clip(ids, 0, num_blocks - 1)
    tiles = ids[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    rows = pool.reshape(num_blocks * kv_heads, block_size * head_dim)
    # Workarounds for XLA's CPU backend, each measured. The first barrier keeps XLA from converting
    # the whole bfloat16 pool before the caller's loop. A float32 gather is slow alone but fast if
    # fused with a product, hence `factor`; the second barrier keeps slower work out of that fusion.
    rows, tiles = optimization_barrier((rows, tiles))
    factors: float | Array = factor
    if scales is not None:
        factors = factor * scales.reshape(-1).at[tiles].get(mode="promise_in_bounds")[..., None]
    chunk = rows.at[tiles].get(mode="promise_in_bounds").astype(jnp.float32) * factors
    (chunk,) = optimization_barrier((chunk,))
    return chunk.reshape(ids.shape[0], kv_heads, ids.shape[1] * block_size, head_dim)


def attend_chunk(
    q: Float[Array, "w h r d"],
    k: Float[Array, "w h c d"],
    v: Float[Array, "w h c d"],
    visible: Bool[Array, "w #r c"],
    written: Bool[Array, "w c"],
    options: AttentionOptions,
) -> SoftmaxState:
    """Return the softmax state of queries over one chunk.

    Args:
        q: Queries, float32.
        k: Keys, float32, already times `sm_scale`.
        v: Values, float32, already times `V_FACTOR`.
        visible: Mask of the tokens that each query sees.
        written: Mask of the tokens that some query sees. The values of the others may be NaN;
            they are zeroed, because 0 * NaN is NaN.
        options: Scale (already applied), soft cap and window (already in `visible`).
    """
    # HIGHEST, because a GPU rounds float32 operands to tf32 otherwise. K is on the left because
    # XLA's CPU backend is faster in this order for few queries.
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
    """Return the state relative to another peak, which must not be lower than its own."""
    factor = jnp.exp(state.peak - peak)
    return SoftmaxState(state.weighted * factor[..., None], peak, state.total * factor)


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Return the state over the tokens of `a` and of `b`."""
    peak = jnp.maximum(a.peak, b.peak)
    a, b = rescale(a, peak), rescale(b, peak)
    return SoftmaxState(a.weighted + b.weighted, peak, a.total + b.total)


def merge_into_rows(
    state: SoftmaxState, part: SoftmaxState, rows: Int[Array, " w"]
) -> SoftmaxState:
    """Merge part `i` into row `rows[i]` of `state`; rows repeat; parts out of range are dropped."""
    peak = state.peak.at[rows].max(part.peak, mode="drop")
    # Parts out of range get any peak here; they are dropped below.
    part = rescale(part, peak.at[rows].get(mode="clip"))
    state = rescale(state, peak)
    weighted = state.weighted.at[rows].add(part.weighted, mode="drop")
    return SoftmaxState(weighted, peak, state.total.at[rows].add(part.total, mode="drop"))


def finalize(
    state: SoftmaxState, sinks: Float[Array, "#*queries"] | None
) -> tuple[Float[Array, "*queries head_dim"], Float[Array, "*queries"]]:
    """Return the attention output and the natural log of its denominator (0 and -inf if empty).

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
