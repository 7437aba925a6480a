"""Write a trace for each rule of the hand-off: ``python -m tests.scheduler.handoff.proofs FILE``.

The trace is that of the planted bug in `BITES`, shrunk. The committed file is
``docs/specification/handoff_proofs.jsonl``; the docs show it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

from radixkv.scheduler import handoff
from radixkv.spec.harness.engine import replay
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.rules.handoff import HANDOFF_RULES
from radixkv.spec.rules.rule import Rule

from ...spec.planted.handoff_bugs import HANDOFF_BUGS
from ...spec.planted.table import write_table
from .bites import BITES
from .bugs import Bug
from .planted import planted
from .worlds import run_random, subject_of

PROGRAMS: Final = 2000
NUM_STEPS: Final = 150


def prove(rule: Rule) -> dict[str, Any]:
    """Return the row of the bug that breaks a rule: steps until it does, and its trace."""
    name = BITES[rule.name.split()[1]]
    bug = next(bug for bug in HANDOFF_BUGS if bug.name == name)
    steps = 0
    with planted(Bug(bug.name, bug.file, bug.edits)) as package:
        for seed in range(PROGRAMS):
            run = run_random(package, seed, NUM_STEPS)
            steps += run.num_steps
            if run.finding is not None and run.finding.rule == rule.name:
                break
        assert run.finding is not None, f"{name}: no program breaks {rule.name}"
        found = shrink(subject_of(package), run.finding)
    good = replay(subject_of(handoff), found.config, found.trace)
    assert good is None, f"the trace of {rule.name} breaks {good} without the bug"
    figures = {"median": steps, "worst": steps, "survived": 0}
    shortest = found.to_json()
    return {"name": name, "rule": rule.name, "depths": {"full": figures}, "shortest": shortest}


def main() -> None:
    """Prove all rules."""
    rows = []
    for rule in HANDOFF_RULES:
        rows.append(prove(rule))
        steps, trace = rows[-1]["depths"]["full"]["median"], rows[-1]["shortest"]["trace"]
        print(f"{rule.name}: {steps} steps, {len(trace)} calls", flush=True)
    steps = [row["depths"]["full"]["median"] for row in rows]
    summary = {
        "bugs": len(rows),
        "engine": "random",
        "seeds": 1,
        "max_steps": PROGRAMS * NUM_STEPS,
        "depth": "full",
        "survivors": [],
        "median_of_medians": median(steps),
        "worst": max(steps),
    }
    write_table(Path(sys.argv[1]), {"summary": summary, "bugs": rows, "proofs": {}})


if __name__ == "__main__":
    main()
