"""The simulated device: ghost memory, and the reads of requests."""

from __future__ import annotations

from collections.abc import Sequence

from ..rules.cache import C1
from ..rules.rule import Rule, require
from .ghost import UNWRITTEN, ContentError, GhostMemory, Tag


class Device:
    """The blocks of a device, through which requests read and write their KV."""

    def __init__(self, block_size: int) -> None:
        self.memory = GhostMemory(block_size)

    def append(self, table: Sequence[int], position: int, tag: Tag) -> None:
        """Write the KV of one token; what its block held behind it is lost."""
        size = self.memory.block_size
        index, offset = divmod(position, size)
        self.memory.write(table[index], offset, tag)
        self.memory.blocks[table[index]][offset + 1 :] = [UNWRITTEN] * (size - offset - 1)

    def read(self, who: str, table: Sequence[int], tags: Sequence[Tag], rule: Rule = C1) -> None:
        """Check that a request reads the KV of its own prefix, for all `tags`.

        Raises:
            Violation: `rule`, for the first token that holds other contents.
        """
        try:
            self.memory.read_sequence(table, tags)
        except ContentError as error:
            why = f"{who} reads token {error.position} in block {error.block}, which {error.found}"
            require(False, rule, "{}", why)
