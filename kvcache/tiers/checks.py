"""Invariants of the slower tiers, for `CacheManager.check`."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..ids import OpId
from ..prefix.lease import Lease
from ..prefix.node import Node
from .host_tier import HostRun, TieredNode
from .state import TierState
from .storage_keys import NodeKeys


def check_tiers(tiers: TierState, loading: Collection[OpId], leases: Collection[Lease]) -> None:
    """Assert every invariant of the slower tiers, by a walk over all of them.

    Args:
        tiers: the state to check.
        loading: operations that load a lease.
        leases: live and detached leases.
    """
    host, nodes = tiers.host, list(tiers.tree.tiered_nodes())
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
    assert sorted(loading) == sorted(waiting), "what is loaded is not waited for"
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


def _check_keys(keys: NodeKeys, nodes: list[TieredNode]) -> None:
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
