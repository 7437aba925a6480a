"""Shrinks a failing trace: fewer operations, simpler arguments, the same rule broken."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Final

from ...rules.rule import Violation
from ..engine import Config, Finding, Subject, Trace, new_world
from ..random_engine import run_case

MAX_REPLAYS: Final = 4_000
_NUM_TOKENS: Final = 3

SHORT: Final = 12
"""Operations of a trace for which no other way to the broken rule is searched."""

NUM_CASES: Final = 100
"""Cases of such a search."""

SMALLEST: Final = {"num_blocks": 1, "block_size": 1, "max_running": 1, "alphabet": 1,
                   "host_blocks": 1, "prefill_blocks": 1, "decode_blocks": 1, "num_prefill": 1,
                   "num_decode": 1, "num_groups": 1, "num_shards": 1}  # fmt: skip
"""Sizes of a configuration that shrinking reduces."""


class _Shrinker:
    """Tries simpler candidates and keeps those that break the same rule.

    Operations name requests, so removing one does not change the meaning of the others. The replay
    skips operations whose names no longer exist, and shrinking removes them too.

    Source: delta debugging (ddmin, Zeller and Hildebrandt 2002), to a fixpoint.
    """

    def __init__(self, subject: Subject, finding: Finding) -> None:
        self.subject = subject
        self.rule = finding.rule
        self.config: Config = dict(finding.config)
        self.trace: Trace = deepcopy(finding.trace)
        self.why: str
        self.num_replays = 0
        self._failed: set[str] = set()  # rounds repeat many candidates
        self._random = random.Random(0)

    def keeps(self, config: Config, trace: Trace) -> bool:
        """Whether a candidate breaks the rule too; if so, continue from its applied operations."""
        candidate = repr((config, trace))
        if candidate in self._failed or self.num_replays >= MAX_REPLAYS:
            return False
        self.num_replays += 1
        violation, applied = _replay(self.subject, config, trace)
        if violation is None or violation.rule.name != self.rule:
            self._failed.add(candidate)
            return False
        self.config, self.trace, self.why = config, applied, violation.why
        return True

    def run(self) -> None:
        """Shrink until a whole round changes nothing."""
        before = None
        while before != (self.config, self.trace):
            before = (self.config, self.trace)
            self.leave_out_requests()
            self.leave_out_operations()
            self.simplify_arguments()
            self.simplify_tokens()
            self.shrink_sizes()
            self.simplify_by_subject()
            self.search_anew()
        self.rename()

    def leave_out_requests(self) -> None:
        """Remove whole requests, with all operations that name them."""
        for operation in list(self.trace):
            if operation[0] == "submit":
                name = operation[1]
                self.keeps(self.config, [each for each in self.trace if not _names(each, name)])

    def leave_out_operations(self) -> None:
        """Remove runs of operations, long ones first."""
        length = max(1, len(self.trace) // 2)
        while length:
            start = 0
            while start < len(self.trace):
                shorter = self.trace[:start] + self.trace[start + length :]
                if not self.keeps(self.config, shorter):
                    start += length
            length //= 2

    def simplify_arguments(self) -> None:
        """Make numbers smaller and lists shorter."""
        for index in range(len(self.trace)):
            place = 1
            # The trace may be shorter now, if other operations depended on the argument.
            while index < len(self.trace) and place < len(self.trace[index]):
                self._simplify(index, place)
                place += 1

    def _simplify(self, index: int, place: int) -> None:
        for simpler in _simpler(self.trace[index][place]):
            operation = list(self.trace[index])
            operation[place] = simpler
            if self.keeps(self.config, [*self.trace[:index], operation, *self.trace[index + 1 :]]):
                break

    def simplify_tokens(self) -> None:
        """Make a token smaller everywhere at once, because equal prefixes must stay equal."""
        for token in sorted(_tokens(self.trace)):
            for simpler in range(min(token, _NUM_TOKENS)):
                if self.keeps(self.config, _with_token(self.trace, token, simpler)):
                    break

    def shrink_sizes(self) -> None:
        """Make the world smaller."""
        only_drawn = getattr(self.subject, "only_drawn", ())
        possible = getattr(self.subject, "sizes", {})
        for name, smallest in SMALLEST.items():
            size_now = self.config.get(name, 0)
            for size in possible.get(name, range(smallest, size_now)):
                is_smaller = size < size_now and name not in only_drawn
                if is_smaller and self.keeps({**self.config, name: size}, self.trace):
                    break

    def search_anew(self) -> None:
        """Draw shorter traces in the same world, if no part of a long one can be left out.

        What a request does may depend on the number of steps before, so that leaving one out moves
        everything after it: then another trace is easier to find than the shorter one.
        """
        num_steps = len(self.trace) - 2
        for _ in range(NUM_CASES if len(self.trace) > SHORT else 0):
            world = new_world(self.subject, self.config)
            trace, violation = run_case(world, self._random.randrange, num_steps)
            if violation is not None and self.keeps(self.config, trace):
                break

    def simplify_by_subject(self) -> None:
        """Try the simpler traces that the subject proposes."""
        simpler: Callable[[Trace], Iterator[Trace]] | None
        simpler = getattr(self.subject, "simpler", None)
        if simpler is not None:
            for candidate in simpler(self.trace):
                if self.keeps(self.config, candidate):
                    break

    def rename(self) -> None:
        """Renumber the requests."""
        submitted = [operation[1] for operation in self.trace if operation[0] == "submit"]
        names = {name: f"r{number}" for number, name in enumerate(submitted, 1)}
        self.keeps(self.config, [_renamed(operation, names) for operation in self.trace])


def shrink(subject: Subject, finding: Finding) -> Finding:
    """Return a finding of the same rule whose trace cannot be reduced further.

    Args:
        subject: the subject of the finding.
        finding: the finding; it is returned unchanged if a replay does not reproduce it.
    """
    shrinker = _Shrinker(subject, finding)
    if not shrinker.keeps(shrinker.config, shrinker.trace):
        return finding
    shrinker.run()
    return Finding(finding.rule, shrinker.why, shrinker.config, shrinker.trace)


def _replay(subject: Subject, config: Config, trace: Trace) -> tuple[Violation | None, Trace]:
    """Run a trace from the start; return the violation and the operations applied before it."""
    applied: Trace = []
    try:
        world = subject.world(dict(config))
    except Exception:  # the manager may refuse these sizes; a rule broken here is another finding
        return None, applied
    for operation in trace:
        try:
            if world.apply(operation):
                applied.append(operation)
        except Violation as violation:
            return violation, [*applied, operation]
    return None, applied


def _names(value: Any, name: str) -> bool:
    if isinstance(value, str):
        return value == name or value.startswith(f"{name}.")
    return isinstance(value, list) and any(_names(each, name) for each in value)


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(each, names) for each in value]
    if isinstance(value, str):
        name, dot, rest = value.partition(".")
        return names.get(name, name) + dot + rest
    return value


def _tokens(trace: Trace) -> set[int]:
    lists = (value for operation in trace for value in operation if isinstance(value, list))
    return {number for value in lists for number in _numbers(value)}


def _numbers(value: list[Any]) -> Iterator[int]:
    for each in value:
        if isinstance(each, list):
            yield from _numbers(each)
        elif type(each) is int:
            yield each


def _with_token(trace: Trace, token: int, other: int) -> Trace:
    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return other if type(value) is int and value == token else value

    return [
        [replaced(value) if isinstance(value, list) else value for value in operation]
        for operation in trace
    ]


def _simpler(value: Any) -> Iterator[Any]:
    """Yield simpler values, the simplest first."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield from range(value)
    elif isinstance(value, list):
        yield from (value[:length] for length in range(len(value)))
        yield from (value[:index] + value[index + 1 :] for index in range(len(value)))
        yield from _with_a_zero(value)


def _with_a_zero(value: Any) -> Iterator[Any]:
    """Yield the value with each of its numbers in turn replaced by 0."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            for zeroed in _with_a_zero(each):
                yield [*value[:index], zeroed, *value[index + 1 :]]
    elif isinstance(value, int) and value:
        yield 0
