"""A prefill node's offers: gathered blocks, and SENDs that wait until those are served."""

from __future__ import annotations

from typing import Final

from ..handoff import Key, NodeId, Offer, Send, Ticket, Withdraw
from ..transport import Offered, Transport, WireTicket
from .kv_parts import KVParts
from .node_engine import Letter

_OFFER_TTL_S: Final = 600.0
"""Each offer is withdrawn when its attempt ends; this is for a process that has lost count."""


class PartsOut:
    """What a node has offered, by attempt."""

    def __init__(self, kv: KVParts, transport: Transport) -> None:
        """Make it over what gathers, and what serves."""
        self._kv = kv
        self._transport = transport
        self._wires: dict[Key, dict[Ticket, WireTicket | None]] = {}  # None: not served yet
        self._held: dict[Ticket, Letter] = {}

    def offer(self, offer: Offer) -> None:
        """Gather blocks as they are now, and offer them."""
        self._wires.setdefault(offer.ticket.key, {})[offer.ticket] = None
        arrays, descriptor = self._kv.read(offer.blocks), self._kv.describe(len(offer.blocks))
        self._transport.offer(offer.ticket, arrays, descriptor, ttl_s=_OFFER_TTL_S)

    def letter(self, peer: NodeId, send: Send) -> Letter | None:
        """Add to SEND what it takes to pull the part; None: `offered` will return it."""
        head = send.head
        assert head.peer_epoch is not None, "a part is sent to nobody"
        ticket = Ticket(head.key, head.epoch, head.peer_epoch, head.grant, send.part)
        wire = self._wires[head.key][ticket]
        letter = Letter(peer, send, wire)
        if wire is not None:
            return letter
        self._held[ticket] = letter
        return None

    def offered(self, event: Offered) -> Letter | None:
        """Take in that a part is served; return the SEND that has waited for it."""
        wires = self._wires.get(event.ticket.key)
        if wires is None:
            return None  # it was withdrawn meanwhile
        wires[event.ticket] = event.wire
        held = self._held.pop(event.ticket, None)
        return None if held is None else held._replace(wire=event.wire)

    def withdraw(self, withdraw: Withdraw) -> None:
        """Serve an attempt's parts no more."""
        for ticket in self._wires.pop(withdraw.key, {}):
            self._held.pop(ticket, None)
        self._transport.withdraw(withdraw.key, was_read=withdraw.was_read)
