"""From the device to the host: what is copied when, and what is dropped for it."""

from __future__ import annotations

import numpy as np

from ..prefix.node import ITEM_BYTES, Node
from ..tokens import Int32Array
from .completions import Landing
from .host_tier import HostRun, TieredNode
from .operations import OpKind
from .state import TierState


class HostWriter:
    """Copies nodes to the host: when the device evicts them, or before, by the write policy.

    Attributes:
        tree: the nodes that it copies.
        demoted_blocks: blocks that the device evicted and the host was to take.
    """

    def __init__(self, tiers: TierState) -> None:
        self.demoted_blocks = 0
        self._tiers = tiers
        self._config = tiers.config
        self._host = tiers.host
        self.tree = tiers.tree
        self._published: dict[Node, None] = {}  # where paths end that are to be written through

    # When the device evicts

    def evict(self, num_blocks: int) -> Int32Array:
        """Take the least recently used leaf blocks off the device; return their device ids.

        They move to the host, or, with write-through, are dropped if they have no copy there. What
        finds no room is dropped, the coldest first: that is always possible.
        """
        victims = self.tree.take_coldest(num_blocks)
        for node in victims:
            if node in self._published and node.parent is not None:
                # What is left of its path is still to be copied.
                del self._published[node]
                self._published[node.parent] = None
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
        """Move what the device evicts to the host, block for block as if one after the other.

        Each becomes the warmest that the host alone has, by the copy that it has or when it has
        been copied, and none makes room for another that is warmer.
        """
        needed = sum([node.num_blocks for node in victims if node.host is None])
        idle = sum([node.num_blocks for node in victims if _is_idle(node)])
        victims = self._drop_coldest(victims, needed + idle - self._host.available)
        copies = self._host.hold([n.host for n in victims if n.host is not None and _is_idle(n)])
        sources = {node: node.device_blocks for node in victims if node.host is None}
        for node in sources:
            node.device_blocks = b""
        if sources:
            ids, landing = self.land(sources, _count(sources))
            moved = {*copies, *landing}
            order = [node.host for node in victims if node.host in moved]
            self._submit(Landing(self._tiers, landing, order), sources, ids)
        self._host.let_go(copies)

    def _drop_coldest(self, nodes: list[TieredNode], num_blocks: int) -> list[TieredNode]:
        """Drop the first num_blocks of nodes that leave the device; return what is left of them.

        Those count that have no copy; and those whose copy can be dropped, if copies are moved.
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

    def published(self, node: Node) -> None:
        """Note that a lease has published the path to node."""
        if self._config.write == "through" and self._config.hits == 0:
            self._published[node] = None

    def hit(self, node: Node) -> None:
        """Note that a request has hit the path to node."""
        hits = self.tree.hits
        for place in reversed(self.tree.path(node)):
            if place.host is not None:
                self._host.touch(place.host)
            elif self._config.hits:
                hits[place] += 1
        if self._config.hits:
            self._published[node] = None

    def write_through(self) -> None:
        """Copy what was noted, as one operation; what finds no room stays without a copy."""
        sources: dict[TieredNode, bytes] = {}
        paths = [self.tree.path(last) for last in self._published]
        room = self._host.available - self._keep(paths)
        for path in paths:
            for node in path:
                if not node.device_blocks or node.host is not None or node in sources:
                    continue
                if self.tree.hits[node] < self._config.hits or node.num_blocks > room:
                    break  # without this one, what follows it could not be found
                room -= node.num_blocks
                sources[node] = node.device_blocks
        self._published.clear()
        self.copy(sources)

    def _keep(self, paths: list[list[TieredNode]]) -> int:
        """Make the copies of some paths the last to be dropped; return how many blocks can be."""
        runs = [node.host for path in paths for node in reversed(path) if node.host is not None]
        for run in runs:
            self._host.touch(run)
        return sum([run.num_blocks for run in {*runs} if run.is_idle])

    # Shared steps

    def copy(self, sources: dict[TieredNode, bytes]) -> None:
        """Copy nodes to the host, which has room for them."""
        if sources:
            ids, runs = self.land(sources, _count(sources))
            self._submit(Landing(self._tiers, runs), sources, ids)

    def _submit(self, landing: Landing, sources: dict[TieredNode, bytes], ids: Int32Array) -> None:
        read = b"".join(sources.values())
        self._tiers.submit(OpKind.DEVICE_TO_HOST, landing, read, ids.tobytes())

    def land(
        self, sources: dict[TieredNode, bytes], num_blocks: int
    ) -> tuple[Int32Array, list[HostRun]]:
        """Take num_blocks host blocks, the first ones as copies of nodes; return both."""
        self.make_room(num_blocks)
        ids = self._host.pool.allocate(num_blocks)
        runs, place = [], 0
        for node, blocks in sources.items():
            after = place + len(blocks) // ITEM_BYTES
            runs.append(self._host.land(node, ids[place:after]))
            place = after
        return ids, runs

    def make_room(self, num_blocks: int) -> None:
        """Drop copies until num_blocks host blocks are free, or none can be dropped."""
        host, tree = self._host, self.tree
        while host.num_idle and (short := num_blocks - host.pool.num_free) > 0:
            run = host.next_to_drop()
            node = run.node
            assert node is not None, "a dropped copy is in the host tier's lists"
            if run.num_blocks > short:
                if host.is_spare(run):  # its head goes first
                    node = tree.split(node, short)
                else:
                    tree.split(node, run.num_blocks - short)
            if not node.device_blocks:
                tree.remove(node)
            else:
                assert node.host is not None, "a node whose copy is dropped has none"
                host.drop(node.host)


def _is_idle(node: TieredNode) -> bool:
    """Whether a node has a copy that can be dropped."""
    return node.host is not None and node.host.is_idle


def _count(sources: dict[TieredNode, bytes]) -> int:
    return sum(map(len, sources.values())) // ITEM_BYTES
