"""The host and storage tiers of a cache manager: operations out, completions in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ..errors import StorageConfigError
from ..ids import OpId
from ..prefix.block_pool import BlockPool
from ..prefix.lease import Lease
from ..prefix.node import Node
from ..stats import TierStats
from ..tokens import Tokens
from .checks import check_tiers
from .host_tier import HostConfig
from .load import HostReader, Loads
from .offload import HostWriter
from .operations import Operation, OpKind
from .parked import Parked, ParkedIn
from .parking import park, unpark
from .prefetch import Prefetch, prefetch
from .state import Cache, TierState
from .storage_keys import NodeKeys

if TYPE_CHECKING:
    from ..storage.keys import StorageNamespace


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
        config: configuration of the host tier, with its write policy.
        state: what the parts of the tiers share.
        writer: copies blocks to the host.
        reader: loads blocks from the host.
    """

    def __init__(
        self,
        config: HostConfig,
        storage: StorageNamespace | None,
        cache: Cache,
        device_pool: BlockPool,
        publish_run: Callable[[Lease, bytes], None],
    ) -> None:
        """Make the tiers of a manager.

        Args:
            config: configuration of the host tier.
            storage: see `storage`.
            cache, device_pool, publish_run: see `TierState`.

        Raises:
            StorageConfigError: see `storage`.
        """
        self.config = config.with_policy(storage=storage is not None)
        self.state = TierState(self.config, cache, device_pool, publish_run)
        self.writer = HostWriter(self.state)
        self.reader = HostReader(self.state, self.writer)
        self.storage = storage

    @property
    def storage(self) -> StorageNamespace | None:
        """Whose blocks storage keeps, from now on; None: there is no storage.

        After `CacheManager.reset` for new weights, set the same with another `weights_revision`.

        Raises:
            StorageConfigError: for what is no StorageNamespace, or has blocks of another size.
        """
        keys = self.state.tree.keys
        return None if keys is None else keys.namespace

    @storage.setter
    def storage(self, namespace: StorageNamespace | None) -> None:
        if namespace is not None:
            block_size = getattr(namespace, "block_size", None)
            if block_size is None:  # storage itself, perhaps, or its URL, with a password
                kind = type(namespace).__name__
                raise StorageConfigError(f"storage must be a StorageNamespace here, got {kind}")
            expected = self.state.cache.block_size
            if block_size != expected:
                raise StorageConfigError(
                    f"storage has blocks of {block_size} tokens, the cache of {expected}"
                )
        self.state.tree.keys = None if namespace is None else NodeKeys(namespace)

    # Operations out, completions in

    def take_operations(self) -> list[Operation]:
        """Hand out what was decided since the last call, to be dispatched before the next step."""
        self.writer.write_through()
        return self.state.operations.take()

    def take_used(self) -> list[bytes]:
        """Hand out the storage keys that were used since the last call, each after what follows it.

        For `Storage.touch`, before the operations that are taken next. Whatever becomes of them,
        only the order in which storage forgets depends on it.
        """
        return self.state.uses.take()

    def take_cancelled(self) -> list[OpId]:
        """Hand out which operations, of those taken, nobody wants any more.

        Each must still be completed or fenced, when nobody writes its blocks any more.
        """
        return self.state.operations.take_cancelled()

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
        return self.state.operations.complete(op_id, ok, fenced=fenced)

    def fence(self, op_id: OpId) -> bool:
        """Say that nobody uses the blocks of an ended operation any more; False if known."""
        return self.state.operations.fence(op_id)

    @property
    def num_open_operations(self) -> int:
        """Operations that have not ended, or may still write."""
        operations = self.state.operations
        return operations.num_open + operations.num_quarantined

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
        return park(self.state, self.writer, lease, tokens, where)

    def unpark(self, parked: Parked) -> None:
        """Let go of what a parked request keeps: it was aborted, or computes all again.

        Raises:
            LeaseError: if it was resumed or let go before.
        """
        unpark(self.state, parked)

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
        cache = self.state.cache
        cache.publish(lease, tokens)
        root = lease.node
        while root.parent is not None:
            root = root.parent
        other = cache.admit(cache.match(tokens, root.key))
        tail_tokens = len(tokens) - other.num_shared_blocks * cache.block_size
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
        return prefetch(self.state, self.writer, tokens, namespace)

    def cancel(self, prefetch: Prefetch) -> None:
        """End a prefetch whose request has gone; nothing happens if it has ended."""
        self.state.operations.cancel(prefetch.op_id)

    # For the manager

    def adopt(self, node: Node, tokens: bytes, device_blocks: bytes) -> Node:
        """Put on the device what a lease has of a node that only the host had; see the tree."""
        adopted = self.state.tree.adopt(node, tokens, device_blocks)
        assert adopted.host is not None, "what only the host had is not there"
        self.state.host.gained(adopted.host)
        self.state.keep_one(adopted.host)
        return adopted

    def cancel_all(self) -> None:
        """Cancel every operation, as the cache is reset."""
        self.state.operations.cancel_all()
        self.reader.reset()
        self.state.uses.reset()

    def quarantined_device_blocks(self) -> list[int]:
        """Return the device blocks that released leases left while they were written."""
        effects = self.state.operations.effects()
        return [block for effect in effects for block in effect.own_device_blocks()]

    def stats(self) -> TierStats:
        """Return the counts; O(1)."""
        state = self.state
        host, operations = state.host, state.operations
        return TierStats(
            host_blocks=host.pool.num_blocks,
            host_free_blocks=host.pool.num_free,
            host_cached_blocks=host.num_cached,
            parked=len(state.parked),
            open_operations=operations.num_open,
            quarantined_operations=operations.num_quarantined,
            promoted_blocks=self.reader.promoted_blocks,
            demoted_blocks=self.writer.demoted_blocks,
            dropped_blocks=state.tree.dropped_blocks,
            stored_blocks=state.stored_blocks,
            fetched_blocks=state.fetched_blocks,
            late_completions=operations.late_completions,
        )

    def check(self, leases: Collection[Lease]) -> None:
        """Assert every invariant of the tiers; leases are the live and the detached ones."""
        check_tiers(self.state, self.reader.loading, leases)
