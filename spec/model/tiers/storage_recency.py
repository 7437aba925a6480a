"""Reports of uses to storage: which are required, which are allowed, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...rules import tiers as rules
from ...rules.rule import require
from ..ghost import Tag
from .prefixes import Prefixes


def window_of(config: Mapping[str, Any]) -> int:
    """Number of admissions and stored blocks for which a reported use covers later ones."""
    return 0 if config["at_once"] or config["law"] else config["num_blocks"] % 2 * 4


@dataclass(frozen=True, slots=True)
class _Reported:
    """Earliest and latest time of the last reported use of a prefix."""

    first: int
    last: int


@dataclass
class StorageUses:
    """Uses of prefixes that must be reported to storage.

    Attributes:
        window: see `window_of`.
        now: number of admissions and stored blocks.
        stored: prefixes in storage that have been cached since they were written or fetched.
    """

    window: int
    now: int = 0
    stored: set[Tag] = field(default_factory=set)
    _reported: dict[Tag, _Reported] = field(default_factory=dict)
    # Since storage was told:
    _may: dict[Tag, list[int]] = field(default_factory=dict)  # the uses that it may be told
    _last: dict[Tag, int] = field(default_factory=dict)  # the last use
    _must: set[Tag] = field(default_factory=set)  # what it must be told
    _gone: set[Tag] = field(default_factory=set)  # what was dropped after a use, and may be back

    def use(self, path: Iterable[Tag], *, must: bool = True) -> None:
        """Record a use: it may be reported, and must be if storage has the prefix.

        Args:
            path: the used prefixes.
            must: False if a report is only allowed.
        """
        now = self.now
        never = _Reported(now - self.window, now - self.window)
        for tag in path:
            since = self._reported.get(tag, never)
            uses = self._may.setdefault(tag, [])
            if now - since.first >= self.window:
                uses.append(now)
            self._last[tag] = now
            if must and tag in self.stored and now - since.last >= self.window:
                self._must.add(tag)

    def written(self, tags: Collection[Tag], good: Collection[Tag]) -> None:
        """Record that `tags` were written to storage, `good` of them without a fault."""
        self.stored.update(good)
        for tag in tags:
            self._reported.pop(tag, None)

    def cached(self, anywhere: Collection[Tag]) -> None:
        """Forget the prefixes that are not cached anywhere."""
        self.stored.intersection_update(anywhere)
        self._gone.update(tag for tag in self._may if tag not in anywhere)
        for tag in [tag for tag in self._reported if tag not in anywhere]:
            del self._reported[tag]

    def reset(self) -> None:
        """Forget all uses and reports."""
        self._reported.clear()
        self._forget_uses()

    def tell(self, keys: Sequence[bytes], prefixes: Prefixes) -> None:
        """Check the uses reported to storage since the last report."""
        by_key = {prefixes.key[tag]: tag for tag in self._may}
        other = [key for key in keys if key not in by_key]
        require(not other, rules.T30, "{} blocks are reported that were not used", len(other))
        place = {by_key[key]: place for place, key in enumerate(keys)}
        require(len(place) == len(keys), rules.T31, "a report names a block twice")
        for tag, here in place.items():
            after = place.get(prefixes.parent[tag], len(keys))
            require(here < after, rules.T31, "a report names a block after its parent")
            uses = self._may[tag]
            require(len(uses) > 0, rules.T30, "a block is reported again too soon")
            # A prefix dropped in between may be reported again at once.
            first = uses[0] - self.window if tag in self._gone else uses[0]
            self._reported[tag] = _Reported(first, self._last[tag])
        for tag in self._must:
            depth = prefixes.depth[tag]
            require(tag in place, rules.T29, "the use of block {} is not reported", depth)
        self._forget_uses()

    def _forget_uses(self) -> None:
        for each in (self._may, self._last, self._must, self._gone):
            each.clear()
