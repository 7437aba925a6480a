"""Adapter of our mixed scheduler over a cache with a host tier and storage."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ... import scheduler as own_scheduler
from ...kvcache import CacheManager, HostConfig, Tiers
from ...kvcache.ids import OpId
from ...kvcache.storage.keys import StorageNamespace
from ...spec.adapters.scheduler import SchedulerFactory, SchedulerPromises
from ...spec.adapters.tiers import Copy
from ...spec.harness.engine import Config
from .scheduler_adapter import MixedAdapter
from .tier_adapter import KINDS


class TieredMixedAdapter(MixedAdapter):
    """A `MixedScheduler` over a `CacheManager` with tiers."""

    def _make_manager(self, config: Config) -> CacheManager:
        size, storage = config["block_size"], None
        if config["storage"]:
            storage = StorageNamespace("model", "weights", "float32", size, (0, 1), (0, 1))
        host = HostConfig(config["host_blocks"], config["write"])
        return CacheManager(config["num_blocks"], size, host=host, storage=storage)

    @property
    def tiers(self) -> Tiers:
        """Tiers of the manager."""
        tiers = self.manager.tiers
        assert tiers is not None, "a manager with a host tier has tiers"
        return tiers

    def take(self) -> list[Copy]:
        """Take the queued operations."""
        self.tiers.take_used()
        return [
            Copy(
                int(each.id),
                KINDS[each.kind.value],
                tuple(each.sources.tolist()),
                tuple(each.destinations.tolist()),
                each.keys,
            )
            for each in self.tiers.take_operations()
        ]

    def take_cancelled(self) -> list[int]:
        """Take the ids of cancelled operations."""
        return [int(op_id) for op_id in self.tiers.take_cancelled()]

    def complete(self, copy: int, ok: Sequence[bool], fenced: bool) -> bool:
        """Report the result of an operation."""
        return self.tiers.complete(OpId(copy), ok, fenced=fenced)

    def fence(self, copy: int) -> bool:
        """Report the fence of an operation."""
        return self.tiers.fence(OpId(copy))

    def is_loading(self, name: str) -> bool:
        """Tell whether a request waits for copies into its blocks."""
        return bool(self.requests[name].status.value == "loading")

    def keys(self, tokens: Sequence[int], namespace: bytes) -> list[bytes]:
        """Return the storage keys of the whole blocks."""
        storage = self.tiers.storage
        if storage is None:
            return []
        whole = np.array(tokens[: len(tokens) - len(tokens) % storage.block_size], np.int32)
        return list(storage.block_keys(whole, namespace))

    def num_cached(self, name: str) -> int:
        """Return the number of blocks of a match, on the device and the host."""
        request = self.requests[name]
        match = self.manager.match(request.tokens, request.namespace)
        return match.num_blocks + match.num_host_blocks

    def num_copies(self) -> int:
        """Return the number of operations that are not fenced."""
        return self.tiers.num_open_operations

    def num_parked(self) -> int:
        """Return the number of parked requests."""
        return self.tiers.stats().parked

    def num_pinned(self) -> int:
        """Return the number of host blocks that are neither free nor cached."""
        stats = self.tiers.stats()
        return stats.host_blocks - stats.host_free_blocks - stats.host_cached_blocks

    def reset(self, keep: Sequence[bytes], weights: str) -> None:
        """Reset the cache."""
        self.scheduler.reset_cache(list(keep), weights)


def make_factory(
    scheduler: ModuleType | None = None, promises: SchedulerPromises | None = None
) -> SchedulerFactory:
    """Return a factory of adapters for a scheduler package: ours, or a copy with a planted bug."""
    package: Any = own_scheduler if scheduler is None else scheduler
    claimed = SchedulerPromises.all() if promises is None else promises
    return lambda config: TieredMixedAdapter(config, package, claimed)
