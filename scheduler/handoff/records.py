"""Log probabilities in messages: packed, because a request may have many.

The record of a token is its rank and its log probability, and then the id and the log probability
of each of the most likely tokens, as little-endian int32 and float32. The token itself is sent
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..request import MAX_LOGPROBS, TokenLogprob

_PAIR: Final = np.dtype([("number", "<i4"), ("logprob", "<f4")])
PAIR_BYTES: Final = _PAIR.itemsize
MAX_RECORD_BYTES: Final = PAIR_BYTES * (1 + MAX_LOGPROBS)
MAX_RECORDS_BYTES: Final = 4 << 20
"""Most bytes of the records of a request, because they travel in one message."""


def max_tokens(num_top: int) -> int:
    """Return how many tokens a request may have if each record has this many most likely ones."""
    return MAX_RECORDS_BYTES // (PAIR_BYTES * (1 + num_top))


def pack_records(records: Sequence[TokenLogprob]) -> bytes:
    """Return the bytes of records that have as many most likely tokens each."""
    rows = [[(record.rank, record.logprob), *record.top] for record in records]
    return np.array(rows, _PAIR).tobytes()


def unpack_records(packed: bytes, tokens: Sequence[int]) -> list[TokenLogprob]:
    """Return the record of each token; none if there are none, or if they do not fit the tokens."""
    num_bytes, rest = divmod(len(packed), max(1, len(tokens)))
    if rest or num_bytes % PAIR_BYTES or not 0 < num_bytes <= MAX_RECORD_BYTES or not tokens:
        return []
    pairs = np.frombuffer(packed, _PAIR).reshape(len(tokens), -1)
    rows: Any = pairs.tolist()
    return [
        TokenLogprob(token, logprob, rank, tuple(top))
        for token, [(rank, logprob), *top] in zip(tokens, rows, strict=True)
    ]
