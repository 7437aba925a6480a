"""Counts of the kernels that a compiled program launches, as its optimised HLO has them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

FREE = frozenset({
    "bitcast", "conditional", "constant", "get-tuple-element", "parameter", "tuple", "while",
})  # fmt: skip
"""Operations that are no kernels, besides those in the computations that they call."""


class Launches(NamedTuple):
    """Kernels of one call."""

    outside: int
    """Kernels that run always and once."""
    branches: tuple[tuple[int, ...], ...]
    """The same of each branch of each conditional, of which a call takes one."""
    in_loops: tuple[int, ...]
    """Kernels of each step of each loop."""
    loops_outside: int
    """Loops that are in no branch."""


def launches(hlo: str) -> Launches:
    """Count the kernels of a program, whose conditionals are not in one another."""
    computations = dict(_computations(hlo))
    entry = next(name for name in computations if name.startswith("ENTRY"))
    conditionals = [line for line in computations[entry] if " conditional(" in line]
    branches = [
        re.search(r"branch_computations={([^}]*)}", line)[1].split(",")  # type: ignore[index]
        for line in conditionals
    ]
    bodies = re.findall(r" while\(.*?body=%?([\w.\-]+)", hlo)
    return Launches(
        _kernels(computations[entry]),
        tuple(
            tuple(_kernels(computations[name.strip("% ")]) for name in names) for names in branches
        ),
        tuple(_kernels(computations[name]) for name in bodies),
        sum(" while(" in line for line in computations[entry]),
    )


def _kernels(lines: list[str]) -> int:
    found = [re.search(r"= .*? ([a-z][a-z\-]*)\(", line) for line in lines]
    return sum(match is not None and match[1] not in FREE for match in found)


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    for match in re.finditer(r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", hlo, re.M | re.S):
        yield (match[1] or "") + match[2], match[3].splitlines()
