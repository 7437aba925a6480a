"""What a cache manager hands out: matches, leases and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, TypeAlias

from .block_tables import BlockTables
from .radix_node import ITEM_BYTES, Node, Walk
from .tokens import Int32Array

Epoch = NewType("Epoch", int)

NextBlock: TypeAlias = tuple[Node, bytes]
"""Identifies a block that is not published: the node it would follow, and its tokens."""


class Match:
    """What of some tokens is published: the result of `CacheManager.match`. It holds no blocks.

    Attributes:
        num_blocks: the whole blocks that can be shared.
        num_tokens: the tokens in them.
    """

    __slots__ = (
        "_block_size",
        "_length",
        "_namespace",
        "_tokens",
        "_version",
        "_walk",
        "num_blocks",
        "num_tokens",
    )

    def __init__(
        self,
        tokens: Int32Array,
        length: int,
        namespace: bytes,
        walk: Walk | None,
        version: int,
        block_size: int,
    ) -> None:
        self._tokens = tokens
        self._length = length
        self._namespace = namespace
        self._walk = walk
        self._version = version
        self._block_size = block_size
        num_bytes = walk.num_bytes if walk is not None else 0
        self.num_tokens = num_bytes // ITEM_BYTES
        self.num_blocks = self.num_tokens // block_size

    @property
    def next_block(self) -> NextBlock | None:
        """Identifies the first block that is not published, by what it follows and its tokens.

        Equal to `CacheManager.next_block` of a lease that is computing it; None if fewer than a
        block's tokens follow, or if the match ends inside a run: then nobody is computing it.
        """
        walk, first = self._walk, self.num_tokens
        if walk is None or walk.inside is not None or first == len(self._tokens):
            return None
        block = self._tokens[first : first + self._block_size]
        return (walk.node, block.tobytes())


class Lease:
    """The blocks of one request, its only hold on the cache, until it is released.

    ::

        block_table  | hit at admission | published since | private |
                     0          num_hit_blocks   num_shared_blocks   num_blocks

    The first `num_shared_blocks` are pinned in the tree and immutable; the rest are its own.
    """

    __slots__ = ("_tables", "epoch", "node", "num_hit_blocks", "num_shared_blocks", "row")

    def __init__(
        self, tables: BlockTables, row: int, epoch: Epoch, node: Node, num_hit_blocks: int
    ) -> None:
        self._tables = tables
        self.row = row
        self.epoch = epoch
        self.node = node
        self.num_hit_blocks = num_hit_blocks
        self.num_shared_blocks = num_hit_blocks

    @property
    def num_blocks(self) -> int:
        """The blocks it holds; 0 once released."""
        return self._tables.num_blocks.item(self.row) if self.row >= 0 else 0

    @property
    def num_tokens(self) -> int:
        """The tokens it has asked room for; 0 once released."""
        return self._tables.num_tokens.item(self.row) if self.row >= 0 else 0

    @property
    def block_table(self) -> Int32Array:
        """Its block ids in order, a read-only int32 view: read it anew after each call."""
        view = self._tables.ids[self.row, : self.num_blocks]
        view.flags.writeable = False
        return view


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks now, and of events since the manager was made.

    `num_blocks = free_blocks + cached_blocks + private_blocks`, and idle blocks are those of the
    cached that no lease uses. Events: `hit_blocks` and `admitted` at admission, `evicted_blocks`,
    and `duplicate_blocks` that two requests computed and one gave back.
    """

    num_blocks: int
    free_blocks: int
    cached_blocks: int
    idle_blocks: int
    private_blocks: int
    live_leases: int
    admitted: int
    hit_blocks: int
    evicted_blocks: int
    duplicate_blocks: int
