"""Print how many of our instructions each call executes, as JSON.

The committed table is that of Python 3.11. A change that makes a call dearer or cheaper has to
write it anew, and so shows what it costs, on any machine and without a clock::

    python -m tests.costs.instructions > tests/costs/instructions.json

It runs in a process of its own, because pytest compiles our assertions differently.
"""

from __future__ import annotations

import json
from typing import TypeAlias

from .all_subjects import SUBJECTS
from .measure import Work, measured, run, work_of
from .subjects import Subject

Table: TypeAlias = dict[str, dict[str, list[int]]]
"""Instructions of each call of a name, by subject and name."""


def instructions_of(subject: Subject) -> dict[str, list[int]]:
    """Return the instructions of radixkv that each call of a subject executes, by name."""
    run(subject.calls(subject.few))  # what is made at the first call only
    found: dict[str, list[Work]] = measured(subject.calls(subject.few), work_of)
    return {name: [work.ours for work in works] for name, works in found.items()}


def text_of(table: Table) -> str:
    """Return a table as JSON with one line per call, so that a diff shows what a change costs."""
    subjects = []
    for subject, calls in table.items():
        lines = [f"    {json.dumps(name)}: {json.dumps(counts)}" for name, counts in calls.items()]
        subjects.append(f"  {json.dumps(subject)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(subjects) + "\n}"


if __name__ == "__main__":
    print(text_of({subject.name: instructions_of(subject) for subject in SUBJECTS}))
