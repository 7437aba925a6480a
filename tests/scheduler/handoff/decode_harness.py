"""A decode scheduler, and the messages of a prefill node to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.scheduler import DecodeScheduler
from radixkv.scheduler.handoff import (
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Hits,
    Post,
    Pull,
    Refuse,
    Send,
    Timing,
)


def scheduler(num_blocks: int = 16, host: int = 0, **options: Any) -> DecodeScheduler:
    manager = CacheManager(num_blocks, 2, host=HostConfig(host) if host else None)
    sizes: dict[str, Any] = {
        "epoch": 1,
        "timing": Timing(),
        "token_budget": 8,
        "max_running": 4,
        "reserve_tokens": 0,
    }
    return DecodeScheduler(manager, **(sizes | options))


def actions(d: DecodeScheduler) -> list[Any]:
    return [*d.take_actions()]


def ask(
    d: DecodeScheduler,
    name: str = "a",
    num_tokens: int = 4,
    max_new_tokens: int = 1,
    *,
    peer: str = "p0",
    attempt: int = 1,
    tokens: bytes | None = None,
) -> Any:
    """Send an ASK for a prompt of the name's letter; return the answer."""
    prompt = np.full(num_tokens, ord(name), "<i4").tobytes() if tokens is None else tokens
    d.receive(peer, Ask(Header(AttemptKey(name, attempt), 5), prompt, b"", 2, 1, max_new_tokens))
    messages = [each.message for each in actions(d) if isinstance(each, Post)]
    return messages[-1]


def send(d: DecodeScheduler, granted: Grant, num_blocks: int, commit: Commit) -> None:
    """Send all blocks of a prompt that D lacks."""
    header = Header(granted.header.key, 5, 1, granted.header.grant)
    if num_blocks:
        d.receive("p0", Send(header, 0, granted.first_block, num_blocks, 0))
        [pull] = [each for each in actions(d) if isinstance(each, Pull)]
        d.pulled(pull.part_id)
    d.receive("p0", commit)


def start(
    d: DecodeScheduler, name: str = "a", num_tokens: int = 4, max_new_tokens: int = 3, **more: Any
) -> list[Any]:
    """Hand a request over; return what D reports."""
    granted = ask(d, name, num_tokens, max_new_tokens)
    assert isinstance(granted, Grant), granted
    return hand_over(d, granted, num_tokens, **more)


def hand_over(d: DecodeScheduler, granted: Grant, num_tokens: int, **more: Any) -> list[Any]:
    """Send and commit what was granted; return what D reports."""
    num_blocks = -(-num_tokens // 2) - granted.first_block
    header = Header(granted.header.key, 5, 1, granted.header.grant)
    commit = Commit(header, bool(num_blocks), 9, num_tokens, Hits(1, 2, 0), **more)
    send(d, granted, num_blocks, commit)
    return [each for each in actions(d) if not isinstance(each, Post)]


def step(d: DecodeScheduler, token: int = 1) -> list[tuple[str, int, int]]:
    plan = d.schedule()
    if plan.chunks:
        d.update(plan, [token] * len(plan.chunks))
    return [(each.request.request_id, each.start, each.length) for each in plan.chunks]


def refusal(answer: Any) -> tuple[str, int, int]:
    assert isinstance(answer, Refuse), answer
    return answer.reason, answer.needed, answer.available
