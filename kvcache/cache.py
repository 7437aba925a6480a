"""The cache as a whole: whose each block is; counts, checks, and blocks for whoever needs some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import LeaseError, OutOfBlocksError
from .invariants import (
    check_leases,
    check_ownership,
    check_tiers,
)
from .prefix.block_pool import BlockPool
from .prefix.block_tables import BlockTables
from .prefix.deduplication import share_run
from .prefix.lease import (
    CacheStats,
    Epoch,
    Lease,
)
from .prefix.radix_tree import RadixTree
from .tokens import Int32Array, as_count

if TYPE_CHECKING:
    from .tiers.api import Tiers


class Cache:
    """What a `CacheManager` manages: blocks, each free, published or private to a lease.

    ::

        free: BlockPool ── fill ──► private to a lease: BlockTables ── publish ──► RadixTree
               ▲  ▲                                │                                  │
               │  └──────────── release ───────────┘                                  │
               └──────────────────────────── evict ───────────────────────────────────┘

    Attributes:
        num_blocks: usable blocks, with ids ``1 .. num_blocks``.
        block_size: tokens per block.
        epoch: how often it was reset.
        tables: the block tables of the live leases.
        tiers: what is below the device, or None.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = as_count("num_blocks", num_blocks, minimum=1)
        self.block_size = as_count("block_size", block_size, minimum=1)
        self.epoch = Epoch(0)
        self.tables = BlockTables()
        self.tiers: Tiers | None = None
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(block_size)
        self._leases: dict[int, Lease] = {}
        self._admitted = self._hit_blocks = self._evicted_blocks = self._duplicate_blocks = 0

    @property
    def available(self) -> int:
        """How many blocks are free or can be evicted now."""
        return self._pool.num_free + self._tree.num_idle

    def evict(self, num_blocks: int) -> int:
        """Free up to num_blocks of the least recently used idle blocks; return how many.

        Raises:
            CountError: if num_blocks is negative.
        """
        victims = self._evict(as_count("num_blocks", num_blocks))
        self._pool.recycle(victims)
        return len(victims)

    def publish_run(self, lease: Lease, run: bytes) -> None:
        """Publish the blocks of a lease that follow its shared ones.

        Args:
            lease: has the blocks.
            run: their tokens, whole blocks, as bytes of int32.
        """
        tree, tiers = self._tree, self.tiers
        first = lease.num_shared_blocks
        last = first + len(run) // tree.block_bytes
        # Mostly nobody has published the same after its node, and there is nothing to share.
        if run[: tree.block_bytes] in lease.node.children:
            self._duplicate_blocks += share_run(tree, self._pool, tiers, lease, run)
            run = run[(lease.num_shared_blocks - first) * tree.block_bytes :]
            first = lease.num_shared_blocks
        if run:
            blocks = lease._tables.ids[lease.row, first:last].tobytes()
            lease.node = tree.append(lease.node, run, blocks)
            lease.num_shared_blocks = last
        if tiers is not None:
            tiers.writer.published(lease.node)

    def recycle(self, ids: Int32Array) -> None:
        """Take back blocks that a lease left while they were still written."""
        self._pool.recycle(ids)

    def end_heir(self, heir: Lease) -> None:
        """Release an heir, after what it waited for."""
        self._tree.unpin(heir.node)
        self._pool.recycle(heir.block_table[heir.num_shared_blocks :])

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
        """Assert every invariant of the cache; costs a walk over all of it."""
        self._pool.check()
        self._tree.check()
        self.tables.check()
        check_leases(self._leases, self.tables, self.epoch)
        holders, quarantined = list(self._leases.values()), []
        if self.tiers is not None:
            holders += self.tiers.reader.heirs.values()
            check_tiers(self.tiers, holders)
            quarantined = self.tiers.quarantined_device_blocks()
        check_ownership(self._pool, self._tree, holders, quarantined)

    # Shared steps

    def _not_live(self, lease: Lease) -> LeaseError:
        """Return what to raise for a lease that is not live."""
        if lease.epoch != self.epoch:
            return LeaseError(f"the lease is of epoch {lease.epoch}, the cache of {self.epoch}")
        return LeaseError("the lease was released, or is of another manager")

    def _require_available(self, needed: int) -> None:
        if needed > self.available:
            raise OutOfBlocksError(needed, self.available)

    def _fill(self, ids: Int32Array) -> None:
        """Fill ids with blocks that are known to be available, evicting exactly what is short."""
        short = len(ids) - self._pool.num_free
        if short <= 0:
            self._pool.fill(ids)
            return
        # Evicted blocks go straight to their new owner, not through the pool.
        ids[-short:] = self._evict(short)
        if self._pool.num_free:
            self._pool.fill(ids[:-short])

    def _evict(self, num_blocks: int) -> Int32Array:
        tiers = self.tiers
        victims = (self._tree if tiers is None else tiers.writer).evict(num_blocks)
        self._evicted_blocks += len(victims)
        return victims
