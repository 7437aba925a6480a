"""A small block manager with a prefix cache. It loses blocks: see `ToyCache.publish`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from radixkv.spec.adapters.cache import Promises

Prefix: TypeAlias = tuple[bytes, tuple[int, ...]]


class ToyCache:
    """A dictionary from prefixes to blocks. It has the methods that the specification calls."""

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, counts_available=True
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.cached: dict[Prefix, int] = {}
        self.users: dict[int, int] = {}  # by cached block
        self.running: dict[str, tuple[bytes, list[int], int]] = {}  # namespace, table, tokens

    def prefixes(self, namespace: bytes, tokens: Sequence[int]) -> list[Prefix]:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        table: list[int] = []
        for prefix in self.prefixes(namespace, tokens[:-1]):
            if prefix not in self.cached:
                break
            table.append(self.cached[prefix])
        hits = list(table)
        for block in hits:
            self.users[block] += 1
        self.running[name] = namespace, table, 0
        if not self.append(name, tokens):
            self.release(name)
            return None
        return len(hits) * self.block_size

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        namespace, table, length = self.running[name]
        length += len(tokens)
        short = -(-length // self.block_size) - len(table)
        if short > self.available():
            return False
        while len(self.free) < short:
            prefix = next(prefix for prefix, block in self.cached.items() if not self.users[block])
            block = self.cached.pop(prefix)
            del self.users[block]
            self.free.append(block)
        table += [self.free.pop() for _ in range(short)]
        self.running[name] = namespace, table, length
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        namespace, table, _ = self.running[name]
        for index, prefix in enumerate(self.prefixes(namespace, tokens)):
            block = self.cached.setdefault(prefix, table[index])
            if block != table[index]:
                # Another request was first: use its block. The duplicate is lost here.
                table[index] = block
                self.users[block] += 1
            elif block not in self.users:
                self.users[block] = 1

    def release(self, name: str) -> None:
        for block in self.running.pop(name)[1]:
            if block in self.users:
                self.users[block] -= 1
            else:
                self.free.append(block)

    def block_table(self, name: str) -> Sequence[int]:
        return self.running[name][1]

    def available(self) -> int:
        return len(self.free) + sum(not users for users in self.users.values())


def make(num_blocks: int, block_size: int) -> ToyCache:
    """Make a manager; it is its own adapter."""
    return ToyCache(num_blocks, block_size)
