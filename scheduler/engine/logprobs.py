"""Log probabilities of tokens: of the output, and of prompts.

They are those of the model, before temperature, penalties and masks. The programs are apart from
those of a step, and are compiled when a request first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.stages import Compiled
from jaxtyping import Array, Float, Int32

from ...kernels import compiler_options
from ...kvcache import Int32Array
from ..models import Linear, Model, ModelConfig
from ..models.tensor_parallel import on_all
from ..models.transformer import Batch, compute_logits
from ..request import MAX_LOGPROBS, TokenLogprob
from ..step_plan import StepPlan

_TOKENS_PER_PIECE: Final = 32
"""Tokens of a prompt whose logits are computed at a time, because all of them are large."""


class TopLogprobs(NamedTuple):
    """Log probabilities of one token per row, and the most likely tokens.

    Attributes:
        logprobs: ``[rows]`` of the token of each row.
        ranks: ``[rows]`` number of tokens that are more likely, plus 1.
        top_logprobs, top_ids: ``[rows, K]``, most likely first.
    """

    logprobs: Float[Array, " rows"]
    ranks: Int32[Array, " rows"]
    top_logprobs: Float[Array, "rows top"]
    top_ids: Int32[Array, "rows top"]

    def copy_to_host_async(self) -> None:
        """Begin to copy all arrays to the host."""
        for array in self:
            array.copy_to_host_async()

    def rows(self, num_rows: int) -> RowLogprobs:
        """Wait for the arrays, and return the first rows of them."""
        return RowLogprobs(*(np.asarray(array)[:num_rows] for array in self))


class RowLogprobs(NamedTuple):
    """`TopLogprobs` on the host."""

    logprobs: Any
    ranks: Any
    top_logprobs: Any
    top_ids: Any

    def at(self, row: int, token: int, num_top: int) -> TokenLogprob:
        """Return the record of the token of a row."""
        top = zip(
            self.top_ids[row, :num_top].tolist(),
            self.top_logprobs[row, :num_top].tolist(),
            strict=True,
        )
        return TokenLogprob(token, self.logprobs.item(row), self.ranks.item(row), tuple(top))


class StepLogprobs(NamedTuple):
    """What a step in flight computes: of its rows, and of the tokens of its prompts, if asked."""

    output: TopLogprobs | None
    prompt: TopLogprobs | None

    def copy_to_host_async(self) -> None:
        """Begin to copy all arrays to the host."""
        for each in self:
            if each is not None:
                each.copy_to_host_async()

    def append(self, plan: StepPlan) -> None:
        """Give the requests of a step their records, after `update` has given them tokens."""
        if self.output is not None:
            rows = self.output.rows(plan.num_chunks)
            for row, request in enumerate(plan.requests):
                records, number = request.output_logprobs, len(request.output_tokens)
                if request.logprobs is not None and len(records) < number:
                    token = request.output_tokens[-1]
                    assert len(records) == number - 1, f"{request!r} misses records"
                    records.append(rows.at(row, token, request.logprobs))
        if self.prompt is not None:
            rows = self.prompt.rows(plan.num_tokens)
            for request, place, position in _prompt_tokens(plan):
                if len(request.prompt_records) == position + 1:
                    token = request.prompt.item(position + 1)
                    request.prompt_records.append(rows.at(place, token, request.prompt_logprobs))


def _prompt_tokens(plan: StepPlan) -> Iterator[tuple[Any, int, int]]:
    """Yield request, place in the step, and position of each token before one of its prompt."""
    place = plan.num_decode
    for request, start, length in plan.prefill:
        if request.prompt_logprobs is not None:
            last = min(start + length, request.num_prompt_tokens - 1)
            for position in range(start, last):
                yield request, place + position - start, position
        place += length


class Logprobs:
    """The programs for log probabilities. Use it from one thread only."""

    def __init__(self) -> None:
        """Compile nothing yet."""
        self._programs: dict[Any, Compiled] = {}

    def warm_up(self, logits: Array) -> None:
        """Compile the program for output tokens."""
        tokens = np.zeros(len(logits), np.int32)
        self._program("output", _of_rows, logits, tokens)

    def of_output(self, logits: Array, tokens: Array) -> TopLogprobs:
        """Dispatch the computation for the token of each row.

        Args:
            logits: ``[all_rows, vocab]`` of the model.
            tokens: int32 ``[all_rows]``.
        """
        result: Any = self._program("output", _of_rows, logits, tokens)(logits, tokens)
        return TopLogprobs(*result)

    def of_prompt(
        self, plan: StepPlan, model: Model, batch: Batch, x: Float[Array, "tokens hidden"]
    ) -> TopLogprobs:
        """Dispatch the computation for the token after each token of a step.

        Args:
            plan: the step.
            model: configuration and parameters.
            batch: of the step, on the device.
            x: residual stream after the last layer.
        """
        targets = np.zeros(len(x), np.int32)
        for request, place, position in _prompt_tokens(plan):
            targets[place] = request.prompt[position + 1]
        return self.of_targets(targets, model, batch, x)

    def of_targets(
        self, targets: Int32Array, model: Model, batch: Batch, x: Float[Array, "tokens hidden"]
    ) -> TopLogprobs:
        """Dispatch the computation for one token after each token of a step, see `of_prompt`."""
        params = model.params
        given = params.norm, params.lm_head, batch, x, targets
        key = "prompt", len(x), len(batch.q_lengths)
        if key not in self._programs:
            lowered = _of_tokens.lower(model.config, model.mesh, *given)
            self._programs[key] = lowered.compile(compiler_options())
        result: Any = self._programs[key](*given)
        return TopLogprobs(*result)

    def _program(self, key: Any, function: Callable[..., Any], *given: Any) -> Compiled:
        """Return a program by its key; compile it at its first use."""
        if key not in self._programs:
            lower: Any = function
            self._programs[key] = lower.lower(*given).compile(compiler_options())
        return self._programs[key]


def top_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> tuple[Array, Array, Array, Array]:
    """Return the fields of `TopLogprobs` for a token of each row."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    ranks = 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32)
    values, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return (chosen - total)[:, 0], ranks, values - total, ids.astype(jnp.int32)


_of_rows = jax.jit(top_logprobs)


@partial(jax.jit, static_argnums=(0, 1))
def _of_tokens(
    config: ModelConfig,
    mesh: Mesh | None,
    norm: Float[Array, " hidden"],
    lm_head: Linear,
    batch: Batch,
    x: Float[Array, "tokens hidden"],
    targets: Int32[Array, " tokens"],
) -> Any:
    num_tokens = len(x)
    num_pieces = -(-num_tokens // _TOKENS_PER_PIECE)
    # The last piece is filled up with tokens of its own.
    place = jnp.arange(num_pieces * _TOKENS_PER_PIECE, dtype=jnp.int32)
    place = jnp.minimum(place, num_tokens - 1).reshape(num_pieces, _TOKENS_PER_PIECE)

    def piece(places: Int32[Array, " piece"]) -> tuple[Array, Array, Array, Array]:
        of_piece = batch._replace(logit_rows=places)
        logits = compute_logits(config, norm, lm_head, of_piece, x, mesh=mesh)
        return top_logprobs(logits, targets[places])

    results = lax.map(piece, place)
    results = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:])[:num_tokens], results)
    return on_all(mesh, results)
