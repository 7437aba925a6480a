"""A finding as a script in the calls of the tested manager; it needs nothing of this package."""

from __future__ import annotations

import re
from collections.abc import Container
from copy import copy
from itertools import count
from typing import Any, Final

from ...adapters.recorder import Line, Recording, recording
from ...rules.rule import RULES, Violation
from ..engine import Finding, Subject, new_world
from .known import KnownSubject
from .program import to_call

LOOKS: Final = ("available", "block_table", "snapshot", "refusal", "check")
"""Methods of an adapter that change nothing. Their calls are shown for the last operation only."""


def to_script(finding: Finding, subject: Subject) -> str:
    """Write a finding as a plain script.

    The script makes the calls that the adapter made on what it wraps with `recorded`, with the
    arguments that it passed. It fails as long as the manager gives the same answers.

    Args:
        finding: the finding, preferably shrunk.
        subject: its subject.

    Returns:
        The script; "" if the adapter records no calls, if none of them has an answer to compare
        or raises the error, or if the finding is not reproduced.
    """
    with recording() as log:
        parts: list[tuple[str, list[Line]]] = [("", log.lines)]
        factory = _noting(subject.factory, log)  # type: ignore[attr-defined]  # all subjects have it
        world = new_world(_with_factory(subject, factory), finding.config)
        for operation in finding.trace:
            log.lines = []
            parts.append((to_call(operation, subject), log.lines))
            try:
                world.apply(operation)
            except Violation as violation:
                if violation.rule.name != finding.rule:
                    return ""
                why = violation.why
                break
        else:
            return ""
    if not any(lines for _, lines in parts):
        return ""
    requests: dict[str, Any] = getattr(world, "requests", {})
    tables = {name: getattr(each, "table", []) for name, each in requests.items()}
    held = ", ".join(f"{name} {table}" for name, table in tables.items() if table)
    return _write(finding, log, _without_looks(parts), why, held)


def _without_looks(parts: list[tuple[str, list[Line]]]) -> list[tuple[str, list[Line]]]:
    """Leave out what only looks or reads, but not in the last part, nor what later lines use."""
    kept: list[tuple[str, list[Line]]] = []
    words: set[str] = set()
    for call, lines in reversed(parts):
        shown: list[Line] = []
        for line in reversed(lines):
            if not kept or not (line.is_look or line.is_read) or line.name in words:
                shown.append(line)
                words.update(re.findall(r"\w+", line.text))
        kept.append((call, shown[::-1]))
    return kept[::-1]


def _write(
    finding: Finding, log: Recording, parts: list[tuple[str, list[Line]]], why: str, held: str
) -> str:
    rule = RULES[finding.rule]
    answers: dict[str, str] = {}
    # The manager has changed these answers since, which `deepcopy` keeps as they were.
    live = {
        id(line)
        for _, lines in parts
        for line in lines
        if line.result and line.result != log.text(line.answer)
    }
    if live:
        log.imports.add("from copy import deepcopy")
    text = [f'"""{rule.name}: {rule.sentence}"""', ""]
    if folders := sorted(log.folders):
        text += ["import sys", "", *(f"sys.path.insert(0, {each!r})" for each in folders), ""]
    text += [*sorted(log.imports), ""]
    for call, lines in parts:
        text += [f"# {call}"] if call and (lines or call == parts[-1][0]) else []
        for line in lines:
            if line.result:
                line.name = _new_name(line, answers)
                answers[line.name] = line.result
            call_text = f"deepcopy({line.text})" if id(line) in live else line.text
            shown = f"{line.name} = {call_text}" if line.name else call_text
            comment = f"raises {line.error}" if line.error else line.result
            text.append(f"{shown}  # {comment}" if comment else shown)
    if not (lines and lines[-1].error):
        if not answers:
            return ""
        names, results = ", ".join(answers), ", ".join(answers.values())
        text += ["", f"# block tables: {held}"] if held else [""]
        text.append(f"assert [{names}] != [{results}], {f'{rule.name}: {why}'!r}")
    return "\n".join(text).rstrip() + "\n"


def _new_name(line: Line, taken: Container[str]) -> str:
    words = re.findall(r"\.([a-z]\w*)", line.text.partition("(")[0] or line.text)
    word = words[-1] if words else "answer"
    names = (f"{word}_{number}" for number in count(1))
    return next(name for name in names if name not in taken)


def _with_factory(subject: Any, factory: Any) -> Any:
    if isinstance(subject, KnownSubject):
        return subject.with_factory(factory)
    made = copy(subject)
    made.factory = factory
    return made


def _noting(factory: Any, log: Recording) -> Any:
    """Return a factory of the same adapters, whose methods that only look are noted as such."""

    class Noting:
        def __init__(self, *sizes: Any) -> None:
            self.adapter = factory(*sizes)

        def __getattr__(self, name: str) -> Any:
            value = getattr(self.adapter, name)
            if name not in LOOKS or not callable(value):
                return value

            def look(*given: Any) -> Any:
                before = len(log.lines)
                try:
                    return value(*given)
                finally:
                    for line in log.lines[before:]:
                        line.is_look = True

            return look

    return Noting
