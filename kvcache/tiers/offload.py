"""Offload: evict blocks from the device and copy them to the host, by the write policy."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..prefix.node import ITEM_BYTES, Node
from ..tokens import Int32Array
from .completion_handlers import OffloadCompletion
from .host_tier import HostRun, TieredNode
from .operations import OpKind
from .state import TierState

_MANY_NODES: Final = 16
"""Nodes of a published path from which on they are joined: the cost of a block is that of a node,
and of a copy of the path's tokens for every few blocks."""


class Offloader:
    """Copies nodes to the host, when the device evicts them or before.

    Attributes:
        tree: the radix tree.
        demoted_blocks: number of blocks evicted from the device towards the host.
    """

    def __init__(self, state: TierState) -> None:
        self.demoted_blocks = 0
        self._state = state
        self._config = state.config
        self._host = state.host
        self.tree = state.tree

    # Eviction from the device

    def evict(self, num_blocks: int) -> Int32Array:
        """Evict the least recently used leaf blocks from the device and return their ids.

        They move to the host. With write-through, blocks without a copy there are dropped instead.
        Blocks that find no room are dropped, coldest first: that always succeeds.
        """
        victims = self.tree.take_coldest(num_blocks)
        for node in victims:
            if node in self.tree.published and node.parent is not None:
                # The rest of its path must still be copied.
                del self.tree.published[node]
                self.tree.published[node.parent] = None
        ids = b"".join([node.device_blocks for node in victims])
        for node in victims:
            if node.host is not None:
                node.device_blocks = b""
        if self._config.write == "through":
            self._drop_coldest(victims, sum([n.num_blocks for n in victims if n.host is None]))
        else:
            self.demoted_blocks += len(ids) // ITEM_BYTES
            self._demote(victims)
        return np.frombuffer(ids, np.int32)

    def _demote(self, victims: list[TieredNode]) -> None:
        """Move evicted nodes to the host, with the same result as block by block.

        Each becomes the warmest block that only the host has, at once if it has a copy there, else
        when it has been copied. Victims that fit are not dropped to make room for each other.
        """
        needed = sum([node.num_blocks for node in victims if node.host is None])
        idle = sum([node.num_blocks for node in victims if _is_idle(node)])
        victims = self._drop_coldest(victims, needed + idle - self._host.available)
        copies = self._host.hold([n.host for n in victims if n.host is not None and _is_idle(n)])
        sources = {node: node.device_blocks for node in victims if node.host is None}
        for node in sources:
            node.device_blocks = b""
        if sources:
            ids, runs = self.allocate(sources, _count(sources))
            moved = {*copies, *runs}
            order = [node.host for node in victims if node.host in moved]
            self._submit(OffloadCompletion(self._state, runs, order), sources, ids)
        self._host.release_hold(copies)

    def _drop_coldest(self, nodes: list[TieredNode], num_blocks: int) -> list[TieredNode]:
        """Drop the first num_blocks blocks of evicted nodes and return the remaining nodes.

        Only nodes without a copy are dropped, and, unless the policy is "through", nodes whose
        copy can be dropped.
        """
        kept = []
        for node in nodes:
            stays = node.host is not None and (
                self._config.write == "through" or not _is_idle(node)
            )
            if num_blocks <= 0 or stays:
                kept.append(node)
                continue
            if num_blocks < node.num_blocks:
                kept.append(self.tree.split(node, node.num_blocks - num_blocks))
            num_blocks -= node.num_blocks
            if node.host is None:
                self.tree.dropped_blocks += node.num_blocks
                node.device_blocks = b""
            self.tree.remove(node)
        return [node for node in kept if node.parent is not None]

    # Write-through

    def record_publish(self, node: Node) -> None:
        """Record that a lease has published the path to node."""
        if self._config.write == "through" and self._config.hits == 0:
            self.tree.published[node] = None

    def record_hit(self, node: Node) -> None:
        """Record that a request has hit the path to node."""
        hits = self.tree.hits
        for place in reversed(self.tree.path(node)):
            if place.host is not None:
                self._host.touch(place.host)
            elif hits[place] < self._config.hits:
                hits[place] += 1
        if self._config.hits:
            self.tree.published[node] = None

    def write_through(self) -> None:
        """Copy the recorded paths in one operation, as far as the host has room."""
        sources: dict[TieredNode, bytes] = {}
        paths = [self._keep(last) for last in self.tree.published]
        copies = {node.host for path in paths for node in path if node.host is not None}
        room = self._host.available - sum([run.num_blocks for run in copies if run.is_idle])
        for path in paths:
            for node in path:
                if not node.device_blocks or node.host is not None or node in sources:
                    continue
                if self.tree.hits[node] < self._config.hits or node.num_blocks > room:
                    break  # without this node, the nodes after it could not be found
                room -= node.num_blocks
                sources[node] = node.device_blocks
        self.tree.published.clear()
        if sources:
            ids, runs = self.allocate(sources, _count(sources))
            self._submit(OffloadCompletion(self._state, runs), sources, ids)

    def _keep(self, last: Node) -> list[TieredNode]:
        """Make the copies of a path the warmest, and return its nodes.

        A request that decodes adds a node for each block, as the one before has a copy by then.
        """
        path = self.tree.path(last)
        for node in reversed(path):
            if node.host is not None:
                self._host.touch(node.host)
        if len(path) <= _MANY_NODES or not last.refs:
            return path
        self.tree.join_path(last)
        return self.tree.path(last)

    # Shared steps

    def _submit(
        self, handler: OffloadCompletion, sources: dict[TieredNode, bytes], ids: Int32Array
    ) -> None:
        blocks = b"".join(sources.values())
        self._state.submit(OpKind.DEVICE_TO_HOST, handler, blocks, ids.tobytes())

    def allocate(
        self, sources: dict[TieredNode, bytes], num_blocks: int
    ) -> tuple[Int32Array, list[HostRun]]:
        """Allocate num_blocks host blocks and assign the first ones to nodes, as their copies.

        Returns:
            The ids of all blocks, and the copies.
        """
        self.make_room(num_blocks)
        ids = self._host.pool.allocate(num_blocks)
        runs, place = [], 0
        for node, blocks in sources.items():
            after = place + len(blocks) // ITEM_BYTES
            runs.append(self._host.add_copy(node, ids[place:after]))
            if self._host.events is not None:
                self._host.events.copying(blocks, ids[place:after])
            place = after
        return ids, runs

    def make_room(self, num_blocks: int) -> None:
        """Drop copies until num_blocks host blocks are free or no copy can be dropped."""
        host, tree = self._host, self.tree
        while host.num_idle and (short := num_blocks - host.pool.num_free) > 0:
            run = host.next_to_drop()
            node = run.node
            assert node is not None, "a dropped copy is in the host tier's lists"
            if run.num_blocks > short:
                if host.is_redundant(run):  # dropped from its head
                    node = tree.split(node, short)
                else:
                    tree.split(node, run.num_blocks - short)
            if not node.device_blocks:
                tree.remove(node)
            else:
                assert node.host is not None, "a node whose copy is dropped has none"
                host.drop(node.host)


def _is_idle(node: TieredNode) -> bool:
    """Return whether a node has a copy that can be dropped."""
    return node.host is not None and node.host.is_idle


def _count(sources: dict[TieredNode, bytes]) -> int:
    return sum(map(len, sources.values())) // ITEM_BYTES
