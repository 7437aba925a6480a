"""The kill matrix: how many steps until each planted bug is found, and by which rule."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from statistics import median
from typing import Any, Literal, TypeAlias, cast

from radixkv.scheduler.fuzz import cache_adapter, pool_adapter
from radixkv.scheduler.fuzz.tiers import adapter as tier_adapter
from radixkv.spec.adapters.cache_target import Depth
from radixkv.spec.harness import hypothesis_engine, random_engine
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.cost_world import CostSubject
from radixkv.spec.harness.engine import Subject, replay
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.pool_world import PoolSubject
from radixkv.spec.harness.tiers.world import TierSubject

from .handoff_bugs import handoff_with
from .plant import Bug, load
from .plant_scheduler import subject_with

Engine: TypeAlias = Literal["random", "hypothesis"]

TRACES_PER_RULE = 3

SEEDS_AT_ONCE = 5
"""Hunts in a row, by one process, for which a bug is planted once."""


@dataclass(frozen=True)
class Hunt:
    """One hunt for one bug: with a seed, at a depth."""

    bug: Bug
    depth: Depth
    seed: int


@dataclass(frozen=True)
class Kill:
    """How a hunt ended.

    Attributes:
        steps: operations until the bug was found, or all of them.
        rule: the rule that named it; "" if it survived.
        shrunk: the finding, shrunk, as plain data; None where it was not asked for.
    """

    hunt: Hunt
    steps: int
    rule: str
    shrunk: dict[str, Any] | None = None


def subject_of(bug: Bug, depth: Depth) -> Subject:
    """Make the world that a bug is looked for in, around a copy of the package with the bug."""
    if bug.world in ("scheduler", "tiered_scheduler"):
        return subject_with(bug)
    if bug.world == "handoff":
        return handoff_with(bug)
    module = load(bug)
    if bug.world == "pool":
        return PoolSubject(pool_adapter.make_factory(module))
    if bug.world == "costs":
        return CostSubject(tier_adapter.make_cost_factory(module))
    if bug.world == "tiers":
        return TierSubject(tier_adapter.make_factory(module))
    make = cache_adapter.make_factory(module)

    def make_humble(num_blocks: int, block_size: int) -> Any:
        adapter = make(num_blocks, block_size)
        adapter.promises = replace(adapter.promises, **dict.fromkeys(bug.unclaimed, False))
        return adapter

    return CacheSubject(make_humble, depth)


_planted = lru_cache(maxsize=1)(subject_of)


def hunt(hunt: Hunt, *, max_steps: int, engine: Engine = "random", shrinks: bool = False) -> Kill:
    """Plant a bug and look for it."""
    subject = _planted(hunt.bug, hunt.depth)
    search = random_engine if engine == "random" else hypothesis_engine
    result = search.run(subject, hunt.seed, max_steps)
    if result.finding is None:
        return Kill(hunt, result.num_steps, "")
    shrunk = shrink(subject, result.finding).to_json() if shrinks else None
    return Kill(hunt, result.num_steps, result.finding.rule, shrunk)


def breaks(bug: Bug, depth: Depth, finding: dict[str, Any]) -> bool:
    """Return whether the trace of a finding breaks its rule by the bug, and by the bug alone."""
    good = replace(bug, edits=(), elsewhere=())
    bad, none = (replay(subject_of(each, depth), finding["config"], finding["trace"])
                 for each in (bug, good))  # fmt: skip
    return (
        bad is not None
        and bad.rule.name == finding["rule"]
        and (none is None or bool(bug.unclaimed))
    )


def _hunt_at_depth(one: Hunt, *, max_steps: int, engine: Engine) -> Kill:
    # At less than full depth some bugs cannot be seen: few steps are enough to say so.
    deep = one.depth == "full"
    steps = max_steps if deep else max_steps // 25
    shrinks = deep and one.seed == 0 and engine == "random"  # only these traces are shown
    return hunt(one, max_steps=steps, engine=engine, shrinks=shrinks)


class Hunters:
    """Processes that hunt, several at a time.

    Attributes:
        max_steps: after so many steps a bug counts as a survivor.
    """

    def __init__(self, num_jobs: int, max_steps: int, engine: Engine = "random") -> None:
        self.max_steps = max_steps
        self._engine = engine
        self._pool = (
            ProcessPoolExecutor(num_jobs, get_context("spawn"), gc.freeze) if num_jobs > 1 else None
        )

    def hunt_all(
        self, bugs: Sequence[Bug], depths: Sequence[Depth], num_seeds: int
    ) -> Iterator[Kill]:
        """Hunt every bug with every seed at every depth; of seed 0 the trace is shrunk."""
        # Of long hunts the survivors are the longest: with few seeds at once, they are spread.
        hunts = [
            Hunt(bug, depth, seed)
            for first in range(0, num_seeds, SEEDS_AT_ONCE)
            for depth in depths
            for bug in bugs
            if bug.world == "cache" or depth == depths[-1]
            for seed in range(first, min(first + SEEDS_AT_ONCE, num_seeds))
        ]
        return self._map(partial(_hunt_at_depth, max_steps=self.max_steps), hunts)

    def prove(self, kills: Iterable[Kill]) -> dict[str, dict[str, Any]]:
        """Return for each rule that was named the shortest trace of some hunts that named it."""
        by_rule: dict[str, list[Kill]] = {}
        for kill in sorted(kills, key=lambda kill: (kill.hunt.depth != "full", kill.steps)):
            if kill.rule:
                by_rule.setdefault(kill.rule, []).append(kill)
        hunts = [kill.hunt for named in by_rule.values() for kill in named[:TRACES_PER_RULE]]
        shrunk = self._map(partial(hunt, max_steps=self.max_steps, shrinks=True), hunts)
        proofs: dict[str, dict[str, Any]] = {}
        for kill in shrunk:
            assert kill.shrunk is not None, f"a hunt ended otherwise than before: {kill}"
            known = proofs.get(kill.rule)
            if known is None or _length(kill.shrunk) < _length(known["finding"]):
                proofs[kill.rule] = {
                    "bug": kill.hunt.bug.name,
                    "depth": kill.hunt.depth,
                    "finding": kill.shrunk,
                }
        return dict(sorted(proofs.items()))

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown()

    def _map(self, task: partial[Kill], hunts: Sequence[Hunt]) -> Iterator[Kill]:
        task = partial(task, engine=self._engine)
        if self._pool is None:
            return map(task, hunts)
        return self._pool.map(task, hunts, chunksize=SEEDS_AT_ONCE)


def summarize(bugs: Iterable[Bug], kills: Iterable[Kill]) -> list[dict[str, Any]]:
    """Return a row per bug, as plain data: its rule, its steps by depth, its shrunk trace."""
    by_bug: dict[str, list[Kill]] = {}
    for kill in kills:
        by_bug.setdefault(kill.hunt.bug.name, []).append(kill)
    return [_row(bug.name, by_bug[bug.name]) for bug in bugs]


def _row(name: str, kills: Sequence[Kill]) -> dict[str, Any]:
    depths: dict[str, dict[str, Any]] = {}
    for depth in dict.fromkeys(kill.hunt.depth for kill in kills):
        here = [kill for kill in kills if kill.hunt.depth == depth]
        depths[depth] = {
            "median": int(median(kill.steps for kill in here)),
            "worst": max(kill.steps for kill in here),
            "survived": sum(not kill.rule for kill in here),
        }
    deepest = Counter(kill.rule for kill in here if kill.rule)
    shrunk = [kill.shrunk for kill in kills if kill.shrunk is not None]
    return {
        "name": name,
        "rule": deepest.most_common(1)[0][0] if deepest else "",
        "depths": depths,
        "shortest": shrunk[0] if shrunk else None,
    }


def _length(shrunk: dict[str, Any]) -> int:
    return len(cast(list[Any], shrunk["trace"]))


def markdown(rows: Sequence[dict[str, Any]], depths: Sequence[Depth]) -> str:
    """Write the rows as a table."""
    head = ["bug", "rule", *(f"{depth}: median (worst)" for depth in depths), "trace"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        shortest = row["shortest"]
        lines.append(
            _line(
                [
                    row["name"],
                    row["rule"] or "**survives**",
                    *(_steps(row["depths"].get(depth)) for depth in depths),
                    str(_length(shortest)) if shortest else "-",
                ]
            )
        )
    return "\n".join(lines)


def _steps(steps: dict[str, Any] | None) -> str:
    if steps is None:
        return "-"
    survived = f", {steps['survived']} survive" if steps["survived"] else ""
    return f"{steps['median']:,} ({steps['worst']:,}{survived})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def default_jobs() -> int:
    """Return how many hunts may go on at once."""
    return os.cpu_count() or 1
