"""The one interface of transports: how parts of a prompt get from P's memory into D's.

::

    P's loop                                D's loop
    offer(ticket, arrays)
    poll ──► Offered(wire) ── with SEND ──► pull(ticket, wire, want)
                                            poll ──► Received(arrays)     scatter them, then
                                                                          release(ticket)
    withdraw(key)        ◄── ACK, or any end of the attempt
    poll ──► Withdrawn(key)

No call waits. Whatever was begun ends by one event of `poll`, in bounded time:

- an offer by Offered or OfferFailed (or silently, if it was withdrawn before),
- a pull by Received or PullFailed, at its deadline if not before,
- a withdrawal by Withdrawn: no pull of those parts can begin any more, and one that had begun gets
  what was offered, or fails by its digests.

A transport neither reads P's blocks nor writes D's. P offers arrays that it has gathered, and they
do not change any more; what D receives goes to staging memory, from which its engine scatters it.
So for the protocol a pull that has ended is fenced: nothing of it comes into D's blocks unless D
puts it there. What an engine that cannot be stopped may still write is staging memory; that is in
quarantine until the engine has ended the transfer, and is counted.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...handoff.messages import AttemptKey, Ticket
from .descriptors import (
    Descriptor,
    PayloadArray,
    WireTicket,
    describe,
)
from .errors import TransportArgumentError


class Fault(enum.Enum):
    """Why a pull has failed."""

    MISMATCH = "mismatch"
    """What is offered is not what D expects; nothing was pulled."""
    EXPIRED = "expired"
    """The offer is not served any more."""
    TIMED_OUT = "timed out"
    """The deadline came first: P is stopped, gone, or does not know the offer."""
    PEER_LOST = "peer lost"
    """P's process ended, or the connection to it did."""
    CORRUPT = "corrupt"
    """What arrived does not have the digests of what was offered."""
    CANCELLED = "cancelled"
    """D gave it up."""
    TOO_LARGE = "too large"
    """It does not fit D's staging memory, even when that is empty."""
    FAILED = "failed"
    """The engine says so; the reason has its words."""


@dataclass(frozen=True, slots=True)
class Offered:
    """P: a part can be pulled; send the wire ticket along with SEND."""

    ticket: Ticket
    wire: WireTicket


@dataclass(frozen=True, slots=True)
class OfferFailed:
    """P: a part cannot be offered; give the attempt up."""

    ticket: Ticket
    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """P: the memory of all that was offered for an attempt is free; no pull of it can succeed, but
    one that had begun and has the bytes that were offered.
    """

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Received:
    """D: all of a part is here, and has the digests of what was offered.

    Attributes:
        ticket: of the pull.
        arrays: as described; read-only, and until `release`. Some transports' are views of
            staging memory, which `jax.device_put` does not copy on CPU: release the part when
            what was made of it is ready (`block_until_ready`), or give `device_put` a copy.
    """

    ticket: Ticket
    arrays: tuple[PayloadArray, ...]


@dataclass(frozen=True, slots=True)
class PullFailed:
    """D: a part did not arrive, and nothing of it will."""

    ticket: Ticket
    fault: Fault
    reason: str


Event: TypeAlias = Offered | OfferFailed | Withdrawn | Received | PullFailed


@dataclass(frozen=True, slots=True)
class TransportStats:
    """What a transport holds and has done.

    Attributes:
        offers: served now.
        pulls: begun, and without an end.
        received: parts that were received and not released yet.
        quarantined_bytes: of staging memory into which an ended pull may still write.
        parts_received, bytes_received: so far.
        offers_expired: that were not withdrawn in time.
        faults: ends of pulls that failed, so far.
    """

    offers: int = 0
    pulls: int = 0
    received: int = 0
    quarantined_bytes: int = 0
    parts_received: int = 0
    bytes_received: int = 0
    offers_expired: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)


