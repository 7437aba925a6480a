"""A decode node's pulls: from a transport's staging memory into the granted blocks."""

from __future__ import annotations

from collections import deque

from ..handoff import CancelPull, PartId, Pull
from .kv_parts import KVParts
from .transport import PullFailed, PullInfo, Received, Transport


class KVReceiver:
    """Pulls parts, and copies them into blocks on the thread that owns the arrays."""

    def __init__(self, kv: KVParts, transport: Transport, *, timeout_s: float) -> None:
        """Set up.

        Args:
            kv: copies parts into blocks.
            transport: pulls parts.
            timeout_s: limit of each pull.
        """
        self._kv = kv
        self._transport = transport
        self._timeout_s = timeout_s
        self._pulls: dict[PartId, Pull] = {}
        # Parts whose copies may still read staging memory, and how many steps began before them.
        self._written: deque[tuple[PartId, int]] = deque()

    def pull(self, pull: Pull, info: PullInfo) -> None:
        """Begin to pull a part."""
        self._pulls[pull.part_id] = pull
        sent = pull.sent
        expected = self._kv.describe(sent.num_blocks, pull.group, pull.num_groups, sent.block_size)
        self._transport.pull(pull.part_id, info, expected, timeout_s=self._timeout_s)

    def cancel(self, cancel: CancelPull) -> None:
        """Cancel a pull, which still ends with an event."""
        self._transport.cancel(cancel.part_id)

    def received(self, event: Received, num_started: int) -> None:
        """Copy a received part into its granted blocks, after num_started steps in all."""
        pull = self._pulls.pop(event.part_id)
        self._kv.write(pull.blocks, event.arrays, pull.group, pull.num_groups, pull.sent)
        self._written.append((event.part_id, num_started))

    def failed(self, event: PullFailed) -> None:
        """Forget a failed pull."""
        del self._pulls[event.part_id]

    def release_written(self, num_ended: int) -> None:
        """Release the staging memory of parts whose copies have ended.

        A copy has ended if a step that began after it has, because that step reads the same arrays.
        While steps overlap, the arrays are never idle.

        Args:
            num_ended: number of steps that have ended.
        """
        while self._written:
            part_id, num_started = self._written[0]
            if num_ended <= num_started and not self._kv.is_idle():
                return
            self._written.popleft()
            self._transport.release(part_id)
