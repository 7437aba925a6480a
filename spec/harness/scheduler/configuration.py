"""The configuration of a scheduler's world, and its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..engine import Below, Config

NAMESPACES: Final = (b"", b"tenant")
MAX_WAITING: Final = 6


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
        "depth": (1, 1, 2, 2, 3)[below(5)],
    }


def draw_tiers(below: Below) -> Config:
    """Draw the sizes and options below the device; a small one, so that requests compete."""
    storage = int(below(3) > 0)
    block_size = 1 + below(3)
    return {
        "num_blocks": (9, 6, 5)[block_size - 1] + below(3),
        "reserve_tokens": (None, 0, 0, 0, 0, 0, 0, 0)[below(8)],
        "block_size": block_size,
        "prefix_cache": True,
        "alphabet": (1, 2, 2, 3)[below(4)],
        "host_blocks": 3 + below(14),
        "write": ("exclusive", "back", "through")[below(3)],
        "storage": storage,
        "preempt": ("recompute", "host", "host", "storage" if storage else "host")[below(4)],
        "late": below(2),
        "depth": (1, 1, 2)[below(3)],
        "decode": int(below(6) == 5),
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
    # A request that needs half of the pool waits long enough for others to overtake it. With tiers,
    # such prompts would be too many steps of copies.
    if "write" not in config and not below(16):
        half = size * config["num_blocks"] // 2
        length = half + below(max(half, 1))
    length = max(1, min(length, size * config["num_blocks"] + 2))
    prompt = prompt[:length]
    return prompt + [below(alphabet) for _ in range(length - len(prompt))]
