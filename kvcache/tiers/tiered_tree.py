"""Radix tree whose nodes are on the device, on the host, or on both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..prefix.eviction_order import unlink
from ..prefix.node import ITEM_BYTES, Node, Walk
from ..prefix.radix_tree import RadixTree
from ..tokens import Int32Array
from .host_tier import HostRun, HostTier, TieredNode
from .storage_key_cache import StorageKeyCache


class TieredTree(RadixTree):
    """Radix tree with a host tier below the device.

    ::

        root --[device]--[both]--+--[host]--[host]       below a node that only the host has,
                                 +--[device]             nothing is on the device

    Walks, pins and the idle list concern nodes on the device; the host tier has its own lists.

    Attributes:
        host: the host tier.
        keys: storage keys of the nodes; None without storage.
        hits: number of hits of nodes without a copy, as far as the policy counts them.
        published: ends of paths to write through.
        dropped_blocks: see `TierStats`.
    """

    def __init__(self, block_size: int, host: HostTier) -> None:
        super().__init__(block_size)
        self._node_type = TieredNode
        self.host = host
        self.keys: StorageKeyCache | None = None
        self.hits: Counter[Node] = Counter()
        self.published: dict[Node, None] = {}
        self.dropped_blocks = 0

    def path(self, node: Node) -> list[TieredNode]:
        """Return the nodes from below the root through node."""
        assert isinstance(node, TieredNode), "a bare node"
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def host_runs(self, node: Node, tokens: memoryview) -> tuple[list[HostRun], int]:
        """Follow tokens from the end of a walk through nodes that only the host has.

        Returns:
            The matching copies, and how many blocks match: the last copy may match in part.
        """
        assert isinstance(node, TieredNode), "a bare node"
        runs: list[HostRun] = []
        position, end, block_bytes = 0, len(tokens), self.block_bytes
        while position < end:
            child = node.children.get(tokens[position : position + block_bytes].tobytes())
            if child is None or child.host is None or not child.host.is_valid:
                break
            assert not child.device_blocks, "a walk ended above a node on the device"
            runs.append(child.host)
            after = position + child.num_blocks * block_bytes
            if after > end or not child.tokens.startswith(tokens[position:after]):
                inside_blocks = self._common_blocks(tokens[position:after], child.tokens)
                return runs, position // block_bytes + inside_blocks
            position, node = after, child
        return runs, position // block_bytes

    def unpin(self, node: Node) -> None:
        """Unpin the path to node, and make its host copies the warmest."""
        assert isinstance(node, TieredNode), "a bare node"
        place: TieredNode | None = node
        while place is not None:
            if place.host is not None:
                self.host.touch(place.host)
            place = place.parent
        super().unpin(node)

    def split(self, lower: Node, num_blocks: int) -> TieredNode:
        """Cut a node in two, in every tier, and return the upper part."""
        upper = super().split(lower, num_blocks)
        assert isinstance(lower, TieredNode) and isinstance(upper, TieredNode), "a bare node"
        if lower in self.hits:
            self.hits[upper] = self.hits[lower]
        if lower.host is not None:
            self.host.split(lower.host, upper, num_blocks)
        if self.keys is not None:
            self.keys.split(lower, upper, num_blocks)
        return upper

    def _are_alike(self, upper: Node, lower: Node) -> bool:
        """See RadixTree: their copies would be dropped, and are counted and reported, together."""
        assert isinstance(upper, TieredNode) and isinstance(lower, TieredNode), "a bare node"
        return (
            self.host.are_alike(upper.host, lower.host)
            and self.hits[upper] == self.hits[lower]
            and upper not in self.published
            and (self.keys is None or self.keys.are_alike(upper, lower))
        )

    def _join(self, nodes: list[Node]) -> None:
        """Join consecutive nodes of a path into the last one, in every tier."""
        copies = [node.host for node in nodes if isinstance(node, TieredNode) and node.host]
        if copies:
            self.host.join(copies)
        if self.keys is not None:
            self.keys.join(nodes)
        for node in nodes[:-1]:
            self.hits.pop(node, None)
        super()._join(nodes)

    def add_device_blocks(self, node: Node, tokens: bytes, device_blocks: bytes) -> TieredNode:
        """Put a node that only the host had on the device; a lease computed or loaded its blocks.

        Args:
            node: a child of the lease's last node that is not on the device.
            tokens, device_blocks: a run, as bytes of int32. Its first block is that of node; either
                may be longer, and they may differ after some blocks.

        Returns:
            The part of node that is on the device now, pinned by the lease.
        """
        assert isinstance(node, TieredNode), "a bare node"
        num_bytes = node.num_blocks * self.block_bytes
        if not tokens.startswith(node.tokens):
            common = self._common_blocks(memoryview(tokens)[:num_bytes], node.tokens)
            node = self.split(node, common)
        self.version += 1
        node.device_blocks = device_blocks[: node.num_blocks * ITEM_BYTES]
        node.refs = 1
        self.num_cached += node.num_blocks
        return node

    def take_coldest(self, num_blocks: int) -> list[TieredNode]:
        """Remove the num_blocks least recently used leaf blocks from the idle list, as whole nodes.

        The nodes keep their device blocks; the caller clears them.
        """
        num_blocks = min(num_blocks, self.num_idle)
        self.version += 1
        self.num_idle -= num_blocks
        self.num_cached -= num_blocks
        nodes = []
        while num_blocks > 0:
            node = self._idle.warmer
            assert isinstance(node, TieredNode), "the idle list is too short"
            if node.num_blocks > num_blocks:
                self.split(node, node.num_blocks - num_blocks)  # the lower part stays node
            unlink(node)
            self.hits.pop(node, None)
            num_blocks -= node.num_blocks
            nodes.append(node)
        return nodes

    def remove(self, node: TieredNode) -> None:
        """Remove a node that is not on the device, and all nodes below it."""
        parent = node.parent
        assert parent is not None, "a dead node is removed again"
        del parent.children[node.key]
        self.version += 1
        stack = [node]
        while stack:
            dead = stack.pop()
            assert not dead.device_blocks, "a node on the device is removed"
            stack.extend(dead.children.values())
            if dead.host is not None:
                self.dropped_blocks += dead.host.num_blocks
            self._clear(dead)
        if parent.parent is None:
            self._drop_empty(parent)

    def _clear(self, node: Node) -> None:
        """Clear a removed node and drop its copy."""
        assert isinstance(node, TieredNode), "a bare node"
        if node.host is not None:
            self.host.drop(node.host)
        self.hits.pop(node, None)
        if self.keys is not None:
            self.keys.forget(node)
        super()._clear(node)

    def attach(
        self, namespace: bytes, tokens: bytes, host_blocks: Int32Array, keys: Sequence[bytes]
    ) -> TieredNode | None:
        """Add the last blocks of a path, which were loaded from storage to the host.

        Args:
            namespace, tokens: the whole path; tokens as bytes of int32.
            host_blocks: host ids of its last blocks.
            keys: storage keys of those blocks.

        Returns:
            A new node with the last of those blocks; the tree had the others already. None if it
            had all of them, or no longer has the blocks before them.
        """
        root = self.roots.get(namespace) or self.add_root(namespace)
        walk = self._find(root, memoryview(tokens))
        first = len(tokens) // self.block_bytes - len(host_blocks)
        missing = (len(tokens) - walk.num_bytes) // self.block_bytes
        if missing == 0 or walk.num_bytes // self.block_bytes < first:
            self._drop_empty(root)
            return None
        parent = walk.node
        assert isinstance(parent, TieredNode), "a bare node"
        if walk.inside is not None:
            parent = self.split(walk.inside, walk.inside_blocks)
        rest = tokens[walk.num_bytes :]
        node = TieredNode(parent, rest[: self.block_bytes], rest, b"")
        parent.add_child(node)
        run = self.host.add_copy(node, host_blocks[-missing:])
        run.stored = True  # it came from storage
        if self.host.events is not None:
            self.host.events.fetching(namespace, tokens, host_blocks[-missing:])
        assert self.keys is not None, "a block was loaded from storage, but the cache has none"
        self.keys.learn(node, keys[-missing:])
        self.host.mark_valid(run)
        self.version += 1
        return node

    def _find(self, root: Node, tokens: memoryview) -> Walk:
        """Follow tokens down as far as any tier has them, copies in flight included."""
        walk = self.walk(root, tokens)
        if walk.inside is not None:
            return walk
        node, position, block_bytes = walk.node, walk.num_bytes, self.block_bytes
        while position < len(tokens):
            child = node.children.get(tokens[position : position + block_bytes].tobytes())
            if child is None:
                break
            after = position + child.num_blocks * block_bytes
            if after > len(tokens) or not child.tokens.startswith(tokens[position:after]):
                inside_blocks = self._common_blocks(tokens[position:after], child.tokens)
                return Walk(node, position + inside_blocks * block_bytes, child, inside_blocks)
            position, node = after, child
        return Walk(node, position)
