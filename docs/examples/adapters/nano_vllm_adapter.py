"""Adapter for nano-vllm's `BlockManager`, at the depths api and events.

It needs nano-vllm's sources and two packages. It runs on any CPU::

    pip install numpy xxhash
    git clone https://github.com/GeeeekExplorer/nano-vllm
    PYTHONPATH=nano-vllm radixkv fuzz --target docs/examples/adapters/nano_vllm_adapter.py:NanoVLLM

A block of one token is impossible: nano-vllm allocates a block when the number of tokens modulo
the block size is 1. Its configuration allows multiples of 256 only; the manager does not care.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stubs import stub_modules

from radixkv.spec.adapters.cache import Promises
from radixkv.spec.adapters.recorder import recorded

stub_modules("nanovllm.llm")  # the package imports its engine, which needs a GPU

try:
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.sequence import Sequence as Request
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}: `pip install numpy xxhash`, then clone nano-vllm and put it on PYTHONPATH"
    ) from error

VERSION = "nano-vllm bb823b3"  # the tested commit


class NanoVLLM:
    """A request is a `Sequence`. An offset of its tokens stands for the namespace."""

    # A copy of a block replaces the one before it, which can no longer be hit.
    promises = Promises(
        refuses_only_short=True, holds_exactly=True, leaves_first=True, lru=True,
        ages_from_release=True, frees_at_once=True, counts_available=True,
    )  # fmt: skip
    block_sizes = (2, 3, 4, 256)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        Request.block_size = block_size
        self.block_size = block_size
        self.manager: Any = recorded(BlockManager)(num_blocks, block_size)
        self.requests: dict[str, Any] = {}
        self.tenants: dict[str, int] = {}
        self.name = ""

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        tenant = len(namespace) << 24
        request: Any = recorded(Request)([token + tenant for token in tokens])
        num_hit = self.manager.can_allocate(request)
        if num_hit < 0:
            return None
        self.name, self.requests[name], self.tenants[name] = name, request, tenant
        self.manager.allocate(request, num_hit)
        return int(num_hit * self.block_size)

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request, self.name = self.requests[name], name
        held = -(-len(request) // self.block_size)
        if -(-(len(request) + len(tokens)) // self.block_size) - held > self.available():
            return False
        for token in tokens:
            request.append_token(token + self.tenants[name])
            assert self.manager.can_append(request), "there is room"
            self.manager.may_append(request)
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        request, self.name = self.requests[name], name
        request.num_scheduled_tokens = len(tokens) - request.num_cached_tokens
        self.manager.hash_blocks(request)
        request.num_cached_tokens = len(tokens)

    def release(self, name: str) -> None:
        self.manager.deallocate(self.requests.pop(name))

    def block_table(self, name: str) -> Sequence[int]:
        table: list[int] = self.requests[name].block_table
        return list(table)

    def available(self) -> int:
        return len(self.manager.free_block_ids)

    def report_to(self, events: Any) -> None:
        manager = self.manager
        allocate, deallocate = manager._allocate_block, manager._deallocate_block
        hash_blocks = manager.hash_blocks

        def allocate_block() -> int:
            block: int = manager.free_block_ids[0]
            if manager.blocks[block].hash != -1:
                events.evicted([block])
            events.allocated(self.name, [block])
            allocated: int = allocate()
            return allocated

        def deallocate_block(block: int) -> None:
            if manager.blocks[block].hash == -1:
                events.freed([block])
            deallocate(block)

        def hash_and_report(request: Any) -> None:
            start = request.num_cached_tokens // self.block_size
            hash_blocks(request)
            end = (request.num_cached_tokens + request.num_scheduled_tokens) // self.block_size
            events.published(self.name, request.block_table[start:end])

        manager._allocate_block, manager._deallocate_block = allocate_block, deallocate_block
        manager.hash_blocks = hash_and_report
