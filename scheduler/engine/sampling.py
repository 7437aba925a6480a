"""Sampling: the next token of each row from its logits, inside the compiled step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32


class SamplingBatch(NamedTuple):
    """`SamplingParams` of each row, and the position of the new token in its sequence."""

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    seed: UInt32[Array, " rows"]
    position: Int32[Array, " rows"]


def sample(logits: Float[Array, "rows vocab"], batch: SamplingBatch) -> Int32[Array, " rows"]:
    """Sample a token per row: greedily, or by a draw that depends on (seed, position) alone.

    Args:
        logits: float32 logits.
        batch: parameters of each row, see `SamplingParams`; temperature 0 is greedy.

    Returns:
        int32 token ids. The token of a row does not depend on other rows.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        drawn = jax.vmap(_draw_row)(logits, batch)
        return jnp.where(batch.temperature > 0, drawn, greedy)

    # Most batches are greedy: skip the sort of the vocabulary for them.
    tokens: Array = jax.lax.cond(jnp.any(batch.temperature > 0), draw, lambda: greedy)
    return tokens


def _draw_row(logits: Array, row: SamplingBatch) -> Array:
    # Subtract the maximum so that a small temperature cannot overflow.
    scaled = (logits - jnp.max(logits)) / jnp.where(row.temperature > 0, row.temperature, 1.0)
    order = jnp.argsort(-scaled)
    ranked = scaled[order]
    rank = jnp.arange(ranked.shape[0])
    ranked = jnp.where((row.top_k == 0) | (rank < row.top_k), ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked)  # over what top_k keeps, as in vLLM
    before = jnp.cumsum(probability) - probability
    kept = (before < row.top_p) | (rank == 0)
    key = jax.random.fold_in(jax.random.key(row.seed), row.position)
    # The Gumbel-max trick. Noise belongs to a token, not to its rank.
    noise = jax.random.gumbel(key, ranked.shape)[order]
    token: Array = order.astype(jnp.int32)[jnp.argmax(jnp.where(kept, ranked + noise, -jnp.inf))]
    return token
