"""Storage in a simulation: which keys it has, and how fast it is; the values are made up.

An operation that would not end by its deadline fails there, as in the engine: a write is
forgotten, and what was to be loaded is computed. Nothing else fails.
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
    """What storage did in a simulation.

    Attributes:
        storage_blocks: its size.
        used_blocks: that it has at the end.
        evicted_blocks: given up for others.
        late_blocks: not written, or not read, as it would have taken longer than the deadline.
        bytes_written, bytes_read: copied from the host and to the host.
        busy_writing_s, busy_reading_s: simulated time that these copies took.
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
    """The keys of the blocks that are stored: the least recently used goes first.

    A read and a write are a use; a lookup is none, as with directories (`storage.files`).

    Attributes:
        num_blocks: how many blocks there is room for.
        write_bytes_per_s, read_bytes_per_s: its bandwidth.
        lookup_s: how long it takes to say which keys it has, however many are asked for.
        evicted_blocks: given up for others.
    """

    def __init__(self, num_blocks: int, costs: CostModel) -> None:
        """Make an empty storage, as fast as the costs say.

        Raises:
            CountError: if num_blocks is less than 1.
        """
        self.num_blocks = as_count("num_blocks", num_blocks, minimum=1)
        self.write_bytes_per_s = costs.storage_write_bytes_per_s
        self.read_bytes_per_s = costs.storage_read_bytes_per_s
        self.lookup_s = costs.step.lookup_s
        self.evicted_blocks = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def count_moved(self, kind: OpKind, keys: Sequence[bytes]) -> int:
        """Count the blocks that an operation copies: what is there is not written again."""
        if kind is OpKind.LOOKUP:
            return 0
        num_there = sum(key in self._keys for key in keys)
        return num_there if kind is OpKind.STORAGE_TO_HOST else len(keys) - num_there

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make those of keys that are there the most recently used, the last the most."""
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)

    def end(self, kind: OpKind, keys: Sequence[bytes]) -> list[bool]:
        """End an operation that is in time; return what became of each block."""
        if kind is OpKind.HOST_TO_STORAGE:
            for key in keys:
                self._keys[key] = None
        there = [key in self._keys for key in keys]
        if kind is not OpKind.LOOKUP:
            for key in keys:
                if key in self._keys:
                    self._keys.move_to_end(key)
        while len(self._keys) > self.num_blocks:
            self._keys.popitem(last=False)
            self.evicted_blocks += 1
        return there


def name_blocks(block_size: int) -> StorageNamespace:
    """Say whose blocks are stored: there is one model, so that its name has no bearing."""
    return StorageNamespace("simulated", "", "simulated", block_size, layers=(0, 1), heads=(0, 1))
