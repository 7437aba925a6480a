"""Types that all engines share: worlds, subjects, operations, traces and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..adapters.cache import AdapterError
from ..rules.rule import Violation
from . import operations
from .operations import Table

Operation: TypeAlias = list[Any]
"""Plain data: a word and its arguments, as ``["admit", "r1"]``, with names, not indices."""

Trace: TypeAlias = list[Operation]
"""Operations in order; with its configuration, a trace can be replayed anywhere."""

Config: TypeAlias = dict[str, Any]
"""The sizes and options of one world, as plain data."""

Below: TypeAlias = operations.Below
"""A source of choices: ``below(n)`` returns one of 0 .. n-1. Random, or from Hypothesis."""


class World(Protocol):
    """A system under test with its requests, its simulated device and the specification."""

    config: Config
    """The configuration it was made from."""

    table: Table[Any]
    """The operations that its adapter allows."""

    situations: Counter[str]
    """How often each situation of interest occurred."""

    def draw(self, below: Below) -> Operation:
        """Return an operation that applies now."""

    def apply(self, operation: Operation) -> bool:
        """Do one operation and check every rule.

        Returns:
            Whether it applied; if a name does not exist, nothing is done.

        Raises:
            Violation: a rule is broken.
        """

    def picture(self) -> str:
        """Draw the current state as text."""


class Subject(Protocol):
    """Makes worlds around a system under test; each case of a run has a new, tiny world."""

    table: Table[Any]
    """All operations."""

    def configure(self, below: Below) -> Config:
        """Draw the sizes and options of a world."""

    def world(self, config: Config) -> World:
        """Make an empty world."""

    # Optional: `case_lengths` has numbers of operations, one of which each world gets.
    # Optional: `simpler(trace) -> Iterator[Trace]` yields traces that shrinking should try.


@dataclass(frozen=True)
class Finding:
    """A broken rule, with everything needed to reproduce it.

    Attributes:
        rule: the name of the rule.
        why: the observed state.
        config: the configuration of the world.
        trace: the operations; the last one breaks the rule.
    """

    rule: str
    why: str
    config: Config
    trace: Trace

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data, in the format of a ``*.trace.json`` file."""
        return {
            "format": 1,
            "rule": self.rule,
            "why": self.why,
            "config": self.config,
            "trace": self.trace,
        }


def new_world(subject: Subject, config: Mapping[str, Any]) -> World:
    """Return an empty world.

    Raises:
        AdapterError: if a rule is broken before the first operation.
    """
    try:
        return subject.world(dict(config))
    except Violation as violation:
        broken = f"breaks {violation.rule.name}: {violation.why}"
        raise AdapterError(f"a new world of {dict(config)} {broken}") from violation


def replay(subject: Subject, config: Mapping[str, Any], trace: Trace) -> Violation | None:
    """Run a trace from the start; operations that do not apply are skipped.

    Returns:
        The rule that broke, or None.
    """
    try:
        world = subject.world(dict(config))
        for operation in trace:
            world.apply(operation)
    except Violation as violation:
        return violation
    return None
