"""A prefill node's offers: gathered blocks, and SENDs that wait until those are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from ..handoff import (
    AttemptKey,
    NodeId,
    Offer,
    Send,
    Ticket,
    Withdraw,
)
from .node import Letter
from .transport import (
    Descriptor,
    Offered,
    PayloadArray,
    Transport,
    WireTicket,
)

_OFFER_TTL_S: Final = 600.0
"""Each offer is withdrawn when its attempt ends; this is for a process that has lost count."""


class Gather(Protocol):
    """What copies blocks; see `KVParts`."""

    def describe(self, num_blocks: int) -> Descriptor:
        """Say which arrays a part of so many blocks is."""

    def read(self, blocks: Sequence[int]) -> Sequence[PayloadArray]:
        """Gather blocks as they are now."""


class PartsOut:
    """What a node has offered, by attempt.

    What is offered are copies, beside the blocks. When they would be more than so many bytes, a
    part is gathered later; its blocks stay pinned and as they are, its SEND waits, and the node
    computes on. The oldest attempt need not wait, or it might for ever: for others that cannot end
    because they wait for it. So all copies are the bytes allowed and one prompt's at most.

    Attributes:
        num_bytes: of the copies that are held.
    """

    def __init__(self, kv: Gather, transport: Transport, *, max_bytes: int) -> None:
        """Make it over what gathers, and what serves; max_bytes: of all copies."""
        self.num_bytes = 0
        self._kv = kv
        self._transport = transport
        self._max_bytes = max_bytes
        # Attempts in order of their first offers; None: not served yet.
        self._wires: dict[AttemptKey, dict[Ticket, WireTicket | None]] = {}
        self._waiting: list[Offer] = []
        self._copies: dict[Ticket, int] = {}  # and their bytes
        self._held: dict[Ticket, Letter] = {}

    def offer(self, offer: Offer) -> None:
        """Gather blocks, which do not change until they are withdrawn, and offer them."""
        self._wires.setdefault(offer.ticket.key, {})[offer.ticket] = None
        self._waiting.append(offer)
        self._gather()

    def letter(self, peer: NodeId, send: Send) -> Letter | None:
        """Add to SEND what it takes to pull the part; None: `offered` will return it."""
        header = send.header
        assert header.peer_epoch is not None, "a part is sent to nobody"
        ticket = Ticket(header.key, header.epoch, header.peer_epoch, header.grant, send.part)
        wire = self._wires[header.key][ticket]
        letter = Letter(peer, send, wire)
        if wire is not None:
            return letter
        self._held[ticket] = letter
        return None

    def offered(self, event: Offered) -> Letter | None:
        """Take in that a part is served; return the SEND that has waited for it."""
        if self._transport.copies_offers:
            self._free([event.ticket])
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
        self._waiting = [each for each in self._waiting if each.ticket.key != withdraw.key]
        self._transport.withdraw(withdraw.key, was_read=withdraw.was_read)

    def withdrawn(self, key: AttemptKey) -> None:
        """Take in that the copies of an attempt are gone."""
        self._free([ticket for ticket in self._copies if ticket.key == key])

    def _free(self, tickets: Sequence[Ticket]) -> None:
        self.num_bytes -= sum([self._copies.pop(ticket, 0) for ticket in tickets])
        self._gather()

    def _gather(self) -> None:
        """Offer what has waited, in order, as far as there is room; all of the oldest attempt."""
        oldest = next(iter(self._wires), None)
        waiting, self._waiting = self._waiting, []
        for offer in waiting:
            descriptor = self._kv.describe(len(offer.blocks))
            fits = self.num_bytes + descriptor.num_bytes <= self._max_bytes
            if offer.ticket.key != oldest and (self._waiting or not fits):
                self._waiting.append(offer)
                continue
            self.num_bytes += descriptor.num_bytes
            self._copies[offer.ticket] = descriptor.num_bytes
            arrays = self._kv.read(offer.blocks)
            self._transport.offer(offer.ticket, arrays, descriptor, ttl_s=_OFFER_TTL_S)
