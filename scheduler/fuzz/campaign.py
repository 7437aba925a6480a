"""Campaigns: many short runs against the specification, in one or several processes.

Runs are numbered, and the seed of each follows from the seed of the campaign and its number. A seed
therefore gives the same cases for any number of processes, and however fast they are.
"""

from __future__ import annotations

import gc
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
from ...spec.harness.subjects import WHATS, SubjectOptions, What, make_subject
from ..terminal.interrupts import admit_interrupt, hold_interrupts

EngineName: TypeAlias = Literal["random", "hypothesis"]

DEFAULT_TARGETS: Final[dict[What, str]] = {what: f"{__package__}.targets:{what}" for what in WHATS}
"""Import path of our target of each kind."""

STEPS_PER_RUN: Final = {"random": 1_000, "hypothesis": 5_000}
"""Steps per run: few, to check the time often, but enough for Hypothesis to vary its choices."""
_TURN_S: Final = 0.2
"""How often jobs that all run long look for a ctrl-C."""


@dataclass(frozen=True)
class CampaignConfig:
    """What a campaign tests, and how; plain data, which can be sent to another process.

    Attributes:
        what: Kind of the target.
        target: Import path of its factory.
        depth: How much of it is checked.
        engine: Generator of the operations.
        seed: Seed of the campaign.
        options: Sizes, and known findings.
    """

    what: What = "cache"
    target: str = DEFAULT_TARGETS["cache"]
    depth: Depth = "full"
    engine: EngineName = "random"
    seed: int = 0
    options: SubjectOptions = field(default_factory=SubjectOptions)


@dataclass
class CampaignResult:
    """What a campaign did and found.

    Attributes:
        num_steps: Number of operations applied.
        num_cases: Number of worlds they were applied to.
        wall_s: Duration.
        finding: The rule that broke, before shrinking, or None.
        situations: How often each situation of interest occurred.
        interrupted: Whether ctrl-C ended the campaign.
    """

    num_steps: int = 0
    num_cases: int = 0
    wall_s: float = 0.0
    finding: Finding | None = None
    situations: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False

    def add(self, run: Run) -> None:
        """Add the counts of a run, and its finding if it is the first."""
        self.num_steps += run.num_steps
        self.num_cases += run.num_cases
        self.situations.update(run.situations)
        self.finding = self.finding or run.finding


@cache
def load_subject(what: What, target: str, depth: Depth, options: SubjectOptions) -> Subject:
    """Import a target and wrap it for the harness.

    Raises:
        TargetError: The target cannot be imported.
    """
    subject = make_subject(what, load_target(target), depth, options)
    gc.freeze()  # the garbage collector need not visit again what was loaded until now
    return subject


def run_part(config: CampaignConfig, number: int, num_steps: int) -> Run:
    """Perform one run of a campaign."""
    run: Callable[[Subject, int, int], Run]
    if config.engine == "random":
        from ...spec.harness.random_engine import run
    else:
        from ...spec.harness.hypothesis_engine import run
    subject = load_subject(config.what, config.target, config.depth, config.options)
    seed = random.Random(f"{config.seed} {number}").getrandbits(31)
    return run(subject, seed, num_steps)


def run_campaign(
    config: CampaignConfig,
    *,
    num_steps: int | None = None,
    seconds: float | None = None,
    num_jobs: int = 1,
) -> CampaignResult:
    """Perform runs until a rule breaks, a limit is reached, or ctrl-C.

    Args:
        config: What to test.
        num_steps: Stop after this many steps and the rest of the last case; None for no limit.
        seconds: Stop after this time; None for no limit.
        num_jobs: Number of processes.
    """
    result = CampaignResult()
    begin = time.monotonic()
    parts = _parts(STEPS_PER_RUN[config.engine], num_steps)
    runs = _runs_here(config, parts) if num_jobs == 1 else _runs_in_jobs(config, parts, num_jobs)
    try:
        for run in runs:
            result.add(run)
            is_late = seconds is not None and time.monotonic() - begin >= seconds
            if result.finding is not None or is_late:
                break
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        runs.close()
    result.wall_s = time.monotonic() - begin
    return result


def _parts(steps_per_run: int, num_steps: int | None) -> Iterator[tuple[int, int]]:
    """Yield the number and the steps of each run."""
    number = 0
    while num_steps is None or number * steps_per_run < num_steps:
        left = steps_per_run if num_steps is None else num_steps - number * steps_per_run
        yield number, min(steps_per_run, left)
        number += 1


_Runs: TypeAlias = Generator[Run, None, None]


def _runs_here(config: CampaignConfig, parts: Iterator[tuple[int, int]]) -> _Runs:
    for number, num_steps in parts:
        yield run_part(config, number, num_steps)


def _runs_in_jobs(config: CampaignConfig, parts: Iterator[tuple[int, int]], num_jobs: int) -> _Runs:
    # In the middle of `submit` or `wait`, an interrupt may leave the lock of a future locked. The
    # pool comes first, because Python unblocks SIGINT when it makes one.
    with _processes(num_jobs) as pool, hold_interrupts():
        pending: set[Future[Run]] = set()
        while True:
            while len(pending) < 2 * num_jobs and (part := next(parts, None)) is not None:
                pending.add(pool.submit(run_part, config, *part))
            if not pending:
                return
            ended, pending = wait(pending, _TURN_S, FIRST_COMPLETED)
            for future in ended:
                yield future.result()
            admit_interrupt()


@contextmanager
def _processes(num_jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of spawned processes: a fork of a process with threads, as of JAX, can hang."""
    pool = ProcessPoolExecutor(num_jobs, get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
