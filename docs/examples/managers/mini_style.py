"""A manager with a radix tree of blocks, in the shape of mini-sglang's, and its adapter.

A request holds a lock on a node of the tree, which keeps its path, and after each step puts what
it computed into the tree. Where another request was first, its own blocks are copies: they are
freed, and its block table must then point to the blocks in the tree. With ``repoint=False`` it is
not changed, so that the request goes on to read blocks that soon belong to somebody else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from radixkv.spec.adapters.cache import Promises

Tokens: TypeAlias = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A run of whole blocks; `locks` counts the requests that use it or a node below."""

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
    """Which blocks hold which prefixes."""

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
        """Cut a node in two; returns the upper one."""
        size = num_blocks * self.block_size
        upper = Node(node.tokens[:size], node.blocks[:num_blocks], node.parent)
        upper.locks, upper.last_use = node.locks, node.last_use
        self._hang(upper)
        node.tokens, node.blocks, node.parent = node.tokens[size:], node.blocks[num_blocks:], upper
        self._hang(node)
        return upper

    def _hang(self, node: Node) -> None:
        assert node.parent is not None, "a root hangs nowhere"
        node.parent.children[node.tokens[: self.block_size]] = node

    def insert(self, namespace: bytes, tokens: Tokens, blocks: Sequence[int]) -> list[int]:
        """Put whole blocks into the tree; returns those that were there, for the same prefix."""
        node, found = self.walk(namespace, tokens)
        if len(found) < len(blocks):
            start = len(found) * self.block_size
            new = Node(tokens[start:], list(blocks[len(found) :]), node, last_use=next(self.clock))
            self._hang(new)
        return found

    def lock(self, node: Node | None, change: int) -> None:
        """Lock the path to a node, or unlock it with -1."""
        while node is not None:
            node.locks += change
            node = node.parent

    def unlocked(self) -> list[Node]:
        """Return the nodes that can be evicted, or could after those below them."""
        nodes = itertools.chain.from_iterable(root.below() for root in self.roots.values())
        return [node for node in nodes if node.parent and not node.locks]

    def evict(self, num_blocks: int) -> list[int]:
        """Take the coldest leaves out; returns their blocks, at least so many."""
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

    `num_cached` of its blocks are the tree's; `computed` tokens have their KV written.
    """

    namespace: bytes
    tokens: Tokens
    table: list[int]
    node: Node
    num_cached: int
    computed: int


class CacheManager:
    """Hands out blocks, and keeps what was computed."""

    def __init__(self, num_blocks: int, block_size: int, repoint: bool = True) -> None:
        self.block_size = block_size
        self.repoint = repoint
        self.free = list(range(num_blocks))
        self.tree = RadixTree(block_size)

    def available(self) -> int:
        """Count free blocks and those that can be evicted."""
        return len(self.free) + sum(len(node.blocks) for node in self.tree.unlocked())

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks, evicting what is short; None if there are too few."""
        if num_blocks > self.available():
            return None
        self.free += self.tree.evict(num_blocks - len(self.free))
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def start(self, namespace: bytes, tokens: Tokens) -> Request | None:
        """Begin a request with what is cached of all but its last token."""
        node, found = self.tree.walk(namespace, tokens[:-1])
        self.tree.lock(node, 1)
        new = self.allocate(-(-len(tokens) // self.block_size) - len(found))
        if new is None:
            self.tree.lock(node, -1)
            return None
        hit = len(found) * self.block_size
        return Request(namespace, tokens, found + new, node, len(found), hit)

    def cache_request(self, request: Request, finished: bool) -> None:
        """Keep what a request has computed. If it is finished, free the rest of its blocks."""
        num_whole = request.computed // self.block_size
        tokens = request.tokens[: num_whole * self.block_size]
        found = self.tree.insert(request.namespace, tokens, request.table[:num_whole])
        node, blocks = self.tree.walk(request.namespace, tokens)
        self.tree.lock(request.node, -1)
        self.free += request.table[request.num_cached : len(found)]  # copies of what was there
        if finished:
            self.free += request.table[num_whole:]
            return
        if self.repoint:
            request.table[:num_whole] = blocks
        self.tree.lock(node, 1)
        request.node, request.num_cached = node, num_whole


class MiniStyle:
    """The manager, as the specification drives it."""

    promises = Promises(hits_all=True, exact=True)

    def __init__(self, num_blocks: int, block_size: int, repoint: bool = True) -> None:
        self.manager = CacheManager(num_blocks, block_size, repoint)
        self.requests: dict[str, Request] = {}

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        request = self.manager.start(namespace, tuple(tokens))
        if request is None:
            return None
        self.requests[name] = request
        return request.computed

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request = self.requests[name]
        num_tokens = len(request.tokens) + len(tokens)
        short = -(-num_tokens // self.manager.block_size) - len(request.table)
        new = self.manager.allocate(short)
        if new is None:
            return False
        request.table += new
        request.tokens += tuple(tokens)
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        request = self.requests[name]
        request.computed = len(tokens)
        self.manager.cache_request(request, finished=False)

    def release(self, name: str) -> None:
        self.manager.cache_request(self.requests.pop(name), finished=True)

    def block_table(self, name: str) -> Sequence[int]:
        return self.requests[name].table

    def available(self) -> int:
        return self.manager.available()


def make(num_blocks: int, block_size: int) -> MiniStyle:
    """Make a manager with its adapter."""
    return MiniStyle(num_blocks, block_size)


def make_without_repointing(num_blocks: int, block_size: int) -> MiniStyle:
    """Make one whose requests keep pointing to the copies that it frees."""
    return MiniStyle(num_blocks, block_size, repoint=False)
