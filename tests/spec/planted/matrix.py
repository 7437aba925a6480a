"""The kill matrix: how many steps until each planted bug is found, and by which rule."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, Literal, TypeAlias, cast

from radixkv.scheduler.fuzz import cache_adapter, pool_adapter
from radixkv.spec.cache_world import CacheSubject
from radixkv.spec.engine import Finding, Subject
from radixkv.spec.pool_world import PoolSubject
from radixkv.spec.random_engine import run
from radixkv.spec.shrink import shrink
from radixkv.spec.target import Depth

from .plant import Bug, load

Engine: TypeAlias = Literal["random", "hypothesis"]

SEEDS_TO_SHRINK = 2


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

    bug: str
    depth: Depth
    seed: int
    steps: int
    rule: str
    shrunk: dict[str, Any] | None = None


def subject_of(bug: Bug, depth: Depth) -> Subject:
    """Make the world that a bug is looked for in, around a copy of the package with the bug."""
    module = load(bug)
    if bug.world == "pool":
        return PoolSubject(pool_adapter.make_factory(module))
    make = cache_adapter.make_factory(module)

    def make_humble(num_blocks: int, block_size: int) -> Any:
        adapter = make(num_blocks, block_size)
        adapter.promises = replace(adapter.promises, **dict.fromkeys(bug.unclaimed, False))
        return adapter

    return CacheSubject(make_humble, depth)


def hunt(hunt: Hunt, *, max_steps: int, engine: Engine = "random") -> Kill:
    """Plant a bug and look for it."""
    subject = subject_of(hunt.bug, hunt.depth)
    search = _random if engine == "random" else _hypothesis
    steps, finding = search(subject, hunt.seed, max_steps)
    shrunk = None
    if finding is not None and hunt.depth == "full" and hunt.seed < SEEDS_TO_SHRINK:
        shrunk = shrink(subject, finding).to_json()
    rule = finding.rule if finding is not None else ""
    return Kill(hunt.bug.name, hunt.depth, hunt.seed, steps, rule, shrunk)


def _hunt_at_depth(one: Hunt, *, max_steps: int, engine: Engine) -> Kill:
    # At less than full depth some bugs cannot be seen: a tenth of the steps is enough to say so.
    return hunt(one, max_steps=max_steps if one.depth == "full" else max_steps // 10, engine=engine)


def _random(subject: Subject, seed: int, max_steps: int) -> tuple[int, Finding | None]:
    result = run(subject, seed, max_steps)
    return result.num_steps, result.finding


def _hypothesis(subject: Subject, seed: int, max_steps: int) -> tuple[int, Finding | None]:
    """Let Hypothesis choose; the steps are those until the first failure, without its shrinking."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed
    from hypothesis import strategies as st

    from radixkv.spec.rules import Violation

    steps_per_case = 50
    num_steps = 0
    found: list[Finding] = []

    @with_seed(seed)
    @settings(
        max_examples=max(1, max_steps // steps_per_case),
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.data())
    def case(data: st.DataObject) -> None:
        nonlocal num_steps

        def below(bound: int) -> int:
            return data.conjecture_data.draw_integer(0, bound - 1) if bound > 1 else 0

        config = subject.configure(below)
        world, trace = subject.world(config), []
        try:
            for _ in range(steps_per_case):
                trace.append(world.draw(below))
                num_steps += not found
                world.apply(trace[-1])
            trace.append(["drain"])
            world.apply(["drain"])
        except Violation as violation:
            found.append(Finding(violation.rule.name, violation.why, config, trace))
            raise

    try:
        case()
    except Exception:
        if not found:
            raise
    return num_steps, found[0] if found else None


def hunt_all(
    bugs: Sequence[Bug],
    depths: Sequence[Depth],
    num_seeds: int,
    max_steps: int,
    num_jobs: int,
    engine: Engine = "random",
) -> Iterator[Kill]:
    """Hunt every bug with every seed at every depth, several at a time."""
    # Of long hunts the survivors are the longest: with seeds outermost, they are spread.
    hunts = [
        Hunt(bug, depth, seed)
        for seed in range(num_seeds)
        for depth in depths
        for bug in bugs
        if bug.world == "cache" or depth == depths[-1]
    ]
    task = partial(_hunt_at_depth, max_steps=max_steps, engine=engine)
    if num_jobs == 1:
        yield from map(task, hunts)
        return
    with ProcessPoolExecutor(num_jobs, get_context("spawn"), gc.freeze) as pool:
        yield from pool.map(task, hunts, chunksize=4)


def summarize(bugs: Iterable[Bug], kills: Iterable[Kill]) -> list[dict[str, Any]]:
    """Return a row per bug, as plain data: its rule, its steps by depth, its shortest trace."""
    by_bug: dict[str, list[Kill]] = {}
    for kill in kills:
        by_bug.setdefault(kill.bug, []).append(kill)
    return [_row(bug, by_bug[bug.name]) for bug in bugs]


def _row(bug: Bug, kills: Sequence[Kill]) -> dict[str, Any]:
    deepest = kills[-1].depth if all(kill.depth != "full" for kill in kills) else "full"
    rules = Counter(kill.rule for kill in kills if kill.rule and kill.depth == deepest)
    shrunk = [kill.shrunk for kill in kills if kill.shrunk is not None]
    depths: dict[str, dict[str, Any]] = {}
    for depth in dict.fromkeys(kill.depth for kill in kills):
        here = [kill for kill in kills if kill.depth == depth]
        depths[depth] = {
            "median": int(median(kill.steps for kill in here)),
            "worst": max(kill.steps for kill in here),
            "survived": sum(not kill.rule for kill in here),
            "rules": dict(Counter(kill.rule for kill in here if kill.rule).most_common()),
        }
    return {
        **{
            key: value
            for key, value in asdict(bug).items()
            if key in ("name", "seen_in", "file", "world")
        },
        "rule": rules.most_common(1)[0][0] if rules else "",
        "other_rules": [rule for rule, _ in rules.most_common()[1:]],
        "depths": depths,
        "shortest": min(shrunk, key=_length) if shrunk else None,
    }


def _length(shrunk: dict[str, Any]) -> int:
    return len(cast(list[Any], shrunk["trace"]))


def markdown(rows: Sequence[dict[str, Any]], depths: Sequence[Depth]) -> str:
    """Write the rows as a table."""
    head = ["bug", "seen in", "rule", *(f"{depth}: median (worst)" for depth in depths), "trace"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        shortest = row["shortest"]
        lines.append(
            _line(
                [
                    row["name"],
                    row["seen_in"],
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
