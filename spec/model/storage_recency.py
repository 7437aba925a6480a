"""What storage is told of uses: what it must hear, what it may, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..rules import tiers as rules
from ..rules.rule import require
from .ghost import Tag
from .prefixes import Prefixes


def window_of(config: Mapping[str, Any]) -> int:
    """For how many admissions and stored blocks a use that was told stands for later ones."""
    return 0 if config["at_once"] or config["law"] else config["num_blocks"] % 2 * 4


@dataclass(frozen=True, slots=True)
class _Told:
    """Since when storage counts a prefix as used, by what it was told last: at least, at most."""

    first: int
    last: int


@dataclass
class StorageUses:
    """The uses of prefixes of which storage is to be told.

    Attributes:
        window: see `window_of`.
        stored: prefixes that came to storage or from there, and have been cached since.
    """

    window: int
    stored: set[Tag] = field(default_factory=set)
    _told: dict[Tag, _Told] = field(default_factory=dict)
    # Since storage was told:
    _may: dict[Tag, list[int]] = field(default_factory=dict)  # the uses that it may be told
    _last: dict[Tag, int] = field(default_factory=dict)  # the last use
    _must: set[Tag] = field(default_factory=set)  # what it must be told
    _gone: set[Tag] = field(default_factory=set)  # what was dropped after a use, and may be back

    def use(self, now: int, path: Iterable[Tag], *, must: bool = True) -> None:
        """Some prefixes are used: storage may be told, and must be if it has them.

        Args:
            now: admissions and stored blocks so far.
            path: the prefixes.
            must: False: it may only.
        """
        never = _Told(now - self.window, now - self.window)
        for tag in path:
            since = self._told.get(tag, never)
            uses = self._may.setdefault(tag, [])
            if now - since.first >= self.window:
                uses.append(now)
            self._last[tag] = now
            if must and tag in self.stored and now - since.last >= self.window:
                self._must.add(tag)

    def written(self, tags: Collection[Tag], good: Collection[Tag]) -> None:
        """Some prefixes were written, or some of them: each is now used after the one before it."""
        self.stored.update(good)
        for tag in tags:
            self._told.pop(tag, None)

    def cached(self, anywhere: Collection[Tag]) -> None:
        """Only these are cached now; of others nothing is remembered."""
        self.stored.intersection_update(anywhere)
        self._gone.update(tag for tag in self._may if tag not in anywhere)
        for tag in [tag for tag in self._told if tag not in anywhere]:
            del self._told[tag]

    def reset(self) -> None:
        """What was to be told is lost, and what was told is forgotten."""
        self._told.clear()
        self._forget_uses()

    def tell(self, keys: Sequence[bytes], prefixes: Prefixes) -> None:
        """Check what storage is told of the uses since the last time."""
        by_key = {prefixes.key[tag]: tag for tag in self._may}
        other = [key for key in keys if key not in by_key]
        require(not other, rules.T42, "storage is told of {} blocks that were not used", len(other))
        place = {by_key[key]: place for place, key in enumerate(keys)}
        require(len(place) == len(keys), rules.T41, "storage is told twice of one block")
        for tag, here in place.items():
            after = place.get(prefixes.parent[tag], len(keys))
            require(here < after, rules.T41, "storage is told of a block after what it follows")
            uses = self._may[tag]
            require(len(uses) > 0, rules.T42, "storage is told of a block again, so soon")
            # Who dropped it does not know that it was told, and may tell it again at once.
            first = uses[0] - self.window if tag in self._gone else uses[0]
            self._told[tag] = _Told(first, self._last[tag])
        for tag in self._must:
            depth = prefixes.depth[tag]
            require(tag in place, rules.T40, "storage is not told that block {} is used", depth)
        self._forget_uses()

    def _forget_uses(self) -> None:
        for each in (self._may, self._last, self._must, self._gone):
            each.clear()
