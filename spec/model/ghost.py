"""Ghost memory: the contents of a cache's blocks, as tags instead of keys and values.

The KV of a token is a function of its namespace and of all tokens up to it. A tag of those stands
for the KV, so a comparison of tags tells whether a request reads its own KV: an oracle for any
cache manager, without a model or arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from ..rules.cache import C1
from ..rules.rule import Rule, require

Tag: TypeAlias = int
"""Stands for the KV of one token: a hash of the tokens up to it, and of their namespace."""

UNWRITTEN: Final = 0  # a prefix has this tag with probability 2**-64
POISON: Final = 1  # the contents after a failed step

_SHIFT: Final = 1 << 31  # makes an int32 token not negative: hash(-1) == hash(-2)


def first_tag(namespace: bytes) -> Tag:
    """Return the tag of the empty prefix."""
    return hash(tuple(namespace))  # the hash of bytes differs between processes


def next_tag(tag: Tag, token: int) -> Tag:
    """Return the tag of a prefix and one more token, 64 bits, so that collisions are negligible."""
    return hash((tag, token + _SHIFT))


def tags_after(tag: Tag, tokens: Iterable[int]) -> list[Tag]:
    """Return the tag of a prefix extended by each token in turn."""
    return list(accumulate(tokens, next_tag, initial=tag))[1:]


def prefix_tags(namespace: bytes, tokens: Iterable[int]) -> list[Tag]:
    """Return a tag per token: a chained hash of the namespace and all tokens up to it.

    Example:
        >>> one, two = prefix_tags(b"", [1, 2, 3]), prefix_tags(b"", [1, 2, 4])
        >>> one[:2] == two[:2], one[2] == two[2]
        (True, False)
        >>> prefix_tags(b"tenant", [1])[0] == one[0]
        False
    """
    return tags_after(first_tag(namespace), tokens)


class GhostMemory:
    """The tag last written to each slot of each block; as on a device, nothing is erased.

    ::

        position   0 1 2 3 | 4 5 6 7 | 8          block = block_table[position // block_size]
        block         4    |    9    | 2          offset = position % block_size

    Example:
        >>> ghost = GhostMemory(block_size=2)
        >>> tags = prefix_tags(b"", [7, 8, 9])
        >>> ghost.write_sequence([4, 1], tags)
        >>> ghost.read_sequence([4, 1], tags)
        >>> ghost.read_sequence([4, 1], prefix_tags(b"", [7, 8, 5]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        radixkv...Violation: [C1 read-own-prefix] a request reads token 2 in block 1, which holds another prefix
    """  # noqa: E501

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[int, list[Tag]] = {}

    def write(self, block: int, offset: int, tag: Tag) -> None:
        """Write a tag to a slot."""
        assert 0 <= offset < self.block_size, f"offset {offset} in a block of {self.block_size}"
        self.blocks.setdefault(block, [UNWRITTEN] * self.block_size)[offset] = tag

    def write_sequence(
        self, block_table: Sequence[int], tags: Sequence[Tag], start: int = 0
    ) -> None:
        """Write the tags of a sequence from position ``start`` on, through its block table."""
        for position in range(start, len(tags)):
            index, offset = divmod(position, self.block_size)
            self.write(block_table[index], offset, tags[position])

    def append(self, block_table: Sequence[int], position: int, tag: Tag) -> None:
        """Write the KV of one token; what its block held behind it is lost."""
        index, offset = divmod(position, self.block_size)
        self.write(block_table[index], offset, tag)
        behind = self.block_size - offset - 1
        self.blocks[block_table[index]][offset + 1 :] = [UNWRITTEN] * behind

    def content(self, block: int) -> list[Tag]:
        """Return the tag in each slot of a block."""
        return self.blocks.get(block) or [UNWRITTEN] * self.block_size

    def read_sequence(
        self,
        block_table: Sequence[int],
        tags: Sequence[Tag],
        reader: str = "a request",
        rule: Rule = C1,
    ) -> None:
        """Check that a sequence reads all its own tags through its block table.

        Raises:
            Violation: of ``rule``, for the first position with other contents.
        """
        for start in range(0, len(tags), self.block_size):
            block = block_table[start // self.block_size]
            wanted = tags[start : start + self.block_size]
            found = self.content(block)
            if found[: len(wanted)] != wanted:
                offset = next(i for i, tag in enumerate(wanted) if found[i] != tag)
                state = {UNWRITTEN: "was never written", POISON: "holds what a failed step left"}
                text = state.get(found[offset], "holds another prefix")
                why = "{} reads token {} in block {}, which {}"
                require(False, rule, why, reader, start + offset, block, text)
