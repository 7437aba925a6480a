"""Invariants across the tree, the pool, the block tables and the leases of a manager."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from .prefix.node import ITEM_BYTES, Node

if TYPE_CHECKING:
    from .prefix.block_pool import BlockPool
    from .prefix.block_tables import BlockTables
    from .prefix.lease import Lease
    from .prefix.radix_tree import RadixTree


def check_leases(leases: Mapping[int, Lease], tables: BlockTables, epoch: int) -> None:
    """Assert that leases and live rows of the tables agree."""
    assert sorted(leases) == np.flatnonzero(tables.live).tolist(), "leases and live rows disagree"
    for lease in leases.values():
        assert lease.epoch == epoch, "a live lease is of an older epoch"


def check_ownership(
    pool: BlockPool, tree: RadixTree, leases: Collection[Lease], quarantined: list[int]
) -> None:
    """Assert that every block has one owner, and that nodes count the leases that use them."""
    nodes = list(tree.nodes())
    uses = {id(node): 0 for node in [*nodes, *tree.roots.values()]}
    private: list[int] = []
    for lease in leases:
        private += _check_lease(lease, tree, uses)
    # The reference count of a node is the number of leases with the node on their path.
    for node in [*nodes, *tree.roots.values()]:
        assert node.refs == uses[id(node)], f"{node.refs} refs, but {uses[id(node)]} users"
    # Every block has one owner: the pool, the tree, a lease or an operation.
    cached = [b for node in nodes for b in np.frombuffer(node.device_blocks, np.int32).tolist()]
    owned = pool.free_ids().tolist() + cached + private + quarantined
    assert sorted(owned) == list(range(1, pool.num_blocks + 1)), (
        f"{len(owned)} blocks are owned, {len(set(owned))} of them distinct, "
        f"but there are {pool.num_blocks}"
    )


def _check_lease(lease: Lease, tree: RadixTree, uses: dict[int, int]) -> list[int]:
    # It has exactly the blocks that its tokens need.
    assert lease.num_blocks == -(-lease.num_tokens // (tree.block_bytes // ITEM_BYTES)), (
        "wrong table length"
    )
    # Its shared blocks are the path of its node.
    shared = tree.path_blocks(lease.node)
    table = lease.block_table
    assert table[: lease.num_shared_blocks].tobytes() == shared, "shared blocks are not the path"
    node: Node | None = lease.node
    while node is not None:
        uses[id(node)] += 1
        node = node.parent
    return [int(block) for block in table[lease.num_shared_blocks :]]
