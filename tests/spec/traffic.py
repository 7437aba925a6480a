"""Print what random steps on our systems consist of, as JSON.

A world that never draws some operation, number or configuration finds no bug there, and reports
success. So does one that tells its model nothing of what happens, or comes to no guard. The
committed table counts all that each world draws, what comes of it, each call of the model, and each
judgement. A change that makes a world draw or tell something else has to write it anew, and so
shows what is drawn or judged more rarely::

    python -m tests.spec.traffic > tests/spec/traffic.json
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, TypeAlias
from unittest.mock import patch

from radixkv.scheduler.fuzz import targets
from radixkv.spec.harness.engine import Config, Operation, Subject
from radixkv.spec.harness.random_engine import case_lengths_of
from radixkv.spec.harness.subjects import WHATS, What, make_subject
from radixkv.spec.rules import rule as rules

COMMITTED: Final = Path(__file__).with_name("traffic.json")

NUM_CASES: Final[dict[What, tuple[int, int]]] = {
    "cache": (60, 0), "costs": (3, 0), "handoff": (5, 300), "pool": (4, 0), "scheduler": (40, 0),
    "tiered_scheduler": (16, 0), "tiers": (24, 0),
}  # fmt: skip
"""Arguments of `traffic_of`, so many cases that every operation is drawn, or almost."""

NUM_CONFIGS: Final = 200
"""Configurations of each kind that are drawn, most of them for no world."""

Traffic: TypeAlias = dict[str, dict[str, Any]]


def subject_of(what: What) -> Subject:
    """Return ours of a kind."""
    return make_subject(what, getattr(targets, what), "full")


def traffic_of(subject: Subject, num_cases: int, num_steps: int = 0) -> Traffic:
    """Run some worlds and count.

    Args:
        subject: makes the worlds.
        num_cases: number of worlds.
        num_steps: operations in each; 0 for one of the subject's ``case_lengths``.

    Returns:
        How often each value of each part of a configuration was drawn, each operation was drawn and
        applied, each argument of it had each value, and each situation occurred; by method of a
        model, the number of calls and the sum of each argument; and how often each function judged
        each rule.
    """
    generator = random.Random(0)
    configs: defaultdict[str, Counter[str]] = defaultdict(Counter)
    operations: Counter[str] = Counter()
    arguments: defaultdict[str, Counter[str]] = defaultdict(Counter)
    situations: Counter[str] = Counter()

    def below(bound: int) -> int:
        return int(generator.random() * bound)

    def configure() -> Config:
        config = subject.configure(below)
        for name, value in config.items():
            configs[name][_shown(value)] += 1
        return config

    for _ in range(NUM_CONFIGS):
        configure()
    lengths = case_lengths_of(subject)
    with noted() as (told, judged):
        for _ in range(num_cases):
            world = subject.world(configure())
            length = num_steps or lengths[below(len(lengths))]
            for operation in _operations(world.draw, below, length):
                word, *values = operation
                operations[word] += 1
                operations[f"{word}, applied"] += world.apply(operation)
                for place, value in enumerate(values):
                    arguments[f"{word} {place}"][_shown(value)] += 1
            situations.update(world.situations)
    return {
        "configurations": {name: _sorted(counts) for name, counts in sorted(configs.items())},
        "operations": _sorted(operations),
        "arguments": {name: _sorted(counts) for name, counts in sorted(arguments.items())},
        "situations": _sorted(situations),
        "told": {name: [*counts.values()] for name, counts in sorted(told.items())},
        "judged": _sorted(judged),
    }


@contextmanager
def noted() -> Iterator[tuple[dict[str, Counter[str]], Counter[str]]]:
    """Count the calls of all methods of the models, and the judgements, as long as it is open.

    Yields:
        By method, the number of calls and the sum of each argument; by function and rule, the
        number of judgements.
    """
    told: defaultdict[str, Counter[str]] = defaultdict(Counter)
    judged: Counter[str] = Counter()

    def require(condition: object, rule: rules.Rule, why: str, *values: object) -> None:
        caller = sys._getframe(1)
        module = caller.f_globals["__name__"].removeprefix("radixkv.spec.")
        function = caller.f_code.co_qualname.partition(".<locals>")[0]
        judged[f"{module}: {function}: {rule.code}"] += 1
        original(condition, rule, why, *values)

    original = rules.require
    with ExitStack() as stack:
        for module in _modules("radixkv.spec"):
            if vars(module).get("require") is original:
                stack.enter_context(patch.object(module, "require", require))
        for module in _modules("radixkv.spec.model"):
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == module.__name__:
                    for name, method in [*vars(kind).items()]:
                        if isinstance(method, FunctionType) and not name.startswith("_"):
                            counts = told[f"{kind.__name__}.{name}"]
                            stack.enter_context(patch.object(kind, name, _counted(method, counts)))
        yield told, judged
    for name in [name for name, counts in told.items() if not counts]:
        del told[name]


def _modules(prefix: str) -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(prefix)]


def _counted(method: FunctionType, counts: Counter[str]) -> Callable[..., Any]:
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]

    @functools.wraps(method)
    def counted(self: Any, *given: Any, **named: Any) -> Any:
        counts["calls"] += 1
        for name, value in (*zip(names, given, strict=False), *named.items()):
            counts[name] += _size(value)
        return method(self, *given, **named)

    return counted


def _size(value: object) -> int:
    """Return a number, a length, or the sum of them of all parts of a record."""
    match value:
        case int():
            return value if abs(value) < 1 << 32 else 1  # the others are tags
        case str() | bytes() | None:
            return bool(value)
        case Sized() if not hasattr(value, "_fields"):
            return len(value)
    names = [each.name for each in fields(value)] if is_dataclass(value) else ()
    return 1 + sum(_size(getattr(value, name)) for name in getattr(value, "_fields", names))


def _operations(draw: Any, below: Any, number: int) -> Iterator[Operation]:
    """Yield operations that are drawn, and at last the one that ends every case."""
    for _ in range(number):
        yield draw(below)
    yield ["drain"]


def _shown(value: object) -> str:
    """Return a small value as it is, and of another one how large it is."""
    match value:
        case bool() | None:
            return str(value)
        case int():
            return str(value) if 0 <= value < 16 else f"{value.bit_length()} bits"
        case list() | tuple():
            return f"{len(value)} items"
        case str() if any(each.isdigit() for each in value):
            return "a name"
    return str(value)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def text_of(traffic: dict[str, Traffic]) -> str:
    """Return the table as JSON with one line per part, so that a diff shows what a change does."""
    worlds = []
    for what, parts in traffic.items():
        lines = [f"    {json.dumps(name)}: {_lines(each)}" for name, each in parts.items()]
        worlds.append(f"  {json.dumps(what)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(worlds) + "\n}"


def _lines(part: dict[str, Any]) -> str:
    rows = [f"      {json.dumps(name)}: {json.dumps(each)}" for name, each in part.items()]
    return "{\n" + ",\n".join(rows) + "\n    }"


if __name__ == "__main__":
    print(text_of({what: traffic_of(subject_of(what), *NUM_CASES[what]) for what in WHATS}))
