"""Run random programs of the simulation: ``python -m tests.scheduler.handoff --steps 10000000``.

Run it from the root of a checkout. What fails is written as JSON, and ``--replay FILE`` runs that.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from radixkv.scheduler.handoff_simulation import Failure, replay, run_random


def main() -> int:
    """Run programs; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler.handoff", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ops", type=int, default=500, help="operations of a program")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--out", type=Path, default=Path("handoff-failure.json"))
    parser.add_argument("--replay", type=Path)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    begin = time.perf_counter()
    num_programs = -(-arguments.steps // arguments.ops)
    try:
        if arguments.replay is not None:
            counts = replay(arguments.replay.read_text()).counts
            num_programs = 0
        for seed in range(arguments.seed, arguments.seed + num_programs):
            counts += run_random(seed, arguments.ops).counts
    except Failure as failure:
        if arguments.replay is None:
            arguments.out.write_text(failure.trace)
            print(f"seed {seed}, written to {arguments.out}")
        print(failure)
        return 1
    wall_s = time.perf_counter() - begin
    print(f"{num_programs * arguments.ops} operations in {wall_s:.1f} s")
    print(*(f"{name}: {count}" for name, count in sorted(counts.items())), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
