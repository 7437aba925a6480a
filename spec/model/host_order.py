"""In which order the host drops its copies: what was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..rules import tiers as rules
from ..rules.rule import require
from .ghost import Tag


class HostOrder:
    """When each prefix was last used, as far as that is known.

    A request uses its path when it is admitted, and when it ends. Operations on copies may count as
    a use, too, or may not: that is the manager's choice.

    Attributes:
        now: counts the uses.
        used_at: of each prefix, since when it counts as used at least.
        touched_at: since when it counts as used at most.
    """

    def __init__(self) -> None:
        self.now = 0
        self.used_at: dict[Tag, int] = {}
        self.touched_at: dict[Tag, int] = {}

    def use(self, path: Iterable[Tag]) -> None:
        """A request uses some prefixes."""
        self.now += 1
        self.used_at.update(dict.fromkeys(path, self.now))

    def touch(self, tags: Iterable[Tag]) -> None:
        """Some prefixes may count as used now."""
        self.touched_at.update(dict.fromkeys(tags, self.now))

    def check(self, idle: Sequence[Tag]) -> None:
        """Check the prefixes that can be dropped, in the order in which they are."""
        used = 0
        for tag in idle:
            require(
                used <= self.touched_at.get(tag, 0),
                rules.T38,
                "a copy is dropped after those that were used {} later",
                used - self.touched_at.get(tag, 0),
            )
            used = max(used, self.used_at.get(tag, 0))
