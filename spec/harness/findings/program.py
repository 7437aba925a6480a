"""A finding as text: its trace as readable calls, and the state before the failing call."""

from __future__ import annotations

import re
from typing import Any, Final

from ...rules.rule import RULES, Violation
from ..engine import Finding, Operation, Subject, World, new_world

_NAME: Final = re.compile(r"[a-z]\d+(\.\d+)?")

NAMED: Final = {
    "submit": ("max_new_tokens", "more", "priority", "seed", "stop", "namespace"),
    "misuse": ("kind",),
}
"""Arguments that are shown with their names, by word; those of 0 or [] are omitted."""


def to_program(finding: Finding, subject: Subject | None = None) -> str:
    """Write a finding as a program.

    Args:
        finding: the finding, preferably shrunk.
        subject: its subject, to name arguments and to draw the state before the failing step.

    Returns:
        The rule with its sentence, the sizes, one call per operation with the failing one marked,
        and the picture.
    """
    rule = RULES.get(finding.rule)
    lines = [f"{finding.rule}: {rule.sentence}" if rule else finding.rule, ""]
    lines.append(f"with {_describe(finding, subject)}")
    calls = [f"    {to_call(operation, subject)}" for operation in finding.trace]
    if calls:
        calls[-1] += f"    # breaks {finding.rule}: {finding.why}"
    lines += calls
    if subject is not None:
        picture = world_before(subject, finding).picture() or "(nothing has happened yet)"
        lines += ["", "before the last call:", *(f"    {line}" for line in picture.split("\n"))]
    return "\n".join(lines)


def to_call(operation: Operation, subject: Subject | None = None) -> str:
    """Write an operation as a call, such as ``submit(r1, [0, 0], more=3)``.

    Args:
        operation: the operation.
        subject: its subject, which knows the names of its arguments.
    """
    word, *arguments = operation
    row = None if subject is None else subject.table.by_word.get(word)
    named = NAMED.get(word, ())
    keywords = [name if name in named else "" for name in row.arguments] if row is not None else []
    shown = []
    for place, argument in enumerate(arguments):
        keyword = keywords[place] if place < len(keywords) else ""
        if keyword and argument not in (0, []):
            shown.append(f"{keyword}={_value(argument)}")
        elif not keyword and argument != "":
            shown.append(_value(argument))
    return f"{word}({', '.join(shown)})"


def world_before(subject: Subject, finding: Finding) -> World:
    """Return the world before the last operation of a finding."""
    world = new_world(subject, finding.config)
    try:
        for operation in finding.trace[:-1]:
            world.apply(operation)
    except Violation:
        pass  # it broke earlier this time, so the target is not deterministic; show this state
    return world


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    return repr(value)


def _describe(finding: Finding, subject: Subject | None) -> str:
    unshown = getattr(subject, "only_drawn", ())
    sizes = (f"{key}={value!r}" for key, value in finding.config.items() if key not in unshown)
    return ", ".join(sizes)
