"""Print which planted bug breaks each guard of the specification, as JSON.

A guard is a call of ``require``, or a ``raise`` of a `Violation`. One that nothing ever breaks may
as well be missing. The committed table names a bug for each that a bug breaks, with its trace in
``docs/specification``; write it anew after these tables, or after a change of a guard::

    python -m tests.spec.guards > tests/spec/guards.json
"""

from __future__ import annotations

import ast
import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from radixkv import spec
from radixkv.spec.adapters.cache_target import Depth
from radixkv.spec.harness.engine import replay
from radixkv.spec.rules.rule import Violation

from .planted.cache_bugs import CACHE_BUGS
from .planted.handoff_bugs import HANDOFF_BUGS
from .planted.matrix import subject_of
from .planted.plant import Bug
from .planted.scheduler_bugs import SCHEDULER_BUGS
from .planted.table import read_table
from .planted.tier_bugs import TIER_BUGS
from .planted.tiered_scheduler_bugs import TIERED_SCHEDULER_BUGS

ROOT: Final = Path(__file__).parents[2]
SPEC: Final = Path(spec.__file__).resolve().parent
"""The package under test, which a hunt for mutants replaces by a copy with other lines."""

COMMITTED: Final = Path(__file__).with_name("guards.json")
TABLES: Final = ("kills", "kills_tiers", "handoff_proofs")

BUGS: Final[dict[str, Bug]] = {
    bug.name: bug
    for bug in (
        *CACHE_BUGS, *SCHEDULER_BUGS, *TIER_BUGS, *TIERED_SCHEDULER_BUGS, *HANDOFF_BUGS
    )
}  # fmt: skip


class Proof(NamedTuple):
    """A bug, and a trace in a table that shows it."""

    table: str
    bug: str
    depth: Depth
    finding: dict[str, Any]

    @property
    def key(self) -> list[str]:
        """By what it is found again."""
        return [self.table, self.bug, self.depth]


class Guard(NamedTuple):
    """Where a guard is, and its name: its file, its function and its rule."""

    name: str
    file: str
    first_line: int
    last_line: int


@cache
def guards() -> tuple[Guard, ...]:
    """Return every guard."""
    return tuple(
        guard
        for path in sorted(SPEC.rglob("*.py"))
        for guard in _guards_of(str(path.relative_to(SPEC)), ast.parse(path.read_text("utf-8")))
    )


def _guards_of(file: str, tree: ast.Module) -> Iterator[Guard]:
    seen: Counter[str] = Counter()
    for function, node in _nodes(tree, ""):
        match node:
            case ast.Call(func=ast.Name("require"), args=[_, rule, *_]):
                pass
            case ast.Raise(exc=ast.Call(func=ast.Name("Violation"), args=[rule, *_])):
                pass
            case _:
                continue
        name = f"{file}: {function}: {ast.unparse(rule).removeprefix('rules.')}"
        seen[name] += 1
        number = f" [{seen[name]}]" if seen[name] > 1 else ""
        yield Guard(name + number, file, node.lineno, node.end_lineno or node.lineno)


def _nodes(parent: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(parent):
        name = getattr(node, "name", "") if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
        inside = f"{function}.{name}".strip(".") if name else function
        yield inside, node
        yield from _nodes(node, inside)


def guard_of(violation: Violation) -> str:
    """Return the name of the guard that a violation broke; "" for one of an adapter."""
    frames = traceback.extract_tb(violation.__traceback__)
    [*_, frame] = [each for each in frames if not each.filename.endswith("rules/rule.py")]
    for each in guards():
        is_here = each.first_line <= (frame.lineno or 0) <= each.last_line
        if is_here and frame.filename.endswith(f"spec/{each.file}"):
            return each.name
    return ""


def proofs() -> Iterator[Proof]:
    """Yield the traces of all tables."""
    for table in TABLES:
        found = read_table(ROOT / "docs" / "specification" / f"{table}.jsonl")
        for row in found["bugs"]:
            if row["shortest"] is not None:
                yield Proof(table, row["name"], "full", row["shortest"])
        for each in found.get("proofs", {}).values():
            yield Proof(table, each["bug"], each["depth"], each["finding"])


def broken_by(proof: Proof) -> str:
    """Return the guard that a bug breaks; "" if none of ours."""
    violation = replay(
        subject_of(BUGS[proof.bug], proof.depth), proof.finding["config"], proof.finding["trace"]
    )
    return guard_of(violation) if violation is not None else ""


def find() -> dict[str, list[str]]:
    """Return by guard the bug that breaks it the fastest."""
    best: dict[str, tuple[float, list[str]]] = {}
    for proof in proofs():
        begin = time.perf_counter()
        name = broken_by(proof)
        seconds = time.perf_counter() - begin
        if name and (name not in best or seconds < best[name][0]):
            best[name] = seconds, proof.key
    return {name: key for name, (_, key) in sorted(best.items())}


def text_of(table: dict[str, list[str]]) -> str:
    """Return the table as JSON with one line per guard."""
    lines = [f"  {json.dumps(name)}: {json.dumps(key)}" for name, key in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    print(text_of(find()))