class Transport(ABC):
    """Moves parts from one node to another. Its calls are for one thread, and none waits.

    Attributes:
        name: of the engine.
        copies_offers: whether the arrays of an offer are free when it is served (Offered), or only
            when it is withdrawn (Withdrawn).
    """

    name: str
    copies_offers: bool

    @abstractmethod
    def offer(
        self,
        ticket: Ticket,
        arrays: Sequence[PayloadArray],
        descriptor: Descriptor,
        *,
        ttl_s: float,
    ) -> None:
        """P: let D read some arrays, until they are withdrawn, for ttl_s at most.

        Args:
            ticket: never used before.
            arrays: which do not change until they are offered, NumPy's, or ever, JAX's; those may
                still be being computed.
            descriptor: of them; see `describe`.
            ttl_s: after this they are freed, even if nobody withdraws them.

        Raises:
            TransportArgumentError: if the arrays are not as described, or the ticket is known.
            TransportClosedError: after close.
        """

    @abstractmethod
    def withdraw(self, key: AttemptKey, *, was_read: bool = False) -> None:
        """P: stop serving all parts of an attempt; `Withdrawn` follows, also if there are none.

        Args:
            key: the attempt; it must not be offered anything any more.
            was_read: whether D has said that all of it has arrived (ACK). Otherwise an engine may
                have to find out.

        Raises:
            TransportClosedError: after close.
        """

    @abstractmethod
    def pull(self, ticket: Ticket, wire: WireTicket, want: Descriptor, *, timeout_s: float) -> None:
        """D: read a part into staging memory; it ends by Received or PullFailed.

        Args:
            ticket: that the protocol wants, and the wire ticket must have.
            wire: what P said of its offer. Anything at all may be in it.
            want: exactly what must be offered; nothing is allocated for anything else.
            timeout_s: it ends after this long.

        Raises:
            TransportArgumentError: if this ticket is being pulled, or was not released.
            TransportClosedError: after close.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """D: give a pull up; it ends as CANCELLED, and by Received no more. Nothing if it ended."""

    @abstractmethod
    def release(self, ticket: Ticket) -> None:
        """D: the arrays of a received part are not used any more. Nothing if there are none."""

    @abstractmethod
    def poll(self) -> list[Event]:
        """Return what has happened since the last call, in order."""

    @abstractmethod
    def stats(self) -> TransportStats:
        """Return what it holds and has done."""

    @abstractmethod
    def close(self) -> None:
        """Stop, and free what can be freed; calling it again does nothing."""


def check_offer(
    ticket: Ticket, arrays: Sequence[PayloadArray], descriptor: Descriptor, is_known: bool
) -> None:
    """Refuse arrays that are not as described, and a ticket that is known.

    Raises:
        TransportArgumentError: with the first difference.
    """
    if is_known:
        raise TransportArgumentError(f"part {ticket.part} of {ticket.key} is offered already")
    found = describe(arrays, num_blocks=descriptor.num_blocks, group=descriptor.group)
    difference = _first_difference(found.arrays, descriptor.arrays)
    if difference:
        raise TransportArgumentError(f"what is offered is not what is described: {difference}")


def refusal(
    ticket: Ticket, wire: WireTicket, want: Descriptor, transport: str
) -> PullFailed | None:
    """Say why a wire ticket must not be pulled; None if it may.

    Args:
        ticket, want: what D expects.
        wire: what P said.
        transport: the name of D's.
    """
    reason = ""
    if wire.ticket != ticket:
        reason = "the ticket is of another part"
    elif wire.transport != transport:
        reason = f"offered by {wire.transport!r}, but this node uses {transport!r}"
    elif wire.descriptor.namespace_digest != want.namespace_digest:
        reason = "of another namespace or model"
    elif wire.descriptor.group != want.group or wire.descriptor.num_blocks != want.num_blocks:
        there, here = wire.descriptor, want
        reason = (
            f"{there.num_blocks} blocks of group {there.group} are offered, "
            f"{here.num_blocks} of group {here.group} expected"
        )
    else:
        reason = _first_difference(wire.descriptor.arrays, want.arrays)
    if reason:
        return PullFailed(ticket, Fault.MISMATCH, reason)
    if wire.expires_at <= time.time():
        return PullFailed(ticket, Fault.EXPIRED, "the offer has expired")
    return None


def _first_difference(found: Sequence[object], wanted: Sequence[object]) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} arrays, expected {len(wanted)}"
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            return f"array {number} is {one}, expected {other}"
    return ""
