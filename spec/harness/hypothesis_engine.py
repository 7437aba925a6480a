"""The Hypothesis engine: runs the state machine of a subject for a number of steps."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test

from ..rules.rule import Violation
from .engine import Finding, Subject
from .machine import machine_of
from .random_engine import Run, case_lengths_of

CASES_AT_ONCE: Final = 500
"""Cases per Hypothesis test; Hypothesis stores every choice, so tests must not grow too long."""


class _Stop(BaseException):
    """Ends a Hypothesis test at once; otherwise it would run a failing case twice more."""


def run(subject: Subject, seed: int, num_steps: int, steps_per_case: int = 0) -> Run:
    """Run the machine of a subject until a rule breaks or enough operations were applied.

    Args:
        subject: the subject to test.
        seed: the same seed gives the same run, with the same version of Hypothesis.
        num_steps: minimum number of operations; the last case is completed.
        steps_per_case: operations in one world, or 0 for the longest of the subject's
            `case_lengths`; each case ends with ``drain``.
    """
    steps_per_case = steps_per_case or max(case_lengths_of(subject))
    done = num_cases = 0
    found: Finding | None = None
    situations: Counter[str] = Counter()

    class Counting(machine_of(subject)):  # type: ignore[misc]
        def teardown(self) -> None:
            nonlocal done, num_cases
            try:
                super().teardown()
            finally:
                done += len(self.trace)
                if self.trace:
                    num_cases += 1
                    situations.update(self.world.situations)
            if done >= num_steps:
                raise _Stop

        def do(self, *operation: Any) -> None:
            nonlocal found
            try:
                super().do(*operation)
            except Violation as violation:
                config, trace = self.world.config, self.trace
                found = Finding(violation.rule.name, violation.why, config, trace)
                raise _Stop from None

    tests = 0
    while found is None and done < num_steps:
        before = done
        _run_test(with_seed(seed + (tests << 32))(Counting), steps_per_case)
        tests += 1
        if done == before:
            break  # every example was refused
    return Run(done, found, situations, num_cases)


def _run_test(machine: Any, steps_per_case: int) -> None:
    chosen = settings(
        max_examples=CASES_AT_ONCE,
        stateful_step_count=1 + steps_per_case,  # the first makes the world
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except (_Stop, Unsatisfiable):
        return
