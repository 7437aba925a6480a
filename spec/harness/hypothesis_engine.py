"""The Hypothesis engine: the same generator, driven by the choices of Hypothesis."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Final

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

from ..rules.rule import Violation
from .engine import Finding, Subject, Trace
from .random_engine import Run

CASES_AT_ONCE: Final = 500
"""Hypothesis remembers every choice of a test: so many cases, then a new test begins."""


class _Stop(BaseException):
    """Ends a test of Hypothesis at once: it would run a failing case again, twice."""


class _Hunt:
    """What is added up over the cases, until a rule breaks or there were enough steps."""

    def __init__(self, subject: Subject, num_steps: int, steps_per_case: int) -> None:
        self.subject = subject
        self.num_steps = num_steps
        self.steps_per_case = steps_per_case
        self.done = 0
        self.finding: Finding | None = None
        self.situations: Counter[str] = Counter()

    def case(self, random: Random) -> None:
        """Run one case, in a new world."""
        randrange = random.randrange  # a draw by st.data() would cost twice the step

        def below(bound: int) -> int:
            return randrange(bound) if bound > 1 else 0

        config = self.subject.configure(below)
        world = self.subject.world(config)
        trace: Trace = []
        try:
            for _ in range(self.steps_per_case):
                operation = world.draw(below)
                trace.append(operation)
                world.apply(operation)
            trace.append(["drain"])
            world.apply(["drain"])
        except Violation as violation:
            self.finding = Finding(violation.rule.name, violation.why, config, trace)
            raise _Stop from None
        finally:
            self.done += len(trace)
            self.situations.update(world.situations)
        if self.done >= self.num_steps:
            raise _Stop


def run(subject: Subject, seed: int, num_steps: int, steps_per_case: int = 50) -> Run:
    """Apply operations of Hypothesis' choice until a rule breaks or enough were applied.

    Args:
        subject: what to test.
        seed: the same seed gives the same run, with the same version of Hypothesis.
        num_steps: operations in all, to the end of the last case.
        steps_per_case: operations in one world; each case ends with ``drain``.
    """
    hunt = _Hunt(subject, num_steps, steps_per_case)
    tests = 0
    while hunt.finding is None and hunt.done < num_steps:
        before = hunt.done
        _run_test(hunt, seed + (tests << 32))
        tests += 1
        if hunt.done == before:
            break  # every choice there is has been tried
    return Run(hunt.done, hunt.finding, hunt.situations)


def _run_test(hunt: _Hunt, seed: int) -> None:
    @with_seed(seed)
    @settings(
        max_examples=CASES_AT_ONCE,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def test(random: Random) -> None:
        hunt.case(random)

    try:
        test()
    except _Stop:
        return
