"""Counts of an engine: steps, compilations, and copies between the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...kvcache import CacheStats
from ..step_plan import SchedulerStats


@dataclass(frozen=True)
class CopyStats:
    """Counts of copies between the tiers since the engine was made.

    Attributes:
        copied_bytes: bytes by direction, such as "device to host".
        operations: ended operations by direction and result, such as "device to host: done".
        dropped_blocks: blocks not copied to the host because earlier ones filled staging up to the
            deadline. Blocks that storage did not take are not among them.
        errors: failed copies by name of the exception type.
    """

    copied_bytes: Mapping[str, int]
    operations: Mapping[str, int]
    dropped_blocks: int
    errors: Mapping[str, int]


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine since it was made.

    Attributes:
        dtype: dtype of the parameters and of the KV.
        attention_backend: "mosaic" for the Hopper kernels, "xla" for jnp code.
        attention_reason: why this backend is used.
        num_devices: number of devices that share the model and its KV.
        steps: number of model steps.
        padding_tokens: padding tokens computed to fill the compiled shapes.
        prefill_tokens_computed: tokens of prefill chunks, including recomputed ones.
        compilations_at_warm_up: XLA compilations when the engine was made. Programs that an engine
            of the same sizes compiled before in this process are reused.
        compilations_after_warm_up: XLA compilations during steps; expected to be 0.
        scheduler, cache: see `SchedulerStats` and `CacheStats`.
        copies: copies between the tiers; None without a host tier.
    """

    dtype: str
    attention_backend: str
    attention_reason: str
    num_devices: int
    steps: int
    padding_tokens: int
    prefill_tokens_computed: int
    compilations_at_warm_up: int
    compilations_after_warm_up: int
    scheduler: SchedulerStats
    cache: CacheStats
    copies: CopyStats | None = None
