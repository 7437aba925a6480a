"""Adapters of our mixed and decode schedulers over a cache with a host tier and storage."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ... import scheduler as own_scheduler
from ...kvcache import CacheManager, HostConfig, Tiers
from ...kvcache.ids import OpId
from ...kvcache.storage.keys import StorageNamespace
from ...spec.adapters.scheduler import Received, SchedulerFactory, SchedulerPromises, Submission
from ...spec.adapters.tiers import Copy
from ...spec.harness.engine import Config
from .. import handoff as own_handoff
from .scheduler_adapter import MixedAdapter
from .tiers.copies import take_copies


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
        return take_copies(self.tiers)

    def take_cancelled(self) -> list[int]:
        """Take the ids of cancelled operations."""
        return [int(op_id) for op_id in self.tiers.take_cancelled()]

    def complete(self, copy: int, ok: Sequence[bool | None], fenced: bool) -> bool:
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
        return list(storage.block_keys(np.array(tokens, np.int32), namespace))

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


class TieredDecodeAdapter(TieredMixedAdapter):
    """A `DecodeScheduler` over tiers, and a prefill node that hands requests over to it.

    The prefill node asks for each request until the decode node grants blocks, then sends the KV.
    """

    def _make_scheduler(self, config: Config) -> Any:
        self._has_priorities = config["policy"] == "priority"
        self._asked: dict[str, Submission] = {}
        self._grants: list[Any] = []
        self._attempt = 1
        self._now = 0
        self._messages = getattr(self.package, "handoff", own_handoff)
        timing = self._messages.Timing(1, 2**20, 2**20, 0)
        options = self._options(config)
        options["depth"] = config.get("depth", 1)
        return self.package.DecodeScheduler(self.manager, epoch=1, timing=timing, **options)

    def add(self, request: Submission) -> bool:
        """Ask for a request; False if it is too large for the pool."""
        self.requests[request.name] = self._make(request.name, request)
        self._asked[request.name] = request
        self._ask(request)
        return request.name in self._asked

    def ask(self) -> bool:
        """Ask for the waiting requests, until one is granted."""
        self._now += 1
        self.scheduler.tick(self._now)
        self._carry_out()
        for request in self._queue():
            if not self._grants:
                self._ask(request)
        return bool(self._grants)

    def receive(self) -> Received:
        """Send the blocks that the decode node lacks as one part, and the first token."""
        handoff, grant = self._messages, self._grants.pop(0)
        key, first = grant.header.key, grant.first_block
        request = self._asked.pop(key.request_id)
        table, num_tokens = self.block_table(request.name), len(request.prompt)
        num_cached = first * self.manager.block_size
        [lease] = [
            each.lease for each in self.scheduler._side.receiving if each.request_id == request.name
        ]
        num_on_device = min(lease.num_hit_blocks * self.manager.block_size, num_cached)
        header = handoff.Header(key, 1, 1, grant.header.grant)
        lacking = len(table) - first
        if lacking:
            self.scheduler.receive("p0", handoff.Send(header, 0, first, lacking, 0))
        commit = handoff.Commit(
            header, int(lacking > 0), request.first_token, num_tokens, handoff.Hits(),
            stop_token_ids=tuple(request.stop),
        )  # fmt: skip
        self.scheduler.receive("p0", commit)
        self._carry_out()
        started = self.requests[request.name]
        return Received(request.name, started.arrival, num_cached, num_on_device, table)

    def _queue(self) -> list[Submission]:
        key = (lambda each: each.priority) if self._has_priorities else (lambda each: 0)
        return sorted(self._asked.values(), key=key)

    def _ask(self, request: Submission) -> None:
        handoff = self._messages
        key = handoff.AttemptKey(request.name, self._attempt)
        prompt = np.array(request.prompt, "<i4").tobytes()
        size, most = self.manager.block_size, request.max_new_tokens
        header, namespace = handoff.Header(key, 1), request.namespace
        ask = handoff.Ask(header, prompt, namespace, size, 1, most, request.priority)
        self.scheduler.receive("p0", ask)
        self._carry_out()

    def _carry_out(self) -> None:
        while actions := self.scheduler.take_actions():
            for action in actions:
                self._act(action)

    def _act(self, action: Any) -> None:
        kind = type(action).__name__
        if kind == "Post" and type(action.message).__name__ == "Grant":
            key = action.message.header.key
            if key.request_id in self._asked and key.attempt == self._attempt:  # not given up
                self._grants.append(action.message)
        elif kind == "Post" and getattr(action.message, "reason", "") == "too large":
            del self._asked[action.message.header.key.request_id]
        elif kind == "Pull":
            self.scheduler.pulled(action.part_id)
        elif kind == "Started":
            self.requests[action.request.request_id] = action.request

    def abort(self, name: str) -> bool:
        """End a request, also at the prefill node; False if it has ended."""
        request = self.requests[name]
        if request.finish_reason is not None:
            return False
        self.scheduler.abort(name)
        if self._asked.pop(name, None) is not None:
            request.finish_reason = "abort"
        return True

    def waiting(self) -> list[str]:
        """Return the preempted requests, and those that the prefill node asks for."""
        return [*super().waiting(), *(request.name for request in self._queue())]

    def block_table(self, name: str) -> list[int]:
        """Return the block table of a request, also of one that is being received."""
        for request in self.scheduler._side.receiving:
            if request.request_id == name:
                return list(request.lease.block_table.tolist())
        return super().block_table(name)

    def reset(self, keep: Sequence[bytes], weights: str) -> None:
        """Give up what is being received, and reset the cache."""
        self.scheduler.drain("the weights change")
        self._attempt += 1
        super().reset(keep, weights)

    def _misuse_between(self, what: str, name: str) -> bool:
        return what == "add a twin" or super()._misuse_between(what, name)


def make_factory(
    scheduler: ModuleType | None = None, promises: SchedulerPromises | None = None
) -> SchedulerFactory:
    """Return a factory of adapters for a scheduler package: ours, or a copy with a planted bug."""
    package: Any = own_scheduler if scheduler is None else scheduler
    claimed = SchedulerPromises.all() if promises is None else promises

    def make(config: Config) -> TieredMixedAdapter:
        kind = TieredDecodeAdapter if config.get("decode") else TieredMixedAdapter
        return kind(config, package, claimed)

    return make
