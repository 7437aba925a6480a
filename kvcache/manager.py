"""CacheManager: match, admit, extend, publish, release, evict and reset. No I/O, clock or JAX."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import (
    HostConfigError,
    LeaseError,
    MatchError,
    NamespaceError,
    OutOfBlocksError,
    RequestTooLargeError,
    StepError,
    StorageConfigError,
)
from .events import EventBatch, EventRecorder
from .ids import Epoch
from .invariants import check_leases, check_ownership
from .prefix.block_pool import BlockPool
from .prefix.block_tables import BlockTables
from .prefix.deduplication import deduplicate
from .prefix.lease import Lease, Match, NextBlock, not_a_lease
from .prefix.node import Walk
from .prefix.radix_tree import RadixTree
from .stats import CacheStats
from .tiers.api import Tiers
from .tiers.host_tier import HostConfig
from .tiers.parked import Parked
from .tiers.parking import require_saved
from .tokens import (
    INT32,
    Int32Array,
    SupportsArray,
    Tokens,
    as_bytes,
    as_count,
    as_ids,
    as_tokens,
    check_namespaces,
)

if TYPE_CHECKING:
    from .storage.keys import StorageNamespace


class CacheManager:
    """Bookkeeping of a paged KV cache with prefix sharing, on the device and in slower tiers.

    For each request: `match` its tokens, `admit` it (pins the hit and reserves the other blocks),
    `publish` the blocks that have been computed, `extend` it while it decodes, and `release` it. To
    preempt a request, `release` it or park it with `Tiers.park`; to abort it, `release` it. A call
    that raises changes nothing. Use the manager from one thread at a time.

    Example:
        >>> manager = CacheManager(num_blocks=8, block_size=2)
        >>> lease = manager.admit(manager.match([1, 2, 3, 4, 5]))
        >>> manager.publish(lease, [1, 2, 3, 4, 5])
        >>> manager.release(lease)
        >>> manager.match([1, 2, 3, 4, 9]).num_tokens
        4

    ::

        free: BlockPool ── fill ──► private to a lease: BlockTables ── publish ──► RadixTree
               ▲  ▲                                │                                  │
               │  └──────────── release ───────────┘                                  │
               └──────────────────────────── evict ───────────────────────────────────┘

    Attributes:
        num_blocks: number of usable blocks, with ids ``1 .. num_blocks``.
        block_size: tokens per block.
        epoch: number of resets.
        tables: block tables of the live leases.
        tiers: host and storage tiers, or None.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        host: HostConfig | None = None,
        storage: StorageNamespace | None = None,
        record_events: bool = False,
    ) -> None:
        """Create a manager with all blocks free.

        Args:
            num_blocks: number of usable blocks, with ids ``1 .. num_blocks``; id 0 is the padding
                sink.
            block_size: tokens per block.
            host: host tier; None for none, then `tiers` is None.
            storage: namespace of the blocks in storage, below the host tier; None for no storage.
            record_events: whether to record KV events; see `take_events`.

        Raises:
            CountError: if either count is less than 1.
            HostConfigError: if host is not a HostConfig.
            StorageConfigError: if storage is not a StorageNamespace, has another block size, or
                there is no host tier.
        """
        self.num_blocks = as_count("num_blocks", num_blocks, minimum=1)
        self.block_size = as_count("block_size", block_size, minimum=1)
        self.epoch = Epoch(0)
        self.tables = BlockTables()
        self.tiers: Tiers | None = None
        self._pool = BlockPool(self.num_blocks)
        self._tree = RadixTree(self.block_size)
        self._leases: dict[int, Lease] = {}
        self._steps_begun = self._steps_ended = 0
        # Duplicates, and the number of steps that must have ended before they are recycled.
        self._replaced: deque[tuple[int, Int32Array]] = deque()
        self._admitted = self._hit_blocks = self._evicted_blocks = self._duplicate_blocks = 0
        self._events: EventRecorder | None = None
        if storage is not None and host is None:
            raise StorageConfigError(
                "storage needs a host tier, because its blocks pass through the host"
            )
        if host is not None and not isinstance(host, HostConfig):
            raise HostConfigError(f"host must be a HostConfig, got {host!r}")
        if record_events:
            num_host_blocks = 0 if host is None else host.num_blocks
            self._events = EventRecorder(self.block_size, self.num_blocks, num_host_blocks)
        if host is not None:
            self.tiers = Tiers(host, storage, self, self._pool, self._publish_run, self._events)
            self._tree = self.tiers.state.tree

    @property
    def available(self) -> int:
        """Number of blocks that are free or can be evicted now."""
        return self._pool.num_free + self._tree.num_idle

    def available_after(self, match: Match) -> int:
        """Return the number of blocks free or evictable once a match is pinned. Changes nothing.

        Raises:
            MatchError: if match is not a Match.
        """
        try:
            is_current = match._version == self._tree.version
        except AttributeError:
            raise MatchError(match) from None
        if not is_current:
            match = self._match(match._tokens, match._length, match._namespace)
        pinned = self._tree.idle_blocks_on(match._walk) if match._walk is not None else 0
        return self.available - pinned

    def __repr__(self) -> str:
        used = self.num_blocks - self.available
        text = (
            f"CacheManager({self.num_blocks:,} blocks of {self.block_size} tokens: "
            f"{self._pool.num_free:,} free, {self._tree.num_idle:,} idle, {used:,} in use; "
            f"live leases: {len(self._leases):,}"
        )
        if self.tiers is not None:
            text += f"; host tier of {self.tiers.config.num_blocks:,} blocks"
        return f"{text})"

    # A request's life

    def match(
        self, tokens: Tokens, namespace: bytes = b"", *, max_hit_tokens: int | None = None
    ) -> Match:
        """Find the longest published prefix of tokens, in whole blocks. Changes nothing.

        An int32 array is not copied: do not change it until the match is admitted. Other forms of
        tokens are converted at each call; see `as_tokens`.

        Args:
            tokens: the tokens of a request.
            namespace: only requests of the same namespace share blocks.
            max_hit_tokens: most tokens of the hit, in all tiers, for a request that computes the
                others itself; None for no limit.

        Raises:
            TokenError, NamespaceError: for arguments of the wrong kind.
            CountError: if max_hit_tokens is negative.
        """
        tokens = as_tokens(tokens)
        if not isinstance(namespace, bytes):
            raise NamespaceError(f"namespace must be bytes, got {namespace!r}")
        end = length = len(tokens)
        if max_hit_tokens is not None:
            end = min(length, as_count("max_hit_tokens", max_hit_tokens))
        return self._match(tokens[: end - end % self.block_size], length, namespace)

    def _match(self, whole: Int32Array, length: int, namespace: bytes) -> Match:
        root = self._tree.roots.get(namespace)
        walk = self._tree.walk(root, as_bytes(whole)) if root is not None else None
        match = Match(whole, length, namespace, walk, self._tree.version, self.block_size)
        if self.tiers is not None and walk is not None and walk.inside is None:
            self.tiers.loader.match(match, walk)
        return match

    def admit(self, match: Match, parked: Parked | None = None, *, count_hit: bool = True) -> Lease:
        """Pin the matched blocks and reserve blocks for the other tokens of the match.

        If the hit is all of the tokens, compute the last token again for its logits, but write no
        KV: the blocks of the hit are shared.

        Blocks that the host has beyond the hit, or keeps for a parked request, are copied into the
        lease by one operation, `Lease.loading`. Compute when it has ended.

        Args:
            match: match of the request's tokens.
            parked: the parked request that resumes. This call ends it.
            count_hit: whether the hit counts in `stats` now, or when `count_hit` is called, if
                the request might be given up before it uses the hit.

        Raises:
            MatchError: if match is not a Match.
            LeaseError: if parked is not a Parked, has ended, is not saved yet, or has more tokens
                than the match.
            RequestTooLargeError: if the tokens need more blocks than the pool has.
            OutOfBlocksError: if too few blocks are free or evictable now.
        """
        tree = self._tree
        try:
            is_current = match._version == tree.version
        except AttributeError:
            raise MatchError(match) from None
        if not is_current:
            match = self._match(match._tokens, match._length, match._namespace)
        tiers = self.tiers
        if parked is not None:
            require_saved(tiers.state if tiers is not None else None, parked, match._length)
        num_blocks = -(-match._length // self.block_size)
        needed = num_blocks - match.num_blocks
        walk = match._walk
        if needed > self._pool.num_free:
            if num_blocks > self.num_blocks:
                raise RequestTooLargeError(match._length, num_blocks, self.num_blocks)
            pinned = tree.idle_blocks_on(walk) if walk is not None else 0
            if needed > self.available - pinned:
                raise OutOfBlocksError(needed, self.available - pinned)
        if walk is None:
            walk = Walk(tree.add_root(match._namespace), 0)
        node = tree.pin(walk)
        plan = tiers.loader.reserve(match, parked) if tiers is not None else None
        tables = self.tables
        row = tables.take_row()
        ids = tables.grow(row, num_blocks)
        if match.num_blocks:
            ids[: match.num_blocks] = np.frombuffer(tree.path_blocks(node), INT32)
        self._fill(ids[match.num_blocks :])
        tables.num_tokens[row] = match._length
        lease = Lease(tables, row, self.epoch, node, match.num_blocks, match.num_tokens)
        self._leases[row] = lease
        self._admitted += 1
        if count_hit:
            self._hit_blocks += match.num_blocks
        if tiers is not None:
            tiers.loader.start_load(lease, plan)
        tree.join_path(node)
        return lease

    def count_hit(self, lease: Lease) -> None:
        """Count the hit of a lease that was admitted without counting it. Call it once.

        Raises:
            LeaseError: if the lease is not live.
        """
        try:
            if self._leases.get(lease.row) is not lease:
                raise self._not_live(lease)
        except AttributeError:
            raise not_a_lease(lease) from None
        self._hit_blocks += lease.num_hit_blocks

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Make room for num_tokens more tokens of a lease.

        Raises:
            CountError, LeaseError: for a negative count, or a lease that is not live.
            OutOfBlocksError: if too few blocks are free or evictable now.
        """
        num_tokens = as_count("num_tokens", num_tokens)
        try:
            if self._leases.get(lease.row) is not lease:
                raise self._not_live(lease)
        except AttributeError:
            raise not_a_lease(lease) from None
        tables, row = self.tables, lease.row
        total = tables.num_tokens.item(row) + num_tokens
        held = tables.num_blocks.item(row)
        needed = -(-total // self.block_size) - held
        if needed > 0:
            if needed > self._pool.num_free:
                self._require_available(needed)
            self._fill(tables.grow(row, held + needed)[held:])
        tables.num_tokens[row] = total

    def extend_batch(self, rows: Sequence[int] | SupportsArray) -> None:
        """Make room for one more token of every lease in rows, all of them or none.

        Args:
            rows: integers ``[batch]``, distinct `Lease.row` values.

        Raises:
            IdError: if rows are not integers within int32.
            LeaseError: if a row is not that of a live lease, or comes twice.
            OutOfBlocksError: if too few blocks are free or evictable now.
        """
        rows = as_ids("row", rows)
        tables = self.tables
        if not tables.rows_are_live(rows):
            raise LeaseError(f"rows {rows.tolist()} are not all rows of live leases")
        num_tokens = tables.num_tokens[rows] + 1
        held = tables.num_blocks[rows]
        crosses = num_tokens > held * self.block_size
        crossing = rows[crosses]
        if len(rows) and np.bincount(rows).max() > 1:
            raise LeaseError(f"rows {rows.tolist()} name a lease twice")
        if len(crossing):
            self._require_available(len(crossing))
            new = np.empty(len(crossing), np.int32)
            self._fill(new)
            tables.append(crossing, new)
        tables.num_tokens[rows] = num_tokens

    def publish(self, lease: Lease, tokens: Tokens) -> None:
        """Share the whole blocks of a lease that have been computed.

        If another request has published the same block before, this lease's duplicate is recycled
        and its block table points to the published one. A step in flight may read the duplicate
        through an older copy of the table: call `begin_step` and `end_step`, or publish only when
        no running step reads the table.

        Args:
            lease: the lease that computed the blocks.
            tokens: all tokens of the sequence whose KV is written. Fewer than in an earlier call
                have no effect.

        Raises:
            TokenError: for arguments that are not tokens.
            LeaseError: if the lease is not live, is loading or parking, or has no room for so many
                tokens.
        """
        tokens = as_tokens(tokens)
        try:
            if self._leases.get(lease.row) is not lease:
                raise self._not_live(lease)
        except AttributeError:
            raise not_a_lease(lease) from None
        if len(tokens) > self.tables.num_tokens.item(lease.row):
            raise LeaseError(
                f"{len(tokens)} tokens published on a lease with room for {lease.num_tokens}"
            )
        if lease.loading is not None or lease.parking:
            raise LeaseError("the lease cannot be published while it is loading or parking")
        first, last = lease.num_shared_blocks, len(tokens) // self.block_size
        if last <= first:
            return
        run = tokens[first * self.block_size : last * self.block_size].tobytes()
        self._publish_run(lease, run)

    def begin_step(self) -> None:
        """Report that a step was dispatched that reads block tables as they are now.

        Duplicates that `publish` replaces from now on stay quarantined until the step has ended.
        """
        self._steps_begun += 1

    def end_step(self) -> None:
        """Report that the first step in flight has ended; steps end in the order of their begin.

        Raises:
            StepError: if no step is in flight.
        """
        if self._steps_ended == self._steps_begun:
            raise StepError(f"a step ends, and all {self._steps_begun} that began have ended")
        self._steps_ended += 1
        while self._replaced and self._replaced[0][0] <= self._steps_ended:
            self._pool.recycle(self._replaced.popleft()[1])

    def _recycle_replaced(self, blocks: Int32Array) -> None:
        """Recycle duplicates when no step in flight can read them."""
        if self._steps_ended == self._steps_begun:
            self._pool.recycle(blocks)
        else:
            self._replaced.append((self._steps_begun, blocks.copy()))

    def next_block(self, lease: Lease, tokens: Tokens) -> NextBlock | None:
        """Identify the next block that a lease will publish; None if tokens do not fill it.

        A request whose ``Match.next_block`` is equal can wait for it instead of computing it too.
        """
        try:
            if self._leases.get(lease.row) is not lease:
                raise self._not_live(lease)
        except AttributeError:
            raise not_a_lease(lease) from None
        first = lease.num_shared_blocks * self.block_size
        block = as_tokens(tokens)[first : first + self.block_size]
        return (lease.node, block.tobytes()) if len(block) == self.block_size else None

    def release(self, lease: Lease) -> None:
        """End a lease, when its request finishes, is aborted or preempted, or fails.

        Its private blocks become free, and its published blocks evictable when no lease uses them.
        Blocks in flight become free when their operation ends; those that an "exclusive" host moved
        to the device are published then. Releasing a lease of an older epoch changes nothing,
        because `reset` has ended it.

        Raises:
            LeaseError: if the lease was released before, or is being parked.
        """
        try:
            if self._leases.get(lease.row) is not lease:
                if lease.epoch != self.epoch:
                    return
                raise self._not_live(lease)
        except AttributeError:
            raise not_a_lease(lease) from None
        if lease.parking:
            raise LeaseError("the lease is being parked: it ends with its copy")
        tables, row = self.tables, lease.row
        if lease.loading is not None and self.tiers is not None:
            self.tiers.loader.detach(lease)
        else:
            self._tree.unpin(lease.node)
            self._pool.recycle(tables.row(row)[lease.num_shared_blocks :])
        tables.give_row(row)
        del self._leases[row]
        lease.row = -1

    # The cache as a whole

    def evict(self, num_blocks: int) -> int:
        """Evict up to num_blocks of the least recently used idle blocks and return how many.

        Raises:
            CountError: if num_blocks is negative.
        """
        victims = self._evict(as_count("num_blocks", num_blocks))
        self._pool.recycle(victims)
        return len(victims)

    def reset(self, keep: Collection[bytes] = ()) -> Epoch:
        """End every lease and free every block, for example because the weights have changed.

        Blocks that operations of the old epoch still write become free when those have ended.
        No step may be in flight. Storage is not cleared: set `Tiers.storage` to a namespace for the
        new weights, or the blocks of the old weights are found again.

        Args:
            keep: namespaces whose published blocks stay.

        Raises:
            NamespaceError: if keep is not a collection of bytes.
        """
        check_namespaces("keep", keep)
        self._steps_ended = self._steps_begun
        while self._replaced:
            self._pool.recycle(self._replaced.popleft()[1])
        if self.tiers is None and not keep:
            self._tree = RadixTree(self.block_size)
            self._pool.reset()
        else:
            self._clear(keep)
        if self._events is not None and not keep:
            self._events.cleared()
        self.epoch = Epoch(self.epoch + 1)
        self.tables = BlockTables()
        self._leases.clear()
        return self.epoch

    def _clear(self, keep: Collection[bytes]) -> None:
        """End every operation and lease, and remove the namespaces that are not kept."""
        if self.tiers is not None:
            self.tiers.cancel_all()
        for lease in list(self._leases.values()):
            self.release(lease)
        for namespace in [name for name in self._tree.roots if name not in keep]:
            removed = self._tree.remove_root(namespace)
            if self._events is not None:
                self._events.evicted(removed)
            self._pool.recycle(removed)

    def take_events(self) -> EventBatch | None:
        """Return the KV events since the last call, in order; None if there are none.

        Take them after each step: they are kept until then. Without ``record_events`` there are
        none.
        """
        return None if self._events is None else self._events.take()

    def stats(self) -> CacheStats:
        """Return the counts; O(1)."""
        free, cached = self._pool.num_free, self._tree.num_cached
        return CacheStats(
            num_blocks=self.num_blocks,
            free_blocks=free,
            cached_blocks=cached,
            idle_blocks=self._tree.num_idle,
            private_blocks=self.num_blocks - free - cached,
            live_leases=len(self._leases),
            admitted=self._admitted,
            hit_blocks=self._hit_blocks,
            evicted_blocks=self._evicted_blocks,
            duplicate_blocks=self._duplicate_blocks,
            tiers=None if self.tiers is None else self.tiers.stats(),
        )

    def check(self) -> None:
        """Assert every invariant of the cache, by a walk over all of it."""
        self._pool.check()
        self._tree.check()
        self.tables.check()
        check_leases(self._leases, self.tables, self.epoch)
        holders = list(self._leases.values())
        quarantined = [block for _, blocks in self._replaced for block in blocks.tolist()]
        if self.tiers is not None:
            holders += self.tiers.loader.detached.values()
            self.tiers.check(holders)
            quarantined += self.tiers.quarantined_device_blocks()
        check_ownership(self._pool, self._tree, holders, quarantined)

    # Shared steps

    def _not_live(self, lease: Lease) -> LeaseError:
        """Return the error for a lease that is not live."""
        if lease.epoch != self.epoch:
            return LeaseError(
                f"the lease is of epoch {lease.epoch}, but the cache is at epoch {self.epoch}"
            )
        return LeaseError("the lease was released or belongs to another manager")

    def _require_available(self, needed: int) -> None:
        if needed > self.available:
            raise OutOfBlocksError(needed, self.available)

    def _fill(self, ids: Int32Array) -> None:
        """Fill ids with blocks that must be available, evicting exactly as many as needed."""
        short = len(ids) - self._pool.num_free
        if short <= 0:
            self._pool.fill(ids)
            return
        # Evicted blocks go directly to their new owner, not through the pool.
        ids[-short:] = self._evict(short)
        if self._pool.num_free:
            self._pool.fill(ids[:-short])

    def _evict(self, num_blocks: int) -> Int32Array:
        tiers = self.tiers
        victims = (self._tree if tiers is None else tiers.offloader).evict(num_blocks)
        self._evicted_blocks += len(victims)
        if self._events is not None:
            self._events.evicted(victims)
        return victims

    def _publish_run(self, lease: Lease, run: bytes) -> None:
        """Publish the first private blocks of a lease, without checks.

        Args:
            lease: the lease.
            run: tokens of the whole blocks to publish, as bytes of int32.
        """
        tree, tiers = self._tree, self.tiers
        first = lease.num_shared_blocks
        last = first + len(run) // tree.block_bytes
        # Usually no other lease has published the same block, and there is no duplicate.
        if run[: tree.block_bytes] in lease.node.children:
            self._duplicate_blocks += deduplicate(tree, self._recycle_replaced, lease, run, tiers)
            run = run[(lease.num_shared_blocks - first) * tree.block_bytes :]
            first = lease.num_shared_blocks
        if run:
            blocks = lease._tables.row(lease.row)[first:last].tobytes()
            if self._events is not None:
                self._events.published(lease.node, run, blocks)
            lease.node = tree.append(lease.node, run, blocks)
            lease.num_shared_blocks = last
        if tiers is not None:
            tiers.offloader.record_publish(lease.node)
