"""Known findings: rules that are broken, and that no longer hide what else is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any, Final

from ...adapters.cache import AdapterError
from ...rules.rule import RULES, Violation, not_judging
from ..engine import Config, Operation, Subject, World

MET: Final = "known: "
"""Situations whose names begin so count the findings that were met."""


def rules_named(words: Sequence[str]) -> frozenset[str]:
    """Return the names of the rules with these codes or names.

    Raises:
        AdapterError: there is no such rule.
    """
    found: set[str] = set()
    for word in words:
        same = {name for name in RULES if word in (name, *name.split())}
        if not same:
            raise AdapterError(f"known: there is no rule {word!r}")
        found |= same
    return frozenset(found)


class KnownSubject:
    """A subject with known findings.

    A known rule is not judged: where it is broken, the world counts it and goes on as if it were
    not. If the manager cannot be followed after that, because it has stopped with an exception or
    the model has lost it, the world ends, and a new one of the same sizes begins.

    Args:
        subject: the subject.
        known: codes or names of the rules.
    """

    def __init__(self, subject: Subject, known: Sequence[str]) -> None:
        self._subject = subject
        self.known = rules_named(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._subject, name)

    def with_factory(self, factory: Any) -> KnownSubject:
        """Return the same with adapters of another factory."""
        subject: Any = copy(self._subject)
        subject.factory = factory
        return KnownSubject(subject, sorted(self.known))

    def world(self, config: Config) -> World:
        """Make an empty world."""
        return _KnownWorld(self._subject, config, self.known)


class _KnownWorld:
    """A world, and the next one when it ends with a known finding."""

    def __init__(self, subject: Subject, config: Config, known: frozenset[str]) -> None:
        self._subject, self._config, self._known = subject, config, known
        self._world = subject.world(dict(config))
        self._earlier: Counter[str] = Counter()
        self.situations: Counter[str] = Counter()
        self._has_met = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def apply(self, operation: Operation) -> bool:
        world = self._world
        with not_judging(self._known) as met:
            try:
                return self._apply(operation, met)
            finally:  # an operation that breaks another rule may have met a known one before
                self._has_met = self._world is world and (self._has_met or bool(met))
                self._earlier.update({f"{MET}{name}": times for name, times in met.items()})
                self.situations = self._earlier + self._world.situations

    def _apply(self, operation: Operation, met: Counter[str]) -> bool:
        try:
            return self._world.apply(operation)
        except Violation as violation:
            if violation.rule.name not in self._known:
                raise
            met[violation.rule.name] += 1
        except AdapterError:
            raise
        except Exception:  # after a known finding, the model or the manager may fail in any way
            if not (self._has_met or met):
                raise
        self._earlier.update(self._world.situations)
        self._world = self._subject.world(dict(self._config))
        return True
