"""Adapters that give the cache manager and its peers one interface, for `peers.py`.

Only the peer's own classes run, on the CPU. The docstring of each adapter lists the differences
from its use on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from array import array
from collections.abc import MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, TypeAlias

from radixkv.kvcache import CacheManager
from radixkv.kvcache.tokens import Int32Array

Given: TypeAlias = Int32Array | list[int]


class Adapter(Protocol):
    """Interface of a manager in the benchmark."""

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int) -> None:
        """Make a manager of num_blocks blocks for requests of up to max_tokens tokens."""

    def load(self, tokens: Given) -> Any:
        """Convert an array or a list to the form that the manager takes."""

    def run(self, prompt: Any, tokens: Any) -> int:
        """Pass one request through its whole life; return the number of hit tokens."""

    def available_tokens(self) -> int:
        """Return the number of tokens in free and evictable blocks."""


# ---------------------------------------------------------------------------------------- ours


class RadixKV:
    """The manager of this package."""

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int) -> None:
        self._manager = CacheManager(num_blocks, block_size)

    def load(self, tokens: Given) -> Given:
        """Return them as they are: the manager converts a list at each call."""
        return tokens

    def run(self, prompt: Given, tokens: Given) -> int:
        """Pass one request through its whole life."""
        match = self._manager.match(prompt)
        lease = self._manager.admit(match)
        self._manager.publish(lease, prompt)
        self._manager.extend(lease, len(tokens) - len(prompt))
        self._manager.publish(lease, tokens)
        self._manager.release(lease)
        # A full hit computes the last token again; the peers never match that token.
        return min(match.num_tokens, len(prompt) - 1)

    def available_tokens(self) -> int:
        """Count free and evictable blocks."""
        return self._manager.available * self._manager.block_size


# --------------------------------------------------------------------------------------- peers


class VLLM:
    """vLLM's KVCacheManager with one group of full-attention layers.

    A request is vLLM's `Request`, which hashes its blocks with SHA-256. Blocks are cached when they
    are computed. Stubs replace packages that the manager imports but does not call; some need GPU
    libraries.
    """

    STUBS = (
        "cbor2", "cpuinfo", "vllm.config", "vllm.distributed", "vllm.multimodal",
        "vllm.pooling_params", "vllm.sampling_params", "vllm.usage", "vllm.v1.attention",
        "vllm.v1.engine", "vllm.v1.metrics.stats", "vllm.v1.structured_output",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int) -> None:
        stub_modules(self.STUBS)
        torch = one_thread_torch()
        manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
        utilities = importlib.import_module("vllm.v1.core.kv_cache_utils")
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        sha256 = importlib.import_module("vllm.utils.hashing").sha256
        utilities.init_none_hash(sha256)
        self._request_class = importlib.import_module("vllm.v1.request").Request
        self._hasher = utilities.get_request_block_hasher(block_size, sha256)
        self._pooling = SimpleNamespace(skip_reading_prefix_cache=False)
        self._block_size = block_size
        layers = interface.FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = interface.KVCacheConfig(
            num_blocks=num_blocks + 1,  # block 0 is padding
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], layers)],
        )
        self._manager = manager.KVCacheManager(
            config,
            whole_blocks(max_tokens, block_size),
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )

    def load(self, tokens: Given) -> list[int]:
        """Return a list."""
        return tokens if isinstance(tokens, list) else tokens.tolist()

    def run(self, prompt: list[int], tokens: list[int]) -> int:
        """Pass one request through its whole life."""
        manager = self._manager
        request = self._request_class(
            "", prompt, sampling_params=None, pooling_params=self._pooling,
            block_hasher=self._hasher,
        )  # fmt: skip
        blocks, num_hit_tokens, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(
            request, len(prompt) - num_hit_tokens, num_hit_tokens, blocks, delay_cache_blocks=True
        )
        request.num_computed_tokens = len(prompt)
        manager.cache_blocks(request, len(prompt))
        output = tokens[len(prompt) :]
        manager.allocate_slots(request, len(output), delay_cache_blocks=True)
        request.append_output_token_ids(output)
        request.num_computed_tokens = len(tokens)
        manager.cache_blocks(request, len(tokens))
        manager.free(request)
        return int(num_hit_tokens)

    def available_tokens(self) -> int:
        """Count free blocks; vLLM counts the evictable ones among them."""
        return int(self._manager.block_pool.get_num_free_blocks()) * self._block_size


class MiniSGLang:
    """mini-sglang's CacheManager on its radix cache, with its key comparison in C++.

    Memory is not pinned without a GPU. The scheduler's copy of the tokens into its token pool is
    omitted, since the other managers have no such pool.
    """

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int) -> None:
        core = importlib.import_module("minisgl.core")
        self._torch = torch = one_thread_torch()
        if core._GLOBAL_CTX is None:  # the first manager of this process
            core.set_global_ctx(core.Context(block_size))
            if not torch.cuda.is_available():
                empty = torch.empty
                torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)
        self._request_class, self._sampling = core.Req, core.SamplingParams()
        width = whole_blocks(max_tokens, block_size)
        self._table = torch.zeros((1, width), dtype=torch.int32)
        cache = importlib.import_module("minisgl.scheduler.cache")
        self._manager = cache.CacheManager(num_blocks, block_size, self._table, "radix")

    def load(self, tokens: Given) -> Any:
        """Return an int32 tensor, over the memory of an array."""
        return self._torch.as_tensor(tokens, dtype=self._torch.int32)

    def run(self, prompt: Any, tokens: Any) -> int:
        """Pass one request through its whole life."""
        manager = self._manager
        pending = SimpleNamespace(input_ids=prompt, input_len=len(prompt))
        handle = manager.match_req(pending).cuda_handle
        num_hit_tokens = int(handle.cached_len)
        manager.lock(handle)
        if num_hit_tokens:
            self._table[0, :num_hit_tokens].copy_(handle.get_matched_indices())
        num_output = len(tokens) - len(prompt)
        request = self._request_class(
            prompt, 0, num_hit_tokens, num_output, 0, self._sampling, handle
        )
        manager.allocate_paged([request])
        request.cached_len = len(prompt)
        manager.cache_req(request, finished=False)
        request.input_ids, request.device_len = tokens, len(tokens)
        manager.allocate_paged([request])
        request.cached_len = len(tokens)
        manager.cache_req(request, finished=True)
        return num_hit_tokens

    def available_tokens(self) -> int:
        """Count free and evictable pages, after the manager's own check."""
        self._manager.check_integrity()
        return int(self._manager.available_size)


