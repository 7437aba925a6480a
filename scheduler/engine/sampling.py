"""Sampling: the next token of each row from its logits, in a compiled program."""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

_ROWS_PER_DRAW: Final = 16
"""Rows that are sorted at a time. Rows after the last one that is drawn cost nothing."""


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
    return draw(logits, batch, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def draw(
    logits: Float[Array, "rows vocab"], batch: SamplingBatch, greedy: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Replace the tokens of rows with a temperature above 0 by drawn ones; see `sample`."""
    num_rows = len(greedy)
    size = min(_ROWS_PER_DRAW, num_rows)
    end = jnp.max(jnp.where(batch.temperature > 0, jnp.arange(1, num_rows + 1), 0))

    def draw_some(state: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last rows are drawn twice if the number of rows is no multiple: with the same result.
        start, tokens = state
        part_logits, part, old = jax.tree.map(
            lambda rows: jax.lax.dynamic_slice_in_dim(rows, start, size), (logits, batch, tokens)
        )
        new = jnp.where(part.temperature > 0, jax.vmap(_draw_row)(part_logits, part), old)
        return start + size, jax.lax.dynamic_update_slice_in_dim(tokens, new, start, 0)

    first = jnp.zeros((), end.dtype), greedy
    return jax.lax.while_loop(lambda state: state[0] < end, draw_some, first)[1]


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
