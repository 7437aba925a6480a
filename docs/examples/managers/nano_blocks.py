"""A manager of hashed blocks, in the style of nano-vllm.

A block without users goes to the end of the free queue and keeps its hash, so it can be found until
it is allocated again. There is no tree, and no separate eviction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(slots=True)
class Block:
    """A block, the number of requests that use it, and its hash; empty if it is not cached."""

    number: int
    users: int = 0
    hash: bytes = b""


def hash_block(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash a block's tokens together with the hash of the block before it."""
    return blake2b(before + repr(tuple(tokens)).encode(), digest_size=16).digest()


class BlockManager:
    """Allocates blocks, cached ones if possible."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free = deque(range(num_blocks))
        self.by_hash: dict[bytes, int] = {}

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the leading hashes."""
        found: list[int] = []
        for each in hashes:
            if each not in self.by_hash:
                break
            found.append(self.by_hash[each])
        return found

    def take(self, found: Sequence[int], num_new: int) -> list[int] | None:
        """Allocate found and new blocks; return None and change nothing if too few are free."""
        unused = [number for number in found if not self.blocks[number].users]
        if num_new > len(self.free) - len(unused):
            return None
        for number in unused:
            self.free.remove(number)
        new = [self.free.popleft() for _ in range(num_new)]
        for number in new:
            block = self.blocks[number]
            if block.hash:
                del self.by_hash[block.hash]
                block.hash = b""
        table = [*found, *new]
        for number in table:
            self.blocks[number].users += 1
        return table

    def share(self, table: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Enter blocks under their hashes; a duplicate stays private."""
        for number, each in zip(table, hashes, strict=False):
            if each not in self.by_hash:
                self.by_hash[each] = number
                self.blocks[number].hash = each

    def give_back(self, table: Sequence[int]) -> None:
        """Free blocks, the last ones first, so that they are reused first."""
        for number in reversed(table):
            block = self.blocks[number]
            block.users -= 1
            if not block.users:
                self.free.append(number)
