"""The next token of each row, from its logits: inside the compiled step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32


class SamplingBatch(NamedTuple):
    """`SamplingParams` of each row, and the place in its sequence that the new token takes."""

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    seed: UInt32[Array, " rows"]
    position: Int32[Array, " rows"]


def sample(logits: Float[Array, "rows vocab"], batch: SamplingBatch) -> Int32[Array, " rows"]:
    """Choose a token per row: the likeliest, or a draw keyed by (seed, position) alone.

    Args:
        logits: float32.
        batch: temperature 0 is greedy; see `SamplingParams` for the others.

    Returns:
        int32 token ids. A row's token does not depend on the other rows.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        drawn = jax.vmap(_draw_row)(logits, batch)
        return jnp.where(batch.temperature > 0, drawn, greedy)

    # Sorting the vocabulary is dear, and most batches are greedy.
    tokens: Array = jax.lax.cond(jnp.any(batch.temperature > 0), draw, lambda: greedy)
    return tokens


def _draw_row(logits: Array, row: SamplingBatch) -> Array:
    # From the greatest down, so that no temperature overflows it.
    scaled = (logits - jnp.max(logits)) / jnp.where(row.temperature > 0, row.temperature, 1.0)
    order = jnp.argsort(-scaled)
    ranked = scaled[order]
    rank = jnp.arange(ranked.shape[0])
    ranked = jnp.where((row.top_k == 0) | (rank < row.top_k), ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked)  # of what top_k left, as vLLM has it
    before = jnp.cumsum(probability) - probability
    kept = (before < row.top_p) | (rank == 0)
    key = jax.random.fold_in(jax.random.key(row.seed), row.position)
    # Noise belongs to the token, not to its rank: the draw is the Gumbel maximum.
    noise = jax.random.gumbel(key, ranked.shape)[order]
    token: Array = order.astype(jnp.int32)[jnp.argmax(jnp.where(kept, ranked + noise, -jnp.inf))]
    return token
