"""Deduplicate blocks that two requests computed: the first published one stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..tokens import INT32, Int32Array
from .lease import Lease
from .node import Node
from .radix_tree import RadixTree


class SlowerTiers(Protocol):
    """What deduplication needs of the tiers below the device."""

    def add_device_blocks(self, node: Node, tokens: bytes, device_blocks: bytes) -> Node:
        """Put a node that only the host had on the device, with the blocks of a lease."""


def deduplicate(
    tree: RadixTree,
    recycle: Callable[[Int32Array], None],
    lease: Lease,
    run: bytes,
    tiers: SlowerTiers | None,
) -> int:
    """Replace the duplicate blocks of a lease by the published ones, and recycle them.

    Args:
        tree: the radix tree.
        recycle: recycles duplicates; they are a view that changes after the call.
        lease: the lease; its number of shared blocks grows.
        run: tokens of its first private blocks, as bytes of int32.
        tiers: the tiers below the device, or None.

    Returns:
        Number of duplicates.
    """
    block_bytes = tree.block_bytes
    ids = lease._tables.row(lease.row)
    num_copies = 0
    while (child := lease.node.children.get(run[:block_bytes])) is not None:
        first = lease.num_shared_blocks
        if child.device_blocks:
            walk = tree.walk(lease.node, memoryview(run))
            published = first + walk.num_bytes // block_bytes
            lease.node = tree.pin(walk, above=lease.node)
            copies = ids[first:published]
            recycle(copies)
            num_copies += len(copies)
            theirs = tree.path_blocks(lease.node)
            ids[first:published] = np.frombuffer(theirs, INT32)[first:]
            lease._tables.versions[lease.row] += 1
        else:  # only the host had it; the lease's blocks stay
            assert tiers is not None, "a node is nowhere"
            own = ids[first : first + len(run) // block_bytes]
            lease.node = tiers.add_device_blocks(child, run, own.tobytes())
            published = first + lease.node.num_blocks
        assert published > first, "a published block is not found"
        lease.num_shared_blocks = published
        run = run[(published - first) * block_bytes :]
    return num_copies
