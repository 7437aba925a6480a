"""Generate the tables and traces of the specification from its rules and the planted bugs.

conf.py calls `write_pages`. It reads ``docs/specification/*.jsonl``, of which ``python -m
tests.spec.planted --json`` writes the tables of bugs, and writes into ``docs/_generated/``, which
is not in git.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Final

import tables
from drawings import write_drawings
from sources import num_links, others
from tables import OUTPUT, TABLES, Row, Section

from radixkv.spec.adapters.cache_target import DEPTHS
from radixkv.spec.rules.rule import RULES, Rule

MOST_LINKS: Final = 4

NONE: Final = "\N{EN DASH}"
"""A cell without a value; a hyphen would begin a list."""


def write_pages() -> None:
    """Write everything that the pages of the specification include."""
    OUTPUT.mkdir(exist_ok=True)
    for page, sections in tables.rule_pages().items():
        _write(f"rules_{page}", _summary_table(sections))
        _write(f"traces_{page}", _traces(page, sections))
    _write("bugs", _bugs())
    _write("ruled_out", _ruled_out())
    _write("invariants", _invariants())
    _write("situations", _situations())
    _write("counts", [_counts()])
    write_drawings()


def _write(name: str, lines: Iterable[str]) -> None:
    (OUTPUT / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


# The rules


def _summary_table(sections: tuple[Section, ...]) -> Iterator[str]:
    for section in sections:
        if section.title:
            yield f"**{section.title}**\n"
        yield from _list_table(
            ("Rule", "A bug that breaks it", "Seen in", "Trace"), (38, 30, 21, 11), "rules"
        )
        for rule in section.rules:
            proof = tables.proofs().get(rule.name)
            bug = _sentence(proof.bug) if proof else ""
            calls = f"{{ref}}`{_calls(proof.num_calls)} <{_label(rule)}>`" if proof else ""
            name = f"{{rule}}`{rule.name}`\n    <br>{rule.sentence}"
            yield from _row((name, bug, _seen_in(rule), calls))
        yield "```\n"


def _list_table(heads: Iterable[str], widths: Iterable[int], style: str) -> Iterator[str]:
    yield "```{list-table}\n:header-rows: 1"
    yield f":widths: {' '.join(map(str, widths))}\n:class: {style}\n"
    yield from _row(heads)


def _row(cells: Iterable[str]) -> Iterator[str]:
    for place, cell in enumerate(cells):
        yield f"{'  ' if place else '* '}- {cell}"


def _seen_in(rule: Rule) -> str:
    """Return the places where somebody had a bug that this rule finds first."""
    bugs = tables.planted_bugs()
    names = [name for name, row in tables.rows().items() if row["rule"] == rule.name]
    proof = tables.proofs().get(rule.name)
    names = [proof.bug, *names] if proof else names
    texts = [bugs[name].seen_in for name in names if name in bugs]
    texts += [each["seen_in"] for each in _entries("ruled_out") if each.get("rule") == rule.name]
    places = others(texts)
    more = len(places) - MOST_LINKS
    shown = ", ".join(places[:MOST_LINKS])
    return (f"{shown}, {more} more" if more > 0 else shown) or "own"


def _traces(page: str, sections: tuple[Section, ...]) -> Iterator[str]:
    bugs = tables.planted_bugs()
    for section in sections:
        if section.title:
            yield f"## {section.title}\n"
        for rule in section.rules:
            yield f"({_label(rule)})=\n### {rule.name}\n"
            yield f"{rule.sentence}\n"
            proof = tables.proofs().get(rule.name)
            if proof is None:
                yield "*No planted bug breaks this rule before another one.*\n"
                continue
            places = ", ".join(others([bugs[proof.bug].seen_in]))
            seen_in = f" (seen in {places})" if places else ""
            yield f"*Broken by:* {_sentence(proof.bug)}{seen_in}.\n"
            yield from tables.show_proof(proof, rule.name.replace(" ", "-"))


def _label(rule: Rule) -> str:
    return f"rule-{rule.code.lower()}"


def _calls(number: int) -> str:
    return f"{number} call{'s' * (number != 1)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _counts() -> str:
    bugs = tables.planted_bugs().values()
    entries = _entries("ruled_out")
    links = num_links(others(bug.seen_in for bug in bugs))
    links_out = num_links(others(entry["seen_in"] for entry in entries))
    return (
        f"{len(RULES)} rules, {len(bugs)} planted bugs with links to {links} issues and pull "
        f"requests of other projects, and {len(entries)} bugs that the design rules out, with "
        f"links to {links_out}."
    )


# The bugs


def _bugs() -> Iterator[str]:
    by_engine = {
        document["summary"]["engine"]: {row["name"]: row for row in document["bugs"]}
        for document in tables.documents()
        if not tables.is_main(document)
    }
    for document in tables.documents():
        yield f"{_summary(document['summary'])}\n"
    for document in filter(tables.is_main, tables.documents()):
        yield from _table(document["bugs"], by_engine)


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
    bugs = tables.planted_bugs()
    depths = list(dict.fromkeys(depth for row in rows for depth in row["depths"]))
    heads = [f"`{depth}`" for depth in depths] + [_sentence(engine) for engine in by_engine]
    widths = [26, 17, 8, *[12] * len(depths), *[15] * len(by_engine), 8]
    yield from _list_table(["Bug", "Seen in", "Rule", *heads, "Calls"], widths, "bugs")
    for row in rows:
        steps = [_steps(row["depths"].get(depth)) for depth in depths]
        for theirs in by_engine.values():
            found = theirs.get(row["name"], {"depths": {}})["depths"]
            steps.append(_steps(found[max(found, key=DEPTHS.index)] if found else None))
        calls = str(len(row["shortest"]["trace"])) if row["shortest"] else NONE
        rule = RULES.get(row["rule"])
        code = f"{{ref}}`{rule.code} <{_label(rule)}>`" if rule else row["rule"] or "survives"
        seen_in = bugs[row["name"]].seen_in if row["name"] in bugs else ""
        yield from _row(
            [_sentence(row["name"]), ", ".join(others([seen_in])) or "own", code, *steps, calls]
        )
    yield "```\n"


def _steps(steps: dict[str, Any] | None) -> str:
    if steps is None:
        return NONE
    survived = f", {steps['survived']} not found" if steps["survived"] else ""
    return f"{steps['median']:,} ({steps['worst']:,}{survived})"


# The bugs that the design rules out


def _entries(name: str) -> list[dict[str, Any]]:
    lines = (TABLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _ruled_out() -> Iterator[str]:
    for group, entries in groupby(_entries("ruled_out"), lambda entry: entry["group"]):
        yield f"## {group}\n"
        yield from _list_table(
            ("Bug", "Seen in", "Why it cannot happen here"), (34, 20, 46), "bugs"
        )
        for entry in entries:
            why = _sentence(entry["why"]) + "."
            if "rule" in entry:
                why += f" See {{rule}}`{entry['rule']}`."
            yield from _row((_sentence(entry["bug"]), ", ".join(others([entry["seen_in"]])), why))
        yield "```\n"


# The situations


def _situations() -> Iterator[str]:
    from tests.spec import floors

    for title, table in (
        ("The cache", floors.CACHE_FLOORS),
        ("The scheduler", floors.SCHEDULER_FLOORS),
        ("The tiers", floors.TIER_FLOORS),
        ("The hand-off", floors.HANDOFF_FLOORS),
    ):
        yield _line([title, f"At least, per {floors.PER_STEPS:,} steps"])
        yield _line(["---", "---:"])
        for situation, floor in table.items():
            yield _line([_sentence(situation), f"{floor:,}"])
        yield ""


def _line(cells: list[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


# The invariants


def _invariants() -> Iterator[str]:
    heads = ("", "What must hold", "Rules", "Checked elsewhere")
    yield from _list_table(heads, (6, 50, 18, 26), "bugs")
    by_code = {rule.code: rule for rule in RULES.values()}
    for each in _entries("invariants"):
        what = f"**{_sentence(each['title'])}.** {each['sentence']}"
        codes = (f"{{ref}}`{code} <{_label(by_code[code])}>`" for code in each["rules"])
        elsewhere = each.get("elsewhere", "")
        yield from _row((each["invariant"], what, ", ".join(codes) or "none", elsewhere))
    yield "```\n"
