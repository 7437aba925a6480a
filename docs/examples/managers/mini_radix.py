"""A manager with a radix tree of blocks, in the style of mini-sglang.

A request locks a node of the tree, which keeps the path to it. After each step, its computed blocks
are inserted into the tree. If another request has inserted the same blocks before, its own are
duplicates: they are freed, and its block table must then point to the blocks in the tree. With
``repoint=False`` the table stays unchanged, so the request reads blocks that may soon belong to
another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Tokens: TypeAlias = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A run of full blocks; `locks` counts the requests that use it or a node below it."""

    tokens: Tokens
    blocks: list[int]
    parent: Node | None
    children: dict[Tokens, Node] = field(default_factory=dict)
    locks: int = 0
    last_use: int = 0

    def below(self) -> Iterator[Node]:
        """Yield this node and all below it."""
        yield self
        for child in self.children.values():
            yield from child.below()


class RadixTree:
    """Index from prefixes to blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[bytes, Node] = {}
        self.clock = itertools.count(1)

    def walk(self, namespace: bytes, tokens: Tokens) -> tuple[Node, list[int]]:
        """Return the node where the longest cached prefix ends, and the blocks up to there."""
        node = self.roots.setdefault(namespace, Node((), [], None))
        size, now, found = self.block_size, next(self.clock), list[int]()
        while child := node.children.get(tokens[len(found) * size :][:size]):
            rest = tokens[len(found) * size :]
            same = 1
            while same < len(child.blocks) and self._equal_block(child.tokens, rest, same):
                same += 1
            node = self._split(child, same) if same < len(child.blocks) else child
            node.last_use = now
            found += node.blocks
        return node, found

    def _equal_block(self, tokens: Tokens, others: Tokens, index: int) -> bool:
        start, end = index * self.block_size, (index + 1) * self.block_size
        return tokens[start:end] == others[start:end]

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Split a node; return the upper part."""
        size = num_blocks * self.block_size
        upper = Node(node.tokens[:size], node.blocks[:num_blocks], node.parent)
        upper.locks, upper.last_use = node.locks, node.last_use
        self._attach(upper)
        node.tokens, node.blocks, node.parent = node.tokens[size:], node.blocks[num_blocks:], upper
        self._attach(node)
        return upper

    def _attach(self, node: Node) -> None:
        assert node.parent is not None, "a root has no parent"
        node.parent.children[node.tokens[: self.block_size]] = node

    def insert(self, namespace: bytes, tokens: Tokens, blocks: Sequence[int]) -> list[int]:
        """Insert full blocks; return the blocks that the tree already had for the same prefix."""
        node, found = self.walk(namespace, tokens)
        if len(found) < len(blocks):
            start = len(found) * self.block_size
            new = Node(tokens[start:], list(blocks[len(found) :]), node, last_use=next(self.clock))
            self._attach(new)
        return found

    def lock(self, node: Node | None, change: int) -> None:
        """Lock the path to a node, or unlock it with -1."""
        while node is not None:
            node.locks += change
            node = node.parent

    def unlocked(self) -> list[Node]:
        """Return the nodes that can be evicted once those below them are."""
        nodes = itertools.chain.from_iterable(root.below() for root in self.roots.values())
        return [node for node in nodes if node.parent and not node.locks]

    def evict(self, num_blocks: int) -> list[int]:
        """Remove LRU leaves with at least `num_blocks` blocks together; return the blocks."""
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            leaves = [node for node in self.unlocked() if not node.children]
            coldest = min(leaves, key=lambda node: node.last_use)
            assert coldest.parent is not None, "a root is never evicted"
            del coldest.parent.children[coldest.tokens[: self.block_size]]
            evicted += coldest.blocks
        return evicted


@dataclass(slots=True)
class Request:
    """A running request: its tokens, its blocks, and the node that it has locked.

    The first `num_cached` blocks belong to the tree. The KV of `computed` tokens is written.
    """

    namespace: bytes
    tokens: Tokens
    table: list[int]
    node: Node
    num_cached: int
    computed: int


class CacheManager:
    """Allocates blocks, and caches computed ones."""

    def __init__(self, num_blocks: int, block_size: int, repoint: bool = True) -> None:
        self.block_size = block_size
        self.repoint = repoint
        self.free = list(range(num_blocks))
        self.tree = RadixTree(block_size)

    def available(self) -> int:
        """Return the number of blocks that are free or can be evicted."""
        return len(self.free) + sum(len(node.blocks) for node in self.tree.unlocked())

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Allocate blocks, and evict if necessary; None if there are too few."""
        if num_blocks > self.available():
            return None
        self.free += self.tree.evict(num_blocks - len(self.free))
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def start(self, namespace: bytes, tokens: Tokens) -> Request | None:
        """Start a request. The last token is never taken from the cache."""
        node, found = self.tree.walk(namespace, tokens[:-1])
        self.tree.lock(node, 1)
        new = self.allocate(-(-len(tokens) // self.block_size) - len(found))
        if new is None:
            self.tree.lock(node, -1)
            return None
        hit = len(found) * self.block_size
        return Request(namespace, tokens, found + new, node, len(found), hit)

    def cache_request(self, request: Request, finished: bool) -> None:
        """Cache the computed blocks of a request. If it is finished, free the rest."""
        num_whole = request.computed // self.block_size
        tokens = request.tokens[: num_whole * self.block_size]
        found = self.tree.insert(request.namespace, tokens, request.table[:num_whole])
        node, blocks = self.tree.walk(request.namespace, tokens)
        self.tree.lock(request.node, -1)
        self.free += request.table[request.num_cached : len(found)]  # duplicates
        if finished:
            self.free += request.table[num_whole:]
            return
        if self.repoint:
            request.table[:num_whole] = blocks
        self.tree.lock(node, 1)
        request.node, request.num_cached = node, num_whole
