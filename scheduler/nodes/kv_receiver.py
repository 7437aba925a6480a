"""A decode node's pulls: from a transport's staging memory into the blocks that were granted."""

from __future__ import annotations

from ..handoff import (
    CancelPull,
    Pull,
    Ticket,
)
from .kv_parts import KVParts
from .transport import (
    PullFailed,
    Received,
    Transport,
    WireTicket,
)


class PartsIn:
    """Pulls parts, and writes them into blocks on the thread that owns the arrays."""

    def __init__(self, kv: KVParts, transport: Transport, *, timeout_s: float) -> None:
        """Make it over what scatters, and what pulls for timeout_s at most."""
        self._kv = kv
        self._transport = transport
        self._timeout_s = timeout_s
        self._pulls: dict[Ticket, Pull] = {}
        self._written: list[Ticket] = []  # by copies that may still read staging memory

    def pull(self, pull: Pull, wire: WireTicket) -> None:
        """Begin to pull a part."""
        self._pulls[pull.ticket] = pull
        want = self._kv.describe(len(pull.blocks))
        self._transport.pull(pull.ticket, wire, want, timeout_s=self._timeout_s)

    def cancel(self, cancel: CancelPull) -> None:
        """Give a pull up; its end comes all the same."""
        self._transport.cancel(cancel.ticket)

    def received(self, event: Received) -> None:
        """Write a part into its blocks, which are still granted for it."""
        pull = self._pulls.pop(event.ticket)
        self._kv.write(pull.blocks, event.arrays)
        self._written.append(event.ticket)

    def failed(self, event: PullFailed) -> None:
        """Forget a pull, of which nothing will be written."""
        del self._pulls[event.ticket]

    def release_written(self) -> None:
        """Give staging memory back whose copies are done."""
        if self._written and self._kv.is_idle():
            for ticket in self._written:
                self._transport.release(ticket)
            self._written.clear()
