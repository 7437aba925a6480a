"""The planted bugs and their committed tables, as the pages of the specification show them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import radixkv.spec.rules
from radixkv.spec.harness.engine import Finding, Subject
from radixkv.spec.harness.findings.program import to_program
from radixkv.spec.harness.findings.svg import to_svg
from radixkv.spec.rules.rule import Rule

if TYPE_CHECKING:
    from tests.spec.planted.plant import Bug

DOCS: Final = Path(__file__).parents[1]
OUTPUT: Final = DOCS / "_generated"
TABLES: Final = DOCS / "specification"

WIDTH: Final = 84
"""Characters of a line of code that fit on a page."""

COMPOUND: Final = ("drain", "misuse", "flood", "step_misuse")
"""Operations of a trace that stand for several calls."""

Row: TypeAlias = dict[str, Any]

if str(DOCS.parent) not in sys.path:
    sys.path.append(str(DOCS.parent))  # the planted bugs are tests


@dataclass(frozen=True)
class Section:
    """A part of a page of rules: its title, and its rules in order."""

    title: str
    rules: tuple[Rule, ...]


@cache
def rule_pages() -> dict[str, tuple[Section, ...]]:
    """Return the sections of each module of rules, by the name of the module."""
    pages = {}
    for info in pkgutil.iter_modules(radixkv.spec.rules.__path__):
        module = importlib.import_module(f"{radixkv.spec.rules.__name__}.{info.name}")
        by_name = {name: rule for name, rule in vars(module).items() if isinstance(rule, Rule)}
        if by_name:
            pages[info.name] = tuple(_sections(inspect.getsource(module), by_name))
    return pages


def _sections(source: str, by_name: dict[str, Rule]) -> Iterator[Section]:
    """Yield the rules between the comments that stand alone on a line."""
    title, rules = "", []
    for heading, name in re.findall(r"^# (.+)$|^(\w+): Final = \w+\($", _joined(source), re.M):
        if name in by_name:
            rules.append(by_name[name])
        elif heading:
            if rules:
                yield Section(title, tuple(rules))
            title, rules = heading, []
    yield Section(title, tuple(rules))


def _joined(source: str) -> str:
    """Cut every definition after its parenthesis, so that one pattern finds all of them."""
    return re.sub(r"^(\w+: Final = \w+\().*$", r"\1", source, flags=re.M)


@cache
def documents() -> list[dict[str, Any]]:
    """Return the committed tables."""
    from tests.spec.planted.table import read_table

    paths = [*TABLES.glob("kills*.jsonl"), *TABLES.glob("*_proofs.jsonl")]
    return [read_table(path) for path in sorted(paths)]


def is_main(document: dict[str, Any]) -> bool:
    """Whether the random engine made the table. The pages show the traces of that engine."""
    return str(document["summary"]["engine"]) == "random"


@cache
def planted_bugs() -> dict[str, Bug]:
    """Return the planted bugs by name."""
    from tests.spec.planted.cache_bugs import CACHE_BUGS
    from tests.spec.planted.handoff_bugs import HANDOFF_BUGS
    from tests.spec.planted.scheduler_bugs import SCHEDULER_BUGS
    from tests.spec.planted.tier_bugs import TIER_BUGS
    from tests.spec.planted.tiered_scheduler_bugs import TIERED_SCHEDULER_BUGS

    bugs = (*CACHE_BUGS, *TIER_BUGS, *SCHEDULER_BUGS, *TIERED_SCHEDULER_BUGS, *HANDOFF_BUGS)
    return {bug.name: bug for bug in bugs}


@cache
def rows() -> dict[str, Row]:
    """Return the row of each bug that the random engine searched for."""
    return {row["name"]: row for table in filter(is_main, documents()) for row in table["bugs"]}


@dataclass(frozen=True)
class Proof:
    """A trace in which a planted bug breaks a rule."""

    bug: str
    depth: str
    finding: Finding

    @property
    def num_calls(self) -> int:
        """Number of calls of the trace."""
        return len(self.finding.trace)

    @property
    def hides_calls(self) -> bool:
        """Whether a call of the trace stands for several, so that a reader does not see them."""
        return any(call[0] in COMPOUND for call in self.finding.trace)


@cache
def proofs() -> dict[str, Proof]:
    """Return the shortest trace that breaks each rule, by the name of the rule.

    A trace that hides no calls is preferred to one that does, even if it is longer.
    """
    found: dict[str, Proof] = {}
    for document in filter(is_main, documents()):
        named = [(row["bug"], row["depth"], row["finding"]) for row in document["proofs"].values()]
        named += [(row["name"], "full", row["shortest"]) for row in document["bugs"]]
        for bug, depth, finding in named:
            if finding is None:
                continue
            proof = Proof(bug, depth, _finding(finding))
            known = found.setdefault(finding["rule"], proof)
            if (proof.hides_calls, proof.num_calls) < (known.hides_calls, known.num_calls):
                found[finding["rule"]] = proof
    return found


def _finding(data: dict[str, Any]) -> Finding:
    return Finding(**{key: data[key] for key in ("rule", "why", "config", "trace")})


def show_bug(name: str) -> Iterator[str]:
    """Yield a planted bug: its change of the source, and the shortest trace that shows it."""
    bug, row = planted_bugs()[name], rows().get(name)
    in_scheduler = bug.world == "handoff" or bug.world.endswith("scheduler")
    package = "scheduler" if in_scheduler else "kvcache"
    root = Path(str(importlib.import_module(f"radixkv.{package}").__file__)).parent
    sources: dict[str, str] = {}
    for file, old, new in bug.all_edits():
        source = sources.setdefault(file, (root / file).read_text("utf-8"))
        sources[file] = source.replace(old, new)
    for file, planted in sources.items():
        yield f"```{{code-block}} diff\n:caption: {package}/{file}\n"
        yield from _diff((root / file).read_text("utf-8"), planted)
        yield "```\n"
    if row is not None and row["shortest"] is not None:
        proof = Proof(name, "full", _finding(row["shortest"]))
        yield from show_proof(proof, re.sub(r"[^a-z0-9]+", "-", name.lower()))


def _diff(before: str, after: str) -> Iterator[str]:
    """Yield the lines that differ, with one line around them, without the common indentation."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=1)
    shown = [line for line in list(lines)[2:] if not line.startswith("@@")]
    least = min(len(line[1:]) - len(line[1:].lstrip()) for line in shown if line[1:].strip())
    for line in shown:
        yield f"{line[:1]} {line[1 + least :]}".rstrip()


def show_proof(proof: Proof, stem: str) -> Iterator[str]:
    """Yield a trace as calls and as a drawing, which goes into a file named after `stem`."""
    subject = _subject(proof)
    program = to_program(proof.finding, subject).partition("\n\nbefore the last call:")[0]
    program = program.split("\n", 2)[2]  # without the rule and its sentence
    program = program.replace("    # breaks", "\n    # breaks")
    yield "```text"
    for line in program.strip().split("\n"):
        more = "    # " if line.startswith("    # ") else "     "
        yield from textwrap.wrap(line, WIDTH, subsequent_indent=more, drop_whitespace=True)
    yield "```\n"
    OUTPUT.mkdir(exist_ok=True)
    drawing = OUTPUT / f"{stem}.svg"
    drawing.write_text(to_svg(subject, proof.finding, calls=False), encoding="utf-8")
    yield f"![The state before the last call of the trace](/_generated/{stem}.svg)\n"


def _subject(proof: Proof) -> Subject:
    from tests.spec.planted.matrix import subject_of

    return subject_of(planted_bugs()[proof.bug], proof.depth)  # type: ignore[arg-type]
