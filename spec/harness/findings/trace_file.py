"""Trace files: a ``*.trace.json`` holds a finding and its target."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...adapters.cache import AdapterError
from ...rules.rule import Violation
from ..engine import Finding, Subject, new_world, replay

FORMAT: Final = 1

PARTS: Final = {"rule": str, "why": str, "config": dict, "trace": list}
"""Required fields of a trace file, besides its format."""


class TraceFileError(ValueError):
    """A file is no trace, or a trace does not fit its target; the message is one line."""


@dataclass(frozen=True)
class TraceFile:
    """A finding and its target.

    Attributes:
        finding: the broken rule, with its trace.
        what: the kind of system: one of `WHATS`.
        target: import path of the factory, as ``"package.module:factory"``; "" if not known.
        depth: the depth of the checks.
        known: rules that were not judged.
    """

    finding: Finding
    what: str = "cache"
    target: str = ""
    depth: str = "api"
    known: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the contents as plain data."""
        origin: dict[str, Any] = {"what": self.what, "target": self.target, "depth": self.depth}
        if self.known:
            origin["known"] = list(self.known)
        return {**self.finding.to_json(), **origin}

    def text(self) -> str:
        """Return the text of the file, with one operation per line for readers and diffs."""
        document = self.to_json()
        trace = ",\n".join(f"  {json.dumps(operation)}" for operation in document.pop("trace"))
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
        return "{\n" + ",\n".join([*lines, f' "trace": [\n{trace}\n ]']) + "\n}\n"

    def file_name(self) -> str:
        """Return a file name derived from a digest of the trace and its origin."""
        origin = [self.what, self.target, self.depth, self.known]
        content = json.dumps([*origin, self.finding.config, self.finding.trace], sort_keys=True)
        return f"{hashlib.sha256(content.encode()).hexdigest()[:12]}.trace.json"


def read_trace_file(path: Path) -> TraceFile:
    """Read a trace file.

    Raises:
        OSError: the file cannot be read.
        TraceFileError: the file is not a trace file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TraceFileError(f'{path}: not a trace: it has no "format": {FORMAT}')
    for part, kind in PARTS.items():
        if not isinstance(document.get(part), kind):
            wanted = {dict: "an object", list: "a list", str: "a string"}[kind]
            raise TraceFileError(f'{path}: "{part}" must be {wanted}')
    for number, operation in enumerate(document["trace"], 1):
        if not isinstance(operation, list) or not operation or not isinstance(operation[0], str):
            raise TraceFileError(
                f"{path}: operation {number} must be a list that begins with a word"
            )
    origin = {part: document[part] for part in ("what", "target", "depth") if part in document}
    for part, value in origin.items():
        if not isinstance(value, str):
            raise TraceFileError(f'{path}: "{part}" must be a string')
    known = document.get("known", [])
    if not isinstance(known, list) or not all(isinstance(word, str) for word in known):
        raise TraceFileError(f'{path}: "known" must be a list of strings')
    finding = Finding(**{part: document[part] for part in PARTS})
    return TraceFile(finding, **origin, known=tuple(known))


def replay_file(subject: Subject, file: TraceFile) -> Finding | None:
    """Run a trace from the start; return the finding of this replay, with the trace up to it.

    Raises:
        TraceFileError: the trace does not fit the subject.
    """
    finding = file.finding
    done: list[list[Any]] = []
    try:
        world = new_world(subject, finding.config)
        for operation in finding.trace:
            done.append(operation)
            world.apply(operation)
    except Violation as violation:
        return Finding(violation.rule.name, violation.why, finding.config, done)
    except AdapterError:
        raise
    except (LookupError, ValueError, ArithmeticError, AttributeError, TypeError) as error:
        place = f"operation {len(done)}, {json.dumps(done[-1])}," if done else "the configuration"
        raise TraceFileError(f"{place} fits no world of a {file.what}: {error!r}") from error
    return None


def breaks_again(subject: Subject, finding: Finding) -> bool:
    """Whether a replay of the trace breaks the same rule again."""
    violation = replay(subject, finding.config, finding.trace)
    return violation is not None and violation.rule.name == finding.rule
