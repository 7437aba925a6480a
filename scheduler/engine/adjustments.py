"""Adjusted logits: min-p, penalties and masks, for steps with requests that ask for them.

::

    step ──► logits ──► adjust ──► adjusted logits ──► draw (as for others) ──► tokens ──► count
                          ▲                                                                  │
                          └── counts [slots, vocab] ◄────────────────────────────────────────┘

The programs here are apart from those of a step, so a step that needs none of them runs what it
always runs, and sends what it always sends. They are compiled, and the counts are allocated, when a
request first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Compiled
from jaxtyping import Array, Bool, Float, Int32

from ...kernels import compiler_options
from ...kvcache import Int32Array
from ...kvcache.copies.block_arrays import put_of
from ..request import Request
from ..step_plan import StepPlan
from .programs import Rows
from .step_arrays import NO_SLOT

_IN_PROMPT: Final = 1 << 30
"""Added to the count of a token that is in the prompt: there are fewer tokens than this."""


class RowValues(NamedTuple):
    """What is sent of each row of a step, and neutral values for the others."""

    min_p: Float[Array, " all_rows"]
    repetition_penalty: Float[Array, " all_rows"]
    presence_penalty: Float[Array, " all_rows"]
    frequency_penalty: Float[Array, " all_rows"]


_NEUTRAL: Final = np.array([[0], [1], [0], [0]], np.float32)


class Adjustments:
    """Adjusts the logits of steps, and counts the tokens of requests with penalties.

    Use it from one thread only.
    """

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        max_tokens: int,
        vocab_size: int,
        sharding: NamedSharding | None = None,
    ) -> None:
        """Allocate and compile nothing yet.

        Args:
            num_slots: slots of the batch on the device.
            num_rows: rows of the logits.
            max_tokens: most tokens of a request.
            vocab_size: tokens of the model.
            sharding: devices that have the counts; None for the default device.
        """
        self._sharding = sharding
        self._num_slots, self._num_rows = num_slots, num_rows
        self._max_tokens, self._vocab_size = max_tokens, vocab_size
        self._counts: Int32[Array, "slots vocab"] | None = None
        self._programs: dict[Any, Compiled] = {}
        # One for each row, so that a step finds those of the last one.
        self._mask_without = lru_cache(num_rows)(partial(_mask_without, vocab_size))

    def warm_up(self, logits: Array, rows: Rows, last_tokens: Array) -> None:
        """Compile all programs; the counts are not allocated."""
        shape = self._num_slots, self._vocab_size
        counts: Any = jax.eval_shape(lambda: jnp.zeros(shape, jnp.int32))
        tokens = np.zeros(self._num_rows, np.int32)
        for each in (None, counts):
            for allowed in (None, self._all_allowed()):
                values = np.tile(_NEUTRAL, self._num_rows)
                given = logits, rows, values, each, allowed, last_tokens
                self._program(("adjust", each is None, allowed is None), _adjust, *given)
        self._program("set", _set_counts, counts, self._pack_tokens(0, None))
        is_counted = np.zeros(self._num_rows, np.bool_)
        self._program("count", _count, counts, rows.slots, tokens, is_counted)

    def count_prompts(self, requests: Iterable[tuple[int, Request]]) -> None:
        """Count the tokens of requests, which begin or go on in a slot."""
        for slot, request in requests:
            self.set_counts(self._pack_tokens(slot, request))

    def set_counts(self, packed: Int32Array) -> None:
        """Dispatch the tokens of a request, see `count_prompts`."""
        if self._counts is None:
            zeros = np.zeros((self._num_slots, self._vocab_size), np.int32)
            self._counts = put_of(self._sharding)(zeros, self._sharding)
        given = self._counts, packed
        self._counts = self._program("set", _set_counts, *given)(*given)

    def adjust(
        self, plan: StepPlan, logits: Array, rows: Rows, last_tokens: Array
    ) -> tuple[Array, Array, Array] | None:
        """Adjust the logits of a step, unless no row needs it any more.

        Args:
            plan: the step.
            logits: ``[all_rows, vocab]``, as the model computed them; kept.
            rows: rows of the step.
            last_tokens: of the batch on the device; donated.

        Returns:
            The adjusted logits, the most likely token of each row, and the last tokens with those.
        """
        values, is_counted = np.tile(_NEUTRAL, self._num_rows), False
        allowed: Int32Array | None = None
        for row, (request, start, length) in enumerate(plan.chunks):
            sampling = request.sampling
            values[:, row] = (
                sampling.min_p,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
            is_counted |= sampling.has_penalties
            num_outputs = start + length - _num_given(request)
            # A request that has ended has a row in vain, and a chunk inside a prompt no token.
            is_guided = request.guide is not None and request.finish_reason is None
            is_guided = is_guided and start + length == request.num_tokens
            is_late = bool(request.late_token_ids) and num_outputs < sampling.min_tokens
            if allowed is None and (is_guided or is_late):
                allowed = self._all_allowed()
            if allowed is not None and is_guided and request.guide is not None:
                request.guide.allow(request.output_tokens, allowed[row])
            if allowed is not None and is_late:
                _forbid(allowed[row], self._mask_without(request.late_token_ids))
        if allowed is None and (values == _NEUTRAL).all():
            return None
        return self.adjust_rows(logits, rows, values, is_counted, allowed, last_tokens)

    def adjust_rows(
        self,
        logits: Array,
        rows: Rows,
        values: np.ndarray,
        is_counted: bool,
        allowed: Int32Array | None,
        last_tokens: Array,
    ) -> tuple[Array, Array, Array]:
        """Dispatch the adjustment of the rows of a step, see `adjust`.

        Args:
            logits, rows, last_tokens: see `adjust`.
            values: float32 ``[4, all_rows]``, see `RowValues`.
            is_counted: whether some row has penalties.
            allowed: int32 ``[all_rows, words]``, see `adjust_logits`; None if no row has a mask.
        """
        counts = self._counts if is_counted else None
        given = logits, rows, values, counts, allowed, last_tokens
        compute = self._program(("adjust", counts is None, allowed is None), _adjust, *given)
        adjusted, tokens, last_tokens = compute(*given)
        return adjusted, tokens, last_tokens

    def count(self, plan: StepPlan, rows: Rows, tokens: Array) -> None:
        """Count the chosen token of each request with penalties, if it is one of its output."""
        is_counted = np.zeros(self._num_rows, np.bool_)
        for row, (request, start, length) in enumerate(plan.chunks):
            # A chunk that ends inside what the host knows yields no token.
            is_counted[row] = (
                request.sampling.has_penalties and start + length >= request.num_tokens
            )
        self.count_rows(rows, tokens, is_counted)

    def count_rows(self, rows: Rows, tokens: Array, is_counted: np.ndarray) -> None:
        """Dispatch the count of the tokens of some rows, see `count`."""
        given = self._counts, rows.slots, tokens, is_counted
        self._counts = self._program("count", _count, *given)(*given)

    def _all_allowed(self) -> Int32Array:
        return np.full((self._num_rows, -(-self._vocab_size // 32)), -1, np.int32)

    def _pack_tokens(self, slot: int, request: Request | None) -> Int32Array:
        packed = np.zeros(self._max_tokens + 3, np.int32)
        if request is not None:
            packed[:3] = slot, _num_given(request), request.num_tokens
            packed[3 : 3 + request.num_tokens] = request.tokens
        return packed

    def _program(self, key: Any, function: Callable[..., Any], *given: Any) -> Compiled:
        """Return a program by its key; compile it at its first use."""
        if key not in self._programs:
            lower: Any = function
            self._programs[key] = lower.lower(*given).compile(compiler_options())
        return self._programs[key]


def _num_given(request: Request) -> int:
    """Return the number of prompt tokens that do not count as output."""
    return request.num_prompt_tokens - request.sampling.num_continued


def _mask_without(vocab_size: int, token_ids: frozenset[int]) -> Int32Array:
    """Return a mask of 32 tokens per word with the bits of all tokens but these."""
    mask = np.full(-(-vocab_size // 32), -1, np.int32)
    after_last = range(vocab_size, 32 * len(mask))  # `_all_allowed` sets these, too
    late = (token for token in token_ids if 0 <= token < vocab_size)
    tokens = np.array([*late, *after_last], np.int64)
    bits = np.uint32(1) << (tokens % 32).astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), tokens // 32, ~bits)
    return mask


def _forbid(allowed: Int32Array, mask: Int32Array) -> None:
    """Clear the bits that a mask has not, unless no other one is set."""
    others = allowed & mask
    if others.any():
        allowed[:] = others


@partial(jax.jit, donate_argnums=5)
def _adjust(
    logits: Float[Array, "all_rows vocab"],
    rows: Rows,
    values: Float[Array, "4 all_rows"],
    counts: Int32[Array, "slots vocab"] | None,
    allowed: Int32[Array, "all_rows words"] | None,
    last_tokens: Int32[Array, " slots"],
) -> tuple[Array, Array, Array]:
    own = None if counts is None else counts.at[rows.slots].get(mode="clip")
    logits = adjust_logits(logits, rows.sampling.temperature, RowValues(*values), own, allowed)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return logits, tokens, last_tokens.at[rows.slots].set(tokens, mode="drop")


def adjust_logits(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    values: RowValues,
    counts: Int32[Array, "rows vocab"] | None,
    allowed: Int32[Array, "rows words"] | None,
) -> Float[Array, "rows vocab"]:
    """Mask, penalise, and drop what min_p drops, in this order, as vLLM does.

    Args:
        logits: float32 logits of the model.
        temperature: of each row; min_p does nothing at 0.
        values: parameters of each row; neutral values leave its logits as they are, bit by bit.
        counts: how often each token is in the output, plus ``1 << 30`` if it is in the prompt; None
            if no row has penalties.
        allowed: a bit for each token that may be chosen, 32 per word; None for all.

    Returns:
        The logits; -inf for a token that cannot be chosen.
    """
    if allowed is not None:
        logits = jnp.where(_bits(allowed, logits.shape[1]), logits, -jnp.inf)
    if counts is not None:
        penalty = values.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where((counts > 0) & (penalty != 1), repeated, logits)
        in_output = counts & (_IN_PROMPT - 1)
        logits -= values.frequency_penalty[:, None] * in_output.astype(jnp.float32)
        logits -= values.presence_penalty[:, None] * (in_output > 0).astype(jnp.float32)
    # The probability of a token is that of the most likely one times exp of their distance.
    least = jnp.max(logits, axis=-1) + temperature * jnp.log(values.min_p)
    least = jnp.where((values.min_p > 0) & (temperature > 0), least, -jnp.inf)
    return jnp.where(logits < least[:, None], -jnp.inf, logits)


def _bits(words: Int32[Array, "rows words"], vocab_size: int) -> Bool[Array, "rows vocab"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    is_allowed: Array = bits.reshape(len(words), -1)[:, :vocab_size] > 0
    return is_allowed


@partial(jax.jit, donate_argnums=0)
def _set_counts(
    counts: Int32[Array, "slots vocab"], packed: Int32[Array, " packed"]
) -> Int32[Array, "slots vocab"]:
    slot, num_prompt, num_tokens = packed[:3]
    tokens, vocab_size = packed[3:], counts.shape[1]
    place = jnp.arange(len(tokens), dtype=jnp.int32)
    output = jnp.where((place >= num_prompt) & (place < num_tokens), tokens, vocab_size)
    prompt = jnp.where(place < num_prompt, tokens, vocab_size)
    row = jnp.zeros(vocab_size, jnp.int32).at[prompt].set(_IN_PROMPT, mode="drop")
    row = row.at[output].add(1, mode="drop")
    return counts.at[slot].set(row)


@partial(jax.jit, donate_argnums=0)
def _count(
    counts: Int32[Array, "slots vocab"],
    slots: Int32[Array, " all_rows"],
    tokens: Int32[Array, " all_rows"],
    is_counted: Bool[Array, " all_rows"],
) -> Int32[Array, "slots vocab"]:
    return counts.at[jnp.where(is_counted, slots, NO_SLOT), tokens].add(1, mode="drop")
