"""Tokens for the benchmarks: of the requests of a trace, and unique ones."""

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
    """The sizes of a benchmark exceed each other, or need more token ids than int32 has."""


class Work(NamedTuple):
    """The tokens of one request of a trace."""

    prompt: Int32Array
    tokens: Int32Array
    """The prompt followed by the output; `prompt` is a view of its beginning."""


class TokenSupply:
    """Source of token ids, each of which it returns only once."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, num_tokens: int) -> Int32Array:
        """Return int32[num_tokens] of new ids.

        Raises:
            WorkloadError: int32 has no more ids.
        """
        start, end = self._next, self._next + num_tokens
        if end > _TOKEN_LIMIT:
            raise WorkloadError(f"{end} different token ids are needed, int32 has {_TOKEN_LIMIT}")
        self._next = end
        return np.arange(start, end, dtype=np.int32)


def expand(requests: Sequence[TraceRequest]) -> Iterator[Work]:
    """Yield the tokens of each request one by one, because a trace can have 150M tokens.

    `radixkv.scheduler.replay.trace.tokens` makes the prompts. Output tokens are larger than all
    tokens of prompts and unique.

    Raises:
        WorkloadError: The ids are too large for int32 tokens.
    """
    largest = max((each for request in requests for each in request.hash_ids), default=0)
    supply = TokenSupply(first=(largest + 1) * TOKENS_PER_HASH_ID)
    for request in requests:
        output = supply.take(request.output_length)
        tokens = np.concatenate([prompt_tokens(request), output])
        yield Work(prompt=tokens[: request.input_length], tokens=tokens)
