"""Eviction order of the host tier: least recently used first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...rules import tiers as rules
from ...rules.rule import require
from ..ghost import Tag


class HostOrder:
    """Bounds of the last use of each prefix.

    A request uses its path when it is admitted and when it ends. The manager decides whether
    operations on copies count as a use.

    Attributes:
        now: number of uses so far.
        used_at: earliest time that may count as the last use of each prefix.
        touched_at: latest time that may count as the last use of each prefix.
    """

    def __init__(self) -> None:
        self.now = 0
        self.used_at: dict[Tag, int] = {}
        self.touched_at: dict[Tag, int] = {}

    def use(self, path: Iterable[Tag]) -> None:
        """Record the use of some prefixes by a request."""
        self.now += 1
        path = list(path)
        self.used_at.update(dict.fromkeys(path, self.now))
        self.touch(path)

    def touch(self, tags: Iterable[Tag]) -> None:
        """Allow some prefixes to count as used now."""
        self.touched_at.update(dict.fromkeys(tags, self.now))

    def check(self, idle: Sequence[Tag]) -> None:
        """Check the eviction order of the prefixes that can be dropped."""
        used = 0
        for tag in idle:
            late = used - self.touched_at.get(tag, 0)
            require(late <= 0, rules.T23, "a copy is dropped after those that were used {} later",
                    late)  # fmt: skip
            used = max(used, self.used_at.get(tag, 0))
