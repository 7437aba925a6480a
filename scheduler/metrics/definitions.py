"""The metrics: name, type, meaning, and how each is read from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from .recorder import HISTOGRAMS, Snapshot

PREFIX: Final = "radixkv:"
"""Of all names. What follows it is vLLM's name wherever the meaning is the same."""

Values: TypeAlias = float | Mapping[tuple[str, ...], float] | None
"""A value, or values by their labels; None if the engine has no such thing, as without a host."""


Source = TypeVar("Source")


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """A gauge or a counter, of an engine's snapshot or of a node.

    Attributes:
        name: without the prefix; the samples of a counter end in ``_total``.
        kind: its type.
        text: its meaning, in a line.
        read: its values in a source.
        labels: names of its labels, besides those of the source.
        in_vllm: whether vLLM has a metric with the same meaning, and so with this name.
    """

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    read: Callable[[Source], Values]
    labels: tuple[str, ...] = ()
    in_vllm: bool = False


def _hits(now: Snapshot) -> Values:
    counts = now.stats.scheduler
    return {
        ("device",): counts.hit_tokens,
        ("host",): counts.host_hit_tokens,
        ("storage",): counts.storage_hit_tokens,
    }


def _queries_below(now: Snapshot) -> Values:
    if now.stats.cache.tiers is None:
        return None
    return now.stats.scheduler.prompt_tokens - now.stats.scheduler.hit_tokens


def _hits_below(now: Snapshot) -> Values:
    if now.stats.cache.tiers is None:
        return None
    return now.stats.scheduler.host_hit_tokens + now.stats.scheduler.storage_hit_tokens


def _usage(now: Snapshot) -> float:
    cache = now.stats.cache
    return 1 - (cache.free_blocks + cache.idle_blocks) / cache.num_blocks


def _blocks(now: Snapshot) -> Values:
    cache = now.stats.cache
    blocks: dict[tuple[str, ...], float] = {
        ("device", "free"): cache.free_blocks,
        ("device", "idle"): cache.idle_blocks,
        ("device", "shared"): cache.cached_blocks - cache.idle_blocks,
        ("device", "private"): cache.private_blocks,
    }
    if (tiers := cache.tiers) is not None:
        blocks["host", "free"] = tiers.host_free_blocks
        blocks["host", "cached"] = tiers.host_cached_blocks
        used = tiers.host_blocks - tiers.host_free_blocks - tiers.host_cached_blocks
        blocks["host", "reserved"] = used
    return blocks


def _hit_blocks(now: Snapshot) -> Values:
    cache = now.stats.cache
    blocks: dict[tuple[str, ...], float] = {("device",): cache.hit_blocks}
    if cache.tiers is not None:
        blocks["host",] = cache.tiers.promoted_blocks
        blocks["storage",] = cache.tiers.fetched_blocks
    return blocks


def _evicted(now: Snapshot) -> Values:
    cache = now.stats.cache
    blocks: dict[tuple[str, ...], float] = {("device",): cache.evicted_blocks}
    if cache.tiers is not None:
        blocks["host",] = cache.tiers.dropped_blocks
    return blocks


def _tiers(name: str) -> Callable[[Snapshot], Values]:
    return lambda now: (
        None if now.stats.cache.tiers is None else getattr(now.stats.cache.tiers, name)
    )


def _copied_bytes(now: Snapshot) -> Values:
    copies = now.stats.copies
    return None if copies is None else _by_label(copies.copied_bytes)


def _operations(now: Snapshot) -> Values:
    copies = now.stats.copies
    if copies is None:
        return None
    counts: dict[tuple[str, ...], float] = {}
    for name, count in copies.operations.items():
        direction, _, result = name.rpartition(": ")
        counts[direction, result] = count
    return counts


def _copy_errors(now: Snapshot) -> Values:
    copies = now.stats.copies
    return None if copies is None else _by_label(copies.errors)


def _by_label(counts: Mapping[str, int]) -> Values:
    return {(label,): count for label, count in counts.items()}


