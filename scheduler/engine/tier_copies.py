"""Copies between the tiers of an engine: operations go to a driver, completions to the manager."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ...kvcache import BlockArrays, HostArrays, TierDriver, Tiers
from ...kvcache.cleanup import give_back
from ...kvcache.copies.block_copies import BlockCopies
from ...kvcache.storage import Storage, StorageWorkers
from ..errors import EngineClosedError
from .stats import CopyStats

_MAX_BLOCKS_PER_COPY: Final = 32
_WAIT_S: Final = 1.0
"""Longest wait for a copy when no request can run without one. Any completion ends it sooner."""


class TierCopies:
    """Passes operations to the tier driver and completions to the manager, on one thread."""

    def __init__(self, tiers: Tiers, arrays: BlockArrays, storage: Storage | None) -> None:
        """Allocate the host tier, start the threads and compile every copy program.

        The caller closes it; if this raises, nothing is left to close.
        """
        num_blocks = tiers.config.num_blocks
        most = min(_MAX_BLOCKS_PER_COPY, num_blocks, len(arrays.keys[0]) - 1)
        self._tiers = tiers
        self._storage, self._namespace = storage, tiers.storage
        self._driver = TierDriver(
            HostArrays.like(arrays, num_blocks),
            storage,
            max_blocks_per_copy=1 << (most - 1).bit_length(),
        )
        try:
            self._driver.warm_up(arrays)
        except BaseException:
            give_back(self._driver.close)
            raise
        self._is_closed = False

    def replace_copies(self, make: Callable[[BlockCopies], BlockCopies]) -> None:
        """Replace the copies of the driver by others made of them, before the first operation."""
        self._driver.replace_copies(make)

    def check_open(self) -> None:
        """Check that `close` was not called.

        Raises:
            EngineClosedError: after `close`, even if that returned False.
        """
        if self._is_closed:
            raise EngineClosedError("the engine is closed")

    def collect(self) -> None:
        """Report completions and fences to the manager."""
        for result in self._driver.poll():
            self._tiers.complete(result.op_id, result.ok, fenced=result.fenced)
        for op_id in self._driver.fenced():
            self._tiers.fence(op_id)

    def dispatch(self, arrays: BlockArrays) -> None:
        """Start pending operations. Call it before the next step donates the pools."""
        cancelled = self._tiers.take_cancelled()
        if cancelled:
            self._driver.cancel(cancelled)
        self._follow_namespace()
        self._driver.touch(self._tiers.take_used())
        operations = self._tiers.take_operations()
        if operations:
            self._driver.dispatch(operations, arrays)

    def _follow_namespace(self) -> None:
        """Name blocks in storage by the namespace of their keys, as a later process will."""
        namespace = self._tiers.storage
        if namespace is None or namespace == self._namespace:
            return
        self._namespace = namespace
        if isinstance(self._storage, StorageWorkers):
            self._storage.use_namespace(namespace)

    def wait(self) -> None:
        """Wait for a completion."""
        self._driver.wait(_WAIT_S)

    def close(self, arrays: BlockArrays, timeout_s: float) -> bool:
        """Finish the copies in flight, then stop the threads; see `Engine.close`."""
        self._is_closed = True
        end = time.monotonic() + timeout_s
        while True:
            self.collect()
            self.dispatch(arrays)
            left = end - time.monotonic()
            is_done = self._tiers.num_open_operations == 0 and not self._driver.is_touching
            if is_done or left <= 0:
                break
            self._driver.wait(left)
        return self._driver.close(timeout_s=max(end - time.monotonic(), 0.0))

    def stats(self) -> CopyStats:
        """Return the counts of copies so far."""
        stats = self._driver.stats()
        return CopyStats(
            copied_bytes={kind.value: count for kind, count in stats.copied_bytes.items()},
            operations={
                f"{kind.value}: {outcome.value}": count
                for (kind, outcome), count in stats.operations.items()
            },
            dropped_blocks=stats.dropped_blocks,
            errors=dict(stats.errors),
        )
