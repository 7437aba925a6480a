"""A prefill scheduler, and the messages of a decode node to it."""

from __future__ import annotations

from typing import Any

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.scheduler import PrefillScheduler, Request
from radixkv.scheduler.handoff import AttemptKey, Grant, Header, Post, Timing

PROMPT = [5, 6, 7, 8, 9, 4, 3]


def scheduler(num_blocks: int = 8, host: int = 0, **options: Any) -> PrefillScheduler:
    manager = CacheManager(num_blocks, 2, host=HostConfig(host) if host else None)
    sizes: dict[str, Any] = {"epoch": 1, "timing": Timing(), "token_budget": 4, "max_running": 2}
    return PrefillScheduler(manager, **(sizes | options))


def request(name: str = "a", prompt: list[int] = PROMPT, max_new_tokens: int = 4) -> Request:
    return Request(name, prompt, max_new_tokens)


def actions(p: PrefillScheduler) -> list[Any]:
    return [*p.take_actions()]


def posted(p: PrefillScheduler, kind: type) -> list[Any]:
    messages = [each.message for each in actions(p) if isinstance(each, Post)]
    return [message for message in messages if isinstance(message, kind)]


def grant(p: PrefillScheduler, name: str = "a", first_block: int = 0, number: int = 1) -> None:
    p.receive("d0", Grant(Header(AttemptKey(name, 1), 7, 1, number), first_block, 2))


def step(p: PrefillScheduler, token: int = 1) -> list[tuple[str, int, int]]:
    plan = p.schedule()
    if plan.chunks:
        p.update(plan, [token] * len(plan.chunks))
    return [(each.request.request_id, each.start, each.length) for each in plan.chunks]
