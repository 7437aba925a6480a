"""A decode node's pulls: from a transport's staging memory into the granted blocks."""

from __future__ import annotations

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
        self._written: list[PartId] = []  # copies of these may still read staging memory

    def pull(self, pull: Pull, info: PullInfo) -> None:
        """Begin to pull a part."""
        self._pulls[pull.part_id] = pull
        expected = self._kv.describe(len(pull.blocks))
        self._transport.pull(pull.part_id, info, expected, timeout_s=self._timeout_s)

    def cancel(self, cancel: CancelPull) -> None:
        """Cancel a pull, which still ends with an event."""
        self._transport.cancel(cancel.part_id)

    def received(self, event: Received) -> None:
        """Copy a received part into its granted blocks."""
        pull = self._pulls.pop(event.part_id)
        self._kv.write(pull.blocks, event.arrays)
        self._written.append(event.part_id)

    def failed(self, event: PullFailed) -> None:
        """Forget a failed pull."""
        del self._pulls[event.part_id]

    def release_written(self) -> None:
        """Release the staging memory of parts whose copies have ended."""
        if self._written and self._kv.is_idle():
            for part_id in self._written:
                self._transport.release(part_id)
            self._written.clear()
