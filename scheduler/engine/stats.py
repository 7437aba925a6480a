"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...kvcache import CacheStats
from ..step_plan import SchedulerStats


@dataclass(frozen=True)
class CopyStats:
    """What was copied between the tiers since the engine was made.

    Attributes:
        copied_bytes: by where from and to, as "device to host".
        operations: how many ended, by that and how, as "device to host: done".
        dropped_blocks: not written out, because too much was on its way.
        errors: what ended copies, by name of its type.
    """

    copied_bytes: Mapping[str, int]
    operations: Mapping[str, int]
    dropped_blocks: int
    errors: Mapping[str, int]


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done so far.

    Attributes:
        steps: programs run.
        padding_tokens: tokens that the programs computed only to fill their shapes.
        prefill_tokens_computed: tokens of prefill chunks, recomputed ones included.
        compilations_at_warm_up: what XLA compiled when the engine was made; programs that an
            engine of the same sizes compiled before, in this process, are used again.
        compilations_after_warm_up: what it compiled during steps: 0, unless something is wrong.
        scheduler, cache: see `SchedulerStats` and `CacheStats`.
        copies: between the tiers; None without a host tier.
    """

    steps: int
    padding_tokens: int
    prefill_tokens_computed: int
    compilations_at_warm_up: int
    compilations_after_warm_up: int
    scheduler: SchedulerStats
    cache: CacheStats
    copies: CopyStats | None = None
