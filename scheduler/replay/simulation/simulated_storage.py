"""Simulated storage: an LRU set of keys with a bandwidth; it holds no values.

An operation that would miss its deadline fails then, as in the engine: a write is dropped, and the
blocks of a failed load are computed. Nothing else fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ....kvcache.storage.keys import StorageNamespace
from ....kvcache.tiers.operations import OpKind
from ....kvcache.tokens import as_count
from .cost_model import CostModel


@dataclass(frozen=True, slots=True)
class StorageCounts:
    """Counts of storage over a simulation.

    Attributes:
        storage_blocks: Capacity.
        used_blocks: Blocks held at the end.
        evicted_blocks: Blocks evicted for others.
        late_blocks: Blocks not written or read because the deadline would have passed.
        bytes_written, bytes_read: Bytes copied from and to the host.
        busy_writing_s, busy_reading_s: Simulated time of these copies.
    """

    storage_blocks: int
    used_blocks: int
    evicted_blocks: int
    late_blocks: int
    bytes_written: int
    bytes_read: int
    busy_writing_s: float
    busy_reading_s: float


class SimulatedStorage:
    """The keys of the stored blocks, evicted in LRU order.

    Reads and writes count as uses; lookups do not, as with directories (`storage.files`).

    Attributes:
        num_blocks: Capacity in blocks.
        write_bytes_per_s, read_bytes_per_s: Bandwidth.
        lookup_s: Time of a lookup, for any number of keys.
        evicted_blocks: Blocks evicted for others.
    """

    def __init__(self, num_blocks: int, costs: CostModel) -> None:
        """Make an empty storage with the bandwidth of the cost model.

        Raises:
            CountError: If num_blocks is less than 1.
        """
        self.num_blocks = as_count("num_blocks", num_blocks, minimum=1)
        self.write_bytes_per_s = costs.storage_write_bytes_per_s
        self.read_bytes_per_s = costs.storage_read_bytes_per_s
        self.lookup_s = costs.step.lookup_s
        self.evicted_blocks = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def count_moved(self, kind: OpKind, keys: Sequence[bytes]) -> int:
        """Count the blocks that an operation copies; stored blocks are not written again."""
        if kind is OpKind.LOOKUP:
            return 0
        num_stored = sum(key in self._keys for key in keys)
        return num_stored if kind is OpKind.STORAGE_TO_HOST else len(keys) - num_stored

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the stored keys the most recently used, the last one most of all."""
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)

    def complete(self, kind: OpKind, keys: Sequence[bytes]) -> list[bool]:
        """Complete an operation that met its deadline; return whether each block succeeded."""
        if kind is OpKind.HOST_TO_STORAGE:
            for key in keys:
                self._keys[key] = None
        stored = [key in self._keys for key in keys]
        if kind is not OpKind.LOOKUP:
            self.touch(keys)
        while len(self._keys) > self.num_blocks:
            self._keys.popitem(last=False)
            self.evicted_blocks += 1
        return stored


def simulated_namespace(block_size: int) -> StorageNamespace:
    """Return the storage namespace of the simulated model; there is only one, so any name does."""
    return StorageNamespace("simulated", "", "simulated", block_size, layers=(0, 1), heads=(0, 1))
