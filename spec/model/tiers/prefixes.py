"""The prefixes that a world with tiers knows: content, parent, depth and storage key of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..ghost import Tag


@dataclass
class Prefixes:
    """The prefixes that end with a whole block, by tag.

    Attributes:
        content: the tags of the tokens in the last block.
        parent: the tag of the prefix without the last block.
        first: the tag of the first block.
        depth: the number of blocks before the last one.
        key: the storage key.
    """

    content: dict[Tag, list[Tag]] = field(default_factory=dict)
    parent: dict[Tag, Tag] = field(default_factory=dict)
    first: dict[Tag, Tag] = field(default_factory=dict)
    depth: dict[Tag, int] = field(default_factory=dict)
    key: dict[Tag, bytes] = field(default_factory=dict)

    def learn(self, root: Tag, tags: Sequence[Tag], block_size: int, keys: list[bytes]) -> None:
        """Enter the whole blocks of a token sequence.

        Args:
            root: the tag of the empty prefix.
            tags: the tag of the prefix that ends at each token.
            block_size: tokens of a block.
            keys: the storage key of each whole block; empty without storage.
        """
        path = tags[block_size - 1 :: block_size]
        before = root
        for index, tag in enumerate(path):
            if tag not in self.content:
                self.content[tag] = list(tags[index * block_size : (index + 1) * block_size])
                self.parent[tag], self.first[tag], self.depth[tag] = before, path[0], index
                self.key[tag] = keys[index] if keys else b""
            before = tag

    def root_of(self, tag: Tag) -> Tag:
        """Return the tag of the empty prefix of a prefix."""
        return self.parent[self.first[tag]]

    def path_to(self, tag: Tag) -> list[Tag]:
        """Return the prefixes before one, and the one itself."""
        path = []
        while tag in self.parent:
            path.append(tag)
            tag = self.parent[tag]
        return path

    def paths_to(self, tags: Iterable[Tag]) -> Iterator[Tag]:
        """Yield the prefixes before each of `tags`, and `tags` themselves."""
        for tag in tags:
            yield from self.path_to(tag)
