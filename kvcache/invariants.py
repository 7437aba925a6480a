"""What is always true: of a radix tree, and of tree, pool and leases together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .prefix.node import (
    ITEM_BYTES,
    NO_CHILDREN,
    Node,
)

if TYPE_CHECKING:
    from .prefix.block_pool import BlockPool
    from .prefix.block_tables import BlockTables
    from .prefix.lease import Lease
    from .prefix.radix_tree import RadixTree
    from .tiers.api import Tiers
    from .tiers.host_tier import HostRun
    from .tiers.storage_keys import NodeKeys


def check_tree(tree: RadixTree) -> None:
    """Assert every invariant of the tree; costs a walk over all of it."""
    assert not NO_CHILDREN, "a child was put into the dict that all leaves share"
    nodes = list(tree.nodes())
    for root in tree.roots.values():
        assert root.refs > 0 or root.children, "an empty root was kept"
    for node in nodes:
        _check_node(node, tree.block_bytes)
    idle = list(tree.idle_nodes())
    # The idle list holds the nodes on the device without users, each once.
    assert len(idle) == len(set(map(id, idle))), "a node is in the idle list twice"
    assert {id(n) for n in idle} == {id(n) for n in nodes if n.refs == 0 and n.device_blocks}, (
        "the idle list is not the set of unused nodes"
    )
    # A child stands before its parent.
    place = {id(node): index for index, node in enumerate(idle)}
    for colder, warmer in pairwise(idle):
        assert colder.warmer is warmer and warmer.colder is colder, "the idle list is torn"
    for node in idle:
        on_device = [child for child in node.children.values() if child.device_blocks]
        assert all(place[id(c)] < place[id(node)] for c in on_device), (
            "a parent would be evicted before its child"
        )
    # The counts are those of the nodes.
    num_cached = sum(len(n.device_blocks) // ITEM_BYTES for n in nodes)
    assert tree.num_cached == num_cached, "num_cached is wrong"
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
    unlinked = node.colder is None and node.warmer is None
    assert unlinked or (node.refs == 0 and node.device_blocks), "a pinned idle node"
    # What is on the device follows what is on the device; leases use nothing else.
    above = node.parent.parent is None or node.parent.device_blocks
    assert above or not node.device_blocks, "a node is on the device, its parent is not"
    assert node.device_blocks or (node.refs == 0 and node.host is not None), "a node is nowhere"


def check_leases(leases: Mapping[int, Lease], tables: BlockTables, epoch: int) -> None:
    """Assert that leases and rows of the tables belong together."""
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
    # A node's users are the leases with the node on their path, no more and no fewer.
    for node in [*nodes, *tree.roots.values()]:
        assert node.refs == uses[id(node)], f"{node.refs} refs, but {uses[id(node)]} users"
    # Every block is free, in the tree, private to a lease or waits for an operation: one of them.
    cached = [b for node in nodes for b in np.frombuffer(node.device_blocks, np.int32).tolist()]
    owned = pool.free_ids().tolist() + cached + private + quarantined
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


def check_tiers(tiers: Tiers, leases: Collection[Lease]) -> None:
    """Assert every invariant of the host tier; costs a walk over all of it."""
    host, nodes = tiers.host, list(tiers.tree.nodes())
    host.pool.check()
    runs = [node.host for node in nodes if node.host is not None]
    for node in nodes:
        if node.host is not None:
            assert node.host.node is node, "a copy is of another node"
            assert node.host.num_blocks == node.num_blocks, "a copy is not of its node's length"
    # Whoever holds a copy is known to it, and nobody else is.
    effects = tiers.operations.effects()
    holders = [effect.runs for effect in effects] + [parked.runs for parked in tiers.parked]
    held = {id(run): run for holder in holders for run in holder}
    for run in (*runs, *held.values()):
        known = {id(holder) for holder in holders if any(each is run for each in holder)}
        assert known == set(map(id, run.holders)), "a copy is held by others than it knows"
    # Whoever is parked waits for a copy, and then no more.
    for parked in tiers.parked:
        waits = parked.lease.parking
        assert waits == parked.is_copied == (not parked.saved), "a parked request waits for nothing"
    # Hits are counted of what is on the device, and what is loaded has somebody who waits.
    assert all(node.device_blocks for node in tiers.tree.hits), "hits of an evicted node are kept"
    waiting = [lease.loading for lease in leases if lease.loading is not None]
    assert sorted(tiers.reader.loading) == sorted(waiting), "what is loaded is not waited for"
    # The list holds what is valid and not held, a child before its parent.
    idle = list(host.idle_runs())
    droppable = {id(run) for run in runs if run.is_valid and not run.holders}
    assert len(idle) == len(droppable) and set(map(id, idle)) == droppable, (
        "the host's list is not the copies that can be dropped"
    )
    place = {id(run): index for index, run in enumerate(idle) if not host.is_spare(run)}
    _check_host_order([run for run in idle if not host.is_spare(run)], place)
    # Every host block is free, of one copy, or waits for an operation or a parked request.
    dropped = [run for run in held.values() if run.node is None and not run.leaving]
    owned = host.pool.free_ids().tolist()
    for run in (*runs, *dropped):
        owned += [] if run.leaving else np.frombuffer(run.blocks, np.int32).tolist()
    owned += [block for effect in effects for block in effect.own_host_blocks()]
    owned += [p.tail_block for p in tiers.parked if p.tail_block is not None]
    assert sorted(owned) == list(range(1, host.pool.num_blocks + 1)), (
        f"{len(owned)} host blocks are owned, {len(set(owned))} of them distinct, "
        f"but there are {host.pool.num_blocks}"
    )
    assert host.num_idle == sum(run.num_blocks for run in idle), "num_idle of the host is wrong"
    valid = sum(run.num_blocks for run in runs if run.is_valid)
    assert host.num_cached == valid, "num_cached of the host is wrong"
    if tiers.tree.keys is not None:
        _check_keys(tiers.tree.keys, nodes)


def _check_keys(keys: NodeKeys, nodes: list[Node]) -> None:
    # What is kept is of live nodes, and what would be made anew.
    assert keys.known.keys() <= set(nodes), "the keys of a dead node are kept"
    assert keys.told_at.keys() <= keys.known.keys(), "it was told that a node without keys is used"
    block_size = keys.namespace.block_size
    chains: dict[Node, tuple[bytes, bytes | None]] = {}
    for node in nodes:  # parents first
        above = node.parent
        assert above is not None, "a root is among the nodes"
        extras, last = chains.get(above, (above.key, None))
        tokens = np.frombuffer(node.tokens, np.int32)[: node.num_blocks * block_size]
        made = keys.namespace.block_keys(tokens, extras, last)
        assert b"".join(made).startswith(keys.known.get(node, b"")), "a key is of other tokens"
        chains[node] = extras, made[-1]


def _check_host_order(idle: list[HostRun], place: dict[int, int]) -> None:
    for run in idle:
        assert run.node is not None, "a dropped copy is in the host's list"
        parent = run.node.parent
        if parent is not None and parent.host is not None and id(parent.host) in place:
            assert place[id(run)] < place[id(parent.host)], (
                "a copy would be dropped before what follows it"
            )
