"""A campaign: many short runs, one after the other or in several processes, until a rule breaks.

The runs are numbered, and the seed of each follows from the campaign's and its number. So a seed
gives the same cases whatever the number of processes and however fast they are.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from typing import Final, Literal, TypeAlias

from ...spec.adapters.cache_target import Depth
from ...spec.adapters.load_target import load_target
from ...spec.harness.engine import Finding, Subject
from ...spec.harness.random_engine import Run
from ...spec.harness.subjects import What, make_subject
from ..interrupts import hold_interrupts
from .targets import OWN

EngineName: TypeAlias = Literal["random", "hypothesis"]

STEPS_PER_RUN: Final = {"random": 1_000, "hypothesis": 5_000}
"""Short, so that the time is looked at often; long enough for Hypothesis to vary its choices."""

STEPS_PER_CASE: Final = {"random": 100, "hypothesis": 50}


@dataclass(frozen=True)
class Aim:
    """What is tested, and how; plain data, so that it goes to another process.

    Attributes:
        what: the kind of thing.
        target: where its factory is imported from.
        depth: how deep it is looked into.
        engine: who chooses.
        seed: of the campaign.
    """

    what: What = "cache"
    target: str = OWN["cache"]
    depth: Depth = "full"
    engine: EngineName = "random"
    seed: int = 0


@dataclass
class Report:
    """What a campaign did.

    Attributes:
        num_steps: operations applied.
        num_cases: worlds they were applied to.
        wall_s: how long it took.
        finding: the rule that broke, as found, if one did.
        situations: how often each situation of interest came up.
        interrupted: whether it was stopped from outside.
    """

    num_steps: int = 0
    num_cases: int = 0
    wall_s: float = 0.0
    finding: Finding | None = None
    situations: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False

    def add(self, run: Run, steps_per_case: int) -> None:
        """Count a run in."""
        self.num_steps += run.num_steps
        self.num_cases += -(-run.num_steps // (steps_per_case + 1))
        self.situations.update(run.situations)
        self.finding = self.finding or run.finding


@cache
def subject_of(what: What, target: str, depth: Depth) -> Subject:
    """Import what is to be tested.

    Raises:
        TargetError: it cannot be imported.
    """
    return make_subject(what, load_target(target), depth)


def run_part(aim: Aim, number: int, num_steps: int) -> Run:
    """Do one of a campaign's runs."""
    subject = subject_of(aim.what, aim.target, aim.depth)
    seed = random.Random(f"{aim.seed} {number}").getrandbits(31)
    return _engine(aim.engine)(subject, seed, num_steps, STEPS_PER_CASE[aim.engine])


def _engine(name: EngineName) -> Callable[[Subject, int, int, int], Run]:
    if name == "random":
        from ...spec.harness.random_engine import run as run_random

        return run_random
    from ...spec.harness.hypothesis_engine import run as run_hypothesis

    return run_hypothesis


def run_campaign(
    aim: Aim, *, num_steps: int | None = None, seconds: float | None = None, num_jobs: int = 1
) -> Report:
    """Run until a rule breaks, or enough is done, or the keyboard interrupts.

    Args:
        aim: what to test.
        num_steps: end after so many steps, to the end of the last case; None: by time.
        seconds: end after so long; None with `num_steps` None: never.
        num_jobs: processes.
    """
    report = Report()
    begin = time.monotonic()

    def in_time() -> bool:
        return seconds is None or time.monotonic() - begin < seconds

    parts = _parts(STEPS_PER_RUN[aim.engine], num_steps)
    runs = _runs_here(aim, parts) if num_jobs == 1 else _runs_in_jobs(aim, parts, num_jobs)
    try:
        for run in runs:
            report.add(run, STEPS_PER_CASE[aim.engine])
            if report.finding is not None or not in_time():
                break
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        runs.close()
    report.wall_s = time.monotonic() - begin
    return report


def _parts(steps_per_run: int, num_steps: int | None) -> Iterator[tuple[int, int]]:
    """Yield the number and the steps of each run."""
    number = 0
    while num_steps is None or number * steps_per_run < num_steps:
        left = steps_per_run if num_steps is None else num_steps - number * steps_per_run
        yield number, min(steps_per_run, left)
        number += 1


_Runs: TypeAlias = Generator[Run, None, None]


def _runs_here(aim: Aim, parts: Iterator[tuple[int, int]]) -> _Runs:
    for number, num_steps in parts:
        yield run_part(aim, number, num_steps)


def _runs_in_jobs(aim: Aim, parts: Iterator[tuple[int, int]], num_jobs: int) -> _Runs:
    with _processes(num_jobs) as pool:
        pending: set[Future[Run]] = set()
        while True:
            while len(pending) < 2 * num_jobs and (part := next(parts, None)) is not None:
                with hold_interrupts():  # it may start a process
                    pending.add(pool.submit(run_part, aim, *part))
            if not pending:
                return
            ended, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


@contextmanager
def _processes(num_jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes: a fork of one with threads, as JAX has, can hang."""
    pool = ProcessPoolExecutor(num_jobs, get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
