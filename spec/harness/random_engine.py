"""The random engine: many cases, each a new world of another size."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..rules.rule import Violation
from .engine import Below, Finding, Subject, Trace, World, new_world

CASE_LENGTHS: Final = (100,)
"""Operations in one world, if its subject has no ``case_lengths``."""


@dataclass(frozen=True)
class Run:
    """Result of a run.

    Attributes:
        num_steps: number of applied operations.
        finding: the broken rule, with which the run ended, or None.
        situations: how often each situation of interest occurred.
        num_cases: number of worlds.
    """

    num_steps: int
    finding: Finding | None
    situations: Counter[str]
    num_cases: int


def case_lengths_of(subject: Subject) -> Sequence[int]:
    """Return the numbers of operations that a world of a subject may get."""
    lengths: Sequence[int] = getattr(subject, "case_lengths", CASE_LENGTHS)
    return lengths


def run(subject: Subject, seed: int, num_steps: int, steps_per_case: int = 0) -> Run:
    """Apply random operations until a rule breaks or enough were applied.

    Args:
        subject: the subject to test.
        seed: the same seed gives the same run.
        num_steps: minimum number of operations; the last case is completed.
        steps_per_case: operations in one world, or 0 for one of the subject's ``case_lengths``;
            each case ends with ``drain``.
    """
    generator = random.Random(seed)
    uniform = generator.random

    def below(bound: int) -> int:
        return int(uniform() * bound)

    lengths = (steps_per_case,) if steps_per_case else case_lengths_of(subject)
    done = num_cases = 0
    situations: Counter[str] = Counter()
    while done < num_steps:
        config = subject.configure(below)
        world = new_world(subject, config)
        length = lengths[below(len(lengths))] if len(lengths) > 1 else lengths[0]
        trace, violation = run_case(world, below, length)
        num_cases += 1
        if violation is not None:
            finding = Finding(violation.rule.name, violation.why, config, trace)
            return Run(done + len(trace), finding, situations + world.situations, num_cases)
        done += len(trace)
        situations.update(world.situations)
    return Run(done, None, situations, num_cases)


def run_case(world: World, below: Below, num_steps: int) -> tuple[Trace, Violation | None]:
    """Apply random operations to a world, then ``drain``; return them, and the broken rule."""
    trace: Trace = []
    try:
        for _ in range(num_steps):
            operation = world.draw(below)
            trace.append(operation)
            world.apply(operation)
        trace.append(["drain"])
        world.apply(["drain"])
    except Violation as violation:
        return trace, violation
    return trace, None
