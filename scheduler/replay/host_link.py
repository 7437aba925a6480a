"""The executor of a simulation: copies between device and host take simulated time.

Each direction is a queue of its own, as a GPU has a copy engine for each; what is copied does not
slow the model down, and a step does not wait for copies: only the requests do that need them::

    dispatched at t ──► begins when the one before it has ended ──► ends bytes / bandwidth later

A copy never fails here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ...kvcache.operations import OpId, OpKind
from ...kvcache.tiers import Tiers
from ..plan import SchedulerStats


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What a host tier did in a simulation; blocks as in `kvcache.TierStats`.

    Attributes:
        host_blocks: its size.
        demoted_blocks: evicted from the device towards the host.
        promoted_blocks: hit on the host, and brought to the device; those of resumed requests too.
        dropped_blocks: left the host, or found no room there.
        parked, resumed: requests preempted with their KV kept, and admitted again with it.
        bytes_to_host, bytes_to_device: copied.
        busy_to_host_s, busy_to_device_s: simulated time that these copies took.
        waited_s: simulated time in which nothing could run but for want of a copy.
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


class HostLink:
    """Executes the operations of a manager's tiers between device and host, in simulated time.

    Attributes:
        num_bytes: copied so far, by kind.
        busy_s: how long that took, by kind.
    """

    def __init__(self, tiers: Tiers, bytes_per_block: float, bytes_per_s: float) -> None:
        """Connect a device with its host.

        Args:
            tiers: of the manager; without storage.
            bytes_per_block: KV of a block, all layers.
            bytes_per_s: of each direction.
        """
        self._tiers = tiers
        self._bytes_per_block = bytes_per_block
        self._bytes_per_s = bytes_per_s
        kinds = (OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE)
        self._queues: dict[OpKind, deque[tuple[float, OpId, int]]] = {k: deque() for k in kinds}
        self._free_at_s = dict.fromkeys(kinds, 0.0)
        self.num_bytes = dict.fromkeys(kinds, 0)
        self.busy_s = dict.fromkeys(kinds, 0.0)

    def dispatch(self, now_s: float) -> None:
        """Begin what the manager has decided."""
        for operation in self._tiers.take_operations():
            kind, num_blocks = operation.kind, operation.num_blocks
            num_bytes = num_blocks * self._bytes_per_block
            took_s = num_bytes / self._bytes_per_s
            end_s = max(now_s, self._free_at_s[kind]) + took_s
            self._free_at_s[kind] = end_s
            self._queues[kind].append((end_s, operation.id, num_blocks))
            self.num_bytes[kind] += int(num_bytes)
            self.busy_s[kind] += took_s

    @property
    def next_end_s(self) -> float | None:
        """When the next copy ends; None if none is under way."""
        return min((queue[0][0] for queue in self._queues.values() if queue), default=None)

    def deliver(self, now_s: float) -> None:
        """Tell the manager of every copy that has ended, in the order of their ends."""
        while (end_s := self.next_end_s) is not None and end_s <= now_s:
            queue = min((q for q in self._queues.values() if q), key=lambda q: q[0])
            _, op_id, num_blocks = queue.popleft()
            self._tiers.complete(op_id, [True] * num_blocks)

    def finish(self, scheduler: SchedulerStats, waited_s: float) -> TierCounts:
        """Let everything end, at whatever time, and sum up."""
        self.dispatch(0.0)
        self.deliver(float("inf"))
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
        )