def _configuration(now: Snapshot) -> Values:
    cache, stats = now.stats.cache, now.stats
    host = 0 if cache.tiers is None else cache.tiers.host_blocks
    labels = now.block_size, cache.num_blocks, host, stats.dtype, stats.attention_backend
    return {tuple(map(str, labels)): 1}


def _namespaces(kind: str) -> Callable[[Snapshot], Values]:
    return lambda now: {
        (label,): count for (label, each), count in now.namespaces.items() if each == kind
    }


def _namespace_hits(now: Snapshot) -> Values:
    kinds = ("device", "host", "storage")
    return {key: count for key, count in now.namespaces.items() if key[1] in kinds}


METRICS: Final[tuple[Metric[Snapshot], ...]] = (
    Metric(
        "num_requests_running",
        "gauge",
        "Requests that hold blocks.",
        lambda now: now.num_running,
        in_vllm=True,
    ),
    Metric(
        "num_requests_waiting",
        "gauge",
        "Requests without blocks: new ones, and preempted ones.",
        lambda now: now.num_waiting,
        in_vllm=True,
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "Part of the device's blocks that requests hold, from 0 to 1.",
        _usage,
        in_vllm=True,
    ),
    Metric(
        "cache_config_info",
        "gauge",
        "Always 1; the labels are the sizes of the cache.",
        _configuration,
        ("block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "attention_backend"),
        in_vllm=True,
    ),
    Metric(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up, counted as they are found or computed.",
        lambda now: now.stats.scheduler.prompt_tokens,
        in_vllm=True,
    ),
    Metric(
        "prefix_cache_hits",
        "counter",
        "Prompt tokens that were found on the device.",
        lambda now: now.stats.scheduler.hit_tokens,
        in_vllm=True,
    ),
    Metric(
        "external_prefix_cache_queries",
        "counter",
        "Prompt tokens that were not found on the device; only with a host tier.",
        _queries_below,
        in_vllm=True,
    ),
    Metric(
        "external_prefix_cache_hits",
        "counter",
        "Prompt tokens that were found on the host or in storage; only with a host tier.",
        _hits_below,
        in_vllm=True,
    ),
    Metric(
        "prompt_tokens",
        "counter",
        "Prompt tokens that were found or computed, each once.",
        lambda now: now.stats.scheduler.prompt_tokens,
        in_vllm=True,
    ),
    Metric(
        "prompt_tokens_cached_by_source",
        "counter",
        "Prompt tokens that were found, by tier: device, host, storage.",
        _hits,
        ("source",),
        in_vllm=True,
    ),
    Metric(
        "generation_tokens",
        "counter",
        "Tokens that were generated.",
        lambda now: now.num_generated,
        in_vllm=True,
    ),
    Metric(
        "num_preemptions",
        "counter",
        "Times that a request lost its blocks.",
        lambda now: now.stats.scheduler.preemptions,
        in_vllm=True,
    ),
    Metric(
        "request_success",
        "counter",
        "Requests that ended, by reason: stop, length, abort, error (the engine failed), refused.",
        lambda now: {(reason,): count for reason, count in now.ended.items()},
        ("finished_reason",),
        in_vllm=True,
    ),
    Metric(
        "kv_blocks",
        "gauge",
        "Blocks by tier and state. Device: free, idle (cached, unused), shared (cached, used), "
        "private. Host: free, cached, reserved.",
        _blocks,
        ("tier", "state"),
    ),
    Metric(
        "kv_hit_blocks",
        "counter",
        "Blocks by tier that had them: hits on the device at every admission, loads from the host, "
        "loads from storage.",
        _hit_blocks,
        ("tier",),
    ),
    Metric(
        "kv_evicted_blocks",
        "counter",
        "Blocks evicted from the device; blocks that left the host, or found no room there, and "
        "were not on the device. Storage may have them. A reset counts none.",
        _evicted,
        ("tier",),
    ),
    Metric(
        "kv_demoted_blocks",
        "counter",
        "Blocks evicted from the device towards the host.",
        _tiers("demoted_blocks"),
    ),
    Metric("kv_stored_blocks", "counter", "Blocks written to storage.", _tiers("stored_blocks")),
    Metric(
        "kv_open_operations",
        "gauge",
        "Copies between the tiers that have no result yet.",
        _tiers("open_operations"),
    ),
    Metric(
        "kv_quarantined_operations",
        "gauge",
        "Copies that have ended, but whose blocks may still be written.",
        _tiers("quarantined_operations"),
    ),
    Metric("parked_requests", "gauge", "Preempted requests with saved KV.", _tiers("parked")),
    Metric(
        "kv_copied_bytes",
        "counter",
        "Bytes copied between the tiers, by direction, such as device to host.",
        _copied_bytes,
        ("direction",),
    ),
    Metric(
        "kv_operations",
        "counter",
        "Ended copies between the tiers, by direction and result, such as done.",
        _operations,
        ("direction", "result"),
    ),
    Metric(
        "kv_copy_errors",
        "counter",
        "Failed copies, by type of the exception.",
        _copy_errors,
        ("error",),
    ),
    Metric(
        "kv_skipped_blocks",
        "counter",
        "Blocks not copied because too many bytes were in flight.",
        lambda now: None if now.stats.copies is None else now.stats.copies.dropped_blocks,
    ),
    Metric(
        "recomputed_tokens",
        "counter",
        "Tokens that were computed again after a preemption.",
        lambda now: now.stats.scheduler.recomputed_tokens,
    ),
    Metric("engine_steps", "counter", "Steps of the model.", lambda now: now.stats.steps),
    Metric(
        "padding_tokens",
        "counter",
        "Padding computed to fill the compiled shapes, in tokens.",
        lambda now: now.stats.padding_tokens,
    ),
    Metric(
        "compilations_after_warm_up",
        "counter",
        "XLA compilations during steps; expected to be 0.",
        lambda now: now.stats.compilations_after_warm_up,
    ),
    Metric(
        "namespace_requests",
        "counter",
        "Requests that began to compute, by namespace.",
        _namespaces("requests"),
        ("namespace",),
    ),
    Metric(
        "namespace_prompt_tokens",
        "counter",
        "Prompt tokens of these requests.",
        _namespaces("prompt"),
        ("namespace",),
    ),
    Metric(
        "namespace_prompt_tokens_cached_by_source",
        "counter",
        "Prompt tokens of these requests that were found, by tier.",
        _namespace_hits,
        ("namespace", "source"),
    ),
    Metric(
        "namespace_generation_tokens",
        "counter",
        "Tokens that were generated, by namespace.",
        _namespaces("generation"),
        ("namespace",),
    ),
)

ENGINE_UP: Final = "engine_up"
ENGINE_UP_TEXT: Final = "1 while the engine serves, 0 after it was closed or has failed."
SNAPSHOT_AGE: Final = "snapshot_age_seconds"
SNAPSHOT_AGE_TEXT: Final = "Age of all other values; above 0 if the engine was busy or has ended."

HISTOGRAM_TEXTS: Final[Mapping[str, str]] = {
    "time_to_first_token_seconds": "From submission to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "request_time_per_output_token_seconds": "Mean of a request's inter-token latencies.",
    "e2e_request_latency_seconds": "From submission to the end.",
    "request_queue_time_seconds": "From submission to the step that begins to compute.",
    "request_inference_time_seconds": "From that step to the last token.",
    "request_prefill_time_seconds": "From that step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Length of the prompt.",
    "request_generation_tokens": "Number of generated tokens.",
}
"""Meaning of each histogram. All have vLLM's names."""

assert HISTOGRAM_TEXTS.keys() == HISTOGRAMS.keys()


def table() -> Iterable[tuple[str, str, tuple[str, ...], str, bool]]:
    """Return name, type, labels and meaning of each metric, and whether vLLM has it."""
    yield PREFIX + ENGINE_UP, "gauge", (), ENGINE_UP_TEXT, False
    yield PREFIX + SNAPSHOT_AGE, "gauge", (), SNAPSHOT_AGE_TEXT, False
    for each in METRICS:
        yield PREFIX + each.name, each.kind, each.labels, each.text, each.in_vllm
    for name, text in HISTOGRAM_TEXTS.items():
        yield PREFIX + name, "histogram", (), text, True
