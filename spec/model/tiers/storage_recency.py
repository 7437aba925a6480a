"""Reports of uses to storage: which are required, which are allowed, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ...rules import tiers as rules
from ...rules.rule import require
from ..ghost import Tag
from .prefixes import Prefixes


@dataclass(slots=True)
class _Uses:
    """Uses of a prefix since the last report.

    Attributes:
        first: the first that storage may be told, or None.
        must: whether it must be told.
        was_dropped: whether the prefix was dropped after a use; it may be back.
    """

    first: int | None = None
    last: int = 0
    must: bool = False
    was_dropped: bool = False


@dataclass
class StorageUses:
    """Uses of prefixes that must be reported to storage.

    Attributes:
        window: number of admissions and stored blocks for which a reported use covers later ones.
        now: number of admissions and stored blocks.
        stored: prefixes in storage that have been cached since they were written or fetched.
    """

    window: int
    now: int = 0
    stored: set[Tag] = field(default_factory=set)
    _uses: dict[Tag, _Uses] = field(default_factory=dict)
    _reported: dict[Tag, tuple[int, int]] = field(default_factory=dict)
    """Earliest and latest time of the last reported use of each prefix."""

    def use(self, path: Iterable[Tag], *, must: bool = True) -> None:
        """Record a use: it may be reported, and must be if storage has the prefix.

        Args:
            path: the used prefixes.
            must: False if a report is only allowed.
        """
        long_ago = self.now - self.window
        for tag in path:
            first, last = self._reported.get(tag, (long_ago, long_ago))
            uses = self._uses.setdefault(tag, _Uses())
            uses.last = self.now
            if uses.first is None and first <= long_ago:
                uses.first = self.now
            uses.must |= must and tag in self.stored and last <= long_ago

    def written(self, tags: Collection[Tag], good: Collection[Tag]) -> None:
        """Record that `tags` were written to storage, `good` of them without a fault."""
        self.stored.update(good)
        for tag in tags:
            self._reported.pop(tag, None)

    def cached(self, anywhere: Collection[Tag]) -> None:
        """Forget the prefixes that are not cached anywhere."""
        self.stored.intersection_update(anywhere)
        for tag, uses in self._uses.items():
            uses.was_dropped |= tag not in anywhere
        for tag in [tag for tag in self._reported if tag not in anywhere]:
            del self._reported[tag]

    def reset(self) -> None:
        """Forget all uses and reports."""
        self._reported.clear()
        self._uses.clear()

    def tell(self, keys: Sequence[bytes], prefixes: Prefixes) -> Collection[Tag]:
        """Check the uses reported to storage since the last report; return their prefixes."""
        by_key = {prefixes.key[tag]: tag for tag in self._uses}
        other = [key for key in keys if key not in by_key]
        require(not other, rules.T30, "{} blocks are reported that were not used", len(other))
        place = {by_key[key]: place for place, key in enumerate(keys)}
        require(len(place) == len(keys), rules.T31, "a report names a block twice")
        for tag, here in place.items():
            uses, after = self._uses[tag], place.get(prefixes.parent[tag], len(keys))
            require(here < after, rules.T31, "a report names a block after its parent")
            require(uses.first is not None, rules.T30, "a block is reported again too soon")
            # A prefix dropped in between may be reported again at once.
            first = (uses.first or 0) - self.window * uses.was_dropped
            self._reported[tag] = first, uses.last
        for tag in [tag for tag, uses in self._uses.items() if uses.must]:
            depth = prefixes.depth[tag]
            require(tag in place, rules.T29, "the use of block {} is not reported", depth)
        self._uses.clear()
        return place
