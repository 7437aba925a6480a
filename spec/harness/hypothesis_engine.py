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
"""Cases per Hypothesis test; Hypothesis stores every choice, so tests must not grow too long."""


class _Stop(BaseException):
    """Ends a Hypothesis test at once; otherwise it would run a failing case twice more."""


class _Hunt:
    """Totals over the cases, until a rule breaks or enough steps were applied."""

    def __init__(self, subject: Subject, num_steps: int, steps_per_case: int) -> None:
        self.subject = subject
        self.num_steps = num_steps
        self.steps_per_case = steps_per_case
        self.done = 0
        self.finding: Finding | None = None
        self.situations: Counter[str] = Counter()

    def case(self, random: Random) -> None:
        """Run one case, in a new world."""
        randrange = random.randrange  # st.data() would double the time of a step

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
    """Apply operations chosen by Hypothesis until a rule breaks or enough were applied.

    Args:
        subject: the subject to test.
        seed: the same seed gives the same run, with the same version of Hypothesis.
        num_steps: minimum number of operations; the last case is completed.
        steps_per_case: operations in one world; each case ends with ``drain``.
    """
    hunt = _Hunt(subject, num_steps, steps_per_case)
    tests = 0
    while hunt.finding is None and hunt.done < num_steps:
        before = hunt.done
        _run_test(hunt, seed + (tests << 32))
        tests += 1
        if hunt.done == before:
            break  # all choices were tried
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
