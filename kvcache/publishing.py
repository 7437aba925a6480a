"""Publish: what a lease has computed enters the tree, and what others had first is shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .block_pool import BlockPool
from .block_tables import BlockTables
from .lease import Lease
from .radix_tree import RadixTree

if TYPE_CHECKING:
    from .tiers import Tiers


def publish_run(
    tree: RadixTree,
    pool: BlockPool,
    tables: BlockTables,
    tiers: Tiers | None,
    lease: Lease,
    run: bytes,
) -> int:
    """Publish the blocks of a lease that follow its shared ones.

    Args:
        tree, pool, tables, tiers: of the manager.
        lease: has the blocks.
        run: their tokens, whole blocks, as bytes of int32.

    Returns:
        How many blocks others had published first: the lease shares theirs, its own are free.
    """
    block_bytes = tree.block_bytes
    ids = tables.ids[lease.row]
    first = lease.num_shared_blocks
    last = lease.num_shared_blocks = first + len(run) // block_bytes
    num_copies = 0
    # Mostly nobody has published the same after its node, and there is nothing to walk.
    while (child := lease.node.children.get(run[:block_bytes])) is not None:
        if child.device_blocks:
            walk = tree.walk(lease.node, memoryview(run))
            published = first + walk.num_bytes // block_bytes
            lease.node = tree.pin(walk, above=lease.node)
            copies = ids[first:published]
            pool.recycle(copies)
            num_copies += len(copies)
            theirs = tree.path_blocks(lease.node)
            ids[first:published] = np.frombuffer(theirs, np.int32)[first:]
        else:  # the host has it; now the device has it, too
            assert tiers is not None, "a node is nowhere"
            lease.node = tiers.adopt(child, run, ids[first:last].tobytes())
            published = first + lease.node.num_blocks
        assert published > first, "what is published there is not found there"
        run = run[(published - first) * block_bytes :]
        first = published
    if run:
        lease.node = tree.append(lease.node, run, ids[first:last].tobytes())
    if tiers is not None:
        tiers.writer.published(lease.node)
    return num_copies
