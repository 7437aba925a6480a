"""Named rules of the specification, and the violation raised when one is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Rule:
    """One demand on a cache or a scheduler.

    Its name is the heading in the documentation, the text of the error, and the key for shrinking:
    a shorter trace must break the rule of the same name.

    Attributes:
        name: a code and a few words, such as ``"A1 allocate-only-free"``.
        sentence: the condition that must hold.
    """

    name: str
    sentence: str

    @property
    def code(self) -> str:
        """The short form, such as ``"A1"``; the letter is the chapter."""
        return self.name.split()[0]


RULES: Final[dict[str, Rule]] = {}
"""Every rule by name, in the order of the document."""


def rule(name: str, sentence: str) -> Rule:
    """Make a rule and register it in `RULES`."""
    assert name not in RULES, f"two rules have the name {name}"
    made = RULES[name] = Rule(name, sentence)
    return made


class Violation(AssertionError):
    """The system under test broke a rule.

    It is raised explicitly, so that it works under ``python -O`` too.

    Attributes:
        rule: the broken rule.
        why: the observed state.
    """

    def __init__(self, rule: Rule, why: str) -> None:
        super().__init__(f"[{rule.name}] {why}")
        self.rule = rule
        self.why = why


_not_judged: set[str] = set()
_met: Counter[str] = Counter()


@contextmanager
def not_judging(rules: Collection[str]) -> Iterator[Counter[str]]:
    """Do not judge some rules: where one is broken, `require` only counts it.

    Args:
        rules: the names of the rules.

    Yields:
        How often each of them was broken so far.
    """
    _met.clear()
    _not_judged.update(rules)
    try:
        yield _met
    finally:
        _not_judged.clear()


def require(holds: object, rule: Rule, why: str, *details: object) -> None:
    """Raise a `Violation` of `rule` unless `holds` is true.

    Args:
        holds: the condition of the rule.
        rule: the rule.
        why: the observed state, as a format string for `details`; it is formatted only if needed.
        details: the values for `why`.

    Example:
        >>> require(3 > 2, A1, "never said")
        >>> require(3 > 4, A1, "block {} belongs to {}", 3, "r1")
        Traceback (most recent call last):
            ...
        radixkv.spec.rules.rule.Violation: [A1 allocate-only-free] block 3 belongs to r1
    """
    if holds:
        return
    if rule.name not in _not_judged:
        raise Violation(rule, why.format(*details))
    _met[rule.name] += 1
