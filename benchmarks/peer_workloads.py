"""The requests of `peers.py`: those of a trace, short chats, and a tree of agents."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from radixkv.kvcache.tokens import Int32Array
from radixkv.scheduler.bench.workload import Work, expand
from radixkv.scheduler.replay.trace import read_trace

WORKLOADS = ("short", "tree")
"""Names of the workloads that are made here; another name is the path of a trace."""

VOCABULARY = 150_000


def requests_of(workload: str, num_requests: int | None) -> Iterator[Work]:
    """Yield the tokens of each request; every iteration gives the same."""
    if workload not in WORKLOADS:
        return expand(read_trace(Path(workload), num_requests).requests)
    return {"short": short_chats, "tree": agents}[workload](num_requests or 2_000)


def short_chats(num_requests: int) -> Iterator[Work]:
    """Yield chats of 50 to 500 tokens that begin with one of 100 templates of 32 to 255 tokens.

    The answers have 50 to 200 tokens.
    """
    random = np.random.default_rng(0)
    templates = [_draw(random, int(random.integers(32, 256))) for _ in range(100)]
    for _ in range(num_requests):
        num_prompt, num_output = int(random.integers(50, 501)), int(random.integers(50, 201))
        template = templates[random.integers(100)][: num_prompt - 1]
        rest = _draw(random, num_prompt - len(template) + num_output)
        tokens = np.concatenate([template, rest])
        yield Work(tokens[:num_prompt], tokens)


def agents(num_requests: int) -> Iterator[Work]:
    """Yield requests that each continue one of the last 64, by 16 tokens and 8 of the answer.

    They all begin with the same 2,000 tokens.
    """
    random = np.random.default_rng(0)
    recent = deque([_draw(random, 2_000)], maxlen=64)
    for _ in range(num_requests):
        parent = recent[random.integers(len(recent))]
        tokens = np.concatenate([parent, _draw(random, 24)])
        recent.append(tokens)
        yield Work(tokens[:-8], tokens)


def _draw(random: np.random.Generator, num_tokens: int) -> Int32Array:
    return random.integers(0, VOCABULARY, num_tokens, dtype=np.int32)
