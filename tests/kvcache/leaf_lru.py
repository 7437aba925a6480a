"""The oracle of the prefix cache: blocks one by one, evicted as a leaf LRU. Slow, and obvious."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = tuple[bytes, tuple[int, ...]]
"""A published block: its namespace, and all tokens from the first of the sequence to its last."""


@dataclass
class Entry:
    block: int
    users: int
    last_use: int = 0


class LeafLru:
    """Which blocks are published, who uses them, and which is evicted next."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.entries: dict[Key, Entry] = {}
        self.clock = 0

    def path(self, namespace: bytes, tokens: Sequence[int]) -> list[Key]:
        """The keys of the whole blocks of tokens."""
        size = self.block_size
        return [
            (namespace, tuple(tokens[: end + size]))
            for end in range(0, len(tokens) - size + 1, size)
        ]

    def hit(self, path: Sequence[Key]) -> int:
        """How many blocks of a path are published, from the first on."""
        for num_blocks, key in enumerate(path):
            if key not in self.entries:
                return num_blocks
        return len(path)

    @property
    def num_idle(self) -> int:
        return self.count_idle(list(self.entries))

    def count_idle(self, keys: Sequence[Key]) -> int:
        return sum(self.entries[key].users == 0 for key in keys)

    def blocks(self, keys: Sequence[Key]) -> list[int]:
        return [self.entries[key].block for key in keys]

    def pin(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.entries[key].users += 1

    def unpin(self, keys: Sequence[Key]) -> None:
        """One user leaves: the blocks that nobody else uses were last used now."""
        self.clock += 1
        for key in keys:
            entry = self.entries[key]
            entry.users -= 1
            if entry.users == 0:
                entry.last_use = self.clock

    def evict(self, num_blocks: int) -> list[Key]:
        """Take blocks out: each the unused leaf used longest ago, the deepest of equals."""
        victims = []
        for _ in range(min(num_blocks, self.num_idle)):
            parents = {(ns, tokens[: -self.block_size]) for ns, tokens in self.entries}
            victim = min(
                (
                    key
                    for key, entry in self.entries.items()
                    if entry.users == 0 and key not in parents
                ),
                key=lambda key: (self.entries[key].last_use, -len(key[1])),
            )
            del self.entries[victim]
            victims.append(victim)
        return victims
