"""What is always true: of a radix tree, and of tree, pool and leases together."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .radix_node import ITEM_BYTES, NO_CHILDREN, Node

if TYPE_CHECKING:
    from .block_pool import BlockPool
    from .lease import Lease
    from .radix_tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Assert every invariant of the tree; costs a walk over all of it."""
    assert not NO_CHILDREN, "a child was put into the dict that all leaves share"
    nodes = list(tree.nodes())
    for root in tree.roots.values():
        assert root.refs > 0 or root.children, "an empty root was kept"
    for node in nodes:
        _check_node(node, tree.block_bytes)
    idle = list(tree.idle_nodes())
    # The idle list holds the nodes without users, each once.
    assert len(idle) == len(set(map(id, idle))), "a node is in the idle list twice"
    assert {id(n) for n in idle} == {id(n) for n in nodes if n.refs == 0}, (
        "the idle list is not the set of unused nodes"
    )
    # A child stands before its parent.
    place = {id(node): index for index, node in enumerate(idle)}
    for colder, warmer in pairwise(idle):
        assert colder.warmer is warmer and warmer.colder is colder, "the idle list is torn"
    for node in idle:
        assert all(place[id(c)] < place[id(node)] for c in node.children.values()), (
            "a parent would be evicted before its child"
        )
    # The counts are those of the nodes.
    assert tree.num_cached == sum(n.num_blocks for n in nodes), "num_cached is wrong"
    assert tree.num_idle == sum(n.num_blocks for n in idle), "num_idle is wrong"


def _check_node(node: Node, block_bytes: int) -> None:
    # Links agree in both directions, and the key is the first block.
    assert node.parent is not None and node.parent.children.get(node.key) is node, "bad parent"
    assert node.key == bytes(node.tokens[:block_bytes]), "a key is not the first block"
    # Whole blocks only, at least one.
    num_bytes = node.num_blocks * block_bytes
    assert len(node.tokens) >= num_bytes > 0, "a run has too few tokens"
    assert len(node.tokens) % block_bytes == 0, "a run is not blocks"
    # A lease that uses a node uses its parents too.
    assert node.refs >= sum(c.refs for c in node.children.values()), "refs grow downwards"
    assert node.parent.refs >= node.refs >= 0, "a parent has fewer users than its child"
    # Whoever is not in the idle list has no links to it.
    assert node.refs == 0 or (node.colder is None and node.warmer is None), "a pinned idle node"


def check_ownership(pool: BlockPool, tree: RadixTree, leases: Collection[Lease]) -> None:
    """Assert that every block has one owner, and that nodes count the leases that use them."""
    nodes = list(tree.nodes())
    uses = {id(node): 0 for node in [*nodes, *tree.roots.values()]}
    private: list[int] = []
    for lease in leases:
        private += _check_lease(lease, tree, uses)
    # A node's users are the leases with the node on their path, no more and no fewer.
    for node in [*nodes, *tree.roots.values()]:
        assert node.refs == uses[id(node)], f"{node.refs} refs, but {uses[id(node)]} users"
    # Every block is free, in the tree, or private to a lease: exactly one of them.
    cached = [b for node in nodes for b in np.frombuffer(node.device_blocks, np.int32).tolist()]
    owned = pool.free_ids().tolist() + cached + private
    assert sorted(owned) == list(range(1, pool.num_blocks + 1)), (
        f"{len(owned)} blocks are owned, {len(set(owned))} of them distinct, "
        f"but there are {pool.num_blocks}"
    )


def _check_lease(lease: Lease, tree: RadixTree, uses: dict[int, int]) -> list[int]:
    # Its blocks suffice for its tokens, and are no more than those need.
    assert lease.num_blocks == -(-lease.num_tokens // (tree.block_bytes // ITEM_BYTES)), (
        "wrong table length"
    )
    # The shared part is the path of its node, block for block.
    shared = tree.path_blocks(lease.node)
    table = lease.block_table
    assert table[: lease.num_shared_blocks].tobytes() == shared, "shared blocks are not the path"
    node: Node | None = lease.node
    while node is not None:
        uses[id(node)] += 1
        node = node.parent
    return [int(block) for block in table[lease.num_shared_blocks :]]
