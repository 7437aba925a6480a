"""Weighted random choice of the next operation, among those that apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..engine import Below, Operation
from .requests import MAX_WAITING, NAMESPACES, TOKENS, draw_prompt
from .state import CacheState

WEIGHTS: Final = {
    "submit": 30,
    "admit": 30,
    "forward": 50,
    "append": 40,
    "finish": 12,
    "match": 20,
    "append_batch": 20,
    "launch": 12,
    "done": 30,
    "fail": 4,
    "again": 4,
    "preempt": 8,
    "evict": 6,
    "reset": 2,
    "misuse": 6,
    "check": 2,
    "drain": 1,
}

COMMON: Final = ("submit", "admit", "forward", "finish")
"""Operations that every world needs."""


def weights_of(rare: int, often: int) -> dict[str, int]:
    """Return the weights of a world that prefers some operations and makes others rare.

    Args:
        rare: one bit per operation outside `COMMON` that makes it rare.
        often: one bit per operation that makes it four times as frequent.
    """
    weights = dict(WEIGHTS)
    others = [word for word in WEIGHTS if word not in COMMON]
    for bit, word in enumerate(others):
        if rare >> bit & 1:
            weights[word] = 1 if word != "reset" else 0
    for bit, word in enumerate(WEIGHTS):
        if often >> bit & 1:
            weights[word] *= 4
    return weights


def draw(world: CacheState, weights: Mapping[str, int], below: Below) -> Operation:
    """Draw an operation that applies now."""
    choices = enabled(world)
    pick = below(sum(weights[word] for word in choices))
    for word in choices:
        pick -= weights[word]
        if pick < 0:
            return draw_operation(world, word, choices[word], below)
    raise AssertionError("the weights do not add up")


def enabled(world: CacheState) -> dict[str, list[str]]:
    """Return the operations that apply, each with its possible request or job names."""
    waiting, running, idle, ready = [], [], [], []
    for name, request in world.requests.items():
        if request.state == "waiting":
            waiting.append(name)
        elif request.state == "running":
            running.append(name)
            if not request.job:
                num_tokens = len(request.tokens)
                if request.written < num_tokens:
                    idle.append(name)
                elif num_tokens < request.limit:
                    ready.append(name)
    can = world.target.can
    choices = {
        "submit": [""] if len(waiting) < MAX_WAITING else [],
        "admit": waiting if len(running) < world.config["max_running"] else [],
        "forward": idle,
        "append": ready,
        "finish": running,
        "match": waiting if "match" in can else [],
        "append_batch": ready if "append_batch" in can else [],
        "launch": idle,
        "done": list(world.jobs),
        "fail": list(world.jobs),
        "again": running,
        "preempt": running,
        "evict": [""] if "evict" in can else [],
        "reset": [""] if "reset" in can else [],
        "misuse": [*running[:1], ""] if "misuse" in can else [],
        "check": [""] if "check" in can else [],
        "drain": [""],
    }
    return {word: names for word, names in choices.items() if names}


def draw_operation(world: CacheState, word: str, names: list[str], below: Below) -> Operation:
    """Draw the arguments of an operation."""
    name = names[below(len(names))] if len(names) > 1 else names[0]
    alphabet = world.config["alphabet"]
    if word == "submit":
        past = world.past
        prompt = draw_prompt(below, past, world.config)
        namespace = below(len(NAMESPACES)) if below(3) == 0 else 0
        return [word, f"r{len(past) + 1}", prompt, below(8 + 2 * world.block_size), namespace]
    if word in ("forward", "launch"):
        request = world.requests[name]
        operation = [word, name, len(request.tokens) if below(2) else 1 + below(5)]
        return operation if word == "forward" else [*operation, f"{name}.{request.num_jobs + 1}"]
    if word == "again":
        written = world.requests[name].written
        return [word, name, below(written + 1) if world.promises.ignores_late else written]
    if word == "append":
        most = 1 if below(3) else 3 * world.block_size + 1  # a step, or blocks at once
        return [word, name, [TOKENS[below(alphabet)] for _ in range(1 + below(most))]]
    if word == "append_batch":
        return [word, [[each, TOKENS[below(alphabet)]] for each in names if below(3)]]
    if word == "evict":
        return [word, below(5)]
    if word == "misuse":
        return [word, below(1 << 10), name]
    return [word, name] if name else [word]
