"""Operations: one table per subject, for the random driver and for the Hypothesis machines.

A row says all that a driver needs: the word in a trace, the function that does it, its weight, the
names that it may apply to, and how its arguments are drawn. Everything is drawn with ``Below``, so
a row is drawn in the same way from a random generator and from the choices of Hypothesis.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Generic, TypeAlias, TypeVar

W = TypeVar("W")

Below: TypeAlias = Callable[[int], int]
"""A source of choices: ``below(n)`` returns one of 0 .. n-1. Random, or from Hypothesis."""

Draw: TypeAlias = Callable[[W, str, Below], Any]
"""Draws an argument, from the world, the name that the operation applies to, and choices. A choice
of 0 should be the simplest, because that is what Hypothesis shrinks to."""

Groups: TypeAlias = Mapping[str, Sequence[str]]
"""Names by group, such as the names of the waiting requests; an empty group disables operations."""

Weights: TypeAlias = Mapping[str, int]
"""How often each operation is drawn, by word."""

ALWAYS: Final = ""
"""Group of the operations that apply to nothing in particular; it has one empty name."""


@dataclass(frozen=True)
class Operation(Generic[W]):
    """A row of a table.

    Attributes:
        word: its name in a trace.
        apply: does it with the arguments and checks the rules; returns False, without any change,
            if it does not apply.
        weight: how often it is drawn, relative to the others.
        group: the group of names, one of which it applies to. It is drawn if there is one.
        arguments: how each argument is drawn, by name, in the order of the trace.
        needs: an optional method of the adapter, without which it is never drawn.
    """

    word: str
    apply: Callable[..., bool]
    weight: int
    group: str = ALWAYS
    arguments: Mapping[str, Draw[W]] = field(default_factory=dict)
    needs: str = ""

    def draw(self, world: W, names: Sequence[str], below: Below) -> list[Any]:
        """Draw the name and the arguments."""
        name = names[below(len(names))] if len(names) > 1 else names[0]
        return [self.word, *[draw(world, name, below) for draw in self.arguments.values()]]


class Table(Generic[W]):
    """The operations of a subject.

    Args:
        groups: returns the groups of a world; it is called once per operation.
        operations: the rows; the first is the simplest choice.
    """

    def __init__(self, groups: Callable[[W], Groups], operations: Iterable[Operation[W]]) -> None:
        self.groups = groups
        self.by_word: Final = {operation.word: operation for operation in operations}

    def __iter__(self) -> Iterator[Operation[W]]:
        return iter(self.by_word.values())

    def for_adapter(self, can: Iterable[str]) -> Table[W]:
        """Return the table without the operations for which an adapter lacks a method.

        Args:
            can: the optional methods of the adapter.
        """
        return Table(self.groups, [each for each in self if not each.needs or each.needs in can])

    def weights(self) -> dict[str, int]:
        """Return the weight of each operation."""
        return {operation.word: operation.weight for operation in self}

    def apply(self, world: W, operation: list[Any]) -> bool:
        """Do an operation; False if it does not apply."""
        word, *arguments = operation
        return self.by_word[word].apply(world, *arguments)

    def draw(self, world: W, weights: Weights, below: Below) -> list[Any]:
        """Draw an operation that applies now, by weight."""
        groups = self.groups(world)
        choices = [each for each in self.by_word.values() if groups.get(each.group)]
        ends = list(accumulate(weights[each.word] for each in choices))
        operation = choices[bisect_right(ends, below(ends[-1]))]
        return operation.draw(world, groups[operation.group], below)


# How arguments are drawn


def name_drawn(world: object, name: str, below: Below) -> str:
    """The name that the operation applies to."""
    return name


def number(bound: int, first: int = 0) -> Draw[object]:
    """One of `bound` numbers from `first` on."""
    return lambda world, name, below: first + below(bound)
