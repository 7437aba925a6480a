"""Our cache manager with its tiers, as the specification sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

import numpy as np

from ... import kvcache as own_kvcache
from ...kvcache.storage.keys import StorageNamespace
from ...spec.adapter import Events
from ...spec.cache_rules import R3
from ...spec.engine import Config
from ...spec.rules import require
from ...spec.tier_adapter import Copy, CopyKind, Prefix, TierFactory, TierSnapshot
from .cache_adapter import CacheAdapter

KINDS: Final[dict[str, CopyKind]] = {
    "device to host": "out",
    "host to device": "in",
    "host to storage": "store",
    "storage to host": "fetch",
    "look up in storage": "lookup",
}
"""What the specification calls an operation, by the value of its kind."""


def make_factory(kvcache: ModuleType | None = None) -> TierFactory:
    """Return a factory of adapters for a copy of `radixkv.kvcache`; without one, for our own."""
    module = own_kvcache if kvcache is None else kvcache
    return lambda config: TierAdapter(module, config)


class TierAdapter(CacheAdapter):
    """A `CacheManager` with tiers, whose leases, parked requests and prefetches have names."""

    def __init__(self, kvcache: ModuleType, config: Config) -> None:
        super().__init__(kvcache, config["num_blocks"], config["block_size"])
        size = config["block_size"]
        keys = StorageNamespace("model", "weights", "float32", size, (0, 1), (0, 1))
        host = kvcache.host_tier.HostConfig(config["host_blocks"], config["write"], config["hits"])
        self.manager = kvcache.CacheManager(
            config["num_blocks"], size, host=host, storage=keys if config["storage"] else None
        )
        self.tiers = self.manager.tiers
        self._keys = keys
        self._parked: dict[str, Any] = {}
        self._parking: dict[str, Any] = {}  # their leases, until those have ended
        self._given_up: dict[str, Any] = {}
        self._prefetches: dict[str, Any] = {}
        self._loading: dict[int, str] = {}
        self._ends_as_asked = False

    # Requests

    def tier_match(self, tokens: Sequence[int], namespace: bytes) -> tuple[int, int]:
        """Return what a match says."""
        match = self.manager.match(np.array(tokens, np.int32), namespace)
        return match.num_blocks, match.num_host_blocks

    def _lease(self, name: str, match: Any) -> Any:
        lease = self.manager.admit(match, self._parked.get(name))
        if name in self._parked:
            self._given_up[name] = self._parked.pop(name)
        if lease.loading is not None:
            self._loading[lease.loading] = name
        return lease

    def loading(self, name: str) -> int | None:
        """Return the operation that loads a lease."""
        copy: int | None = self.leases[name].loading
        return copy

    def ready(self, name: str) -> int:
        """Return how many tokens of a lease need not be computed."""
        return int(self.leases[name].num_ready_tokens)

    def release(self, name: str) -> None:
        """End a lease."""
        self._ends_as_asked = True
        super().release(name)
        self._ends_as_asked = False

    def park(self, name: str, tokens: Sequence[int], where: str) -> bool:
        """Park a lease."""
        self._publisher = name
        lease = self._parking[name] = self.leases[name]
        parked = self.tiers.park(lease, np.array(tokens, np.int32), where)
        if parked is None:
            del self._parking[name]
            return False
        del self.leases[name]
        self._parked[name] = parked
        return True

    def parked(self, name: str) -> tuple[int | None, bool, bool]:
        """Return the operation that saves a parked request, whether it is saved, or failed."""
        parked = self._parked[name]
        return parked.op_id, parked.saved, parked.failed

    def unpark(self, name: str) -> None:
        """Let go of a parked request."""
        self._given_up[name] = self._parked.pop(name)
        self.tiers.unpark(self._given_up[name])

    def misuse(self, kind: int, name: str) -> None:
        """Make a wrong call; those about rows know no lease that is being parked."""
        if not self._parking:
            super().misuse(kind, name)
        manager, error = self.manager, self.kvcache.errors.LeaseError
        for parking, lease in self._parking.items():
            match = manager.match(np.zeros(lease.num_tokens, np.int32))
            for wrong in (
                partial(manager.publish, lease, []),
                partial(type(manager).release, manager, lease),
                partial(manager.admit, match, self._parked[parking]),
            ):
                refused = self._is_refused(wrong, error)
                require(refused, R3, "{} is being parked, and used", parking)

    def park_misuse(self, name: str) -> bool:
        """Let go of it again, or resume from it again."""
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

    def keys(self, tokens: Sequence[int], namespace: bytes) -> list[bytes]:
        """Return the storage keys of whole blocks, from the first on."""
        return list(self._keys.block_keys(tokens, namespace))

    def prefetch(self, name: str, tokens: Sequence[int], namespace: bytes) -> bool:
        """Begin a prefetch."""
        array = np.array(tokens, np.int32)
        prefetch = self.tiers.prefetch(array, namespace)
        array[:] = -7
        if prefetch is not None:
            self._prefetches[name] = prefetch
        return prefetch is not None

    def prefetched(self, name: str) -> int | None:
        """Return how many blocks a prefetch has brought, once it has ended."""
        prefetch = self._prefetches[name]
        return prefetch.num_blocks if prefetch.done else None

    def asking(self, name: str) -> int:
        """Return the last operation of a prefetch."""
        return int(self._prefetches[name].op_id)

    def cancel(self, name: str) -> None:
        """End a prefetch."""
        self.tiers.cancel(self._prefetches[name])

    # Operations

    def take(self) -> list[Copy]:
        """Take the operations."""
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
        """Take which of them are not wanted any more."""
        return [int(copy) for copy in self.tiers.take_cancelled()]

    def complete(self, copy: int, ok: Sequence[bool], fenced: bool) -> bool:
        """Report a result."""
        self._publisher = self._loading.get(copy, "")
        return bool(self.tiers.complete(copy, ok, fenced=fenced))

    def fence(self, copy: int) -> bool:
        """Report a fence."""
        self._publisher = self._loading.get(copy, "")
        return bool(self.tiers.fence(copy))

    def wrong_result(self, copy: int, num_results: int) -> bool:
        """Report a result that has too few or too many blocks."""
        wrong = self.kvcache.errors.OperationResultError
        return self._is_refused(lambda: self.tiers.complete(copy, [True] * num_results), wrong)

    def reset_but(self, keep: Sequence[bytes]) -> None:
        """Forget everything but some namespaces."""
        epoch = self.manager.epoch
        ended = [*self.leases.values(), *self._parking.values()]
        assert self.manager.reset(keep) == epoch + 1, "a reset begins an epoch"
        self.ended = [*self.ended, *ended][-3:]
        self.leases.clear()
        self._loading.clear()

    # Events and snapshots

    def report_to(self, events: Events) -> None:
        """Report from now on what happens on the device and on the host."""
        super().report_to(events)
        told: Any = events  # TierEvents
        manager, tree, pool = self.manager, self.tiers.tree, self.tiers.host.pool
        del tree.evict  # of a tree without tiers

        def watched_evict(num_blocks: int) -> np.ndarray:
            victims: np.ndarray = type(self.tiers.writer).evict(self.tiers.writer, num_blocks)
            told.evicted(victims.tolist())
            return victims

        def watched_adopt(node: Any, tokens: bytes, device_blocks: bytes) -> Any:
            adopted = type(tree).adopt(tree, node, tokens, device_blocks)
            blocks = memoryview(adopted.device_blocks).cast("i").tolist()
            told.published(self._publisher, blocks)
            return adopted

        def watched_allocate(num_blocks: int) -> np.ndarray:
            ids: np.ndarray = type(pool).allocate(pool, num_blocks)
            told.host_allocated(ids.tolist())
            return ids

        def watched_recycle(ids: np.ndarray) -> None:
            type(pool).recycle(pool, ids)
            told.host_freed(ids.tolist())

        def watched_release(lease: Any) -> None:
            leases = {**self.leases, **self._parking}
            name = next((name for name, each in leases.items() if each is lease), "")
            if self._ends_as_asked or not name:
                type(manager).release(manager, lease)
                return
            told.ends(name)
            type(manager).release(manager, lease)
            self._parking.pop(name, None)
            told.ended(name)

        self.tiers.writer.evict, tree.adopt = watched_evict, watched_adopt
        pool.allocate, pool.recycle = watched_allocate, watched_recycle
        manager.release = watched_release

    def tier_snapshot(self) -> TierSnapshot:
        """Return all that the host tier holds."""
        found: dict[str, dict[Prefix, int]] = {"host": {}, "landing": {}, "leaving": {}}
        for namespace, root in self.tiers.tree.roots.items():
            stack: list[tuple[Any, tuple[int, ...]]] = [
                (child, ()) for child in root.children.values()
            ]
            while stack:
                node, before = stack.pop()
                tokens = self._see_node(namespace, node, before, found)
                stack += [(child, tokens) for child in node.children.values()]
        idle: list[int] = []
        for run in self.tiers.host.idle_runs():
            blocks = memoryview(run.blocks).cast("i").tolist()
            idle += blocks if self.tiers.host.is_spare(run) else reversed(blocks)
        stats = self.tiers.stats()
        return TierSnapshot(
            self.tiers.host.pool.free_ids().tolist(),
            found["host"],
            found["landing"],
            set(found["leaving"]),
            idle,
            {name: getattr(stats, name) for name in stats.__dataclass_fields__},
        )

    def _see_node(
        self,
        namespace: bytes,
        node: Any,
        before: tuple[int, ...],
        found: dict[str, dict[Prefix, int]],
    ) -> tuple[int, ...]:
        size = self.manager.block_size
        end = len(before) + node.num_blocks * size
        tokens = (*before, *memoryview(node.tokens).cast("i").tolist())[:end]
        run = node.host
        if run is not None:
            state = "landing" if run.landing else "leaving" if run.leaving else "host"
            if state != "leaving" or not node.device_blocks:
                ids = memoryview(run.blocks).cast("i").tolist()
                for index, block in enumerate(ids, 1):
                    found[state][namespace, tokens[: len(before) + index * size]] = block
        return tokens
