"""Requests of a trace scaled down for a tiny model on a CPU.

Prompts are divided by 32: 512 tokens of the trace become one block of 16. The tokens of a block are
a hash of its id, so that requests share the same blocks as in the trace. Outputs are divided by 8
only; shorter ones would not outgrow their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ....kvcache.tokens import Int32Array
from ..trace import TOKENS_PER_HASH_ID, Trace, TraceRequest

PROMPT_SCALE = 32
OUTPUT_SCALE = 8
BLOCK_SIZE = TOKENS_PER_HASH_ID // PROMPT_SCALE

Words: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ScaledRequest:
    """Prompt and output length of a scaled request."""

    prompt: Int32Array
    max_new_tokens: int


def select_requests(trace: Trace, max_requests: int, max_model_len: int) -> list[TraceRequest]:
    """Select requests that fit the model, in file order, preferring conversations of several turns.

    The first two blocks identify a conversation; in Mooncake's conversation trace the first block
    is the same for all. Consecutive requests would share little: turns are minutes apart.
    """
    fitting = [
        request for request in trace.requests if sum(_scaled_lengths(request)) <= max_model_len
    ]
    turns: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(fitting):
        turns.setdefault(request.hash_ids[:2], []).append(index)
    singles = [key for key, indices in turns.items() if len(key) < 2 or len(indices) == 1]
    for key in singles:  # move to the end
        turns[key] = turns.pop(key)
    chosen = [index for indices in turns.values() for index in indices][:max_requests]
    return [fitting[index] for index in sorted(chosen)]


def scale_request(request: TraceRequest, vocab_size: int) -> ScaledRequest:
    """Scale a request down. Token i of a block is a hash of (hash id, i), below vocab_size."""
    ids = np.asarray(request.hash_ids, dtype=np.int64)
    words = (ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).astype(np.uint64)
    prompt = (_mix(words) % np.uint64(vocab_size)).astype(np.int32).reshape(-1)
    num_prompt, num_outputs = _scaled_lengths(request)
    return ScaledRequest(prompt[:num_prompt], num_outputs)


def _scaled_lengths(request: TraceRequest) -> tuple[int, int]:
    return -(-request.input_length // PROMPT_SCALE), -(-request.output_length // OUTPUT_SCALE)


def _mix(words: Words) -> Words:
    """Hash with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
