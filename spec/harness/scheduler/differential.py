"""Differential runs: the same requests must give the same tokens under all options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from ...adapters.scheduler import SchedulerFactory
from ...model.scheduler import Reason
from ...rules.rule import require
from ...rules.scheduler import Q29
from ..engine import Below, Config, Operation
from .configuration import draw_config
from .world import SchedulerWorld

Outputs: TypeAlias = dict[str, tuple[list[int], Reason | None]]
"""Output and reason of each request."""

WAYS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"prefix_cache": False},
    {"prefix_cache": True, "reserve_tokens": 0},
    {"reserve_tokens": None},
    {"token_budget": 1, "max_running": 1},
    {"token_budget": 64, "max_running": 6},
    {"growth": "singles", "reserve_tokens": 0},
    {"depth": 1},
    {"depth": 3, "reserve_tokens": 0},
)
"""Changes of a configuration that must not change any output."""


def outputs(factory: SchedulerFactory, config: Config, requests: Sequence[Operation]) -> Outputs:
    """Submit all requests at once, run until they end, and return their outputs.

    Args:
        factory: makes the scheduler.
        config: sizes and options of the scheduler.
        requests: operations ``["submit", ...]``.

    Raises:
        Violation: a rule is broken.
    """
    world = SchedulerWorld(config, factory)
    for operation in requests:
        world.apply(operation)
    accepted = list(world.live)
    world.apply(["drain"])
    target = world.target
    return {name: (target.output(name), target.reason(name)) for name in accepted}


def check_same(factory: SchedulerFactory, config: Config, requests: Sequence[Operation]) -> None:
    """Check that requests get the same tokens in all of `WAYS`.

    Raises:
        Violation: Q29, or any other rule, is broken.
    """
    first = outputs(factory, config, requests)
    for way in WAYS:
        other = outputs(factory, {**config, **way}, requests)
        require(
            other.keys() == first.keys(),
            Q29, "with {} {} are accepted, and without {}", way, list(other), list(first),
        )  # fmt: skip
        for name, wanted in first.items():
            require(
                other[name] == wanted,
                Q29, "with {} {} generates {}, and without {}", way, name, other[name], wanted,
            )  # fmt: skip


def draw_requests(factory: SchedulerFactory, below: Below) -> tuple[Config, list[Operation]]:
    """Draw sizes, and up to 6 requests.

    Args:
        factory: makes the scheduler.
        below: the source of choices.
    """
    world = SchedulerWorld(draw_config(below), factory)
    submit = world.table.by_word["submit"]
    requests: list[Operation] = []
    for _ in range(1 + below(6)):
        requests.append(submit.draw(world, [""], below))
        world.apply(requests[-1])
    return world.config, requests
