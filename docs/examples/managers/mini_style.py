"""The adapter of the manager in `mini_radix.py`."""

from __future__ import annotations

from collections.abc import Sequence

from mini_radix import CacheManager, Request

from radixkv.spec.adapters.cache import Promises
from radixkv.spec.adapters.recorder import recorded


class MiniStyle:
    """The adapter: the methods that the specification calls."""

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, counts_available=True
    )

    def __init__(self, num_blocks: int, block_size: int, repoint: bool = True) -> None:
        self.manager = recorded(CacheManager)(num_blocks, block_size, repoint)
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
    """Make a manager whose requests keep pointing to freed duplicates."""
    return MiniStyle(num_blocks, block_size, repoint=False)
