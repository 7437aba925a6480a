"""The specification as Hypothesis state machines: a test of your manager in three lines.

::

    from radixkv.spec.harness.machine import CacheMachine

    class TestMine(CacheMachine):
        make = MyManager

``MyManager(num_blocks, block_size)`` makes an adapter: see `radixkv.spec.adapters.cache`. Pytest
and unittest collect the class directly, because it is a TestCase. Use the settings of Hypothesis:
``@settings(max_examples=1000)`` above the class. You can add ``@rule`` and ``@invariant`` methods.
``TierMachine``, ``SchedulerMachine``, ``TieredSchedulerMachine``, ``HandoffMachine``,
``PoolMachine`` and ``CostMachine`` test the other kinds of systems in the same way.

Each row of the subject's table of operations is a rule. Four things differ from a machine that is
written by hand. Of 50 planted bugs, 44 were found in 2,400 steps without the first and the third,
and 48 to 50 with them.

- **Rules are drawn by weight.** Hypothesis draws rules evenly, and disables some in each example;
  often ``submit`` is one of them. Here each example has its own weights, and some operations are
  rare in it.
- **Names instead of bundles.** The name of a request, step or copy is drawn from those to which the
  operation applies now. A bundle holds all that ever were, so most of its draws would do nothing.
- **Examples are not mutated.** Hypothesis spends five of six examples on copies of the last one in
  which a part is repeated; most steps of a copy repeat what the last example did.
- **The rules of the specification** are checked inside each step, not as invariants: a violation
  belongs to one call, and the printed program has one line per call.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

from hypothesis import Phase, reject, settings
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
from .cost_world import COST_TABLE
from .engine import Below, Config, Finding, Subject, Trace, new_world
from .findings.program import to_program
from .handoff.operations import HANDOFF_TABLE
from .operations import Groups, Operation, Table
from .pool_world import POOL_TABLE
from .scheduler.operations import SCHEDULER_TABLE
from .subjects import SubjectOptions, What, make_subject
from .tiers.operations import TIER_TABLE

Draw = Callable[[st.SearchStrategy[Any]], Any]

ENTROPY: Final = 1 << 64

UNIFORM: Final = 1 << 16
"""A range up to which Hypothesis draws integers evenly; larger bounds are powers of two."""


def _below(draw: Draw) -> Below:
    """Return the choices of Hypothesis as a source."""

    def below(bound: int) -> int:
        if bound > UNIFORM:  # Hypothesis prefers small numbers there
            return below(-(-bound // UNIFORM)) * UNIFORM + below(UNIFORM)
        return draw(st.integers(0, bound - 1)) if bound > 1 else 0

    return below


@st.composite
def _config(draw: Draw) -> Config:
    """Draw a configuration, after what keeps Hypothesis from mutating this example.

    Hypothesis mutates no example in which a filter has refused something, and gives up to begin
    with small examples when their simplest form is refused: the first draw is new in each example,
    and the second is 0 in the simplest form. Without either, Hypothesis only generates.
    """
    draw(st.integers(0, ENTROPY))
    if draw(st.integers(0, UNIFORM)) == 0:
        reject()
    accepts: Iterator[bool] = iter((False, True))
    draw(st.tuples().filter(lambda nothing: next(accepts)))
    machine: SpecificationMachine = draw(st.runner())
    return machine.subject().configure(_below(draw))


@st.composite
def _argument(draw: Draw, operation: Operation[Any], name: str) -> Any:
    machine: SpecificationMachine = draw(st.runner())
    return machine.draw_argument(operation, name, _below(draw))


@st.composite
def _weighted(draw: Draw, machine: SpecificationMachine) -> tuple[Any, dict[str, Any]]:
    """Draw a rule and its arguments: an operation by its weight, or a rule that you added."""
    below = _below(draw)
    yours = [rule for rule in machine.yours if machine.is_valid(rule)]
    place = below(len(yours) + len(machine.world.table.by_word)) if yours else 0
    if place < len(yours):
        chosen = yours[place]
        return chosen, {name: draw(each) for name, each in chosen.arguments_strategies.items()}
    word, *values = machine.world.draw(below)
    names = machine.world.table.by_word[word].arguments
    return machine.by_word[word], dict(zip(names, values, strict=True))


def _rule_of(operation: Operation[Any]) -> Any:
    """Return the rule that does an operation."""

    def do(self: SpecificationMachine, **arguments: Any) -> None:
        self.do(operation.word, *(arguments[name] for name in operation.arguments))

    do.__name__ = operation.word
    strategies: dict[str, Any] = {name: _argument(operation, name) for name in operation.arguments}
    as_rule: Callable[[Any], Any] = rule(**strategies)
    return precondition(lambda self: self.applies(operation))(as_rule(do))


class SpecificationMachine(RuleBasedStateMachine, unittest.TestCase):
    """The operations of a table as rules, and what is tested.

    A subclass with a `table` is a kind of machine; a subclass of that, with `make`, is a test.

    Attributes:
        make: makes an adapter.
        depth: which optional methods of the adapter of a cache are used.
        options: sizes of a cache, and rules that it is known to break.
        world: the system under test with the specification.
        trace: the operations so far.
    """

    make: ClassVar[Any]  # a factory; with its type, a function would become a method
    depth: ClassVar[Depth] = "api"
    options: ClassVar[SubjectOptions] = SubjectOptions()
    what: ClassVar[What]
    world: Any  # a World
    __test__ = False  # only classes with a system to test are collected

    def __init_subclass__(cls, table: Table[Any] | None = None, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for operation in table or ():
            setattr(cls, operation.word, _rule_of(operation))
        if "__test__" not in vars(cls):
            cls.__test__ = table is None

    def __init__(self, method: str = "runTest") -> None:
        unittest.TestCase.__init__(self, method)
        RuleBasedStateMachine.__init__(self)
        self.trace: Trace = []
        self._groups: Groups | None = None
        self._drawn: dict[str, Any] = {}
        words = self.subject().table.by_word
        self.by_word = {each.function.__name__: each for each in self.rules}
        self.yours = [each for name, each in self.by_word.items() if name not in words]
        # Hypothesis has no weights. A version of it that does not read this attribute draws the
        # rules evenly: less is found then, which a test notices.
        self.is_valid = self._rules_strategy.is_valid
        self._rules_strategy: Any = _weighted(self)

    @classmethod
    def subject(cls) -> Subject:
        """Return what is tested, in worlds of all sizes."""
        if not hasattr(cls, "make"):
            raise AdapterError(f"{cls.__name__} has no make: set it to what makes an adapter")
        return make_subject(cls.what, cls.make, cls.depth, cls.options)

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
        self.world = new_world(self.subject(), config)

    def teardown(self) -> None:
        """Let all requests end, if the program came to its end."""
        if sys.exc_info()[0] is None and self.trace:
            self.do("drain")

    def applies(self, operation: Operation[Any]) -> bool:
        """Whether an operation applies now; the groups are computed once per step."""
        if self._groups is None:
            self._groups = self.world.table.groups(self.world)
        can = operation.word in self.world.table.by_word
        return can and bool(self._groups.get(operation.group))

    def draw_argument(self, operation: Operation[Any], name: str, below: Below) -> Any:
        """Draw an argument of an operation; with the first one, all of them."""
        if not self._drawn:
            assert self._groups is not None, "a rule is drawn when its precondition holds"
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


class CacheMachine(SpecificationMachine, table=CACHE_TABLE):
    """A cache manager under test: `make` makes an adapter from ``(num_blocks, block_size)``."""

    what = "cache"


class CostMachine(SpecificationMachine, table=COST_TABLE):
    """The costs of a cache manager under test: see `radixkv.spec.harness.cost_world`."""

    what = "costs"


class HandoffMachine(SpecificationMachine, table=HANDOFF_TABLE):
    """The hand-off between prefill and decode nodes: see `radixkv.spec.adapters.handoff`."""

    what = "handoff"


class PoolMachine(SpecificationMachine, table=POOL_TABLE):
    """A block pool under test: see `radixkv.spec.harness.pool_world.Pool`."""

    what = "pool"


class TierMachine(SpecificationMachine, table=TIER_TABLE):
    """A cache manager with tiers under test: see `radixkv.spec.adapters.tiers`."""

    what = "tiers"


class SchedulerMachine(SpecificationMachine, table=SCHEDULER_TABLE):
    """A scheduler under test: see `radixkv.spec.adapters.scheduler`."""

    what = "scheduler"


class TieredSchedulerMachine(SpecificationMachine, table=SCHEDULER_TABLE):
    """A scheduler over a manager with tiers: see `radixkv.spec.adapters.scheduler`."""

    what = "tiered_scheduler"


def machine_of(subject: Subject) -> type[SpecificationMachine]:
    """Return a machine of a subject."""

    class Machine(SpecificationMachine, table=subject.table):
        @classmethod
        def subject(cls) -> Subject:
            return subject

    return Machine
