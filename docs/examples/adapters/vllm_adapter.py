"""Adapter for vLLM's `KVCacheManager`, with one group of full-attention layers.

It needs torch, vLLM's sources and a few of vLLM's dependencies. It runs on any CPU::

    pip install torch numpy msgspec packaging psutil pyzmq regex urllib3 uvloop
    pip download --no-deps vllm && unzip vllm-*.whl -d vllm-unpacked
    PYTHONPATH=vllm-unpacked radixkv fuzz --target docs/examples/adapters/vllm_adapter.py:make

vLLM caches the blocks of a step when it schedules the step. The adapter caches them after the step
has run, with ``delay_cache_blocks`` and `cache_blocks`, as vLLM does for blocks that are filled
later. `vllm_scheduler_adapter.py` tests the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from stubs import stub_modules

from radixkv.spec.adapters.cache import Promises

# The manager imports these but does not call them. Some need GPU libraries.
stub_modules(
    "cbor2", "cpuinfo", "vllm.config", "vllm.distributed", "vllm.multimodal", "vllm.pooling_params",
    "vllm.sampling_params", "vllm.usage", "vllm.v1.attention", "vllm.v1.engine",
    "vllm.v1.metrics.stats", "vllm.v1.structured_output",
)  # fmt: skip

try:
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.version import __version__
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}: `pip install torch numpy msgspec packaging psutil pyzmq regex urllib3 uvloop`,"
        " then `pip download --no-deps vllm`, unzip the wheel and put that folder on PYTHONPATH"
    ) from error

VERSION = f"vllm {__version__}"
ENDLESS = 1 << 20  # maximum sequence length in tokens: the pool is the only limit
POOLING = SimpleNamespace(skip_reading_prefix_cache=False)  # the least that a Request needs

init_none_hash(sha256)


class VLLM:
    """A request is vLLM's `Request`, which hashes its own blocks."""

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, leaves_first=True, lru=True,
        ages_from_release=True, frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        layers = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # block 0 is padding
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)],
        )
        self.manager = KVCacheManager(
            config, ENDLESS, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.requests: dict[str, Any] = {}
        self.name = ""

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        self.name = name
        request = Request(
            name,
            list(tokens),
            sampling_params=None,
            pooling_params=POOLING,
            cache_salt=namespace.decode() or None,
            block_hasher=self.hasher,
        )
        blocks, num_hit, _ = self.manager.get_computed_blocks(request)
        allocated = self.manager.allocate_slots(
            request, len(tokens) - num_hit, num_hit, blocks, delay_cache_blocks=True
        )
        if allocated is None:
            return None
        request.num_computed_tokens = num_hit
        self.requests[name] = request
        return int(num_hit)

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        request, self.name = self.requests[name], name
        allocated = self.manager.allocate_slots(request, len(tokens), delay_cache_blocks=True)
        if allocated is not None:
            request.append_output_token_ids(list(tokens))
        return allocated is not None

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        request = self.requests[name]
        request.num_computed_tokens = len(tokens)
        self.manager.cache_blocks(request, len(tokens))

    def release(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))

    def block_table(self, name: str) -> Sequence[int]:
        table: list[int] = self.manager.get_block_ids(name)[0]
        return table

    def available(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def reset(self) -> None:
        # Like vLLM's scheduler: preempt running requests first.
        for name in list(self.requests):
            self.release(name)
        assert self.manager.reset_prefix_cache(), "the cache was not reset"

    def report_to(self, events: Any) -> None:
        """Report the events of the block pool, by wrapping its methods."""
        pool = self.manager.block_pool
        take, cache, free = pool.get_new_blocks, pool.cache_full_blocks, pool.free_blocks

        def take_and_report(num_blocks: int) -> Any:
            first = pool.free_block_queue.get_all_free_blocks()[:num_blocks]
            events.evicted([block.block_id for block in first if block.block_hash is not None])
            taken = take(num_blocks)
            events.allocated(self.name, [block.block_id for block in taken])
            return taken

        def cache_and_report(**given: Any) -> None:
            cache(**given)
            new = given["blocks"][given["num_cached_blocks"] : given["num_full_blocks"]]
            events.published(given["request"].request_id, [block.block_id for block in new])

        def free_and_report(blocks: Any) -> None:
            blocks = list(blocks)
            free(blocks)
            private = [block for block in blocks if block.block_hash is None]
            events.freed([block.block_id for block in private])

        pool.get_new_blocks, pool.free_blocks = take_and_report, free_and_report
        pool.cache_full_blocks = cache_and_report


def make(num_blocks: int, block_size: int) -> VLLM:
    """Make a manager with its adapter."""
    return VLLM(num_blocks, block_size)
