"""Adapter of our cache manager with tiers for the specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np

from .... import kvcache as own_kvcache
from ....spec.adapters.cache import Events
from ....spec.adapters.tiers import Copy, TierEvents, TierFactory, TierSnapshot
from ....spec.harness.cost_world import CostFactory
from ....spec.harness.engine import Config
from ....spec.harness.tiers.configuration import window_of
from ....spec.rules.rule import require
from ....spec.rules.tiers import T5
from ..cache_adapter import CacheAdapter
from ..lent_tokens import Lent, lending
from ..misuse import make
from .copies import take_copies
from .events import report_events
from .misuse import storage_of, wrong_calls
from .snapshot import snapshot_of


def make_factory(kvcache: ModuleType | None = None) -> TierFactory:
    """Return a factory of adapters for `kvcache`, a copy of `radixkv.kvcache`, or for our own."""
    module = own_kvcache if kvcache is None else kvcache
    return lambda config: TierAdapter(module, config)


def make_cost_factory(kvcache: ModuleType | None = None) -> CostFactory:
    """Return a factory of adapters with tiers, or without if the host is to have no blocks."""
    module = own_kvcache if kvcache is None else kvcache

    def make(config: Config) -> CacheAdapter:
        if config["host_blocks"]:
            return TierAdapter(module, config)
        return CacheAdapter(module, config["num_blocks"], config["block_size"])

    return make


class TierAdapter(CacheAdapter):
    """A `CacheManager` with tiers, whose leases, parked requests and prefetches have names."""

    def __init__(self, kvcache: ModuleType, config: Config) -> None:
        size = config["block_size"]
        self._keys = storage_of(size)
        self._config = config
        super().__init__(kvcache, config["num_blocks"], size)
        self.tiers = self.manager.tiers
        kvcache.tiers.storage_recency.REPORT_INTERVAL = window_of(config)
        self.parked_requests: dict[str, Any] = {}
        self.parking: dict[str, Any] = {}  # leases of parked requests that have not ended
        self._given_up: dict[str, Any] = {}
        self._prefetches: dict[str, Any] = {}
        self._loading: dict[int, str] = {}
        self._forks: dict[str, str] = {}

    def _make_manager(self, num_blocks: int, block_size: int) -> Any:
        config = self._config
        manager = self.kvcache.CacheManager(
            num_blocks,
            block_size,
            host=self.kvcache.HostConfig(config["host_blocks"], config["write"], config["hits"]),
            storage=self._keys if config["storage"] else None,
            record_events=self.records_events,
        )
        if self.records_events and block_size == 1:
            manager._events.max_stored = config["host_blocks"]
        return manager

    @property
    def most_told(self) -> Callable[[], int] | None:
        """Return how many blocks of storage the KV events name at most, if this world has them."""
        events = self.manager._events
        return None if events is None else lambda: int(events.max_stored)

    # Requests

    def tier_match(self, tokens: list[int], namespace: bytes) -> tuple[int, int]:
        """Return the device and host blocks of a match."""
        with lending(tokens) as lent:
            match = self.manager.match(lent, namespace)
        return match.num_blocks, match.num_host_blocks

    def _lease(self, name: str, match: Any, lent: Lent) -> Any:
        if name in self._forks:
            self.publisher = self._forks.pop(name)
            lease = self.tiers.fork(self.leases[self.publisher], lent)
        else:
            lease = self.manager.admit(match, self.parked_requests.get(name))
        if name in self.parked_requests:
            self._given_up[name] = self.parked_requests.pop(name)
        if lease.loading is not None:
            self._loading[lease.loading] = name
        return lease

    def fork(self, name: str, of: str, tokens: list[int]) -> None:
        """Admit a request from the lease of another; `admit` follows, with the same tokens."""
        self._forks[name] = of

    def loading(self, name: str) -> int | None:
        """Return the operation that loads a lease, or None."""
        copy: int | None = self.leases[name].loading
        return copy

    def ready(self, name: str) -> int:
        """Return the number of tokens of a lease that need not be computed."""
        return int(self.leases[name].num_ready_tokens)

    def promoted(self, name: str) -> int:
        """Return the number of blocks of a lease that came from the host."""
        return int(self.leases[name].num_promoted_blocks)

    def release(self, name: str) -> None:
        """Release a lease; an operation that it waits for may continue."""
        copy = self.leases[name].loading
        if copy is not None:
            self._loading[copy] = f"op {copy}"
        super().release(name)

    def park(self, name: str, tokens: list[int], where: str) -> bool:
        """Park a request; False if that was refused."""
        self.publisher = name
        lease = self.parking[name] = self.leases[name]
        with lending(tokens) as lent:
            parked = self.tiers.park(lease, lent, where)
        if parked is None:
            del self.parking[name]
            return False
        del self.leases[name]
        self.parked_requests[name] = parked
        return True

    def parked(self, name: str) -> tuple[int | None, bool, bool]:
        """Return the operation that saves a parked request, and whether it is saved or failed."""
        parked = self.parked_requests[name]
        return parked.op_id, parked.saved, parked.failed

    def unpark(self, name: str) -> None:
        """Give up a parked request."""
        self._given_up[name] = self.parked_requests.pop(name)
        self.tiers.unpark(self._given_up[name])

    def misuse(self, kind: int, name: str) -> None:
        """Make wrong calls; those with rows do not know leases that are being parked."""
        if not self.parking:
            super().misuse(kind, name)
        for call in wrong_calls(self):
            make(self, call)

    def park_misuse(self, name: str) -> bool:
        """Give up or resume a parked request a second time; return whether both were refused."""
        parked = self._given_up[name]
        match = self.manager.match(np.zeros(parked.num_tokens, np.int32))
        for call in (lambda: self.tiers.unpark(parked), lambda: self.manager.admit(match, parked)):
            if not self._is_refused(call, self.kvcache.LeaseError):
                return False
        return True

    def _is_refused(self, call: Callable[[], object], error: type[Exception]) -> bool:
        try:
            call()
        except error:
            return True
        return False

    # Storage

    def keys(self, tokens: list[int], namespace: bytes) -> list[bytes]:
        """Return the storage keys of the whole blocks."""
        with lending(tokens) as lent:
            keys = list(self._keys.block_keys(lent, namespace))
        return keys

    def prefetch(self, name: str, tokens: list[int], namespace: bytes) -> int | None:
        """Start a prefetch, and return its first block."""
        with lending(tokens) as lent:
            prefetch = self.tiers.prefetch(lent, namespace)
        if prefetch is None:
            return None
        self._prefetches[name] = prefetch
        return int(prefetch.first_block)

    def prefetched(self, name: str) -> int | None:
        """Return the number of prefetched blocks, or None before the prefetch has ended."""
        prefetch = self._prefetches[name]
        require(prefetch.done or prefetch.num_blocks == 0, T5, "{} has blocks before its end", name)
        return prefetch.num_blocks if prefetch.done else None

    def asking(self, name: str) -> int:
        """Return the id of the last operation of a prefetch."""
        return int(self._prefetches[name].op_id)

    def cancel(self, name: str) -> None:
        """Cancel a prefetch."""
        self.tiers.cancel(self._prefetches[name])

    # Operations

    def take(self) -> list[Copy]:
        """Take the queued operations."""
        return take_copies(self.tiers)

    def used(self) -> list[bytes]:
        """Take the keys whose use is to be reported to storage."""
        return list(self.tiers.take_used())

    def take_cancelled(self) -> list[int]:
        """Take the ids of operations that were cancelled."""
        return [int(copy) for copy in self.tiers.take_cancelled()]

    def complete(self, copy: int, ok: Sequence[bool | None], fenced: bool) -> bool:
        """Report the result of an operation."""
        self.publisher = self._loading.get(copy, "")
        return bool(self.tiers.complete(copy, ok, fenced=fenced))

    def fence(self, copy: int) -> bool:
        """Report the fence of an operation."""
        self.publisher = self._loading.get(copy, "")
        return bool(self.tiers.fence(copy))

    def wrong_result(self, copy: int, num_results: int) -> bool:
        """Report a result with a wrong number of blocks; return whether it was refused."""
        try:
            self.tiers.complete(copy, [True] * num_results)
        except self.kvcache.errors.OperationResultError as error:
            return (error.op_id, error.results) == (copy, num_results) and error.num_blocks > 0
        return False

    def early(self) -> tuple[int, int]:
        """Report results of queued operations; return how many there are, and how many count."""
        results = [
            self.tiers.complete(copy, [True] * operation.num_blocks)
            for copy, operation in list(self.tiers.state.operations._queued.items())
        ]
        return len(results), sum(results)

    def reset_but(self, keep: Sequence[bytes]) -> None:
        """Reset all namespaces but some."""
        epoch = self.manager.epoch
        ended = [*self.leases.values(), *self.parking.values()]
        assert self.manager.reset(keep) == epoch + 1, "a reset begins an epoch"
        self.ended = [*self.ended, *ended][-3:]
        self.leases.clear()
        self._loading.clear()

    # Events and snapshots

    def report_to(self, events: Events) -> None:
        """Report events of the device and the host from now on."""
        super().report_to(events)
        report_events(self, cast(TierEvents, events))

    def tier_snapshot(self) -> TierSnapshot:
        """Return the state of the host tier."""
        return snapshot_of(self)
