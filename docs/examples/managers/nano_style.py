"""The adapter of the manager in `nano_blocks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nano_blocks import BlockManager, hash_block

from radixkv.spec.adapters.cache import Promises
from radixkv.spec.adapters.recorder import recorded


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
        self.manager = recorded(BlockManager)(num_blocks)
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
            block = tokens[end - self.block_size : end]
            hashes.append(recorded(hash_block)(hashes[-1], block))
        return hashes[1:]


def make(num_blocks: int, block_size: int) -> NanoStyle:
    """Make a manager with its adapter."""
    return NanoStyle(num_blocks, block_size)
