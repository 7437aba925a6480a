"""What follows from the uses of prefixes: the order on the host, write-through, and reports.

The host drops the least recently used copies (`HostOrder`). Write-through copies what was published
or hit often enough (`WriteThrough`). Storage is told of uses (`StorageUses`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...rules import tiers as rules
from ...rules.rule import require
from ..ghost import Tag
from .residency import Prefixes, Residency


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
            gone = (before.host.keys() - now.host.keys()) & set(prefixes.path[tag])
            require(not gone, rules.T19, "what block {} follows is dropped for its copy", source)
        room = now.num_free + len(now.idle.keys() - noted)
        copied_to = {*before.host, *before.offloading, *now.host, *now.offloading}
        for path in self.paths:
            missing = [tag for tag in path if tag in now.device and tag not in copied_to]
            is_due = missing and self.hits[missing[0]] >= self.num_hits
            require(not is_due or room < len(missing), rules.T19,
                    "{} blocks have no copy, with room for {}", len(missing), room)  # fmt: skip
        self.paths.clear()


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
            after = place.get(prefixes.parent[tag], len(keys))
            require(here < after, rules.T31, "a report names a block after its parent")
        due: dict[Tag, int] = {}  # when a block was used first that is due, or follows one that is
        for tag in sorted(place, key=prefixes.depth.__getitem__):
            uses = self._uses[tag]
            first = due.get(prefixes.parent[tag]) if uses.first is None else uses.first
            require(first is not None, rules.T30, "a block is reported again too soon")
            assert first is not None
            due[tag] = first
            # A prefix dropped in between may be reported again at once.
            self._reported[tag] = first - self.window * uses.was_dropped, uses.last
        for tag in [tag for tag, uses in self._uses.items() if uses.must]:
            depth = prefixes.depth[tag]
            require(tag in place, rules.T29, "the use of block {} is not reported", depth)
        self._uses.clear()
        return place
