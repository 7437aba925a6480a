"""What a cache manager hands out: matches, leases and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from ..ids import Epoch, OpId
from ..tokens import Int32Array
from .block_tables import BlockTables
from .node import (
    ITEM_BYTES,
    Node,
    Walk,
)

NextBlock: TypeAlias = tuple[Node, bytes]
"""Identifies a block that is not published: the node it would follow, and its tokens."""


class Match:
    """What of some tokens is published: the result of `CacheManager.match`. It holds no blocks.

    Attributes:
        num_blocks: the whole blocks on the device that can be shared.
        num_tokens: the tokens in them.
        num_host_blocks: the blocks after those that the host has, and that can be promoted.
        host_runs: the host's copies of those; only the tiers read them.
    """

    __slots__ = (
        "_block_size",
        "_length",
        "_namespace",
        "_tokens",
        "_version",
        "_walk",
        "host_runs",
        "num_blocks",
        "num_host_blocks",
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
        self.num_host_blocks = 0
        self.host_runs: Sequence[Any] = ()

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

    Attributes:
        loading: the operation that copies blocks from the host into it; None when that has ended.
        num_promoted_blocks: how many blocks came in that way, and are shared now.
        num_ready_tokens: tokens whose KV it had when it was admitted, or when loading ended: what
            to compute starts there.
        parking: it ends when its KV has been copied; it cannot be used any more.
    """

    __slots__ = (
        "_tables",
        "epoch",
        "loading",
        "node",
        "num_hit_blocks",
        "num_promoted_blocks",
        "num_ready_tokens",
        "num_shared_blocks",
        "parking",
        "row",
    )

    def __init__(
        self,
        tables: BlockTables,
        row: int,
        epoch: Epoch,
        node: Node,
        num_hit_blocks: int,
        num_ready_tokens: int,
    ) -> None:
        self._tables = tables
        self.row = row
        self.epoch = epoch
        self.node = node
        self.num_hit_blocks = num_hit_blocks
        self.num_shared_blocks = num_hit_blocks
        self.num_ready_tokens = num_ready_tokens
        self.num_promoted_blocks = 0
        self.loading: OpId | None = None
        self.parking = False

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


def count_held(leases: Iterable[Lease], match: Match | None = None) -> int:
    """Count the blocks that some leases hold together, each once.

    Args:
        leases: live ones.
        match: counts as if it were pinned, too; there was no change to the cache since.
    """
    held = 0
    seen: set[Node] = set()

    def add_path(node: Node) -> int:
        """Count the blocks from a node up, until one that is counted: those above are, too."""
        count = 0
        while node.parent is not None and node not in seen:
            seen.add(node)
            count += node.num_blocks
            node = node.parent
        return count

    for lease in leases:
        held += lease.num_blocks - lease.num_shared_blocks + add_path(lease.node)
    walk = match._walk if match is not None else None
    if walk is not None:
        is_new = walk.inside is not None and walk.inside not in seen
        held += add_path(walk.node) + (walk.inside_blocks if is_new else 0)
    return held
