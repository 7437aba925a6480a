"""Simulated links between the tiers: they execute a manager's copies in simulated time.

Each direction has its own queue, as a GPU has a copy engine for each. Copies do not slow the model
down, and steps do not wait for them; only the requests that need the blocks do::

    device ◄──► host ◄──► storage

    dispatched at t ──► begins when the copy before it ends ──► ends bytes / bandwidth later

A copy between device and host never fails here. A copy with storage may miss its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from ....kvcache.ids import OpId
from ....kvcache.tiers.api import Tiers
from ....kvcache.tiers.operations import Operation, OpKind
from ...step_plan import SchedulerStats
from .simulated_storage import SimulatedStorage, StorageCounts


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of the tiers below the device over a simulation; blocks as in `kvcache.TierStats`.

    Attributes:
        host_blocks: Size of the host tier.
        demoted_blocks: Blocks evicted from the device to the host.
        promoted_blocks: Host hits copied to the device, those of resumed requests included.
        dropped_blocks: Blocks that left the host, or found no room there.
        parked, resumed: Requests preempted with their KV saved, and readmitted with it.
        bytes_to_host, bytes_to_device: Bytes copied between device and host.
        busy_to_host_s, busy_to_device_s: Simulated time of these copies.
        waited_s: Simulated time in which every request waited for a copy or a lookup.
        storage: Counts of storage; None without it.
    """

    host_blocks: int
    demoted_blocks: int
    promoted_blocks: int
    dropped_blocks: int
    parked: int
    resumed: int
    bytes_to_host: int
    bytes_to_device: int
    busy_to_host_s: float
    busy_to_device_s: float
    waited_s: float
    storage: StorageCounts | None


class TierLinks:
    """Executes the operations of a manager's tiers in simulated time.

    Attributes:
        num_bytes: Bytes copied so far, by kind of operation.
        busy_s: Simulated time of these copies, by kind.
    """

    def __init__(
        self,
        tiers: Tiers,
        bytes_per_block: float,
        bytes_per_s: float,
        storage: SimulatedStorage | None = None,
    ) -> None:
        """Connect the device with the host, and the host with storage.

        Args:
            tiers: Tiers of the manager.
            bytes_per_block: Size of a block's KV in all layers.
            bytes_per_s: Bandwidth between device and host in each direction.
            storage: The storage, if the tiers have one.
        """
        self._tiers = tiers
        self._storage = storage
        self._bytes_per_block = bytes_per_block
        self._bytes_per_s = dict.fromkeys(
            (OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE), bytes_per_s
        )
        if storage is not None:
            self._bytes_per_s[OpKind.HOST_TO_STORAGE] = storage.write_bytes_per_s
            self._bytes_per_s[OpKind.STORAGE_TO_HOST] = storage.read_bytes_per_s
        self._in_flight: list[tuple[float, OpId, Operation, bool]] = []  # a heap by end time
        self._free_at_s = dict.fromkeys(self._bytes_per_s, 0.0)
        self._late_blocks = 0
        self.num_bytes = dict.fromkeys(self._bytes_per_s, 0)
        self.busy_s = dict.fromkeys(self._bytes_per_s, 0.0)

    def dispatch(self, now_s: float) -> None:
        """Start the operations that the manager has issued; recording uses in storage is free."""
        if self._storage is not None:
            self._storage.touch(self._tiers.take_used())
        for operation in self._tiers.take_operations():
            end_s, in_time = self._begin(operation, now_s)
            heappush(self._in_flight, (end_s, operation.id, operation, in_time))

    def _begin(self, operation: Operation, now_s: float) -> tuple[float, bool]:
        """Return when an operation ends, and whether it meets its deadline."""
        kind, num_blocks, storage = operation.kind, operation.num_blocks, self._storage
        if storage is not None and operation.keys:
            if kind is OpKind.LOOKUP:
                return now_s + storage.lookup_s, True
            num_blocks = storage.count_moved(kind, operation.keys)
        num_bytes = num_blocks * self._bytes_per_block
        took_s = num_bytes / self._bytes_per_s[kind]
        end_s = max(now_s, self._free_at_s[kind]) + took_s
        if operation.keys and end_s > now_s + operation.timeout_s:
            self._late_blocks += num_blocks
            return now_s + operation.timeout_s, False
        self._free_at_s[kind] = end_s
        self.num_bytes[kind] += int(num_bytes)
        self.busy_s[kind] += took_s
        return end_s, True

    @property
    def next_end_s(self) -> float | None:
        """Time at which the next operation ends; None if none is in flight."""
        return self._in_flight[0][0] if self._in_flight else None

    def deliver(self, now_s: float) -> None:
        """Report every operation that has ended to the manager, in order of end time."""
        while self._in_flight and self._in_flight[0][0] <= now_s:
            _, op_id, operation, in_time = heappop(self._in_flight)
            ok = [in_time] * operation.num_blocks
            if in_time and self._storage is not None and operation.keys:
                ok = self._storage.complete(operation.kind, operation.keys)
            self._tiers.complete(op_id, ok)

    def run_idle(self, now_s: float, until_s: float) -> None:
        """Advance the copies, and those that follow from them, while no request needs a step."""
        self.dispatch(now_s)
        while (end_s := self.next_end_s) is not None and end_s <= until_s:
            self.deliver(end_s)
            self.dispatch(end_s)

    def finish(self, now_s: float, scheduler: SchedulerStats, waited_s: float) -> TierCounts:
        """Complete every operation, however late, and return the counts."""
        self.run_idle(now_s, float("inf"))
        stats = self._tiers.stats()
        return TierCounts(
            host_blocks=stats.host_blocks,
            demoted_blocks=stats.demoted_blocks,
            promoted_blocks=stats.promoted_blocks,
            dropped_blocks=stats.dropped_blocks,
            parked=scheduler.parked,
            resumed=scheduler.resumed_parked,
            bytes_to_host=self.num_bytes[OpKind.DEVICE_TO_HOST],
            bytes_to_device=self.num_bytes[OpKind.HOST_TO_DEVICE],
            busy_to_host_s=self.busy_s[OpKind.DEVICE_TO_HOST],
            busy_to_device_s=self.busy_s[OpKind.HOST_TO_DEVICE],
            waited_s=waited_s,
            storage=None if self._storage is None else self._storage_counts(self._storage),
        )

    def _storage_counts(self, storage: SimulatedStorage) -> StorageCounts:
        return StorageCounts(
            storage_blocks=storage.num_blocks,
            used_blocks=len(storage),
            evicted_blocks=storage.evicted_blocks,
            late_blocks=self._late_blocks,
            bytes_written=self.num_bytes[OpKind.HOST_TO_STORAGE],
            bytes_read=self.num_bytes[OpKind.STORAGE_TO_HOST],
            busy_writing_s=self.busy_s[OpKind.HOST_TO_STORAGE],
            busy_reading_s=self.busy_s[OpKind.STORAGE_TO_HOST],
        )
