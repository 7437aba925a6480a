"""What every engine runs: worlds that draw and apply operations, and what a run found in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..rules.rule import Violation

Operation: TypeAlias = list[Any]
"""Plain data: a word, then what it needs, as ``["admit", "r1"]``. It names things, not places."""

Trace: TypeAlias = list[Operation]
"""Operations in order. With its configuration it replays anywhere."""

Config: TypeAlias = dict[str, Any]
"""The sizes and options of one world, as plain data."""

Below: TypeAlias = Callable[[int], int]
"""A source of choices: ``below(n)`` is one of 0 .. n-1. Random, Hypothesis' or read from a file."""


class World(Protocol):
    """A thing under test, its surroundings, and the specification beside it."""

    situations: Counter[str]
    """How often each situation of interest came up."""

    def draw(self, below: Below) -> Operation:
        """Return an operation that applies now."""

    def apply(self, operation: Operation) -> bool:
        """Do one operation and check every rule.

        Returns:
            Whether it applied; if what it names is not there, nothing is done.

        Raises:
            Violation: if a rule is broken.
        """

    def picture(self) -> str:
        """Draw the present state as text."""


class Subject(Protocol):
    """What to test: makes worlds around it. Each case of a run has a new tiny world."""

    def configure(self, below: Below) -> Config:
        """Draw the sizes and options of a world."""

    def world(self, config: Config) -> World:
        """Make a world with nothing in it yet."""

    # It may have `simpler(trace) -> Iterator[Trace]`: traces that shrinking should try.


@dataclass(frozen=True)
class Finding:
    """A broken rule, with all that it takes to see it again.

    Attributes:
        rule: the name of the rule.
        why: what was seen.
        config: the world in which it was seen.
        trace: the operations that lead to it; the last one breaks the rule.
    """

    rule: str
    why: str
    config: Config
    trace: Trace

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; the format of a ``*.trace.json`` file."""
        return {
            "format": 1,
            "rule": self.rule,
            "why": self.why,
            "config": self.config,
            "trace": self.trace,
        }


def replay(subject: Subject, config: Mapping[str, Any], trace: Trace) -> Violation | None:
    """Run a trace from the start; what no longer applies is skipped.

    Returns:
        The rule that broke, or None.
    """
    world = subject.world(dict(config))
    try:
        for operation in trace:
            world.apply(operation)
    except Violation as violation:
        return violation
    return None
