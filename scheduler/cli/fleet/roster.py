"""Which nodes a fleet has, which it lacks, and which leave. It needs no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

from ..options.fleet import FleetSize

ROLES: Final = ("prefill", "decode")


@dataclass(slots=True)
class _Member:
    """A node.

    Attributes:
        is_leaving: whether it gets no more requests.
    """

    role: str
    is_leaving: bool = False


class Roster:
    """The names of a fleet's nodes. No I/O.

    Names are not used again, so that a message of a node that has left is nobody else's.

    Attributes:
        size: number of nodes that the fleet shall have.
    """

    def __init__(self, size: FleetSize) -> None:
        self.size = size
        self._numbers = {role: count() for role in ROLES}
        self._members: dict[str, _Member] = {}

    def take_missing(self) -> list[tuple[str, str]]:
        """Return the names and roles of nodes to start, which are members from now on."""
        missing = []
        for role in ROLES:
            for _ in range(len(self._staying(role)), getattr(self.size, role)):
                name = f"{role}-{next(self._numbers[role])}"
                self._members[name] = _Member(role)
                missing.append((name, role))
        return missing

    def take_surplus(self) -> list[str]:
        """Return the nodes that are too many, which leave from now on: the last that started."""
        surplus = [
            name for role in ROLES for name in self._staying(role)[getattr(self.size, role) :]
        ]
        for name in surplus:
            self.let_go(name)
        return surplus

    def let_go(self, name: str) -> None:
        """Let a node leave: another one takes its place if it is missing."""
        self._members[name].is_leaving = True

    def is_leaving(self, name: str) -> bool:
        """Whether a node leaves."""
        return self._members[name].is_leaving

    def idle(self, num_attempts: Callable[[str], int]) -> list[str]:
        """Return the nodes that may end: they leave, and have no attempts in progress."""
        return [
            name
            for name, member in self._members.items()
            if member.is_leaving and not num_attempts(name)
        ]

    def remove(self, name: str) -> None:
        """Forget a node that has ended."""
        del self._members[name]

    def _staying(self, role: str) -> list[str]:
        return [
            name
            for name, member in self._members.items()
            if member.role == role and not member.is_leaving
        ]
