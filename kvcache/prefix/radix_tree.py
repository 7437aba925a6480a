"""Prefix cache: a path-compressed radix tree of blocks, evicted in exact leaf-LRU order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from typing import Final

import numpy as np

from ..tokens import INT32, Int32Array
from .eviction_order import coldest, cut_off, empty_list, link_before, unlink
from .node import ITEM_BYTES, NO_CHILDREN, Node, Walk

_FIRST_VERSIONS: Final = count(0, 2**40)
_AT_ONCE: Final = 1024  # leaves that fit the second-level cache of a processor
_FEW: Final = 16  # leaves: most evictions need fewer


class RadixTree:
    """Published blocks, indexed by the tokens of their paths.

    ::

        root --[blocks 4 9 2]--+--[blocks 7 1]      a node is a run; children differ in their
                               +--[blocks 5]        first block; a root per namespace

    **The idle list** contains every node that no lease uses, coldest first. When a lease leaves a
    path, its nodes are appended from the tail up, so a child always comes before its parent: the
    head of the list is the least recently used *leaf*, without a heap or a search. A run is
    trimmed from its tail, so the victims are those of a block-by-block leaf LRU.

    Source: the order is that of vLLM's free queue (tail first), carried over to a tree of runs.

    Attributes:
        block_bytes: size of a block's tokens in bytes.
        roots: root nodes, by namespace.
        version: increases whenever a walk could end differently. No two trees share a version.
        num_cached: number of blocks in the tree.
        num_idle: number of those that no lease uses: all of them can be evicted.
    """

    def __init__(self, block_size: int) -> None:
        self._node_type: type[Node] = Node
        self.block_bytes = block_size * ITEM_BYTES
        self._idle = empty_list()
        self.roots: dict[bytes, Node] = {}
        self.version = next(_FIRST_VERSIONS)
        self.num_cached = 0
        self.num_idle = 0

    # Reading

    def walk(self, node: Node, tokens: memoryview) -> Walk:
        """Follow tokens (whole blocks, as bytes) down from node as far as the device has them."""
        block_bytes = self.block_bytes
        position, end = 0, len(tokens)
        while position < end:
            child = node.children.get(tokens[position : position + block_bytes].tobytes())
            if child is None or not child.device_blocks:
                break
            run = child.tokens
            after = position + len(child.device_blocks) // ITEM_BYTES * block_bytes
            if after > end or not run.startswith(tokens[position:after]):
                inside_blocks = self._common_blocks(tokens[position:after], run)
                return Walk(node, position + inside_blocks * block_bytes, child, inside_blocks)
            position = after
            node = child
        return Walk(node, position)

    def _common_blocks(self, tokens: memoryview, run: bytes | bytearray) -> int:
        # The first block is equal (it was the key), the whole run is not.
        num_items = len(tokens) // ITEM_BYTES
        differs = np.frombuffer(tokens, INT32) != np.frombuffer(run, INT32, num_items)
        first = int(differs.argmax())
        return (first if differs[first] else num_items) * ITEM_BYTES // self.block_bytes

    def path_blocks(self, node: Node) -> bytes:
        """Return the ids of the blocks from the root through node, as bytes of int32."""
        runs = []
        while node.parent is not None:
            runs.append(node.device_blocks)
            node = node.parent
        runs.reverse()
        return b"".join(runs)

    def idle_blocks_on(self, walk: Walk) -> int:
        """Count the matched blocks that no lease uses: pinning makes them unevictable."""
        idle = walk.inside_blocks if walk.inside is not None and walk.inside.refs == 0 else 0
        node = walk.node
        while (
            node.refs == 0 and node.parent is not None
        ):  # a lease that uses a node uses its parents
            idle += len(node.device_blocks) // ITEM_BYTES
            node = node.parent
        return idle

    # Pins

    def add_root(self, namespace: bytes) -> Node:
        """Create the root of a namespace."""
        assert namespace not in self.roots, f"namespace {namespace!r} has a root"
        self.version += 1
        root = self.roots[namespace] = self._node_type(None, namespace, b"", b"")
        return root

    def pin(self, walk: Walk, above: Node | None = None) -> Node:
        """Pin the nodes that a walk matched and return the last one, split where the walk ends.

        Args:
            walk: result of `walk`. The tree must not have changed since.
            above: pin only the nodes below this one, which is pinned already; None for all.
        """
        last = walk.node if walk.inside is None else self.split(walk.inside, walk.inside_blocks)
        node: Node | None = last
        while node is not above:
            assert node is not None, "pinned to a node that is not on the path"
            if node.refs == 0 and node.parent is not None:
                unlink(node)
                self.num_idle -= len(node.device_blocks) // ITEM_BYTES
            node.refs += 1
            node = node.parent
        return last

    def unpin(self, node: Node) -> None:
        """Unpin the path to node: nodes that no lease uses become evictable, tail first."""
        idle, place = self._idle, node
        warmest = idle.colder
        assert warmest is not None, "the idle list is not closed"
        while (parent := place.parent) is not None:
            place.refs -= 1
            assert place.refs >= 0, "a node was unpinned more often than pinned"
            if place.refs == 0:
                warmest.warmer, place.colder = place, warmest
                warmest = place
                self.num_idle += len(place.device_blocks) // ITEM_BYTES
            place = parent
        warmest.warmer, idle.colder = idle, warmest
        place.refs -= 1
        self._drop_empty(place)

    def join_path(self, node: Node) -> None:
        """Join the runs on the path to node, which is pinned, that nothing tells apart any more.

        ::

            --[4 9]--[2 7]--[5]--+--         one lease hits all of it, the branches between the
                                 +--         runs are evicted:      --[4 9 2 7 5]--+--
                                                                                   +--

        A run is joined with its only child if the same leases use both. No lease then ends between
        them, and both become idle at once, when the last of these is released: the idle list has
        their blocks in the same order as before, tail first. Idle runs are not joined. One may have
        been used after the other, and both cost nothing until a request hits them. Therefore an
        admission joins the path that it hits: it has read that path anyway, and the next hit
        reads one run.
        """
        lower = node
        while (upper := lower.parent) is not None:
            if upper.refs == lower.refs and len(upper.children) == 1:
                upper = self._join_above(lower)
            lower = upper

    def _join_above(self, last: Node) -> Node:
        """Join into last the nodes above it, as far as they are alike; return its new parent."""
        nodes, upper = [last], last.parent
        assert upper is not None, "a root is joined"
        while (
            upper.parent is not None
            and upper.refs == last.refs
            and len(upper.children) == 1
            and self._are_alike(upper, nodes[-1])
        ):
            nodes.append(upper)
            upper = upper.parent
        if len(nodes) > 1:
            self._join(nodes[::-1])
        return upper

    def _are_alike(self, upper: Node, lower: Node) -> bool:
        """Return whether the tiers below the device treat a node and its only child alike."""
        return True

    def _join(self, nodes: list[Node]) -> None:
        """Join consecutive nodes of a path into the last one, which leases may name."""
        self.version += 1
        first, last = nodes[0], nodes[-1]
        runs = [node.tokens[: node.num_blocks * self.block_bytes] for node in nodes]
        last.tokens = b"".join(runs)
        last.device_blocks = b"".join([node.device_blocks for node in nodes])
        assert first.parent is not None, "a root is joined"
        last.parent, last.key = first.parent, first.key
        last.parent.add_child(last)
        for node in nodes[:-1]:
            node.parent, node.children, node.device_blocks = None, NO_CHILDREN, b""

    # Changes

    def append(self, node: Node, tokens: bytes, device_blocks: bytes) -> Node:
        """Publish a run of blocks after node, pinned by the lease that computed them.

        Args:
            node: last node of the lease. No child of it begins with the same block.
            tokens, device_blocks: the run, as bytes of int32.

        Returns:
            The new last node of the lease: node itself, grown, or a child of it.
        """
        self.version += 1
        self.num_cached += len(device_blocks) // ITEM_BYTES
        run: bytes | bytearray = tokens
        if node.refs == 1 and not node.children and node.parent is not None:
            if isinstance(node.tokens, bytearray) and node.host is None:
                node.tokens += tokens
                node.device_blocks += device_blocks
                return node
            # A long prompt is not copied to grow it. The run after it is, and grows in place.
            run = bytearray(tokens)
        key = tokens[: self.block_bytes]
        assert key not in node.children, "a block is published twice under one parent"
        child = self._node_type(node, key, run, device_blocks)
        child.refs = 1
        node.add_child(child)
        return child

    def split(self, lower: Node, num_blocks: int) -> Node:
        """Cut a node in two. Return the upper part, a new node; lower stays the lower part."""
        self.version += 1
        assert lower.parent is not None, "a root cannot be split"
        cut = num_blocks * self.block_bytes
        upper = self._node_type(
            lower.parent,
            lower.key,
            lower.tokens[:cut],
            lower.device_blocks[: num_blocks * ITEM_BYTES],
        )
        upper.refs = lower.refs
        lower.parent.add_child(upper)
        lower.parent = upper
        lower.tokens = lower.tokens[cut : lower.num_blocks * self.block_bytes]
        lower.device_blocks = lower.device_blocks[num_blocks * ITEM_BYTES :]
        lower.key = bytes(lower.tokens[: self.block_bytes])
        upper.add_child(lower)
        if lower.warmer is not None:
            link_before(lower.warmer, upper)
        return upper

    def evict(self, num_blocks: int) -> Int32Array:
        """Evict the num_blocks least recently used leaf blocks (all idle blocks, if fewer).

        Returns:
            Their ids, for one batched recycle. The cost is per run, for a tree of any size.
        """
        if (num_blocks := min(num_blocks, self.num_idle)) <= 0:
            return np.empty(0, np.int32)
        self.version += 1
        self.num_idle -= num_blocks
        self.num_cached -= num_blocks
        short = num_blocks * ITEM_BYTES
        victims = self._evict_few(short)
        while len(victims) < short:
            victims += self._evict_many(short - len(victims))
        return np.frombuffer(victims, INT32)

    def _evict_few(self, num_bytes: int) -> bytes:
        """Evict up to num_bytes of the coldest block ids, leaf by leaf, from a few leaves."""
        victims: list[bytes] = []
        node = self._idle.warmer
        while num_bytes > 0 and len(victims) < _FEW:
            assert node is not None, "the idle list is shorter than its count"
            run = node.device_blocks
            if len(run) > num_bytes:
                self._trim(node, num_bytes)
                victims.append(run[-num_bytes:])
                break
            victims.append(run)
            num_bytes -= len(run)
            parent = node.parent
            assert parent is not None, "a root is in the idle list"
            del parent.children[node.key]
            if parent.parent is None and not parent.children:
                self._drop_empty(parent)
            node.colder = None
            node.warmer, node = None, node.warmer
        assert node is not None, "the idle list is not closed"
        self._idle.warmer, node.colder = node, self._idle
        return b"".join(victims)

    def _evict_many(self, num_bytes: int) -> bytes:
        """Evict from many leaves at a time, in phases: twice as fast on slow memory."""
        idle = self._idle
        assert idle.warmer is not None, "the idle list is not closed"
        # The number needed if all were as long as the coldest; the excess is kept below.
        guess = num_bytes // len(idle.warmer.device_blocks) or 1
        leaves, node = coldest(idle, min(guess, _AT_ONCE))
        run = b"".join([leaf.device_blocks for leaf in leaves])
        excess = len(run) - num_bytes
        while excess > 0:
            node = leaves.pop()
            excess -= len(node.device_blocks)
            if excess < 0:  # evict only its tail
                run = run[: num_bytes + excess] + node.device_blocks[excess:]
                self._trim(node, -excess)
        idle.warmer, node.colder = node, idle
        for parent in cut_off(leaves):
            if parent.parent is None:
                self._drop_empty(parent)
        return run[:num_bytes]

    def remove_root(self, namespace: bytes) -> Int32Array:
        """Remove a namespace that no lease uses and return the device ids of its blocks."""
        root = self.roots.pop(namespace)
        self.version += 1
        runs: list[bytes] = []
        stack = list(root.children.values())
        while stack:
            dead = stack.pop()
            assert dead.refs == 0, "a namespace in use is removed"
            stack.extend(dead.children.values())
            if dead.device_blocks:
                unlink(dead)
                runs.append(dead.device_blocks)
            self._clear(dead)
        ids = np.frombuffer(b"".join(runs), np.int32)
        self.num_idle, self.num_cached = self.num_idle - len(ids), self.num_cached - len(ids)
        return ids

    def _clear(self, node: Node) -> None:
        """Clear a node that was removed with its children."""
        node.parent, node.children, node.device_blocks = None, NO_CHILDREN, b""

    def _trim(self, node: Node, num_bytes: int) -> None:
        node.device_blocks = node.device_blocks[:-num_bytes]
        kept = len(node.device_blocks) // ITEM_BYTES * self.block_bytes
        # In place or not at all: the coldest run is trimmed many times in a row.
        if isinstance(node.tokens, bytearray):
            del node.tokens[kept:]

    def _drop_empty(self, root: Node) -> None:
        if root.refs == 0 and not root.children:
            del self.roots[root.key]
            self.version += 1

    # Checks

    def nodes(self) -> Iterator[Node]:
        """Yield every node that is not a root, parents first."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def idle_nodes(self) -> Iterator[Node]:
        """Yield the nodes that no lease uses, coldest first."""
        node = self._idle.warmer
        while node is not None and node is not self._idle:
            yield node
            node = node.warmer

    def check(self) -> None:
        """Assert every invariant of the tree, by a walk over all of it."""
        assert not NO_CHILDREN, "a child was put into the dict that all leaves share"
        nodes = list(self.nodes())
        for root in self.roots.values():
            assert root.refs > 0 or root.children, "an empty root was kept"
        for node in nodes:
            node.check(self.block_bytes)
        idle = list(self.idle_nodes())
        # The idle list contains the unused nodes on the device, each once.
        assert len(idle) == len(set(map(id, idle))), "a node is in the idle list twice"
        assert {id(n) for n in idle} == {id(n) for n in nodes if n.refs == 0 and n.device_blocks}, (
            "the idle list is not the set of unused nodes"
        )
        # A child comes before its parent.
        place = {id(node): index for index, node in enumerate(idle)}
        for colder, warmer in pairwise(idle):
            assert colder.warmer is warmer and warmer.colder is colder, "the idle list is torn"
        for node in idle:
            on_device = [child for child in node.children.values() if child.device_blocks]
            assert all(place[id(c)] < place[id(node)] for c in on_device), (
                "a parent would be evicted before its child"
            )
        # The counts agree with the nodes.
        num_cached = sum(len(n.device_blocks) // ITEM_BYTES for n in nodes)
        assert self.num_cached == num_cached, "num_cached is wrong"
        assert self.num_idle == sum(n.num_blocks for n in idle), "num_idle is wrong"
