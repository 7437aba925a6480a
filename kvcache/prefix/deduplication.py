"""Publish: where others had published a part of the same first, a lease shares theirs."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..tokens import INT32
from .block_pool import BlockPool
from .lease import Lease
from .node import Node
from .radix_tree import RadixTree


class SlowerTiers(Protocol):
    """What deduplication uses of the tiers below the device."""

    def adopt(self, node: Node, tokens: bytes, device_blocks: bytes) -> Node:
        """Put on the device what a lease has of a node that only the host had."""


def share_run(
    tree: RadixTree, pool: BlockPool, lease: Lease, run: bytes, tiers: SlowerTiers | None
) -> int:
    """Let a lease share the blocks that others have published of a run, from its start on.

    Args:
        tree, pool: of the manager.
        lease: has the blocks; it knows then how many of them are shared.
        run: the tokens of the blocks that follow its shared ones, as bytes of int32.
        tiers: the tiers below the device, or None.

    Returns:
        How many blocks the device had already: the lease shares those, its own are free.
    """
    block_bytes = tree.block_bytes
    ids = lease._tables.ids[lease.row]
    num_copies = 0
    while (child := lease.node.children.get(run[:block_bytes])) is not None:
        first = lease.num_shared_blocks
        if child.device_blocks:
            walk = tree.walk(lease.node, memoryview(run))
            published = first + walk.num_bytes // block_bytes
            lease.node = tree.pin(walk, above=lease.node)
            copies = ids[first:published]
            pool.recycle(copies)
            num_copies += len(copies)
            theirs = tree.path_blocks(lease.node)
            ids[first:published] = np.frombuffer(theirs, INT32)[first:]
        else:  # the host has it; now the device has it, too
            assert tiers is not None, "a node is nowhere"
            own = ids[first : first + len(run) // block_bytes]
            lease.node = tiers.adopt(child, run, own.tobytes())
            published = first + lease.node.num_blocks
        assert published > first, "what is published there is not found there"
        lease.num_shared_blocks = published
        run = run[(published - first) * block_bytes :]
    return num_copies
