"""Tokens for the benchmarks: those of a trace, and ones that are all different."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...kvcache.errors import RadixKVError
from ...kvcache.tokens import Int32Array
from ..replay.trace import TOKENS_PER_HASH_ID, TraceRequest
from ..replay.trace import tokens as prompt_tokens

_TOKEN_LIMIT = 2**31


class WorkloadError(RadixKVError, ValueError):
    """A benchmark's sizes do not fit together, or need more token ids than int32 has."""


class Work(NamedTuple):
    """One request of a trace with its tokens."""

    prompt: Int32Array
    tokens: Int32Array
    """The prompt and the output after it; `prompt` is a view of its beginning."""


class TokenSupply:
    """Hands out token ids that never occurred before."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, num_tokens: int) -> Int32Array:
        """Return int32[num_tokens] of new ids.

        Raises:
            WorkloadError: All ids of int32 are used up.
        """
        start, end = self._next, self._next + num_tokens
        if end > _TOKEN_LIMIT:
            raise WorkloadError(f"{end} different token ids are needed, int32 has {_TOKEN_LIMIT}")
        self._next = end
        return np.arange(start, end, dtype=np.int32)


def expand(requests: Sequence[TraceRequest]) -> Iterator[Work]:
    """Yield each request's tokens, made only when asked for: a trace can have 150M of them.

    Prompts are as `radixkv.scheduler.replay.trace.tokens` makes them; output tokens are larger
    than any of theirs and occur once.

    Raises:
        WorkloadError: The ids are too large for int32 tokens.
    """
    largest = max((max(request.hash_ids, default=0) for request in requests), default=0)
    supply = TokenSupply(first=(largest + 1) * TOKENS_PER_HASH_ID)
    for request in requests:
        output = supply.take(request.output_length)
        tokens = np.concatenate([prompt_tokens(request), output])
        yield Work(prompt=tokens[: request.input_length], tokens=tokens)
