"""Adapter of our block pool for the specification."""

from __future__ import annotations

from types import ModuleType

from ... import kvcache as own_kvcache
from ...spec.harness.pool_world import PoolFactory
from ...spec.rules.cache import F3
from ...spec.rules.rule import require
from .lent_tokens import lending


def make_factory(kvcache: ModuleType | None = None) -> PoolFactory:
    """Return a factory of adapters for `kvcache`, a copy of `radixkv.kvcache`, or for our own."""
    module = own_kvcache if kvcache is None else kvcache
    return lambda num_blocks: PoolAdapter(module, num_blocks)


class PoolAdapter:
    """A `BlockPool` that takes and returns lists."""

    def __init__(self, kvcache: ModuleType, num_blocks: int) -> None:
        self.kvcache = kvcache
        self.pool = kvcache.BlockPool(num_blocks)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Return allocated ids, or None if too few are free."""
        try:
            ids: list[int] = self.pool.allocate(num_blocks).tolist()
        except self.kvcache.OutOfBlocksError:
            return None
        return ids

    def recycle(self, ids: list[int]) -> list[int]:
        """Recycle ids, and return those that were refused."""
        try:
            with lending(ids) as lent:
                self.pool.recycle(lent)
        except self.kvcache.RecycleError as error:
            number = len(error.refused) + error.recycled
            require(number == len(ids), F3, "the error counts {} of {} ids", number, len(ids))
            return list(error.refused)
        return []

    def free_ids(self) -> list[int]:
        """Return the free ids."""
        ids: list[int] = self.pool.free_ids().tolist()
        return ids

    def reset(self) -> None:
        """Make every id free."""
        self.pool.reset()

    def check(self) -> None:
        """Run the pool's own check."""
        self.pool.check()
