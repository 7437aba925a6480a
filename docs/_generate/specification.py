"""Generate the pages of the specification from its rules and the tables of planted bugs.

conf.py calls `write_pages`. It reads ``docs/specification/*.jsonl``, which ``python -m
tests.spec.planted --json`` writes, and writes into ``docs/_generated/``, which is not in git.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import radixkv.spec.rules.cache
import radixkv.spec.rules.scheduler
import radixkv.spec.rules.tiers  # noqa: F401 - all of them enter their rules in RULES
from radixkv.spec.adapters.cache_target import DEPTHS, Depth
from radixkv.spec.harness.coverage import CACHE_FLOORS, PER_STEPS, SCHEDULER_FLOORS, TIER_FLOORS
from radixkv.spec.harness.engine import Finding, Subject
from radixkv.spec.harness.program import to_program
from radixkv.spec.harness.svg import to_svg
from radixkv.spec.rules.invariants import INVARIANTS
from radixkv.spec.rules.rule import RULES

if TYPE_CHECKING:
    from tests.spec.planted.plant import Bug

DOCS: Final = Path(__file__).parents[1]
OUTPUT: Final = DOCS / "_generated"

CHAPTERS: Final = {
    "A": "Allocation",
    "F": "Freeing",
    "H": "Hits",
    "P": "Publishing",
    "E": "Eviction",
    "C": "Content of blocks",
    "R": "Requests and leases",
    "D": "After all requests have ended",
    "S": "After each call",
    "W": "Internal state",
    "Q": "Scheduler",
    "T": "Tiers below the device",
}

Row = dict[str, Any]


def write_pages() -> None:
    """Write rules, bugs, invariants and situations, which specification.md includes."""
    OUTPUT.mkdir(exist_ok=True)
    root = str(DOCS.parent)
    if root not in sys.path:
        sys.path.append(root)  # the planted bugs are tests
    from tests.spec.planted.table import read_table

    documents = [read_table(path) for path in sorted((DOCS / "specification").glob("*.jsonl"))]
    pages = {
        "rules": _rules(documents),
        "bugs": _bugs(documents),
        "invariants": _invariants(),
        "situations": _situations(),
    }
    for name, lines in pages.items():
        (OUTPUT / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _is_main(document: dict[str, Any]) -> bool:
    """Whether the random engine made the table. The page shows the traces of that engine."""
    return str(document["summary"]["engine"]) == "random"


# The rules


def _rules(documents: list[dict[str, Any]]) -> Iterator[str]:
    main = [document for document in documents if _is_main(document)]
    proofs = {rule: proof for document in main for rule, proof in document["proofs"].items()}
    bugs = _planted()
    chapter = ""
    for rule in RULES.values():
        if rule.code[0] != chapter:
            chapter = rule.code[0]
            yield f"### {chapter}: {CHAPTERS[chapter]}\n"
        yield f"#### {rule.name}\n"
        yield f"{rule.sentence}\n"
        if rule.name in proofs:
            proof = proofs[rule.name]
            bug = bugs[proof["bug"]]
            yield from _proof(rule.name, proof, bug.seen_in, _subject_of(bug, proof["depth"]))


def _proof(rule: str, proof: dict[str, Any], seen_in: str, subject: Subject) -> Iterator[str]:
    origin = "" if seen_in == "own" else f" (seen in {seen_in})"
    yield f"*Broken by:* {_sentence(proof['bug'])}{origin}.\n"
    keys = ("rule", "why", "config", "trace")
    finding = Finding(**{key: proof["finding"][key] for key in keys})
    program = to_program(finding).split("\n", 2)[2]  # without the rule and its sentence
    yield f"```text\n{program}\n```\n"
    name = rule.replace(" ", "-")
    (OUTPUT / f"{name}.svg").write_text(to_svg(subject, finding, calls=False), encoding="utf-8")
    yield f"![The state before the last call of the trace](_generated/{name}.svg)\n"


def _planted() -> dict[str, Bug]:
    """Return the planted bugs by name."""
    from tests.spec.planted.cache_bugs import CACHE_BUGS
    from tests.spec.planted.scheduler_bugs import SCHEDULER_BUGS
    from tests.spec.planted.tier_bugs import TIER_BUGS

    return {bug.name: bug for bug in (*CACHE_BUGS, *TIER_BUGS, *SCHEDULER_BUGS)}


def _subject_of(bug: Bug, depth: Depth) -> Subject:
    from tests.spec.planted.matrix import subject_of

    return subject_of(bug, depth)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# The bugs


def _bugs(documents: list[dict[str, Any]]) -> Iterator[str]:
    others = [document for document in documents if not _is_main(document)]
    by_engine = {
        document["summary"]["engine"]: {row["name"]: row for row in document["bugs"]}
        for document in others
    }
    for document in documents:
        yield f"{_summary(document['summary'])}\n"
    for document in filter(_is_main, documents):
        yield from _table(document["bugs"], by_engine)
    yield from _ruled_out()


def _summary(summary: dict[str, Any]) -> str:
    survivors = ", ".join(summary["survivors"]) or "none"
    return (
        f"Engine `{summary['engine']}`, depth `{summary['depth']}`: {summary['bugs']} bugs, "
        f"{summary['seeds']} seeds each, at most {summary['max_steps']:,} steps; survivors: "
        f"{survivors}. Steps to find a bug: {summary['median_of_medians']:,g} (median of the "
        f"medians), {summary['worst']:,} (worst)."
    )


def _table(rows: list[Row], by_engine: dict[str, dict[str, Row]]) -> Iterator[str]:
    """Yield a row per bug. The columns of other engines have the steps at their greatest depth."""
    bugs = _planted()
    depths = list(dict.fromkeys(depth for row in rows for depth in row["depths"]))
    heads = [f"`{depth}`: median (worst)" for depth in depths]
    heads += [_sentence(engine) for engine in by_engine]
    yield _line(["Bug", "Seen in", "Rule", *heads, "Calls"])
    yield _line(["---"] * 3 + ["---:"] * (len(heads) + 1))
    for row in rows:
        steps = [_steps(row["depths"].get(depth)) for depth in depths]
        for theirs in by_engine.values():
            found = theirs.get(row["name"], {"depths": {}})["depths"]
            steps.append(_steps(found[max(found, key=DEPTHS.index)] if found else None))
        calls = str(len(row["shortest"]["trace"])) if row["shortest"] else "-"
        rule = row["rule"].split()[0] if row["rule"] else "survives"
        yield _line([_sentence(row["name"]), bugs[row["name"]].seen_in, rule, *steps, calls])
    yield ""


def _steps(steps: dict[str, Any] | None) -> str:
    if steps is None:
        return "-"
    survived = f", {steps['survived']} not found" if steps["survived"] else ""
    return f"{steps['median']:,} ({steps['worst']:,}{survived})"


def _ruled_out() -> Iterator[str]:
    from tests.spec.planted.ruled_out import RULED_OUT

    yield "### Bugs of other projects that the design rules out\n"
    yield _line(["Bug", "Seen in", "Reason"])
    yield _line(["---"] * 3)
    for bug in RULED_OUT:
        yield _line([_sentence(bug.what), bug.seen_in, bug.why])


# The situations


def _situations() -> Iterator[str]:
    for title, floors in (
        ("The cache", CACHE_FLOORS),
        ("The scheduler", SCHEDULER_FLOORS),
        ("The tiers", TIER_FLOORS),
    ):
        yield _line([title, f"At least, per {PER_STEPS:,} steps"])
        yield _line(["---", "---:"])
        for situation, floor in floors.items():
            yield _line([_sentence(situation), f"{floor:,}"])
        yield ""


def _line(cells: list[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


# The invariants


def _invariants() -> Iterator[str]:
    yield _line(["", "What must hold", "Rules", "Checked elsewhere"])
    yield _line(["---"] * 4)
    for number, invariant in INVARIANTS.items():
        what = f"**{_sentence(invariant.title)}.** {invariant.sentence}"
        yield _line([number, what, ", ".join(invariant.rules) or "-", invariant.elsewhere])
