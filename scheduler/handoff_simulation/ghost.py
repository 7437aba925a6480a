"""Ghost memory: each simulated block remembers the prefix whose KV was written to it."""

from __future__ import annotations

from ...kvcache import CacheManager, Int32Array, Lease
from ...kvcache.tiers.operations import Operation, OpKind
from ..step_plan import StepPlan
from .invariants import OWN_CONTENT, SimulationError

Place = tuple[int, int]
"""A block and a group of layers."""


class GhostMemory:
    """Memory of a device: the prefix written to each block, in each group of layers."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self.tags: dict[Place, bytes] = {}

    def write(self, lease: Lease, tokens: Int32Array, start: int, group: int) -> None:
        """Write the KV of the tokens from start on, except into shared blocks."""
        size, table = self.block_size, lease.block_table
        first = max(start // size, lease.num_shared_blocks)
        for place in range(first, -(-len(tokens) // size)):
            self.tags[int(table[place]), group] = tokens[: (place + 1) * size].tobytes()

    def read(self, lease: Lease, tokens: Int32Array, group: int, reader: object) -> None:
        """Read the KV of some tokens.

        Raises:
            SimulationError: if a block holds the KV of another prefix.
        """
        size, table = self.block_size, lease.block_table
        for place in range(-(-len(tokens) // size)):
            tag = self.tags.get((int(table[place]), group), b"")
            if not tag.startswith(tokens[: (place + 1) * size].tobytes()):
                raise SimulationError(
                    OWN_CONTENT, f"{reader} reads the KV of another prefix in block {place}"
                )

    def compute(self, plan: StepPlan, group: int) -> None:
        """Compute one group of layers of a step."""
        for chunk in plan.chunks:
            request, stop = chunk.request, chunk.start + chunk.length
            assert request.lease is not None, f"{request!r} is computed without blocks"
            self.read(request.lease, request.tokens[: chunk.start], group, request)
            self.write(request.lease, request.tokens[:stop], chunk.start, group)


class GhostCopies:
    """Copies between a device and the host tier below it.

    Attributes:
        host: prefix in each block of the host tier.
        in_flight: operations that may still write, with the data that they have read.
    """

    def __init__(self, manager: CacheManager, device: GhostMemory) -> None:
        self.host: dict[Place, bytes] = {}
        self.in_flight: list[tuple[Operation, dict[Place, bytes]]] = []
        self._manager = manager
        self._device = device

    def dispatch(self) -> None:
        """Start new operations: read all sources."""
        tiers = self._manager.tiers
        if tiers is None:
            return
        tiers.take_cancelled()  # cancelled copies end later all the same
        for operation in tiers.take_operations():
            down = operation.kind is OpKind.DEVICE_TO_HOST
            source = self._device.tags if down else self.host
            read = {
                (int(to), group): source.get((int(block), group), b"")
                for block, to in zip(operation.sources, operation.destinations, strict=True)
                for group in range(self._device.num_groups)
            }
            self.in_flight.append((operation, read))

    def end(self, index: int, ok: bool) -> None:
        """End an operation; if ok, its destinations are written."""
        operation, read = self.in_flight.pop(index % len(self.in_flight))
        down = operation.kind is OpKind.DEVICE_TO_HOST
        if ok:
            (self.host if down else self._device.tags).update(read)
        tiers = self._manager.tiers
        assert tiers is not None, "a copy without a host tier"
        tiers.complete(operation.id, [ok] * operation.num_blocks)

    def forget(self) -> None:
        """Forget all KV."""
        self.host.clear()
        self._device.tags.clear()