class SGLangRadix:
    """SGLang's RadixCache on its paged allocator and its request table.

    Pages come from `alloc`: `alloc_extend` is a Triton kernel, and its CPU fallback would be unfair
    to SGLang. The request has only the fields that the cache reads. Stubs replace five packages of
    SGLang that the cache imports but does not call; they need GPU libraries or load model
    configurations.
    """

    STUBS = tuple(
        f"sglang.srt.{name}"
        for name in ("configs", "multimodal", "constrained", "parser", "entrypoints")
    )

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int) -> None:
        stub_modules(self.STUBS)
        torch = one_thread_torch()
        self._block_size = block_size
        caches = "sglang.srt.mem_cache."
        pools = importlib.import_module(caches + "memory_pool")
        allocators = importlib.import_module(caches + "allocator.paged")
        base = importlib.import_module(caches + "base_prefix_cache")
        self._match_params = base.MatchPrefixParams
        self._key = importlib.import_module(caches + "radix_cache").RadixKey
        self._kv_info = importlib.import_module("sglang.srt.managers.schedule_batch").ReqKvInfo
        self._rows = pools.ReqToTokenPool(1, whole_blocks(max_tokens, block_size), "cpu", False)
        self._allocator = allocators.PagedTokenToKVPoolAllocator(
            num_blocks * block_size, block_size, torch.float16, "cpu", None, False
        )
        params = importlib.import_module(caches + "cache_init_params").CacheInitParams
        self._cache = self._make_cache(
            params, disable=False, page_size=block_size,
            req_to_token_pool=self._rows, token_to_kv_pool_allocator=self._allocator,
        )  # fmt: skip

    def _make_cache(self, params: Any, **fields: Any) -> Any:
        module = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        return module.RadixCache(params(**fields))

    def load(self, tokens: Given) -> array[int]:
        """Return an array of 64-bit integers."""
        if isinstance(tokens, list):
            return array("q", tokens)
        return array("q", tokens.astype("int64").tobytes())

    def run(self, prompt: array[int], tokens: array[int]) -> int:
        """Pass one request through its whole life."""
        cache = self._cache
        key = self._key(prompt, limit=len(prompt) - 1)
        match = cache.match_prefix(self._match_params(key=key))
        node, num_hit_tokens = match.last_device_node, int(match.device_prefix_len)
        lock = cache.lock(node)
        row = self._rows.alloc_rows(1)[0]
        kv = self._kv_info(req_pool_idx=row, cache_protected_len=num_hit_tokens)
        request = SimpleNamespace(
            rid="", kv=kv, lock=lock, last_node=node, origin_input_ids=prompt,
            full_untruncated_fill_ids=prompt, finished=lambda: False, extra_key=None,
            cache_salt=None, priority=0, session=None, session_id=None, kv_rotation_base=None,
        )  # fmt: skip
        if num_hit_tokens:
            self._rows.write((row, slice(0, num_hit_tokens)), cache.path_device_indices(node))
        self._allocate(row, num_hit_tokens, len(prompt))
        cache.checkpoint(request, up_to=len(prompt))
        self._allocate(row, whole_blocks(len(prompt), self._block_size), len(tokens))
        request.full_untruncated_fill_ids, request.finished = tokens, lambda: True
        cache.checkpoint(request, up_to=len(tokens))
        cache.free_kv_row(kv, [(kv.cache_protected_len, len(tokens))])
        cache.unlock(request.lock)
        self._rows.free_rows([row])
        return num_hit_tokens

    def _allocate(self, row: int, start: int, end: int) -> None:
        """Fill a row from the start of a block, evicting as needed."""
        end = whole_blocks(end, self._block_size)
        if start < end:
            self._allocator.evict_to_free_tokens(self._cache, end - start)
            self._rows.write((row, slice(start, end)), self._allocator.alloc(end - start))

    def available_tokens(self) -> int:
        """Count free and evictable pages."""
        return int(self._allocator.available_size() + self._cache.evictable_size())


