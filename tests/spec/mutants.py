"""All small mutants of `kvcache/`, hunted by the random engine: ``python -m tests.spec.mutants``.

Each is hunted in every world that its file can be seen in. Whoever survives is in
`equivalent_mutants.toml` with the reason why it is no bug, or stands for a rule that the
specification lacks.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from signal import ITIMER_PROF, SIGPROF, setitimer, signal
from types import ModuleType
from typing import Final, Literal, TypeAlias

from radixkv.scheduler.fuzz import cache_adapter, pool_adapter
from radixkv.scheduler.fuzz.tiers import adapter as tier_adapter
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Subject
from radixkv.spec.harness.pool_world import PoolSubject
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.tiers.world import TierSubject

from .mutations import Key, Mutant, all_mutants, code_of
from .planted.matrix import default_jobs
from .planted.plant import load_code

World: TypeAlias = Literal["cache", "pool", "tiers"]

ALL_WORLDS: Final[tuple[World, ...]] = ("cache", "pool", "tiers")

HUNTED: Final[dict[str, tuple[World, ...]]] = {
    "prefix/radix_tree.py": ALL_WORLDS,
    "prefix/node.py": ALL_WORLDS,
    "prefix/eviction_order.py": ALL_WORLDS,
    "manager.py": ALL_WORLDS,
    "prefix/deduplication.py": ALL_WORLDS,
    "prefix/lease.py": ALL_WORLDS,
    "prefix/block_pool.py": ALL_WORLDS,
    "prefix/block_tables.py": ALL_WORLDS,
    "tokens.py": ALL_WORLDS,
    "errors.py": ALL_WORLDS,
    "events.py": ("cache", "tiers"),
    "tiers/operations.py": ("tiers",),
    "tiers/state.py": ("tiers",),
    "tiers/completion_handlers.py": ("tiers",),
    "tiers/host_tier.py": ("tiers",),
    "tiers/offload.py": ("tiers",),
    "tiers/load.py": ("tiers",),
    "tiers/tiered_tree.py": ("tiers",),
    "tiers/storage_key_cache.py": ("tiers",),
    "tiers/storage_recency.py": ("tiers",),
    "tiers/api.py": ("tiers",),
    "tiers/parked.py": ("tiers",),
    "tiers/parking.py": ("tiers",),
    "tiers/prefetch.py": ("tiers",),
}
"""Where the mutants of each file are hunted."""

LEFT_OUT: Final = {
    "__init__.py": "exports, and the lazy import of the arrays",
    "prefix/__init__.py": "a docstring",
    "tiers/__init__.py": "a docstring",
    "ids.py": "types",
    "cleanup.py": "how to end what has failed, for drivers and backends",
    "stats.py": "types",
    "invariants.py": "it is there to check",
    "tiers/checks.py": "it is there to check",
    "copies": "the data plane, which the worlds replace by ghost memory, and a driver, which they "
    "replace by a virtual executor: it has a machine of its own, in "
    "tests/kvcache/test_tier_driver_machine.py",
    "storage": "files, sockets and threads, which the worlds replace by a map: it has its own "
    "conformance kit, crash tests and planted bugs, tests/kvcache/storage",
}
"""Files, and a folder, that the specification says nothing of, and why."""

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
STEPS: Final = 10_000
# A mutant may loop without end; then it is found, too. Seconds of the processor, many times
# what is needed: at once, and per step.
LIMIT_S, LIMIT_PER_STEP_S = 3.0, 0.003


def stages(mutant: Mutant, num_steps: int, *, is_explained: bool) -> Iterator[tuple[World, int]]:
    """Yield where a mutant is hunted, and for how many steps, until it is found."""
    worlds = HUNTED[mutant.file]
    for world in worlds:
        yield world, num_steps // 10
    for world in worlds:
        yield world, num_steps
    if not is_explained:  # it may be rare, and is hunted for longer
        for world in worlds:
            yield world, 10 * num_steps


def subject_in(world: World, module: ModuleType) -> Subject:
    """Put a copy of the package into a world."""
    if world == "pool":
        return PoolSubject(pool_adapter.make_factory(module))
    if world == "tiers":
        return TierSubject(tier_adapter.make_factory(module))
    return CacheSubject(cache_adapter.make_factory(module), "full")


def kill(mutant: Mutant, num_steps: int) -> str:
    """Return what finds a mutant: a rule, an error; "" if it survives."""
    signal(SIGPROF, _expired)
    try:
        module = load_code({mutant.file: code_of(mutant)})
        for world, steps in stages(mutant, num_steps, is_explained=mutant.key in explained()):
            setitimer(ITIMER_PROF, LIMIT_S + LIMIT_PER_STEP_S * steps)
            finding = run(subject_in(world, module), steps, steps).finding
            if finding is not None:
                return finding.rule
    except Exception as error:
        return type(error).__name__
    finally:
        setitimer(ITIMER_PROF, 0)
    return ""


def _expired(number: int, frame: object) -> None:
    raise TimeoutError("a mutant loops without end")


def hunt(mutants: Sequence[Mutant], num_steps: int, num_jobs: int) -> Iterator[str]:
    """Yield what finds each mutant."""
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        yield from pool.map(partial(kill, num_steps=num_steps), mutants, chunksize=4)


def explained(path: Path | None = None) -> dict[Key, str]:
    """Return the reasons by file, function and change.

    Args:
        path: the file that lists them; None for `EQUIVALENT`.

    Raises:
        ValueError: if a change is explained twice.
    """
    reasons: dict[Key, str] = {}
    for entry in tomllib.loads((path or EQUIVALENT).read_text("utf-8"))["equivalent"]:
        for change in entry["changes"]:
            key = entry["file"], entry["function"], change
            if key in reasons:
                raise ValueError(f"{key} is explained twice")
            reasons[key] = entry["why"]
    return reasons


def report(mutants: Sequence[Mutant], results: Iterable[str], reasons: Mapping[Key, str]) -> int:
    """Print who survived; return how many survivors and explanations lack their counterpart."""
    stale = dict(reasons)
    unexplained: Counter[str] = Counter()
    num_killed = 0
    for mutant, result in zip(mutants, results, strict=True):
        if result:
            num_killed += 1
            continue
        why = stale.pop(mutant.key, "UNEXPLAINED")
        unexplained[mutant.file] += why == "UNEXPLAINED"
        place = f"kvcache/{mutant.file}:{mutant.line}: {mutant.function}"
        print(f"{place}: {mutant.change}\n    {why}", flush=True)
    for file, function, change in sorted(stale):
        print(f"kvcache/{file}: {function}: {change}\n    is explained, and does not survive")
    num_explained = len(mutants) - num_killed - unexplained.total()
    print(
        f"{len(mutants)} mutants, {num_killed} killed, {num_explained} explained, "
        f"{unexplained.total()} unexplained, {len(stale)} explanations of none"
    )
    return unexplained.total() + len(stale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt every mutant; the exit status is 1 if a survivor has no reason, or a reason no survivor.

    If a reason is of no mutant at all, none is hunted.

    Args:
        arguments: of the command line; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.spec.mutants")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--file", choices=HUNTED, action="append", help="its mutants only")
    parser.add_argument("--only", default="", help="part of the function and change, as printed")
    chosen = parser.parse_args(arguments)
    files = chosen.file or HUNTED

    def is_chosen(key: Key) -> bool:
        return key[0] in files and chosen.only in f"{key[1]}: {key[2]}"

    every = list(chain(*map(all_mutants, HUNTED)))
    for file, function, change in (gone := sorted(explained().keys() - {m.key for m in every})):
        print(f"kvcache/{file}: {function}: {change}\n    is explained, and is no mutant")
    if gone:
        return 1
    mutants = [each for each in every if is_chosen(each.key)]
    reasons = {key: why for key, why in explained().items() if is_chosen(key)}
    begin = time.perf_counter()
    num_wrong = report(mutants, hunt(mutants, chosen.steps, chosen.jobs), reasons)
    print(f"{time.perf_counter() - begin:.0f} s with {chosen.jobs} processes")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
