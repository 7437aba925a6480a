"""The host and storage tiers of a cache manager: operations out, completions in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import StorageConfigError
from ..prefix.lease import TierStats
from ..prefix.node import Node
from ..tokens import Tokens
from .completions import Stored
from .host_tier import (
    HostConfig,
    HostRun,
    HostTier,
)
from .load import HostReader, Loads
from .offload import HostWriter
from .operations import (
    Effect,
    Operation,
    Operations,
    OpId,
    OpKind,
)
from .parking import (
    Parked,
    ParkedIn,
    park,
    settle_parked,
    unpark,
)
from .prefetch import Prefetch, prefetch
from .storage_keys import NodeKeys
from .storage_recency import StorageUses
from .tiered_tree import TieredTree

if TYPE_CHECKING:
    from ..manager import CacheManager
    from ..prefix.lease import Lease
    from ..storage.keys import StorageNamespace

COPY_TIMEOUT_S: Final = 60.0
"""Between device and host; it ends sooner, unless the device hangs."""
STORAGE_TIMEOUT_S: Final = 5.0
"""After this a write is forgotten, and what was to be loaded is computed."""


class Tiers:
    """What of a manager is below the device.

    Take the operations after each round of calls, dispatch them before the next step of the model,
    and report what became of each; `Operation` says in which order they may happen.

    Example:
        >>> from radixkv.kvcache import CacheManager, HostConfig
        >>> manager = CacheManager(2, 2, host=HostConfig(2))
        >>> tiers = manager.tiers
        >>> lease = manager.admit(manager.match([1, 2, 3, 4]))
        >>> manager.publish(lease, [1, 2, 3, 4])
        >>> manager.release(lease)
        >>> manager.evict(1)
        1
        >>> [operation] = tiers.take_operations()
        >>> operation.kind.value
        'device to host'
        >>> tiers.complete(operation.id, [True])
        True
        >>> manager.match([1, 2, 3, 4]).num_host_blocks
        1

    Attributes:
        config: of the host tier, with its policy.
    """

    def __init__(
        self, manager: CacheManager, config: HostConfig, storage: StorageNamespace | None
    ) -> None:
        """Make the tiers of a manager.

        Raises:
            StorageConfigError: see `storage`.
        """
        self.config = config = config.with_policy(storage=storage is not None)
        self.manager = manager
        self.host = HostTier(config.num_blocks, spares_first=config.write != "through")
        self.tree = TieredTree(manager.block_size, self.host)
        self.storage = storage
        self.operations = Operations()
        self.writer = HostWriter(self)
        self.reader = HostReader(self)
        self.uses = StorageUses(self.tree)
        self.parked: dict[Parked, None] = {}
        self.stored_blocks = self.fetched_blocks = 0

    @property
    def storage(self) -> StorageNamespace | None:
        """Whose blocks storage keeps, from now on; None: there is no storage.

        After `CacheManager.reset` for new weights, set the same with another `weights_revision`.

        Raises:
            StorageConfigError: for what is no StorageNamespace, or has blocks of another size.
        """
        return None if self.tree.keys is None else self.tree.keys.namespace

    @storage.setter
    def storage(self, namespace: StorageNamespace | None) -> None:
        if namespace is not None:
            block_size = getattr(namespace, "block_size", None)
            if block_size is None:  # storage itself, perhaps, or its URL, with a password
                kind = type(namespace).__name__
                raise StorageConfigError(f"storage must be a StorageNamespace here, got {kind}")
            expected = self.manager.block_size
            if block_size != expected:
                raise StorageConfigError(
                    f"storage has blocks of {block_size} tokens, the cache of {expected}"
                )
        self.tree.keys = None if namespace is None else NodeKeys(namespace)

    # Operations out, completions in

    def take_operations(self) -> list[Operation]:
        """Hand out what was decided since the last call, to be dispatched before the next step."""
        self.writer.write_through()
        return self.operations.take()

    def take_used(self) -> list[bytes]:
        """Hand out the storage keys that were used since the last call, each after what follows it.

        For `Storage.touch`, before the operations that are taken next. Whatever becomes of them,
        only the order in which storage forgets depends on it.
        """
        return self.uses.take()

    def take_cancelled(self) -> list[OpId]:
        """Hand out which operations, of those taken, nobody wants any more.

        Each must still be completed or fenced, when nobody writes its blocks any more.
        """
        return self.operations.take_cancelled()

    def complete(self, op_id: OpId, ok: Sequence[bool], *, fenced: bool = True) -> bool:
        """Say what became of an operation that was taken; False, and nothing is changed, if it had
        ended, or was not taken.

        Args:
            op_id: of the operation.
            ok: for each of its blocks, whether all of it is where it should be.
            fenced: whether nobody uses its blocks any more; else `fence` is to say so.

        Raises:
            OperationResultError: if there is not one result per block.
        """
        return self.operations.complete(op_id, ok, fenced=fenced)

    def fence(self, op_id: OpId) -> bool:
        """Say that nobody uses the blocks of an ended operation any more; False if known."""
        return self.operations.fence(op_id)

    @property
    def num_open_operations(self) -> int:
        """Operations that have not ended, or may still write."""
        return self.operations.num_open + self.operations.num_quarantined

    # Preemption that keeps its KV, and what storage has

    def park(self, lease: Lease, tokens: Tokens, where: ParkedIn = "host") -> Parked | None:
        """Copy the KV of a lease to a slower tier; the lease ends when that has been done.

        Until then its blocks stay its own, but must not be written: what is being copied already,
        for whomever, is waited for, too. If a copy fails, the lease ends as well, and the request
        computes again what the cache has not.

        Args:
            lease: of a request that no running step reads.
            tokens: all of its tokens whose KV has been computed; whole blocks are published.
            where: "host", or "storage": then the host may drop them once they are stored.

        Returns:
            What to resume from, by `CacheManager.admit`, or to `unpark`; None if the host has no
            room, and then nothing has changed, but for what was published.

        Raises:
            LeaseError: if the lease is not live, still loads, or has no room for so many tokens.
            StorageConfigError: for "storage" without one, or another place.
        """
        return park(self, lease, tokens, where)

    def unpark(self, parked: Parked) -> None:
        """Let go of what a parked request keeps: it was aborted, or computes all again.

        Raises:
            LeaseError: if it was resumed or let go before.
        """
        unpark(self, parked)

    def fork(self, lease: Lease, tokens: Tokens) -> Lease:
        """Admit another request that goes on from where one is: one prompt, several samples.

        Whole blocks are shared. The last one, if it is not whole, is copied, as both will write
        into it: `Lease.loading` is that copy, and `Lease.num_ready_tokens` says how it ended.

        Args:
            lease: of the request, which no running step writes.
            tokens: all of its tokens whose KV has been computed; whole blocks are published.

        Raises:
            LeaseError: if the lease is not live, still loads, or has no room for so many tokens.
            OutOfBlocksError: if no block is free or evictable for the copy.
        """
        manager = self.manager
        manager.publish(lease, tokens)
        root = lease.node
        while root.parent is not None:
            root = root.parent
        other = manager.admit(manager.match(tokens, root.key))
        tail_tokens = len(tokens) - other.num_shared_blocks * manager.block_size
        if tail_tokens > 0:
            source = lease.block_table[other.num_shared_blocks]
            loads = Loads(source.tobytes(), tail_tokens=tail_tokens)
            self.reader.load(OpKind.DEVICE_TO_DEVICE, other, loads)
        return other

    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> Prefetch | None:
        """Bring what storage has of tokens to the host, for a request that is yet to be admitted.

        Returns:
            What to wait for, or to cancel; None if there is nothing to ask storage for.

        Raises:
            TokenError, NamespaceError: for arguments of the wrong kind.
        """
        return prefetch(self, tokens, namespace)

    def cancel(self, prefetch: Prefetch) -> None:
        """End a prefetch whose request has gone; nothing happens if it has ended."""
        self.operations.cancel(prefetch.op_id)

    # Shared steps

    def adopt(self, node: Node, tokens: bytes, device_blocks: bytes) -> Node:
        """Put on the device what a lease has of a node that only the host had; see the tree."""
        node = self.tree.adopt(node, tokens, device_blocks)
        assert node.host is not None, "what only the host had is not there"
        self.host.gained(node.host)
        self.keep_one(node.host)
        return node

    def cancel_all(self) -> None:
        """Cancel every operation, as the cache is reset."""
        self.operations.cancel_all()
        self.reader.reset()
        self.uses.reset()

    def let_go(self, holder: list[HostRun]) -> None:
        """End a hold; with one tier at a time, a copy of what is on the device too goes."""
        runs = list(holder)
        self.host.let_go(holder)
        for run in runs:
            if run.node is not None:
                self.keep_one(run)

    def keep_one(self, run: HostRun) -> None:
        """Drop a copy of what is on the device, if blocks are to be in one tier at a time."""
        assert run.node is not None, "a dropped copy is looked at"
        moved = self.config.write == "exclusive" and run.is_valid and not run.holders
        if run.node.device_blocks and (moved or run.leaving):
            self.host.drop(run)

    def arrived(self, run: HostRun, num_good: int) -> list[HostRun]:
        """Take in that of a landing run num_good blocks have been written; return what is valid."""
        node = run.node
        if node is None:
            return []
        if 0 < num_good < run.num_blocks:
            upper = self.tree.split(node, num_good).host
            assert upper is not None, "half of a copy is missing"
            return [*self.arrived(upper, num_good), *self.arrived(run, 0)]
        if num_good:
            self.tree.version += 1
            self.host.settle(run)
            return [run]
        if node.device_blocks:
            self.host.drop(run)
        else:
            self.tree.remove(node)
        return []

    def submit(
        self,
        kind: OpKind,
        effect: Effect,
        sources: bytes = b"",
        destinations: bytes = b"",
        keys: Sequence[bytes] = (),
    ) -> OpId:
        """Decide an operation on blocks that are given as bytes of int32."""
        return self.operations.submit(
            kind,
            effect,
            epoch=self.manager.epoch,
            sources=np.frombuffer(sources, np.int32),
            destinations=np.frombuffer(destinations, np.int32),
            keys=keys,
            timeout_s=STORAGE_TIMEOUT_S if keys else COPY_TIMEOUT_S,
        )

    def store(self, runs: Sequence[HostRun]) -> None:
        """Write copies that have just arrived on the host to storage, if there is one."""
        tree = self.tree
        if tree.keys is None or not runs:
            return
        blocks = b"".join([run.blocks for run in runs])
        keys: list[bytes] = []
        parents: list[Node] = []
        for run in runs:
            node = run.node
            assert node is not None and node.parent is not None, "a dropped copy is stored"
            keys += tree.keys.each(tree.path(node))
            parents.append(node.parent)
        self.uses.note(parents)  # what they follow must not make room for them
        self.submit(OpKind.HOST_TO_STORAGE, Stored(self, runs), sources=blocks, keys=keys)

    def quarantined_device_blocks(self) -> list[int]:
        """Return the device blocks that released leases left while they were written."""
        effects = self.operations.effects()
        return [block for effect in effects for block in effect.own_device_blocks()]

    def stats(self) -> TierStats:
        """Return the counts; O(1)."""
        host = self.host
        return TierStats(
            host_blocks=host.pool.num_blocks,
            host_free_blocks=host.pool.num_free,
            host_cached_blocks=host.num_cached,
            parked=len(self.parked),
            open_operations=self.operations.num_open,
            quarantined_operations=self.operations.num_quarantined,
            promoted_blocks=self.reader.promoted_blocks,
            demoted_blocks=self.writer.demoted_blocks,
            dropped_blocks=self.tree.dropped_blocks,
            stored_blocks=self.stored_blocks,
            fetched_blocks=self.fetched_blocks,
            late_completions=self.operations.late_completions,
        )

    def settle_parked(self) -> None:
        """Free what a copy that has ended allows of parked requests."""
        settle_parked(self)
