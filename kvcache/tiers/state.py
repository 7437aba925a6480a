"""State that the parts of the tiers share, and the steps that several of them need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from ..events import EventRecorder
from ..ids import Epoch, OpId
from ..prefix.block_pool import BlockPool
from ..prefix.lease import Lease, Match
from ..tokens import Tokens
from .host_tier import HostConfig, HostRun, HostTier
from .operations import CompletionHandler, Operations, OpKind
from .parked import Parked
from .storage_recency import StorageRecency
from .tiered_tree import TieredTree

COPY_TIMEOUT_S: Final = 60.0
"""Deadline of a copy between device and host. It ends sooner, unless the device hangs."""
STORAGE_TIMEOUT_S: Final = 5.0
"""Deadline of a storage operation: then a write is forgotten, and a load is computed instead."""


class Cache(Protocol):
    """What the tiers use of the cache manager above them."""

    block_size: int
    epoch: Epoch

    def match(self, tokens: Tokens, namespace: bytes = b"") -> Match:
        """Find the longest published prefix of tokens."""

    def admit(self, match: Match) -> Lease:
        """Pin a match and reserve blocks for the other tokens."""

    def publish(self, lease: Lease, tokens: Tokens) -> None:
        """Share the whole blocks of a lease that have been computed."""

    def release(self, lease: Lease) -> None:
        """End a lease."""


class TierState:
    """State that the parts of the tiers share.

    Attributes:
        config: configuration of the host tier, with its write policy.
        cache: the manager.
        device_pool: the manager's pool of device blocks.
        publish_run: publishes whole blocks of a lease, given their tokens as bytes of int32. It
            checks nothing.
        events: recorder of KV events, or None.
        tree: the radix tree of all tiers.
        host: the host tier.
        operations: operations that have not ended.
        recency: recency reports to storage.
        parked: parked requests, oldest first.
        stored_blocks: number of blocks written to storage.
        fetched_blocks: number of blocks read from storage.
    """

    def __init__(
        self,
        config: HostConfig,
        cache: Cache,
        device_pool: BlockPool,
        publish_run: Callable[[Lease, bytes], None],
        events: EventRecorder | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.device_pool = device_pool
        self.publish_run = publish_run
        self.events = events
        self.host = HostTier(
            config.num_blocks, redundant_first=config.write != "through", events=events
        )
        self.tree = TieredTree(cache.block_size, self.host)
        self.operations = Operations()
        self.recency = StorageRecency(self.tree)
        self.parked: dict[Parked, None] = {}
        self.stored_blocks = self.fetched_blocks = 0

    def submit(
        self,
        kind: OpKind,
        handler: CompletionHandler,
        sources: bytes = b"",
        destinations: bytes = b"",
        keys: Sequence[bytes] = (),
    ) -> OpId:
        """Queue an operation on blocks that are given as bytes of int32."""
        return self.operations.submit(
            kind,
            handler,
            epoch=self.cache.epoch,
            sources=np.frombuffer(sources, np.int32),
            destinations=np.frombuffer(destinations, np.int32),
            keys=keys,
            timeout_s=STORAGE_TIMEOUT_S if keys else COPY_TIMEOUT_S,
        )

    def release_hold(self, holder: list[HostRun]) -> None:
        """End a hold; the "exclusive" policy then drops copies of blocks on the device."""
        runs = list(holder)
        self.host.release_hold(holder)
        for run in runs:
            if run.node is not None:
                self.drop_redundant(run)

    def drop_redundant(self, run: HostRun) -> None:
        """Drop a copy of blocks on the device if the policy keeps each block in one tier."""
        assert run.node is not None, "a dropped copy is kept"
        moved = self.config.write == "exclusive" and run.is_valid and not run.holders
        if run.node.device_blocks and (moved or run.promoting):
            self.host.drop(run)

    def release_saved(self) -> None:
        """Release the leases of parked requests that no operation copies any more.

        A lease keeps its blocks for every operation that reads them, not only for the request's
        own: if that copy fails, there is no other. Requests parked in storage also release their
        host blocks once those are stored.
        """
        for parked in self.parked:
            if not (parked.saved or parked.is_saving):
                self.mark_saved(parked)
            if parked.where == "storage" and parked.saved and all(r.stored for r in parked.runs):
                self.release_hold(parked.runs)

    def mark_saved(self, parked: Parked) -> None:
        """Release the lease of a parked request, and keep only the copies that succeeded."""
        saved = self.host.hold([run for run in parked.runs if run.node is not None])
        parked.failed = parked.failed or len(saved) < len(parked.runs)
        self.release_hold(parked.runs)
        parked.runs = saved
        parked.saved, parked.lease.parking = True, False
        self.cache.release(parked.lease)
