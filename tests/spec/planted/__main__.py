"""The kill matrix, from the checkout root: ``python -m tests.spec.planted --json FOLDER``.

It has a table of the cache and the scheduler, one of the same bugs under Hypothesis, one of the
tiers and one of the hand-off. Each file has a row per bug, and per rule the shortest trace of a bug
that it names.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from radixkv.spec.adapters.cache_target import DEPTHS, Depth

from .cache_bugs import CACHE_BUGS
from .matrix import Engine, Hunters, breaks, default_jobs, markdown, summarize
from .plant import Bug
from .scheduler_bugs import SCHEDULER_BUGS
from .table import read_table, write_table
from .tier_bugs import TIER_BUGS
from .tiered_scheduler_bugs import TIERED_SCHEDULER_BUGS

COMMITTED: Final = Path(__file__).parents[3] / "docs" / "specification"
"""Folder of the committed tables."""


@dataclass(frozen=True)
class Table:
    """Which bugs are hunted, and how.

    Attributes:
        chapters: first letters of the rules that it proves; "" is all of them.
    """

    bugs: Sequence[Bug]
    engine: Engine = "random"
    depths: Sequence[Depth] = DEPTHS
    max_steps: int = 50_000
    chapters: str = ""


TABLES: Final = {
    "kills": Table((*CACHE_BUGS, *SCHEDULER_BUGS, *TIERED_SCHEDULER_BUGS)),
    "kills_hypothesis": Table((*CACHE_BUGS, *SCHEDULER_BUGS), "hypothesis", ("full",)),
    # Of other rules than the tiers' there are shorter proofs.
    "kills_tiers": Table(TIER_BUGS, depths=("full",), max_steps=200_000, chapters="T"),
}
"""By the name of its file."""


def main() -> int:
    """Hunt every planted bug; the exit status is 1 if one survives at the greatest depth."""
    arguments = _arguments()
    survived = False
    for name in arguments.table or TABLES:
        document = _hunt(name, TABLES[name], arguments)
        if document is None:
            continue
        survived |= bool(document["summary"]["survivors"])
        if arguments.json:
            write_table(Path(arguments.json, f"{name}.jsonl"), document)
    return int(survived)


def _arguments() -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.spec.planted", description=__doc__)
    parser.add_argument("--table", action="append", choices=TABLES, help="this one alone")
    parser.add_argument("--depths", type=lambda text: text.split(","), help="these alone")
    parser.add_argument("--only", default="", help="part of the names of the bugs to hunt")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="hunt only bugs whose row in the "
        "committed table is missing or has a trace that breaks its rule no more",
    )
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--json", metavar="FOLDER", help="write a file for each table there")
    return parser.parse_args()


def _hunt(name: str, table: Table, arguments: Any) -> dict[str, Any] | None:
    """Hunt the bugs of a table, print it, and return it as plain data; None if none is chosen."""
    depths = [depth for depth in table.depths if depth in (arguments.depths or DEPTHS)]
    bugs = [bug for bug in table.bugs if arguments.only in bug.name]
    known = _known(name, table) if arguments.missing else {"bugs": [], "proofs": {},
                                                                         "summary": {}}  # fmt: skip
    rows_of = {row["name"]: row for row in known["bugs"]}
    bugs = [bug for bug in bugs if bug.name not in rows_of]
    if not ((bugs or arguments.missing) and depths):
        return None
    hunters = Hunters(arguments.jobs, table.max_steps, table.engine)
    begin = time.perf_counter()
    kills = list(hunters.hunt_all(bugs, depths, arguments.seeds))
    wall_s = time.perf_counter() - begin + known["summary"].get("wall_s", 0)
    rows = summarize(bugs, kills)
    print(f"# {name}\n\n{markdown(rows, depths)}\n")
    rows_of |= {row["name"]: row for row in rows}
    rows = [rows_of[bug.name] for bug in table.bugs if bug.name in rows_of]
    summary = _summary(rows, table, depths[-1], arguments.seeds, wall_s)
    print(*(f"{key}: {value}" for key, value in summary.items()), "", sep="\n")
    unproven = [kill for kill in kills if kill.rule not in known["proofs"]]
    proofs = hunters.prove(unproven) if arguments.json and table.engine == "random" else {}
    proofs = {rule: proof for rule, proof in proofs.items() if rule.startswith(table.chapters)}
    hunters.close()
    for row in sorted(rows, key=lambda row: len((row["shortest"] or {}).get("trace", ()))):
        finding = row["shortest"]
        if arguments.missing and finding and finding["rule"].startswith(table.chapters):
            proof = {"bug": row["name"], "depth": depths[-1], "finding": finding}
            proofs.setdefault(finding["rule"], proof)
    proofs = dict(sorted({**proofs, **known["proofs"]}.items()))
    return {"summary": summary, "bugs": rows, "proofs": proofs}


def _known(name: str, table: Table) -> dict[str, Any]:
    """Read the committed table, without rows and proofs that are not those of a bug any more."""
    known = read_table(COMMITTED / f"{name}.jsonl")
    by_name = {bug.name: bug for bug in table.bugs}

    def holds(name: str, depth: Depth, finding: Any) -> bool:
        return name in by_name and (finding is None or breaks(by_name[name], depth, finding))

    known["bugs"] = [
        row for row in known["bugs"] if holds(row["name"], table.depths[-1], row["shortest"])
    ]
    known["proofs"] = {
        rule: each
        for rule, each in known["proofs"].items()
        if holds(each["bug"], each["depth"], each["finding"])
    }
    return known


def _summary(
    rows: list[dict[str, Any]], table: Table, depth: Depth, num_seeds: int, wall_s: float
) -> dict[str, Any]:
    steps = [row["depths"][depth] for row in rows]
    lengths = [len(row["shortest"]["trace"]) for row in rows if row["shortest"]]
    return {
        "bugs": len(rows),
        "engine": table.engine,
        "seeds": num_seeds,
        "max_steps": table.max_steps,
        "depth": depth,
        "survivors": [row["name"] for row in rows if row["depths"][depth]["survived"]],
        "median_of_medians": median(each["median"] for each in steps),
        "worst": max(each["worst"] for each in steps),
        "median_trace": median(lengths) if lengths else None,
        "wall_s": round(wall_s, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
