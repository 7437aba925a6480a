"""Random choice of a hand-off's sizes and operations: one table of operations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from ..engine import Below, Config, Operation
from .state import HandoffState

ORDERS: Final = ("early", "prefill_complete")


class Kind(NamedTuple):
    """A kind of operation.

    Attributes:
        weight: how often it is drawn where it applies.
        names: the things to which it applies now; None if it needs none.
        arguments: draws the arguments after the name.
    """

    weight: int
    names: Callable[[HandoffState], Sequence[str]] | None
    arguments: Callable[[Below], list[Any]] = lambda below: []


def draw_prompt(below: Below) -> list[int]:
    """Draw a prompt that often shares a prefix with others."""
    tokens = [(1, 1, 1, 2)[below(4)]] * (1 + below(4))
    return tokens + [1 + below(2) for _ in range(below(5))]


def _request(below: Below) -> list[Any]:
    return [draw_prompt(below), 1 + below((3, 8, 16)[below(3)]), below(4)]


def _messages(world: HandoffState) -> list[str]:
    return [each.name for each in world.network]


def _steps(names: Sequence[str], world: HandoffState) -> list[str]:
    live = [node for name in names if (node := world.nodes[name]) is not None]
    return [each.name for each in live if each.is_stepping or each.system.has_work()]


OPERATIONS: Final[Mapping[str, Kind]] = {
    "submit": Kind(600, lambda world: [f"r{len(world.requests) + 1}"], _request),
    "cancel": Kind(80, lambda world: world.model.open()),
    "deliver": Kind(12_000, _messages),
    "duplicate": Kind(1_000, _messages),
    "drop": Kind(800, _messages),
    "cut": Kind(60, lambda world: world.names),
    "compute": Kind(4_000, lambda world: _steps(world.prefill_names, world)),
    "decode": Kind(3_600, lambda world: _steps(world.decode_names, world)),
    "pull_write": Kind(4_400, lambda world: [each.name for each in world.transfers]),
    "pull_end": Kind(
        4_000,
        lambda world: [each.name for each in world.transfers if not each.ended],
        lambda below: [below(10) > 0, below(2) > 0],
    ),
    "pull_fence": Kind(
        600, lambda world: [each.name for each in world.transfers if each.may_fence]
    ),
    "offer_fence": Kind(
        400, lambda world: [each for node in world.live() for each in node.withdrawn]
    ),
    "crash": Kind(120, lambda world: [node.name for node in world.live()]),
    "restart": Kind(
        1_600, lambda world: [name for name, node in world.nodes.items() if node is None]
    ),
    "new_gateway": Kind(10, None),
    "copy": Kind(
        1_600,
        lambda world: [name for node in world.live() for name in node.copies],
        lambda below: [below(10) > 0],
    ),
    "evict": Kind(
        200, lambda world: [node.name for node in world.live()], lambda below: [1 + below(4)]
    ),
    "reset": Kind(20, lambda world: [node.name for node in world.live()]),
    "tick": Kind(600, None, lambda below: [(1, 1, 1, 1, 4)[below(5)]]),
    "drain": Kind(0, None),
}
"""Operations by word; each is a method of the world."""

WORDS: Final = tuple(OPERATIONS)


def draw_config(below: Below) -> Config:
    """Draw sizes, from too small for two requests to ample; some overload D.

    Each world favours some operations, and neglects others.
    """
    config: Config = {
        "prefill_blocks": (5, 8, 14)[below(3)],
        "decode_blocks": (6, 9, 16)[below(3)],
        "host_blocks": (0, 0, 4, 12)[below(4)],
        "block_size": 1 + below(3),
        "num_groups": 1 + below(2),
        "budget": (2, 5, 16)[below(3)],
        "max_running": (1, 2, 4)[below(3)],
        "order": ORDERS[below(2)],
        "reserve_tokens": (0, 0, 0, 2, None)[below(5)],
        "num_prefill": (1, 1, 2)[below(3)],
        "num_decode": (1, 1, 2)[below(3)],
        "max_attempts": 3,
        "request_s": (30, 5000, 5000)[below(3)],
        "max_overtaken": (1, 3, 256)[below(3)],
    }
    if below(5) < 2:
        config |= {
            "prefill_blocks": 24, "decode_blocks": 20, "budget": 16, "num_decode": 1,
            "max_running": (4, 6)[below(2)],
        }  # fmt: skip
    factors = [(1, 10, 10, 10, 30)[below(5)] for _ in WORDS]
    config["rare"] = [word for word, each in zip(WORDS, factors, strict=True) if each == 1]
    config["often"] = [word for word, each in zip(WORDS, factors, strict=True) if each == 30]
    return config


def weights_of(config: Config) -> list[int]:
    """Return the cumulative weights of the operations in a world."""
    factor = dict.fromkeys(config.get("rare", ()), 1) | dict.fromkeys(config.get("often", ()), 30)
    return list(accumulate(OPERATIONS[word].weight * factor.get(word, 10) for word in WORDS))


def draw(world: HandoffState, below: Below) -> Operation:
    """Draw an operation that applies now; of several things, often the oldest."""
    weights = world.weights
    while True:
        word = WORDS[bisect_right(weights, below(weights[-1]))]
        kind = OPERATIONS[word]
        if kind.names is None:
            return [word, *kind.arguments(below)]
        if names := kind.names(world):
            index = 0 if below(3) < 2 else below(16) % len(names)
            return [word, names[index], *kind.arguments(below)]
