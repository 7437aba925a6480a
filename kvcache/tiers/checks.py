"""Invariants of the slower tiers, for `CacheManager.check`."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..ids import OpId
from ..prefix.lease import Lease
from ..prefix.node import Node
from .host_tier import HostRun, TieredNode
from .state import TierState
from .storage_key_cache import StorageKeyCache


def check_tiers(state: TierState, loading: Collection[OpId], leases: Collection[Lease]) -> None:
    """Assert every invariant of the slower tiers, by a walk over all of them.

    Args:
        state: the state to check.
        loading: operations that load a lease.
        leases: live and detached leases.
    """
    host = state.host
    nodes = [node for node in state.tree.nodes() if isinstance(node, TieredNode)]
    host.pool.check()
    runs = [node.host for node in nodes if node.host is not None]
    for node in nodes:
        if node.host is not None:
            assert node.host.node is node, "a copy belongs to another node"
            assert node.host.num_blocks == node.num_blocks, "a copy is not as long as its node"
    # A copy knows its holders, and no others.
    handlers = state.operations.handlers()
    holders = [handler.runs for handler in handlers] + [parked.runs for parked in state.parked]
    held = {id(run): run for holder in holders for run in holder}
    for run in (*runs, *held.values()):
        known = {id(holder) for holder in holders if any(each is run for each in holder)}
        assert known == set(map(id, run.holders)), "a copy does not know its holders"
    # A parked request waits as long as an operation copies some of it.
    for parked in state.parked:
        waits = parked.lease.parking
        assert waits == parked.is_saving == (not parked.saved), "a parked request waits for nothing"
    # Hits are counted for nodes on the device, and a lease waits for every load.
    assert all(node.device_blocks for node in state.tree.hits), "hits of an evicted node are kept"
    waiting = [lease.loading for lease in leases if lease.loading is not None]
    assert sorted(loading) == sorted(waiting), "no lease waits for a load"
    # The lists contain the runs that are valid and not held, a child before its parent.
    idle = list(host.idle_runs())
    droppable = {id(run) for run in runs if run.is_valid and not run.holders}
    assert len(idle) == len(droppable) and set(map(id, idle)) == droppable, (
        "the host's lists are not the copies that can be dropped"
    )
    place = {id(run): index for index, run in enumerate(idle) if not host.is_redundant(run)}
    _check_host_order([run for run in idle if not host.is_redundant(run)], place)
    # Every host block has one owner: the pool, a copy, an operation or a parked request.
    dropped = [run for run in held.values() if run.node is None and not run.promoting]
    owned = host.pool.free_ids().tolist()
    for run in (*runs, *dropped):
        owned += [] if run.promoting else np.frombuffer(run.blocks, np.int32).tolist()
    owned += [block for handler in handlers for block in handler.owned_host_blocks()]
    owned += [p.tail_block for p in state.parked if p.tail_block is not None]
    assert sorted(owned) == list(range(1, host.pool.num_blocks + 1)), (
        f"{len(owned)} host blocks are owned, {len(set(owned))} of them distinct, "
        f"but there are {host.pool.num_blocks}"
    )
    assert host.num_idle == sum(run.num_blocks for run in idle), "num_idle of the host is wrong"
    valid = sum(run.num_blocks for run in runs if run.is_valid)
    assert host.num_cached == valid, "num_cached of the host is wrong"
    if state.tree.keys is not None:
        _check_keys(state.tree.keys, nodes)


def _check_keys(keys: StorageKeyCache, nodes: list[TieredNode]) -> None:
    # The cached keys belong to live nodes and equal newly computed keys.
    assert keys.known.keys() <= set(nodes), "the keys of a removed node are kept"
    assert keys.reported_at.keys() <= keys.known.keys(), "a node without keys was reported"
    block_size = keys.namespace.block_size
    chains: dict[Node, tuple[bytes, bytes | None]] = {}
    for node in nodes:  # parents first
        above = node.parent
        assert above is not None, "a root is among the nodes"
        extras, last = chains.get(above, (above.key, None))
        tokens = np.frombuffer(node.tokens, np.int32)[: node.num_blocks * block_size]
        made = keys.namespace.block_keys(tokens, extras, last)
        assert b"".join(made).startswith(keys.known.get(node, b"")), "a key belongs to other tokens"
        chains[node] = extras, made[-1]


def _check_host_order(idle: list[HostRun], place: dict[int, int]) -> None:
    for run in idle:
        assert run.node is not None, "a dropped copy is in the host's list"
        parent = run.node.parent
        if parent is not None and parent.host is not None and id(parent.host) in place:
            assert place[id(run)] < place[id(parent.host)], (
                "a copy would be dropped before the copy of a child"
            )
