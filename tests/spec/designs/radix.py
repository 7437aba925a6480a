"""Managers with a radix tree of whole nodes: of SGLang, of mini-sglang, and of LightLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from radixkv.spec.adapters.cache import Promises

Tokens: TypeAlias = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A run of whole blocks; `locks` counts the requests that use it or a node below it."""

    tokens: Tokens
    blocks: list[int]
    parent: Node | None = None
    children: dict[Tokens, Node] = field(default_factory=dict)
    locks: int = 0
    last_access: int = 0

    def below(self) -> Iterator[Node]:
        yield self
        for child in self.children.values():
            yield from child.below()


@dataclass
class Request:
    """`table[:num_cached]` belongs to the tree, locked through `node`."""

    namespace: bytes
    tokens: Tokens
    table: list[int]
    node: Node
    num_cached: int
    computed: int


class SGLang:
    """A match and an insertion access a path; the leaf of the oldest access is evicted whole.

    The computed blocks are inserted after each step. A duplicate is freed, and the table points to
    the block of the tree.
    """

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, one_copy=True,
        shares_duplicates=True, leaves_first=True, lru=True, frees_at_once=True,
        counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.roots: dict[bytes, Node] = {}
        self.clock = count(1)
        self.requests: dict[str, Request] = {}
        self.events: Any = None

    def report_to(self, events: Any) -> None:
        self.events = events

    def report(self, event: str, *arguments: Any) -> None:
        if self.events is not None:
            getattr(self.events, event)(*arguments)

    # The tree

    def walk(self, namespace: bytes, tokens: Tokens) -> tuple[Node, list[int]]:
        """Access the longest cached prefix; return the node where it ends and its blocks."""
        node, now = self.roots.setdefault(namespace, Node((), [])), next(self.clock)
        size, found = self.block_size, list[int]()
        while child := node.children.get(tokens[len(found) * size :][:size]):
            rest = tokens[len(found) * size :]
            same = 1
            while (
                same < len(child.blocks)
                and child.tokens[same * size :][:size] == rest[same * size :][:size]
            ):
                same += 1
            node = child if same == len(child.blocks) else self.split(child, same)
            node.last_access = now
            found += node.blocks
        self.report("used", found)
        return node, found

    def split(self, node: Node, num_blocks: int) -> Node:
        """Split a node; return the upper part. The lower part keeps its access."""
        size = num_blocks * self.block_size
        upper = Node(node.tokens[:size], node.blocks[:num_blocks], node.parent)
        upper.locks, upper.last_access = node.locks, node.last_access
        self.attach(upper)
        node.tokens, node.blocks, node.parent = node.tokens[size:], node.blocks[num_blocks:], upper
        self.attach(node)
        return upper

    def attach(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.tokens[: self.block_size]] = node

    def lock(self, node: Node | None, change: int) -> None:
        while node is not None:
            node.locks += change
            node = node.parent

    def unlocked(self) -> list[Node]:
        nodes = [node for root in self.roots.values() for node in root.below()]
        return [node for node in nodes if node.parent and not node.locks]

    def evict(self, num_blocks: int) -> int:
        """Evict whole leaves with at least so many blocks together."""
        evicted: list[int] = []
        while len(evicted) < num_blocks and (unlocked := self.unlocked()):
            leaves = [node for node in unlocked if not node.children]
            coldest = min(leaves, key=lambda node: node.last_access)
            assert coldest.parent is not None
            del coldest.parent.children[coldest.tokens[: self.block_size]]
            evicted += coldest.blocks
        self.report("evicted", evicted)
        self.give_back(evicted)
        return len(evicted)

    # The blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        self.free += blocks
        self.report("freed", blocks)

    def available(self) -> int:
        return len(self.free) + sum(len(node.blocks) for node in self.unlocked())

    def allocate(self, name: str, request: Request, num_tokens: int) -> bool:
        short = -(-num_tokens // self.block_size) - len(request.table)
        if short > self.available():
            return False
        if short > len(self.free):
            self.evict(short - len(self.free))
        new, self.free = self.free[:short], self.free[short:]
        request.table += new
        self.report("allocated", name, new)
        return True

    # Requests

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        node, found = self.walk(namespace, tuple(tokens[:-1]))
        self.lock(node, 1)
        hit = len(found) * self.block_size
        request = Request(namespace, tuple(tokens), found, node, len(found), hit)
        if not self.allocate(name, request, len(tokens)):
            self.lock(node, -1)
            return None
        self.requests[name] = request
        return hit

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request = self.requests[name]
        if not self.allocate(name, request, len(request.tokens) + len(tokens)):
            return False
        request.tokens += tuple(tokens)
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        self.requests[name].computed = len(tokens)
        self.insert(name)

    def insert(self, name: str) -> None:
        """Insert the computed blocks; the request then uses those of the tree."""
        request = self.requests[name]
        last = request.computed // self.block_size
        tokens = request.tokens[: last * self.block_size]
        node, found = self.walk(request.namespace, tokens)
        copies = request.table[request.num_cached : len(found)]
        if len(found) < last:
            new = request.table[len(found) : last]
            rest = tokens[len(found) * self.block_size :]
            node = Node(rest, new, node, last_access=next(self.clock))
            self.attach(node)
            self.report("published", name, new)
            found = found + new
        request.table[:last] = found
        self.give_back(copies)
        self.lock(node, 1)
        self.lock(request.node, -1)
        request.node, request.num_cached = node, last

    def release(self, name: str) -> None:
        request = self.requests.pop(name)
        self.lock(request.node, -1)
        self.give_back(request.table[request.num_cached :])

    def block_table(self, name: str) -> list[int]:
        return self.requests[name].table

    def reset(self) -> None:
        self.free = list(range(self.num_blocks))
        self.roots.clear()
        self.requests.clear()


class MiniSGLang(SGLang):
    """Inserts when the prompt is computed and when the request ends, not after each step.

    The released one frees a duplicate and leaves it in the table: that is its pull request 142.
    """

    promises = Promises(
        refuses_only_short=True, holds_exactly=True, one_copy=True, leaves_first=True, lru=True,
        frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.prompts: dict[str, int] = {}

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        hit = super().admit(name, tokens, namespace)
        if hit is not None:
            self.prompts[name] = len(tokens)
        return hit

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        self.requests[name].computed = len(tokens)
        if len(tokens) == self.prompts[name]:
            self.insert(name)

    def release(self, name: str) -> None:
        self.insert(name)
        super().release(name)


class LightLLM(SGLang):
    """A block is a token."""

    block_sizes = (1,)


class LazySGLang(SGLang):
    """Collects freed blocks, and frees them in the next call that needs or counts some."""

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, one_copy=True,
        leaves_first=True, lru=True, counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.later: list[int] = []

    def give_back(self, blocks: Sequence[int]) -> None:
        self.later += blocks

    def allocate(self, name: str, request: Request, num_tokens: int) -> bool:
        self.settle()
        return super().allocate(name, request, num_tokens)

    def evict(self, num_blocks: int) -> int:
        evicted = super().evict(num_blocks)
        self.settle()
        return evicted

    def settle(self) -> None:
        self.free += self.later
        self.report("freed", self.later)
        self.later = []

    def available(self) -> int:
        return super().available() + len(self.later)

    def reset(self) -> None:
        self.later = []
        super().reset()
