"""Adapter for vLLM's `Scheduler` with its `KVCacheManager`, without an asynchronous connector.

It needs what `vllm_adapter.py` needs::

    PYTHONPATH=vllm-unpacked radixkv fuzz --what scheduler \
        --target docs/examples/adapters/vllm_scheduler_adapter.py:VLLMScheduler

vLLM caches the blocks of a step when it schedules the step, so that a second request of the step
hits what the first one writes, allocates chunk by chunk, and frees at once what a step in flight
uses: its promises leave these out. `make_long` bounds the chunks of long prompts, as
``--long-prefill-token-threshold`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from stubs import stub_modules

from radixkv.spec.adapters.scheduler import Chunk, SchedulerPromises, Submission
from radixkv.spec.model.scheduler import Reason

# The scheduler imports these but does not call them, or needs no result of them.
stub_modules(
    "cbor2", "cpuinfo", "vllm.compilation", "vllm.config", "vllm.distributed", "vllm.multimodal",
    "vllm.outputs", "vllm.pooling_params", "vllm.sampling_params", "vllm.usage",
    "vllm.v1.attention", "vllm.v1.core.encoder_cache_manager", "vllm.v1.engine",
    "vllm.v1.metrics.perf", "vllm.v1.outputs", "vllm.v1.spec_decode",
    "vllm.v1.structured_output",
)  # fmt: skip

try:
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus
    from vllm.version import __version__
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}: `pip install torch numpy msgspec packaging psutil pyzmq regex urllib3 uvloop`,"
        " then `pip download --no-deps vllm`, unzip the wheel and put that folder on PYTHONPATH"
    ) from error

VERSION = f"vllm {__version__}"
ENDLESS = 1 << 20  # maximum sequence length in tokens: the pool is the only limit
REASONS: dict[Any, Reason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}

init_none_hash(sha256)


class Off(SimpleNamespace):
    """A configuration in which everything that is not set is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def make_config(config: dict[str, Any]) -> Off:
    """Make vLLM's configuration: full attention, and steps one after the other."""
    return Off(
        scheduler_config=Off(
            max_num_seqs=config["max_running"], max_num_batched_tokens=config["token_budget"],
            policy=config["policy"], long_prefill_token_threshold=0, prefill_schedule_interval=1,
            watermark=0.0, enable_chunked_prefill=True,
            scheduler_reserve_full_isl=config["reserve_tokens"] is not None,
        ),
        cache_config=Off(
            num_gpu_blocks=config["num_blocks"] + 1, enable_prefix_caching=config["prefix_cache"]
        ),
        model_config=Off(max_model_len=ENDLESS),
        parallel_config=Off(
            data_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        observability_config=Off(per_request_spec_decode_metrics="none"),
        ec_manager_config=Off(get_encoder_cache_manager_obj=lambda: NoEncoder),
        aux_output_config=Off(enabled=False),
        num_speculative_tokens=0, num_lookahead_tokens=0, num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0, max_concurrent_batches=1,
        max_in_flight_tokens=config["token_budget"],
    )  # fmt: skip


class NoEncoder:
    """The encoder cache of a model without an encoder."""

    @staticmethod
    def create_manager(**_: object) -> Any:
        """Make one."""
        return Off(free=id, get_freed_mm_hashes=list, get_manager_metadata=list)


class VLLMScheduler:
    """A request is vLLM's `Request`; what ended is kept here, because vLLM forgets it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.promises = SchedulerPromises(
            bounds_running=True, policy=True, preempts_when_short=True,
            resumed_first=config["policy"] == "fcfs", hits=True, exact=True,
        )  # fmt: skip
        self.num_blocks: int = config["num_blocks"]
        self.block_size: int = config["block_size"]
        layers = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], layers)]
        self.scheduler = Scheduler(
            make_config(config),
            KVCacheConfig(self.num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=Off(accept_tokens=lambda *_: True),
            block_size=self.block_size,
        )
        self.hasher = get_request_block_hasher(self.block_size, sha256)
        self.requests: dict[str, Any] = {}
        self.hits: dict[str, int] = {}
        self.step: Any = None

    def add(self, request: Submission) -> bool:
        longest = len(request.prompt) + request.max_new_tokens - 1
        if -(-longest // self.block_size) > self.num_blocks:  # vLLM's engine checks this
            return False
        self.requests[request.name] = made = Request(
            request.name,
            list(request.prompt),
            sampling_params=Off(
                max_tokens=request.max_new_tokens, stop_token_ids=list(request.stop), min_tokens=0
            ),
            pooling_params=None,
            arrival_time=float(len(self.requests)),
            cache_salt=request.namespace.decode() or None,
            priority=request.priority,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(made)
        return True

    def schedule(self) -> list[Chunk]:
        self.step = self.scheduler.schedule()
        new = {each.req_id: each.num_computed_tokens for each in self.step.scheduled_new_reqs}
        cached = self.step.scheduled_cached_reqs
        starts = new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        resumed = cached.resumed_req_ids
        self.hits |= {name: hit for name, hit in starts.items() if name in new or name in resumed}
        lengths = self.step.num_scheduled_tokens
        return [(name, starts[name], length) for name, length in lengths.items()]

    def update(self, tokens: Sequence[int]) -> Sequence[str]:
        names = list(self.step.num_scheduled_tokens)
        before = {name for name in names if self.requests[name].is_finished()}
        result = Off(
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] if token >= 0 else [] for token in tokens],
            prompt_logprobs_dict={}, prompt_token_id_logprobs_dict={},
        )  # fmt: skip
        self.scheduler.update_from_output(self.step, result)
        ended = [name for name in names if self.requests[name].is_finished()]
        return [name for name in ended if name not in before]

    def abort(self, name: str) -> bool:
        return bool(self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED))

    def running(self) -> Sequence[str]:
        return [request.request_id for request in self.scheduler.running]

    def waiting(self) -> Sequence[str]:
        return [request.request_id for request in self.scheduler.waiting]

    def num_computed(self, name: str) -> int:
        request = self.requests[name]
        return int(request.num_computed_tokens - request.num_in_flight_tokens)

    def num_hit(self, name: str) -> int:
        return self.hits[name]

    def block_table(self, name: str) -> Sequence[int]:
        table: list[int] = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        return table

    def output(self, name: str) -> Sequence[int]:
        return list(self.requests[name].output_token_ids)

    def reason(self, name: str) -> Reason | None:
        return REASONS.get(self.requests[name].status)

    def available(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def make_long(config: dict[str, Any]) -> VLLMScheduler:
    """Make a scheduler that bounds the chunks of long prompts, by two blocks in each step."""
    made = VLLMScheduler(config)
    made.scheduler.scheduler_config.long_prefill_token_threshold = 2 * config["block_size"]
    return made
