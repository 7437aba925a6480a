"""Adapter for SGLang's `RadixCache` over its page allocator.

It needs SGLang's sources and those of its dependencies that run on a CPU::

    pip install torch transformers compressed-tensors gguf  # and what the error then names
    pip download --no-deps sglang && unzip sglang-*.whl -d sglang-unpacked
    PYTHONPATH=sglang-unpacked radixkv fuzz --target docs/examples/adapters/sglang_adapter.py:make

``sglang_adapter.py:make_unified`` tests the newer `UnifiedRadixCache`. The `RadixCache` can be
tested at depth ``events`` too, and `make_aged` promises its order of eviction there. Pages come
from `alloc`, because `alloc_extend` is a GPU kernel. Requests have only the fields that the cache
reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from stubs import stub_modules

from radixkv.spec.adapters.cache import Promises

# The cache imports these but does not call them. Some need GPU libraries.
stub_modules(
    *(f"sglang.srt.{name}" for name in (
        "configs", "constrained", "entrypoints", "multimodal", "parser",
    ))
)  # fmt: skip

try:
    import torch
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.version import __version__
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}: `pip install torch` and the module named here; for sglang itself"
        " `pip download --no-deps sglang`, unzip the wheel and put that folder on PYTHONPATH"
    ) from error

VERSION = f"sglang {__version__}"
NUM_ROWS = 16  # more requests than ever run at once

torch.set_num_threads(1)


class SGLang:
    """A request is a row of token slots. Block b is the slots from b * block_size on."""

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, one_copy=True,
        shares_duplicates=True, leaves_first=True, frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, unified: bool = False) -> None:
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.rows = ReqToTokenPool(NUM_ROWS, self.num_slots + block_size, "cpu", False)
        if block_size == 1:
            self.pool = TokenToKVPoolAllocator(self.num_slots, torch.float16, "cpu", None, False)
        else:
            self.pool = PagedTokenToKVPoolAllocator(
                self.num_slots, block_size, torch.float16, "cpu", None, False
            )
        self.unified = unified
        self.cache = self._make_cache()
        self.requests: dict[str, Any] = {}
        self.name = ""

    def _make_cache(self) -> Any:
        fields: dict[str, Any] = {
            "disable": False,
            "page_size": self.block_size,
            "req_to_token_pool": self.rows,
            "token_to_kv_pool_allocator": self.pool,
        }
        if not self.unified:
            return RadixCache(CacheInitParams(**fields))
        return UnifiedRadixCache(CacheInitParams(**fields, tree_components=(ComponentType.FULL,)))

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        self.name = name
        ids, extra_key = array("q", tokens), namespace.decode() or None
        key = RadixKey(ids, extra_key, limit=len(ids) - 1)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        node, num_hit = match.last_device_node, int(match.device_prefix_len)
        lock = self.cache.lock(node)
        if self._whole(len(ids)) - num_hit > self._available_slots():
            self.cache.unlock(lock)
            return None
        (row,) = self.rows.alloc_rows(1)
        if num_hit:
            self.rows.write((row, slice(0, num_hit)), self.cache.path_device_indices(node))
        self._allocate(row, num_hit, len(ids))
        self.requests[name] = SimpleNamespace(
            rid=name, kv=ReqKvInfo(req_pool_idx=row, cache_protected_len=num_hit), lock=lock,
            last_node=node, origin_input_ids=ids, full_untruncated_fill_ids=ids,
            extra_key=extra_key, finished=lambda: False, cache_salt=None, priority=0, session=None,
            session_id=None, kv_rotation_base=None,
        )  # fmt: skip
        return num_hit

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request, self.name = self.requests[name], name
        start = len(request.full_untruncated_fill_ids)
        end = start + len(tokens)
        if self._whole(end) - self._whole(start) > self._available_slots():
            return False
        self._allocate(request.kv.req_pool_idx, self._whole(start), end)
        request.full_untruncated_fill_ids = request.full_untruncated_fill_ids + array("q", tokens)
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        self.name = name
        self.cache.checkpoint(self.requests[name], up_to=len(tokens))

    def release(self, name: str) -> None:
        request = self.requests.pop(name)
        row, end = request.kv.req_pool_idx, len(request.full_untruncated_fill_ids)
        self.cache.free_kv_row(request.kv, [(request.kv.cache_protected_len, end)])
        self.cache.unlock(request.lock)
        self.rows.free_rows([row])

    def block_table(self, name: str) -> Sequence[int]:
        request = self.requests[name]
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        end = len(request.full_untruncated_fill_ids)
        return [slot // self.block_size for slot in row[: end : self.block_size].tolist()]

    def available(self) -> int:
        return self._available_slots() // self.block_size

    def reset(self) -> None:
        # Like SGLang's scheduler: retract running requests, then clear the tree and the pools.
        for name in list(self.requests):
            self.release(name)
        self.cache.reset()
        self.rows.clear()
        self.pool.clear()

    def report_to(self, events: Any) -> None:
        """Report the events of a `RadixCache`, by wrapping methods of it and of its pool."""
        cache, pool = self.cache, self.pool
        match_prefix, insert, evict = cache.match_prefix, cache.insert, cache.evict
        delete_leaf, free_segment, alloc = cache._delete_leaf, pool.free_segment, pool.alloc
        evicted: list[int] | None = None

        def match_and_report(params: Any) -> Any:
            result = match_prefix(params)
            events.used(self._blocks(cache.path_device_indices(result.last_device_node)))
            return result

        def insert_and_report(params: Any) -> Any:
            result = insert(params)
            path = self._blocks(cache.path_device_indices(result.last_device_node))
            new = self._blocks(params.value[result.prefix_len :])
            if new:
                events.published(self.name, new)
            events.used(path)
            return result

        def evict_and_report(params: Any) -> Any:
            nonlocal evicted
            evicted = []
            result = evict(params)
            events.evicted(evicted)
            events.freed(evicted)
            evicted = None
            return result

        def delete_and_collect(node: Any) -> None:
            assert evicted is not None, "a leaf is deleted by an eviction"
            evicted.extend(self._blocks(node.value))
            delete_leaf(node)

        def free_and_report(slots: Any, *, start_pos: int) -> None:
            free_segment(slots, start_pos=start_pos)
            if evicted is None and len(slots):
                events.freed(self._blocks(slots))

        def alloc_and_report(num_slots: int) -> Any:
            slots = alloc(num_slots)
            events.allocated(self.name, self._blocks(slots))
            return slots

        cache.match_prefix, cache.insert, cache.evict = (
            match_and_report, insert_and_report, evict_and_report
        )  # fmt: skip
        cache._delete_leaf, pool.free_segment = delete_and_collect, free_and_report
        pool.alloc = alloc_and_report

    def _blocks(self, slots: Any) -> list[int]:
        return [slot // self.block_size for slot in slots.tolist()[:: self.block_size]]

    def _available_slots(self) -> int:
        return int(self.pool.available_size() + self.cache.evictable_size())

    def _whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.block_size

    def _allocate(self, row: int, start: int, end: int) -> None:
        """Allocate the slots of a row from the start of a block on, and evict if necessary."""
        end = self._whole(end)
        if start < end:
            self.pool.evict_to_free_tokens(self.cache, end - start)
            self.rows.write((row, slice(start, end)), self.pool.alloc(end - start))


def make(num_blocks: int, block_size: int) -> SGLang:
    """Make a `RadixCache` with its adapter."""
    return SGLang(num_blocks, block_size)


class Aged(SGLang):
    """Promises the order of eviction too."""

    promises = replace(SGLang.promises, lru=True)


def make_aged(num_blocks: int, block_size: int) -> SGLang:
    """Make a `RadixCache` that promises to evict what was matched or inserted longest ago."""
    return Aged(num_blocks, block_size)


def make_unified(num_blocks: int, block_size: int) -> SGLang:
    """Make a `UnifiedRadixCache` with its adapter."""
    return SGLang(num_blocks, block_size, unified=True)
