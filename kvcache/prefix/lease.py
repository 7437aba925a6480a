"""Match (the result of a lookup) and Lease (the blocks of one request)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import LeaseError
from ..ids import Epoch, OpId
from ..tokens import Int32Array
from .block_tables import BlockTables
from .node import ITEM_BYTES, Node, Walk

NextBlock: TypeAlias = tuple[Node, bytes]
"""Identifies an unpublished block: the node before it, and its tokens."""


class Match:
    """Published prefix of some tokens: the result of `CacheManager.match`. It holds no blocks.

    Attributes:
        num_blocks: number of whole blocks on the device that can be shared.
        num_tokens: number of tokens in them.
        num_host_blocks: number of blocks after them that the host has and can load.
        host_runs: the host's copies of those blocks. Only the tiers read them.
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
        """Identifies the first block that is not published.

        It equals `CacheManager.next_block` of a lease that computes the block. None if fewer
        tokens than a block follow, or if the match ends inside a run: then no lease computes it.
        """
        walk, first = self._walk, self.num_tokens
        if walk is None or walk.inside is not None or first == len(self._tokens):
            return None
        block = self._tokens[first : first + self._block_size]
        return (walk.node, block.tobytes())

    def __repr__(self) -> str:
        host = f" and {self.num_host_blocks:,} host blocks" if self.num_host_blocks else ""
        return (
            f"Match({self.num_tokens:,} of {self._length:,} tokens: {self.num_blocks:,} device "
            f"blocks{host})"
        )


class Lease:
    """The blocks of one request: its only hold on the cache, until it is released.

    ::

        block_table  | hit at admission | published since | private |
                     0          num_hit_blocks   num_shared_blocks   num_blocks

    The first `num_shared_blocks` blocks are pinned in the tree and immutable. The others belong to
    this lease alone.

    Attributes:
        row: row in the block tables; -1 once released.
        epoch: epoch of the manager at admission.
        node: last node of its shared blocks in the tree.
        num_hit_blocks: number of blocks hit on the device at admission.
        num_shared_blocks: number of blocks pinned in the tree.
        loading: operation that copies blocks into it; None when that has ended.
        num_promoted_blocks: number of blocks that the operation loaded from the host.
        num_ready_tokens: number of tokens with KV at admission, or after loading. Compute from
            there on.
        parking: whether it is being parked. It ends with that copy and cannot be used any more.
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
        """Number of blocks it holds; 0 once released."""
        return self._tables.num_blocks.item(self.row) if self.row >= 0 else 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens it has room for; 0 once released."""
        return self._tables.num_tokens.item(self.row) if self.row >= 0 else 0

    @property
    def block_table(self) -> Int32Array:
        """Block ids in order, a read-only int32 view. Read it again after each call."""
        view = self._tables.row(self.row) if self.row >= 0 else np.empty(0, np.int32)
        view.flags.writeable = False
        return view

    def __repr__(self) -> str:
        if self.row < 0:
            return "Lease(released)"
        state = ", parking" if self.parking else ", loading" if self.loading is not None else ""
        return (
            f"Lease({self.num_blocks:,} blocks for {self.num_tokens:,} tokens: "
            f"{self.num_hit_blocks:,} hit, {self.num_shared_blocks:,} shared{state})"
        )


def not_a_lease(given: object) -> LeaseError:
    """Return the error for what is given as a lease and is none."""
    return LeaseError(f"lease must be a Lease, got {type(given).__name__}")


def count_held(leases: Iterable[Lease], match: Match | None = None) -> int:
    """Count the blocks that some leases hold together, each once.

    Args:
        leases: live leases.
        match: a match to count as if it were pinned. The cache must not have changed since.
    """
    held = 0
    seen: set[Node] = set()

    def add_path(node: Node) -> int:
        """Count the blocks from a node up to the first node that is counted already."""
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
