"""The specification as Hypothesis state machines: a test of your manager in three lines.

::

    from radixkv.spec.harness.machine import CacheMachine

    class TestMine(CacheMachine):
        make = MyManager

``MyManager(num_blocks, block_size)`` makes an adapter: see `radixkv.spec.adapters.cache`. Pytest
and unittest collect the class directly, because it is a TestCase. Use the settings of Hypothesis:
``@settings(max_examples=1000)`` above the class. You can add ``@rule`` methods.

Each row of the subject's table of operations is a rule.

- **Weights.** A rule is registered as often as its weight says. Hypothesis disables some rules in
  each example (swarm testing).
- **Names instead of bundles.** The name of a request, a lease, a step or a copy is drawn from those
  to which the operation applies now. A bundle would hold all that ever were; most of its draws
  would do nothing.
- **Rules of the specification.** They are checked inside each step, not as an ``@invariant``, so
  that a violation belongs to one call, and the printed program has one line per call. You can add
  invariants.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable
from typing import Any, ClassVar, Final

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ..adapters.cache import AdapterError
from ..adapters.cache_target import Depth
from ..rules.rule import Violation
from .cache.operations import CACHE_TABLE
from .cache.world import CacheSubject, CacheWorld
from .engine import Below, Config, Finding, Subject, Trace
from .operations import Groups, Operation, Table
from .program import to_program

UNIT: Final = 4
"""Weight for which a rule is registered once."""

Draw = Callable[[st.SearchStrategy[Any]], Any]


def _below(draw: Draw) -> Below:
    """Return the choices of Hypothesis as a source."""
    return lambda bound: draw(st.integers(0, bound - 1)) if bound > 1 else 0


@st.composite
def _config(draw: Draw) -> Config:
    machine: SpecificationMachine = draw(st.runner())
    return machine.subject().configure(_below(draw))


@st.composite
def _argument(draw: Draw, operation: Operation[Any], name: str) -> Any:
    machine: SpecificationMachine = draw(st.runner())
    return machine.draw_argument(operation, name, _below(draw))


def _rule_of(operation: Operation[Any], name: str) -> Any:
    """Return a rule that does an operation."""

    def do(self: SpecificationMachine, **arguments: Any) -> None:
        self.do(operation.word, *(arguments[name] for name in operation.arguments))

    do.__name__ = name
    strategies: dict[str, Any] = {name: _argument(operation, name) for name in operation.arguments}
    as_rule: Callable[[Any], Any] = rule(**strategies)
    return precondition(lambda self: self.applies(operation))(as_rule(do))


def rules_of(table: Table[Any]) -> dict[str, Any]:
    """Return the rules of a table by name, more of an operation of more weight.

    Hypothesis disables rules by name. With ``admit_2``, ``admit_3`` and so on, an example has more
    or less of an operation, and rarely nothing of those that every example needs.
    """
    rules = {}
    for operation in table:
        for number in range(1, max(1, round(operation.weight / UNIT)) + 1):
            name = operation.word if number == 1 else f"{operation.word}_{number}"
            rules[name] = _rule_of(operation, name)
    return rules


class SpecificationMachine(RuleBasedStateMachine, unittest.TestCase):
    """The rules of a subject's operations; its subclasses have a subject.

    Attributes:
        world: the system under test with the specification.
        trace: the operations so far.
    """

    world: Any  # a World
    __test__ = False  # only subclasses of the subclasses are collected

    def __init__(self, method: str = "runTest") -> None:
        unittest.TestCase.__init__(self, method)
        RuleBasedStateMachine.__init__(self)
        self.trace: Trace = []
        self._groups: Groups | None = None
        self._drawn: dict[str, Any] = {}

    @classmethod
    def subject(cls) -> Subject:
        """Return what is tested."""
        raise NotImplementedError

    @classmethod
    def run_settings(cls) -> settings:
        """Return the settings of a run: yours or the profile's, without explaining.

        Explaining is slow, and useless since all violations are raised in one place.
        """
        given = cls.TestCase.settings
        phases = tuple(phase for phase in given.phases if phase is not Phase.explain)
        return settings(given, phases=phases)

    def runTest(self) -> None:
        """Let Hypothesis search for a program that breaks a rule."""
        run_state_machine_as_test(type(self), settings=self.run_settings())

    runTest.is_hypothesis_test = True  # type: ignore[attr-defined]  # for its pytest plugin

    @initialize(config=_config())
    def start(self, config: Config) -> None:
        """Start with an empty world of random size."""
        self.world = self.subject().world(config)

    def teardown(self) -> None:
        """Let all requests end, if the program came to its end."""
        if sys.exc_info()[0] is None and self.trace:
            self.do("drain")

    def applies(self, operation: Operation[Any]) -> bool:
        """Whether an operation applies now; the groups are computed once per step."""
        if self._groups is None:
            self._groups = self.world.table.groups(self.world)
        return (
            bool(self._groups.get(operation.group)) and operation.word in self.world.table.by_word
        )

    def draw_argument(self, operation: Operation[Any], name: str, below: Below) -> Any:
        """Draw an argument of an operation: all of them, when it is the first."""
        if not self._drawn:
            assert self._groups is not None, "a rule is drawn after its precondition holds"
            values = operation.draw(self.world, self._groups[operation.group], below)[1:]
            self._drawn = dict(zip(operation.arguments, values, strict=True))
        return self._drawn.pop(name)

    def do(self, *operation: Any) -> None:
        """Do an operation and check every rule; a violation gets the program as a note."""
        self._groups = None
        self.trace.append(list(operation))
        try:
            self.world.apply(self.trace[-1])
        except Violation as violation:
            finding = Finding(violation.rule.name, violation.why, self.world.config, self.trace)
            violation.add_note(to_program(finding, self.subject()))
            raise


def machine_of(subject: Subject) -> type[SpecificationMachine]:
    """Return a machine that tests a subject."""
    members = {"subject": classmethod(lambda cls: subject), **rules_of(subject.table)}
    return type("Machine", (SpecificationMachine,), members)


class CacheMachine(SpecificationMachine):
    """A cache manager under test; subclass it and set `make`.

    Attributes:
        make: makes an adapter from ``(num_blocks, block_size)``.
        depth: which optional methods of the adapter are used.
    """

    make: ClassVar[Any]  # a Factory; with that type, a function would become a method
    depth: ClassVar[Depth] = "api"
    world: CacheWorld

    vars().update(rules_of(CACHE_TABLE))

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__test__" not in vars(cls):
            cls.__test__ = True

    @classmethod
    def subject(cls) -> CacheSubject:
        """Return the manager in worlds of all sizes."""
        if not hasattr(cls, "make"):
            raise AdapterError(
                f"{cls.__name__} has no make: set it to what makes an adapter from "
                "(num_blocks, block_size)"
            )
        return CacheSubject(cls.make, cls.depth)