class SGLangUnified(SGLangRadix):
    """SGLang's UnifiedRadixCache with its tree in Rust, through the same calls."""

    def _make_cache(self, params: Any, **fields: Any) -> Any:
        components = importlib.import_module("sglang.srt.mem_cache.unified_cache.component_type")
        module = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
        full = (components.ComponentType.FULL,)
        cache = module.UnifiedRadixCache(
            params(**fields, tree_components=full, tree_core_backend="rust")
        )
        if cache._tree_core_backend != "rust":
            raise ImportError("SGLang's Rust tree does not load on this machine")
        return cache


# ------------------------------------------------------------------------------------ helpers


def whole_blocks(num_tokens: int, block_size: int) -> int:
    """Round up to whole blocks, in tokens."""
    return -(-num_tokens // block_size) * block_size


def one_thread_torch() -> Any:
    """Import torch and restrict it to the timed thread."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    return torch


class Anything(type):
    """A class whose every public attribute is another such class. A call returns None."""

    def __getattr__(cls, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *_: object, **__: object) -> None:
        """Return None."""


class StubModule(ModuleType):
    """A package that provides every name imported from it."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - makes the module a package

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StubFinder(MetaPathFinder, Loader):
    """Import hook that returns stubs for some packages and their submodules."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return a spec for the replaced packages only."""
        if not any(f"{name}.".startswith(f"{stub}.") for stub in self._names):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty stub."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the stub empty."""


def stub_modules(names: Sequence[str]) -> None:
    """Replace packages by stubs in later imports; a second call changes nothing."""
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StubFinder(names))
