"""Write-through: which published blocks are due for a copy on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...rules import tiers as rules
from ...rules.rule import require
from ..ghost import Tag
from .prefixes import Prefixes
from .residency import Residency


class WriteThrough:
    """The paths that were published or hit since the last `take`, and how often each was hit.

    Attributes:
        num_hits: hits that a block needs before it is due; 0 makes it due when it is published.
        paths: the paths to copy.
        hits: hits of each prefix that only the device has.
    """

    def __init__(self, num_hits: int, *, is_on: bool) -> None:
        self.num_hits = num_hits
        self.is_on = is_on
        self.paths: list[list[Tag]] = []
        self.hits: Counter[Tag] = Counter()

    def published(self, path: Sequence[Tag]) -> None:
        """A path was published."""
        if self.is_on and not self.num_hits:
            self.paths.append(list(path))

    def hit(self, path: Sequence[Tag], now: Residency) -> None:
        """A path was hit on the device."""
        if self.is_on and self.num_hits:
            self.hits.update(
                tag for tag in path if tag not in now.host and tag not in now.offloading
            )
            self.paths.append(list(path))

    def check(
        self, before: Residency, now: Residency, copied: Mapping[Tag, int], prefixes: Prefixes
    ) -> None:
        """Check the copies of a `take`; all others must lack room.

        Args:
            before, now: the states before and after it.
            copied: the device block of each prefix that is copied.
            prefixes: the parents of the prefixes.
        """
        noted = {tag for path in self.paths for tag in path}
        for tag, source in copied.items():
            there = now.device.get(tag) == source
            require(there, rules.T19, "block {} is copied when it is evicted", source)
            require(tag in noted, rules.T18, "block {} is copied, and was not asked for", source)
            early = prefixes.depth[tag] == 0 and self.hits[tag] < self.num_hits
            require(not early, rules.T18, "block {} is copied before its hits", source)
            gone = (before.host.keys() - now.host.keys()) & set(prefixes.path_to(tag))
            require(not gone, rules.T19, "what block {} follows is dropped for its copy", source)
        room = now.num_free + len(now.idle.keys() - noted)
        copied_to = {*before.host, *before.offloading, *now.host, *now.offloading}
        for path in self.paths:
            missing = [tag for tag in path if tag in now.device and tag not in copied_to]
            is_due = missing and self.hits[missing[0]] >= self.num_hits
            require(not is_due or room < len(missing), rules.T19,
                    "{} blocks have no copy, with room for {}", len(missing), room)  # fmt: skip
        self.paths.clear()
