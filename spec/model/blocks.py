"""Owners of a block, and the records of published blocks and of a request's blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .ghost import Tag

FREE: Final = "free"
CACHED: Final = "the cache"
EVICTED: Final = "evicted"  # by the current call, not yet allocated or freed
LEFT: Final = "an ended request"  # of a manager that frees lazily, to be freed by a later call
RESET: Final = "the reset"

Owner: TypeAlias = str
"""FREE, CACHED, EVICTED, LEFT, or the name of a request."""


@dataclass(slots=True)
class Published:
    """A published block: its prefix, the prefix before it, its depth and its last use."""

    tag: Tag
    parent: Tag
    depth: int
    last_use: int = 0


@dataclass(slots=True)
class Holding:
    """The blocks of a request: `table` in the order of its tokens.

    `tags` has the prefix of each published block of the table; the others are private to the
    request. `path` has the tag of each whole block of its tokens, `computed` the number of written
    tokens.
    """

    path: list[Tag]
    root: Tag
    computed: int = 0
    table: list[int] = field(default_factory=list)
    tags: dict[int, Tag] = field(default_factory=dict)

    @property
    def shared(self) -> list[Tag]:
        """The prefixes of the published blocks."""
        return [self.tags[block] for block in self.table if block in self.tags]

    @property
    def private(self) -> list[int]:
        """The blocks that nobody else uses."""
        return [block for block in self.table if block not in self.tags]

    def share(self, position: int, block: int, tag: Tag) -> None:
        """Let the table point to a published block."""
        self.tags.pop(self.table[position], None)
        self.table[position] = block
        self.tags[block] = tag

    def take_private(self) -> list[int]:
        """Remove the private blocks from the table, and return them."""
        private = self.private
        self.table = [block for block in self.table if block in self.tags]
        return private
