"""Random choice of a scheduler world's configuration, requests and next operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..engine import Below, Config, Operation
from .state import SchedulerState

NAMESPACES: Final = (b"", b"tenant")
MAX_WAITING: Final = 6

WEIGHTS: Final = {
    "submit": 40,
    "step": 100,
    "step_abort": 3,
    "abort": 4,
    "misuse": 3,
    "step_misuse": 3,
    "flood": 1,
    "drain": 2,
}


def draw_config(below: Below) -> Config:
    """Draw the sizes and options of a world; it is tiny, to reach all situations soon."""
    max_running = 1 + below(5)
    return {
        "num_blocks": 4 + below(11),
        "block_size": 1 + below(4),
        "max_running": max_running,
        "token_budget": max_running + below(1 + below(13 - max_running)),
        "policy": ("fcfs", "priority")[below(2)],
        "reserve_tokens": (None, 0, 0, 0, 0, 2)[below(6)],
        "prefix_cache": below(5) > 0,
        "alphabet": (1, 2, 3, 8)[below(4)],
    }


def draw_prompt(below: Below, past: Sequence[Sequence[int]], config: Config) -> list[int]:
    """Draw a prompt: often the start of an earlier one, often of a length near whole blocks."""
    size, alphabet = config["block_size"], config["alphabet"]
    prompt: list[int] = []
    if past and below(6):
        base = past[-1 - below(1 + below(min(6, len(past))))]
        prompt = list(base[: below(len(base) + 2) if below(3) else len(base)])
    near_whole_blocks = size * (1 + below(3)) + below(3) - 1
    length = near_whole_blocks if below(2) else len(prompt) + below(4)
    length = max(1, min(length, size * config["num_blocks"] + 2))
    prompt = prompt[:length]
    return prompt + [below(alphabet) for _ in range(length - len(prompt))]


def draw_submission(below: Below, past: Sequence[Sequence[int]], config: Config) -> Operation:
    """Draw a request: its prompt, limit, priority, stop tokens and namespace.

    Args:
        below: the source of choices.
        past: tokens of each earlier request.
        config: configuration of the world.
    """
    prompt = draw_prompt(below, past, config)
    stop = [below(config["alphabet"])] if below(8) == 0 else []
    namespace = below(2) if below(6) == 0 else 0
    name = f"r{len(past) + 1}"
    return ["submit", name, prompt, 1 + below(14), below(3), stop, namespace]


def draw(world: SchedulerState, below: Below) -> Operation:
    """Draw an operation that applies now."""
    live, past = list(world.live), [request.tokens for request in world.past]
    waiting = len(live) - len(world.running)
    words = {"submit": waiting < MAX_WAITING, "misuse": "misuse" in world.target.can}
    words["step_misuse"] = words["misuse"]
    words |= dict.fromkeys(("step_abort", "abort", "flood"), bool(live))
    choices = [word for word in WEIGHTS if words.get(word, True)]
    pick = below(sum(WEIGHTS[word] for word in choices))
    for word in choices:
        pick -= WEIGHTS[word]
        if pick < 0:
            break
    if word == "submit":
        return draw_submission(below, past, world.config)
    if word == "abort":
        return [word, live[below(len(live))]]
    if word == "step_abort":
        return [word, [live[below(len(live))] for _ in range(1 + below(2))]]
    if word in ("misuse", "step_misuse"):
        return [word, below(8), live[below(len(live))] if live else "r1"]
    if word == "flood":
        prompt = draw_prompt(below, past, world.config)[:4]
        return [word, f"f{len(world.past) + 1}", prompt, 1 + below(3)]
    return [word]
