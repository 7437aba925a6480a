"""A manager with a trie of single blocks, in the design of LMDeploy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

from radixkv.spec.adapters.cache import Promises

Tokens: TypeAlias = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A cached block; the tree itself is one of its references."""

    tokens: Tokens
    block: int
    parent: Node | None = None
    children: dict[Tokens, Node] = field(default_factory=dict)
    last_access: int = 0

    def below(self) -> Iterator[Node]:
        for child in self.children.values():
            yield child
            yield from child.below()


@dataclass
class Request:
    """`node` is the last node of the trie on its path."""

    namespace: bytes
    tokens: Tokens
    table: list[int]
    node: Node
    num_cached: int


class LMDeploy:
    """Blocks with reference counts. A block that only the trie refers to is evicted, leaf by leaf.

    A match and an allocation access a path. A duplicate is replaced by the block of the trie.
    """

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, one_copy=True,
        shares_duplicates=True, leaves_first=True, evicts_exactly=True, lru=True,
        frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.roots: dict[bytes, Node] = {}
        self.requests: dict[str, Request] = {}
        self.clock = count(1)
        self.events: Any = None

    def report_to(self, events: Any) -> None:
        self.events = events

    def report(self, event: str, *arguments: Any) -> None:
        if self.events is not None:
            getattr(self.events, event)(*arguments)

    # The trie

    def walk(self, namespace: bytes, tokens: Tokens) -> list[Node]:
        """Access the cached blocks of a prefix; the first node is the root."""
        now, path = next(self.clock), [self.roots.setdefault(namespace, Node((), -1))]
        while child := path[-1].children.get(self.chunk(tokens, len(path) - 1)):
            child.last_access = now
            path.append(child)
        self.report("used", [node.block for node in path[1:]])
        return path

    def chunk(self, tokens: Tokens, index: int) -> Tokens:
        return tokens[index * self.block_size : (index + 1) * self.block_size]

    def idle(self) -> list[Node]:
        nodes = [node for root in self.roots.values() for node in root.below()]
        return [node for node in nodes if self.refs[node.block] == 1]

    def evict(self, num_blocks: int) -> int:
        evicted: list[int] = []
        while len(evicted) < num_blocks and (idle := self.idle()):
            leaves = [node for node in idle if not node.children]
            node = min(leaves, key=lambda node: node.last_access)
            assert node.parent is not None
            del node.parent.children[node.tokens]
            evicted.append(node.block)
            self.report("evicted", [node.block])
            self.unref([node.block])
        return len(evicted)

    # The blocks

    def unref(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)
                self.report("freed", [block])

    def available(self) -> int:
        return len(self.free) + len(self.idle())

    def allocate(self, name: str, request: Request, num_tokens: int) -> bool:
        short = -(-num_tokens // self.block_size) - len(request.table)
        if short > self.available():
            return False
        self.evict(short - len(self.free))
        new = [self.free.pop() for _ in range(short)]
        for block in new:
            self.refs[block] = 1
        request.table += new
        self.report("allocated", name, new)
        return True

    # Requests

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        path = self.walk(namespace, tuple(tokens[:-1]))
        found = [node.block for node in path[1:]]
        for block in found:
            self.refs[block] += 1
        request = Request(namespace, tuple(tokens), found, path[-1], len(found))
        if not self.allocate(name, request, len(tokens)):
            self.unref(found)
            return None
        self.requests[name] = request
        return request.num_cached * self.block_size

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request = self.requests[name]
        if not self.allocate(name, request, len(request.tokens) + len(tokens)):
            return False
        request.tokens += tuple(tokens)
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        request, now = self.requests[name], next(self.clock)
        for index in range(request.num_cached, len(tokens) // self.block_size):
            block, chunk = request.table[index], self.chunk(request.tokens, index)
            child = request.node.children.get(chunk)
            if child is None:
                child = Node(chunk, block, request.node, last_access=now)
                request.node.children[chunk] = child
                self.refs[block] += 1
                self.report("published", name, [block])
            else:
                request.table[index] = child.block
                self.refs[child.block] += 1
                self.give_up(name, block)
            request.node, request.num_cached = child, index + 1

    def give_up(self, name: str, block: int) -> None:
        """Free a duplicate, to which no table points now."""
        self.unref([block])

    def release(self, name: str) -> None:
        self.unref(self.requests.pop(name).table)

    def block_table(self, name: str) -> list[int]:
        return self.requests[name].table


class Ahead(LMDeploy):
    """The same for an engine with steps in flight: `steps` has the blocks that each may read.

    A duplicate that a step in flight may read is in `kept` until the step has ended.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.steps: list[set[int]] = []
        self.kept: list[int] = []

    def is_read(self, block: int) -> bool:
        return any(block in step for step in self.steps)

    def begin_step(self) -> None:
        tables = [request.table for request in self.requests.values()]
        self.steps.append(set().union(*tables))

    def end_step(self) -> None:
        del self.steps[0]
        over = [block for block in self.kept if not self.is_read(block)]
        self.kept = [block for block in self.kept if block not in over]
        self.unref(over)

    def allocate(self, name: str, request: Request, num_tokens: int) -> bool:
        num_held, done = len(request.table), super().allocate(name, request, num_tokens)
        for step in self.steps:
            step.difference_update(request.table[num_held:])
        return done

    def give_up(self, name: str, block: int) -> None:
        if self.is_read(block):
            self.kept.append(block)
            self.report("replaced", name, [block])
        else:
            self.unref([block])


class Lookahead(LMDeploy):
    """The same with lookahead slots: a request also takes free blocks for its next tokens."""

    promises = replace(LMDeploy.promises, holds_exactly=False)
    slots = 8

    def allocate(self, name: str, request: Request, num_tokens: int) -> bool:
        if not super().allocate(name, request, num_tokens):
            return False
        room = (len(request.table) + len(self.free)) * self.block_size
        return super().allocate(name, request, min(num_tokens + self.slots, room))
