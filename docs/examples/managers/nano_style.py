"""A manager of hashed blocks, in the style of nano-vllm, and its adapter.

A block without users goes to the end of the free queue and keeps its hash, so it can be found until
it is allocated again. There is no tree, and no separate eviction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from radixkv.spec.adapters.cache import Promises


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


# [adapter]
@dataclass(slots=True)
class Request:
    """The state of a request that a scheduler would keep."""

    namespace: bytes
    table: list[int]
    num_tokens: int


class NanoStyle:
    """The adapter: the methods that the specification calls."""

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, counts_available=True
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.manager = BlockManager(num_blocks)
        self.requests: dict[str, Request] = {}

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        found = self.manager.find(self.hashes(namespace, tokens[:-1]))
        table = self.manager.take(found, self.blocks_for(len(tokens)) - len(found))
        if table is None:
            return None
        self.requests[name] = Request(namespace, table, len(tokens))
        return len(found) * self.block_size

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request = self.requests[name]
        num_tokens = request.num_tokens + len(tokens)
        new = self.manager.take([], self.blocks_for(num_tokens) - len(request.table))
        if new is None:
            return False
        request.table += new
        request.num_tokens = num_tokens
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        request = self.requests[name]
        self.manager.share(request.table, self.hashes(request.namespace, tokens))

    def release(self, name: str) -> None:
        self.manager.give_back(self.requests.pop(name).table)

    def block_table(self, name: str) -> Sequence[int]:
        return self.requests[name].table

    def available(self) -> int:
        return len(self.manager.free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hashes(self, namespace: bytes, tokens: Sequence[int]) -> list[bytes]:
        hashes = [namespace]
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            hashes.append(hash_block(hashes[-1], tokens[end - self.block_size : end]))
        return hashes[1:]


def make(num_blocks: int, block_size: int) -> NanoStyle:
    """Make a manager with its adapter."""
    return NanoStyle(num_blocks, block_size)
