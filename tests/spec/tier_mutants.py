"""The small mutants of the tiers: ``python -m tests.spec.tier_mutants``; as in `mutants`.

Not all survivors are explained yet, so this is a list to work on, and no test.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from signal import ITIMER_PROF, SIGPROF, setitimer, signal

from radixkv.scheduler.fuzz import tier_adapter
from radixkv.spec.random_engine import run
from radixkv.spec.tier_world import TierSubject

from .mutants import Mutant, all_mutants, code_of
from .planted.matrix import default_jobs
from .planted.plant import load_code

FILES = (
    "operations.py",
    "effects.py",
    "host_tier.py",
    "host_writer.py",
    "host_reader.py",
    "tiered_tree.py",
    "tiers.py",
    "parking.py",
    "prefetch.py",
)
LIMIT_S = 20.0


def kill(mutant: Mutant, num_steps: int) -> str:
    """Return what finds a mutant: a rule, an error; "" if it survives."""

    def expired(number: int, frame: object) -> None:
        raise TimeoutError("a mutant loops without end")

    signal(SIGPROF, expired)
    try:
        setitimer(ITIMER_PROF, LIMIT_S)
        module = load_code({mutant.file: code_of(mutant)})
        finding = run(TierSubject(tier_adapter.make_factory(module)), 0, num_steps).finding
    except Exception as error:
        return type(error).__name__
    finally:
        setitimer(ITIMER_PROF, 0)
    return finding.rule if finding is not None else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt every mutant and print who survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.spec.tier_mutants")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--file", choices=FILES, action="append", help="its mutants only")
    chosen = parser.parse_args(arguments)
    mutants = [mutant for file in chosen.file or FILES for mutant in all_mutants(file)]
    with ProcessPoolExecutor(chosen.jobs, get_context("spawn")) as pool:
        results = list(pool.map(partial(kill, num_steps=chosen.steps), mutants, chunksize=4))
    survivors: Counter[str] = Counter()
    for mutant, result in zip(mutants, results, strict=True):
        if not result:
            survivors[mutant.file] += 1
            print(f"kvcache/{mutant.file}:{mutant.line}: {mutant.function}: {mutant.change}")
    print(f"{len(mutants)} mutants, {len(mutants) - survivors.total()} killed: {dict(survivors)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
