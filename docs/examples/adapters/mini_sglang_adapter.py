r"""Adapter for mini-sglang's `CacheManager` over its radix cache.

It needs mini-sglang's sources and some of its dependencies. It runs on any CPU::

    pip install torch transformers apache-tvm-ffi msgpack pyzmq
    git clone https://github.com/sgl-project/mini-sglang
    PYTHONPATH=mini-sglang/python radixkv fuzz --target \
        docs/examples/adapters/mini_sglang_adapter.py:make

Block b is the token slots from b * block_size on. Like mini-sglang's scheduler, the adapter
publishes when the prompt is computed, with ``cache_req(finished=False)``, and when a request ends.

`make_repointed` repairs the mistake that is found, to search for others. `make_uncounted` reports
no available block while a request runs. This silences the rules about counts, so that the search
finds a consequence of the mistake instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from radixkv.spec.adapters.cache import Promises

try:
    import minisgl.core
    import torch
    from minisgl.scheduler.cache import CacheManager
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}: `pip install torch transformers apache-tvm-ffi msgpack pyzmq`, then clone"
        " mini-sglang and put its folder python on PYTHONPATH"
    ) from error

VERSION = "mini-sglang 20fcd7f"  # the tested commit; mini-sglang has no releases
NUM_ROWS = 16  # more requests than ever run at once

torch.set_num_threads(1)
_empty = torch.empty
torch.empty = lambda *size, pin_memory=False, **options: _empty(*size, **options)  # no GPU


class MiniSGLang:
    """A request is a row of the page table. An offset of its tokens stands for the namespace."""

    promises = Promises(
        refuses_only_short=True, holds_exactly=True, one_copy=True, leaves_first=True,
        frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, repoint: bool = False) -> None:
        minisgl.core._GLOBAL_CTX = None  # the manager reads its page size from a global
        minisgl.core.set_global_ctx(minisgl.core.Context(block_size))
        self.block_size = block_size
        self.repoint = repoint
        self.table = torch.zeros((NUM_ROWS, (num_blocks + 1) * block_size), dtype=torch.int32)
        self.rows = list(range(NUM_ROWS))
        self.manager = CacheManager(num_blocks, block_size, self.table, "radix")
        self.requests: dict[str, Any] = {}
        self.name = ""

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        self.name = name
        tenant = len(namespace) << 24
        ids = torch.tensor([token + tenant for token in tokens], dtype=torch.int32)
        pending = SimpleNamespace(input_ids=ids, input_len=len(ids))
        handle = self.manager.match_req(pending).cuda_handle
        num_hit = int(handle.cached_len)
        self.manager.lock(handle)
        if not self._is_room(self._num_blocks(len(ids)) - num_hit // self.block_size):
            self.manager.unlock(handle)
            return None
        row = self.rows.pop()
        if num_hit:
            self.table[row, :num_hit].copy_(handle.get_matched_indices())
        request = SimpleNamespace(
            input_ids=ids, table_idx=row, cached_len=num_hit, device_len=len(ids),
            cache_handle=handle, tenant=tenant, num_prompt=len(ids), is_prefill=True,
        )  # fmt: skip
        self.manager.allocate_paged([request])
        self.requests[name] = request
        return num_hit

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request, self.name = self.requests[name], name
        end = request.device_len + len(tokens)
        if self._num_blocks(end) - self._num_blocks(request.device_len) > MiniSGLang.available(
            self
        ):
            return False
        more = torch.tensor([token + request.tenant for token in tokens], dtype=torch.int32)
        request.input_ids, request.device_len = torch.cat([request.input_ids, more]), end
        self.manager.allocate_paged([request])
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        request, self.name = self.requests[name], name
        request.cached_len = len(tokens)
        if not request.is_prefill or len(tokens) < request.num_prompt:
            return
        request.is_prefill = False
        self.manager.cache_req(request, finished=False)
        num_cached = int(request.cache_handle.cached_len)
        if self.repoint and num_cached:
            cached = request.cache_handle.get_matched_indices()
            self.table[request.table_idx, :num_cached].copy_(cached)

    def release(self, name: str) -> None:
        request, self.name = self.requests.pop(name), name
        computed = self._num_blocks(request.cached_len) * self.block_size
        held = self._num_blocks(request.device_len) * self.block_size
        self.manager.cache_req(request, finished=True)
        # mini-sglang allocates per chunk, so its requests never end with more blocks than computed.
        self.manager._free(self.table[request.table_idx, computed:held])
        self.rows.append(request.table_idx)

    def block_table(self, name: str) -> Sequence[int]:
        request = self.requests[name]
        slots = self.table[request.table_idx, : request.device_len : self.block_size].tolist()
        return [slot // self.block_size for slot in slots]

    def available(self) -> int:
        return int(self.manager.available_size) // self.block_size

    def _is_room(self, num_blocks: int) -> bool:
        return num_blocks * self.block_size <= self.manager.available_size

    def report_to(self, events: Any) -> None:
        manager, cache = self.manager, self.manager.prefix_cache
        free, insert, match = manager._free, cache.insert_prefix, cache.match_prefix
        allocate, evict = manager._allocate, cache.evict

        def blocks(slots: Any) -> list[int]:
            return [slot // self.block_size for slot in slots.tolist()[:: self.block_size]]

        def path(handle: Any) -> list[int]:
            return blocks(handle.get_matched_indices()) if handle.cached_len else []

        def free_and_report(slots: Any) -> None:
            free(slots)
            if len(slots):
                events.freed(blocks(slots))

        def insert_and_report(ids: Any, slots: Any) -> Any:
            result = insert(ids, slots)
            new = blocks(slots[result.cached_len : result.handle.cached_len])
            if new:
                events.published(self.name, new)
            events.used(path(result.handle))
            return result

        def match_and_report(ids: Any) -> Any:
            result = match(ids)
            events.used(path(result.cuda_handle))
            return result

        def evict_and_report(size: int) -> Any:
            slots = evict(size)
            events.evicted(blocks(slots))
            events.freed(blocks(slots))
            return slots

        def allocate_and_report(num_pages: int) -> Any:
            slots = allocate(num_pages)
            events.allocated(self.name, [slot // self.block_size for slot in slots.tolist()])
            return slots

        manager._free, manager._allocate = free_and_report, allocate_and_report
        cache.insert_prefix, cache.match_prefix = insert_and_report, match_and_report
        cache.evict = evict_and_report

    def check(self) -> None:
        if not self.requests:  # it holds only while no request runs
            self.manager.check_integrity()

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def make(num_blocks: int, block_size: int) -> MiniSGLang:
    """Make a manager with its adapter."""
    return MiniSGLang(num_blocks, block_size)


class Uncounted(MiniSGLang):
    """Reports no available block while a request runs."""

    promises = Promises()

    def available(self) -> int:
        return 0 if self.requests else super().available()


def make_uncounted(num_blocks: int, block_size: int) -> MiniSGLang:
    """Make a manager that reports no available block while a request runs."""
    return Uncounted(num_blocks, block_size)


def make_repointed(num_blocks: int, block_size: int) -> MiniSGLang:
    """Make a manager whose page table points to the tree's blocks after each publication."""
    return MiniSGLang(num_blocks, block_size, repoint=True)
