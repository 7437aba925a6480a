"""Public interface of the host and storage tiers: operations out, completions in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ..errors import StorageConfigError
from ..events import EventRecorder
from ..ids import OpId
from ..prefix.block_pool import BlockPool
from ..prefix.lease import Lease
from ..prefix.node import Node
from ..stats import TierStats
from ..tokens import Tokens, as_tokens
from .checks import check_tiers
from .completion_handlers import store_again
from .host_tier import HostConfig
from .load import Loader, LoadPlan
from .offload import Offloader
from .operations import Operation, OpKind
from .parked import Parked, ParkedIn
from .parking import park, unpark
from .prefetch import Prefetch, start_prefetch
from .state import Cache, TierState
from .storage_key_cache import StorageKeyCache

if TYPE_CHECKING:
    from ..storage.keys import StorageNamespace


class Tiers:
    """Host and storage tiers of a cache manager.

    Take the operations after each round of calls, dispatch them before the next step of the model,
    and report the result of each. `Operation` defines the order in which they may run.

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
        state: state that the parts of the tiers share.
        offloader: copies blocks from the device to the host.
        loader: copies blocks from the host to the device.
    """

    def __init__(
        self,
        config: HostConfig,
        storage: StorageNamespace | None,
        cache: Cache,
        device_pool: BlockPool,
        publish_run: Callable[[Lease, bytes], None],
        events: EventRecorder | None = None,
    ) -> None:
        """Make the tiers of a manager.

        Args:
            config: configuration of the host tier.
            storage: see `storage`.
            cache, device_pool, publish_run, events: see ``TierState``.

        Raises:
            StorageConfigError: see `storage`.
        """
        self.config = config.with_policy(storage=storage is not None)
        self.state = TierState(self.config, cache, device_pool, publish_run, events)
        self.offloader = Offloader(self.state)
        self.loader = Loader(self.state, self.offloader)
        self.storage = storage

    @property
    def storage(self) -> StorageNamespace | None:
        """Namespace of the blocks in storage, or None without storage.

        After `CacheManager.reset` for new weights, set it to one with another ``weights_revision``.
        Operations write to it what the host has then: the namespaces that the reset kept. Open
        operations with the former one are cancelled: see `take_cancelled`.

        Raises:
            StorageConfigError: if it is not a StorageNamespace, or has another block size.
        """
        keys = self.state.tree.keys
        return None if keys is None else keys.namespace

    @storage.setter
    def storage(self, namespace: StorageNamespace | None) -> None:
        if namespace is not None:
            block_size = getattr(namespace, "block_size", None)
            if block_size is None:  # perhaps a storage URL with a password: do not quote it
                kind = type(namespace).__name__
                raise StorageConfigError(f"storage must be a StorageNamespace, got {kind}")
            expected = self.state.cache.block_size
            if block_size != expected:
                raise StorageConfigError(
                    f"storage has blocks of {block_size} tokens, but the cache of {expected}"
                )
        if namespace == self.storage:
            return
        self.state.operations.cancel_storage()
        self.state.recency.reset()
        self.state.tree.keys = None if namespace is None else StorageKeyCache(namespace)
        if self.state.events is not None:
            self.state.events.forget_storage()
        store_again(self.state)

    # Operations out, completions in

    def take_operations(self) -> list[Operation]:
        """Return the operations queued since the last call. Dispatch them before the next step."""
        self.offloader.write_through()
        return self.state.operations.take()

    def take_used(self) -> list[bytes]:
        """Return the storage keys used since the last call, each after the blocks that follow it.

        Pass them to `Storage.touch` before the operations that you take next. Only the eviction
        order of storage depends on them.
        """
        return self.state.recency.take()

    def take_cancelled(self) -> list[OpId]:
        """Return the dispatched operations that were cancelled since the last call.

        Complete or fence each of them when nothing writes its blocks any more.
        """
        return self.state.operations.take_cancelled()

    def complete(self, op_id: OpId, ok: Sequence[bool | None], *, fenced: bool = True) -> bool:
        """Report the result of a dispatched operation.

        Args:
            op_id: the operation.
            ok: for each block, whether it was copied completely or, for a lookup, found; None if
                storage did not answer.
            fenced: whether nothing uses the blocks any more. If False, call `fence` later.

        Returns:
            False if the operation has a result already or was never taken; nothing changes then.

        Raises:
            OperationResultError: if there is not one result per block.
        """
        return self.state.operations.complete(op_id, ok, fenced=fenced)

    def fence(self, op_id: OpId) -> bool:
        """Report that nothing uses the blocks of an ended operation any more; False if known."""
        return self.state.operations.fence(op_id)

    @property
    def num_open_operations(self) -> int:
        """Number of operations that have not ended or may still write."""
        operations = self.state.operations
        return operations.num_open + operations.num_quarantined

    # Preemption that keeps KV, fork and prefetch

    def park(self, lease: Lease, tokens: Tokens, where: ParkedIn = "host") -> Parked | None:
        """Preempt a request and copy its KV to a slower tier; its lease ends with the copy.

        The lease keeps its blocks until then, and also waits for earlier copies of the same blocks.
        They must not be written. If a copy fails, the lease ends as well, and the request computes
        the missing blocks again.

        Args:
            lease: lease of a request that no running step reads.
            tokens: all of its tokens whose KV has been computed. Whole blocks are published.
            where: "host", or "storage": then the host may drop the blocks once they are stored.

        Returns:
            The parked request, to resume with `CacheManager.admit` or to `unpark`. None if the
            host has no room; then nothing has changed, except that whole blocks are published.

        Raises:
            LeaseError: if the lease is not live, still loads, or has no room for so many tokens.
            StorageConfigError: for "storage" without storage, or another value of where.
        """
        return park(self.state, self.offloader, lease, tokens, where)

    def unpark(self, parked: Parked) -> None:
        """Drop a parked request: it was aborted, or computes everything again.

        Raises:
            LeaseError: if it was resumed or unparked before.
        """
        unpark(self.state, parked)

    def fork(self, lease: Lease, tokens: Tokens) -> Lease:
        """Admit a request that continues another one, as for several samples of one prompt.

        They share whole blocks. A partial last block is copied, because both will write into it:
        `Lease.loading` is that copy, and `Lease.num_ready_tokens` tells how it ended.

        Args:
            lease: lease of a request that no running step writes.
            tokens: all of its tokens whose KV has been computed. Whole blocks are published.

        Raises:
            LeaseError: if the lease is not live, still loads, or has no room for so many tokens.
            OutOfBlocksError: if no block is free or evictable for the copy.
        """
        cache = self.state.cache
        tokens = as_tokens(tokens)
        cache.publish(lease, tokens)
        root = lease.node
        while root.parent is not None:
            root = root.parent
        other = cache.admit(cache.match(tokens, root.key))
        tail_tokens = len(tokens) - other.num_shared_blocks * cache.block_size
        if tail_tokens > 0:
            source = lease.block_table[other.num_shared_blocks]
            plan = LoadPlan(source.tobytes(), tail_tokens=tail_tokens)
            self.loader.load(OpKind.DEVICE_TO_DEVICE, other, plan)
        return other

    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> Prefetch | None:
        """Load the blocks that storage has of a request to the host, before it is admitted.

        Returns:
            The prefetch, to wait for or to `cancel`; None if there is nothing to look up.

        Raises:
            TokenError, NamespaceError: for arguments of the wrong kind.
        """
        return start_prefetch(self.state, self.offloader, tokens, namespace)

    def cancel(self, prefetch: Prefetch) -> None:
        """Cancel a prefetch whose request was aborted; no effect if it has ended."""
        self.state.operations.cancel(prefetch.op_id)

    # For the manager

    def add_device_blocks(self, node: Node, tokens: bytes, device_blocks: bytes) -> Node:
        """Put a node that only the host had on the device: see `TieredTree.add_device_blocks`."""
        adopted = self.state.tree.add_device_blocks(node, tokens, device_blocks)
        assert adopted.host is not None, "a node that only the host had has no copy"
        if self.state.events is not None:
            assert adopted.parent is not None, "a root is put on the device"
            run = adopted.tokens[: adopted.num_blocks * self.state.tree.block_bytes]
            self.state.events.published(adopted.parent, run, adopted.device_blocks)
        self.state.host.relink(adopted.host)
        self.state.drop_redundant(adopted.host)
        return adopted

    def cancel_all(self) -> None:
        """Cancel every operation and end every detached lease, for a reset."""
        num_dropped = self.state.tree.dropped_blocks
        self.state.operations.cancel_all()
        self.state.tree.dropped_blocks = num_dropped  # a reset is no lack of room
        self.loader.reset()
        self.state.recency.reset()

    def quarantined_device_blocks(self) -> list[int]:
        """Return the device blocks of released leases that an operation may still write."""
        handlers = self.state.operations.handlers()
        return [block for handler in handlers for block in handler.owned_device_blocks()]

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
            promoted_blocks=self.loader.promoted_blocks,
            demoted_blocks=self.offloader.demoted_blocks,
            dropped_blocks=state.tree.dropped_blocks,
            stored_blocks=state.stored_blocks,
            fetched_blocks=state.fetched_blocks,
            late_completions=operations.late_completions,
        )

    def check(self, leases: Collection[Lease]) -> None:
        """Assert every invariant of the tiers; leases are the live and the detached ones."""
        check_tiers(self.state, self.loader.loading, leases)
