"""The kill matrix, from the checkout root: ``python -m tests.spec.planted --json FILE``.

The file has a row per bug, and per rule the shortest trace of a bug that it names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from radixkv.spec.target import DEPTHS

from .cache_bugs import CACHE_BUGS
from .matrix import Hunters, default_jobs, markdown, summarize
from .scheduler_bugs import SCHEDULER_BUGS
from .tier_bugs import TIER_BUGS


def main() -> int:
    """Hunt every planted bug; the exit status is 1 if one survives at the greatest depth."""
    arguments = _arguments()
    depths = [depth for depth in DEPTHS if depth in arguments.depths.split(",")]
    all_bugs = TIER_BUGS if arguments.tiers else (*CACHE_BUGS, *SCHEDULER_BUGS)
    bugs = [bug for bug in all_bugs if arguments.only in bug.name]
    hunters = Hunters(arguments.jobs, arguments.max_steps, arguments.engine)
    begin = time.perf_counter()
    kills = list(hunters.hunt_all(bugs, depths, arguments.seeds))
    wall_s = time.perf_counter() - begin
    rows = summarize(bugs, kills)
    print(markdown(rows, depths))
    summary = _summary(rows, depths[-1], arguments, wall_s)
    print()
    print(*(f"{name}: {value}" for name, value in summary.items()), sep="\n")
    if arguments.json:
        proofs = hunters.prove(kills) if arguments.engine == "random" else {}
        if arguments.tiers:  # of the other rules there are shorter proofs
            proofs = {rule: proof for rule, proof in proofs.items() if rule.startswith("T")}
        document = {"format": 1, "summary": summary, "bugs": rows, "proofs": proofs}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    hunters.close()
    return 1 if summary["survivors"] else 0


def _arguments() -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.spec.planted", description=__doc__)
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--max-steps", type=int, default=50_000)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--depths", default=",".join(DEPTHS))
    parser.add_argument("--engine", choices=["random", "hypothesis"], default="random")
    parser.add_argument("--only", default="", help="part of the names of the bugs to hunt")
    parser.add_argument("--tiers", action="store_true", help="the bugs of the tiers, not others")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def _summary(
    rows: list[dict[str, Any]], depth: str, arguments: Any, wall_s: float
) -> dict[str, Any]:
    steps = [row["depths"][depth] for row in rows]
    lengths = [len(row["shortest"]["trace"]) for row in rows if row["shortest"]]
    return {
        "bugs": len(rows),
        "engine": arguments.engine,
        "seeds": arguments.seeds,
        "max_steps": arguments.max_steps,
        "depth": depth,
        "survivors": [row["name"] for row in rows if row["depths"][depth]["survived"]],
        "median_of_medians": median(each["median"] for each in steps),
        "worst": max(each["worst"] for each in steps),
        "median_trace": median(lengths) if lengths else None,
        "wall_s": round(wall_s, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
