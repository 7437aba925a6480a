"""Runs a scenario under many schedules, on a copy of the modules that it tests.

A failure prints the seed and the interleaving::

    from tests.threads.explore import Explorer
    Explorer(scenario).replay(17)
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getsource
from types import ModuleType
from typing import Any, Final

from . import primitives
from .baton import Run, Schedule

Change = Callable[[str], str | ast.Module]
"""Returns the source of a planted bug for the source of a module."""

_KINDS: Final = (None, 1, 2, 3, 1)
"""Preemptions of the schedules, in turn; see `Schedule`."""


@dataclass(frozen=True)
class Scenario:
    """What some threads do with the objects of some modules, and what must hold.

    Attributes:
        modules: modules under test, below ``radixkv``; each before those that import it. They get
            the threads, locks and clocks of `primitives`.
        function: what to run, with the modules as arguments; it raises if something is wrong.
    """

    modules: Sequence[str]
    function: Callable[..., None]

    @property
    def name(self) -> str:
        return self.function.__name__


class Found(AssertionError):
    """A schedule under which a scenario fails."""


class Explorer:
    """Runs one scenario again and again."""

    def __init__(self, scenario: Scenario, changes: dict[str, Change] | None = None) -> None:
        """Load the modules; a change replaces the source of one, by its name."""
        self._scenario = scenario
        self._modules = load(scenario.modules, changes or {})
        self._traced = [module.__file__ or "" for module in self._modules]
        self._num_points = 0

    def explore(self, seeds: Iterable[int]) -> int | None:
        """Return the number of the first schedule that fails, counted from 1; None if none does."""
        for count, seed in enumerate(seeds, 1):
            if self._run(seed).error is not None:
                return count
        return None

    def check(self, seeds: Iterable[int]) -> None:
        """Raise `Found` for the first schedule that fails."""
        for seed in seeds:
            self.replay(seed)

    def replay(self, seed: int) -> None:
        """Raise `Found` if the schedule of a seed fails."""
        run = self._run(seed)
        if run.error is not None:
            raise Found(
                f"{self._scenario.name} fails with seed {seed}: {run.error!r}\n"
                f"The threads ran to these places, in this order:\n{run.interleaving()}"
            ) from run.error

    def _run(self, seed: int) -> Run:
        if not self._num_points:  # of a run without preemptions, of which all are a part
            self._num_points = max(1, self._execute(Schedule(0)).num_points)
        kind = _KINDS[seed % len(_KINDS)]
        return self._execute(Schedule(seed, kind, self._num_points))

    def _execute(self, schedule: Schedule) -> Run:
        run = Run(schedule, self._traced)
        run.execute(lambda: self._scenario.function(*self._modules))
        return run


def load(names: Sequence[str], changes: dict[str, Change]) -> list[ModuleType]:
    """Return copies of modules that import `primitives`, and one another."""
    originals = [importlib.import_module(f"radixkv.{name}") for name in names]
    copies = []
    with _replaced(primitives.MODULES):
        for name, original in zip(names, originals, strict=True):
            source = getsource(original)
            changed = changes.get(name, str)(source)
            copy = ModuleType(original.__name__)
            copy.__dict__.update(__file__=original.__file__, __package__=original.__package__)
            sys.modules[original.__name__] = copy  # for the copies that import it
            exec(compile(changed, original.__file__ or "", "exec"), copy.__dict__)
            copies.append(copy)
    return copies


@contextmanager
def _replaced(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Replace modules, and restore all in the end."""
    before: dict[str, Any] = dict(sys.modules)
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.modules.clear()
        sys.modules.update(before)
