"""The executor of a simulation: copies between the tiers take simulated time.

Each direction is a queue of its own, as a GPU has a copy engine for each; what is copied does not
slow the model down, and a step does not wait for copies: only the requests do that need them::

    device ◄──► host ◄──► storage

    dispatched at t ──► begins when the one before it has ended ──► ends bytes / bandwidth later

A copy between device and host never fails here; one with storage may come too late.
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
    """What the tiers below the device did in a simulation; blocks as in `kvcache.TierStats`.

    Attributes:
        host_blocks: the size of the host tier.
        demoted_blocks: evicted from the device towards the host.
        promoted_blocks: hit on the host, and brought to the device; those of resumed requests too.
        dropped_blocks: left the host, or found no room there.
        parked, resumed: requests preempted with their KV kept, and admitted again with it.
        bytes_to_host, bytes_to_device: copied between these two.
        busy_to_host_s, busy_to_device_s: simulated time that these copies took.
        waited_s: simulated time in which nothing could run but for want of a copy, or of an answer
            of storage.
        storage: what storage did; None: there is none.
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
        num_bytes: copied so far, by kind.
        busy_s: how long that took, by kind.
    """

    def __init__(
        self,
        tiers: Tiers,
        bytes_per_block: float,
        bytes_per_s: float,
        storage: SimulatedStorage | None = None,
    ) -> None:
        """Connect a device with its host, and the host with storage.

        Args:
            tiers: of the manager.
            bytes_per_block: KV of a block, all layers.
            bytes_per_s: of each direction between device and host.
            storage: if the tiers have one.
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
        self._under_way: list[tuple[float, OpId, Operation, bool]] = []  # a heap, by the end
        self._free_at_s = dict.fromkeys(self._bytes_per_s, 0.0)
        self._late_blocks = 0
        self.num_bytes = dict.fromkeys(self._bytes_per_s, 0)
        self.busy_s = dict.fromkeys(self._bytes_per_s, 0.0)

    def dispatch(self, now_s: float) -> None:
        """Begin what the manager has decided; to tell storage of uses takes no time."""
        if self._storage is not None:
            self._storage.touch(self._tiers.take_used())
        for operation in self._tiers.take_operations():
            end_s, in_time = self._begin(operation, now_s)
            heappush(self._under_way, (end_s, operation.id, operation, in_time))

    def _begin(self, operation: Operation, now_s: float) -> tuple[float, bool]:
        """Return when an operation ends, and whether it does so in time."""
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
        """When the next copy ends; None if none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def deliver(self, now_s: float) -> None:
        """Tell the manager of every copy that has ended, in the order of their ends."""
        while self._under_way and self._under_way[0][0] <= now_s:
            _, op_id, operation, in_time = heappop(self._under_way)
            ok = [in_time] * operation.num_blocks
            if in_time and self._storage is not None and operation.keys:
                ok = self._storage.end(operation.kind, operation.keys)
            self._tiers.complete(op_id, ok)

    def run_idle(self, now_s: float, until_s: float) -> None:
        """Let copies end, and what follows from them begin, while no request needs a step."""
        self.dispatch(now_s)
        while (end_s := self.next_end_s) is not None and end_s <= until_s:
            self.deliver(end_s)
            self.dispatch(end_s)

    def finish(self, now_s: float, scheduler: SchedulerStats, waited_s: float) -> TierCounts:
        """Let everything end, at whatever time, and sum up."""
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
            storage=None if self._storage is None else self._sum_up(self._storage),
        )

    def _sum_up(self, storage: SimulatedStorage) -> StorageCounts:
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
