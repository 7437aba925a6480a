"""Owners of a block, and the records of published blocks and of a request's blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .ghost import Tag

FREE: Final = "free"
EVICTED: Final = "evicted"  # evicted by the current call, not yet allocated or freed

Owner: TypeAlias = str | Tag
"""FREE, EVICTED, the name of a request, or the tag of the published prefix."""


@dataclass(slots=True)
class Published:
    """A published block: its id, its parent prefix, and its last use."""

    block: int
    parent: Tag
    depth: int
    last_use: int = 0


@dataclass(slots=True)
class Holding:
    """The blocks of a request: a path of published prefixes, then private blocks.

    `path` has the tag of each whole block of its tokens, `computed` the number of written tokens.
    """

    path: list[Tag]
    root: Tag
    computed: int = 0
    shared: list[Tag] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
