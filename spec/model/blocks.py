"""Who can have a block, and what a request and the cache know of theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .ghost import Tag

FREE: Final = "free"
EVICTED: Final = "evicted"  # taken out of the cache by the present call, not yet given or freed

Owner: TypeAlias = str | Tag
"""FREE, EVICTED, the name of a request, or the tag of the prefix that is published there."""


@dataclass(slots=True)
class Published:
    """A published block: where it is, what it continues, and when it was last used."""

    block: int
    parent: Tag
    depth: int
    last_use: int = 0


@dataclass(slots=True)
class Holding:
    """What a request holds: a path of published prefixes, then private blocks.

    `path` has the tag of each whole block of its tokens, `computed` how many tokens are written.
    """

    path: list[Tag]
    root: Tag
    computed: int = 0
    shared: list[Tag] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
