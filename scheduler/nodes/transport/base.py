"""The transport interface: moves the parts of a prompt from P's memory into D's.

::

    P's loop                                D's loop
    offer(part_id, arrays)
    poll ──► Offered(info) ── with SEND ──► pull(part_id, info, expected)
                                            poll ──► Received(arrays)     copy them, then
                                                                          release(part_id)
    withdraw(key)        ◄── ACK, or any end of the attempt
    poll ──► Withdrawn(key)

No call blocks. Every operation ends with one event of `poll`, in bounded time:

- An offer ends with Offered or OfferFailed, or silently if it was withdrawn before.
- A pull ends with Received or PullFailed, at its deadline at the latest.
- A withdrawal ends with Withdrawn. From then on no pull of those parts can begin. A pull that had
  begun gets the bytes that were offered, or fails by its digests.

A transport neither reads P's blocks nor writes D's. P offers arrays that it has gathered, which do
not change any more. D receives into staging memory, from which its engine copies into blocks. A
pull that has ended is therefore fenced, as far as the protocol is concerned: only D itself writes
to D's blocks. An engine that cannot be stopped may still write to staging memory, which stays
quarantined until the engine has ended the transfer.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...handoff.messages import AttemptKey, PartId
from .descriptors import ArraySpec, Descriptor, PayloadArray, PullInfo, describe
from .errors import TransportArgumentError


class Fault(enum.Enum):
    """Why a pull failed."""

    MISMATCH = "mismatch"
    """The offer is not what D expects. Nothing was pulled."""
    EXPIRED = "expired"
    """P's transport says that it no longer serves the offer."""
    TIMED_OUT = "timed out"
    """The deadline passed: P is stopped, gone, or does not know the offer."""
    PEER_LOST = "peer lost"
    """P's process or the connection to it ended."""
    CORRUPT = "corrupt"
    """The received bytes do not have the digests of the offer."""
    CANCELLED = "cancelled"
    """D cancelled the pull."""
    TOO_LARGE = "too large"
    """The part is larger than D's staging memory."""
    FAILED = "failed"
    """The engine reported an error, which the reason quotes."""


@dataclass(frozen=True, slots=True)
class Offered:
    """P: a part can be pulled. Send ``info`` with SEND."""

    part_id: PartId
    info: PullInfo


@dataclass(frozen=True, slots=True)
class OfferFailed:
    """P: a part cannot be offered, so the attempt must end."""

    part_id: PartId
    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """P: the memory of all offers of an attempt is free.

    A pull that had begun may still succeed, but only with the bytes that were offered.
    """

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Received:
    """D: a part has arrived completely and has the digests of the offer.

    Attributes:
        part_id: id of the part.
        arrays: the arrays as described, read-only and valid until `Transport.release`. Some
            transports give views of staging memory, which `jax.device_put` does not copy on CPU.
            Release the part when all results computed from the arrays are ready
            (`jax.block_until_ready`), or give `jax.device_put` a copy.
    """

    part_id: PartId
    arrays: tuple[PayloadArray, ...]


@dataclass(frozen=True, slots=True)
class PullFailed:
    """D: a pull failed. Nothing of the part will arrive."""

    part_id: PartId
    fault: Fault
    reason: str


Event: TypeAlias = Offered | OfferFailed | Withdrawn | Received | PullFailed
"""What `Transport.poll` has: `Offered`, `OfferFailed`, `Withdrawn`, ``Received``, `PullFailed`."""


@dataclass(frozen=True, slots=True)
class TransportStats:
    """Counts of a transport: current, then since the start.

    Attributes:
        offers: parts served now.
        pulls: pulls in flight.
        received: received parts that are not released yet.
        quarantined_bytes: staging memory that an ended pull may still write.
        parts_received, bytes_received: totals of successful pulls.
        offers_expired: offers that reached their time to live.
        faults: failed pulls, by fault.
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
    """Moves parts from one node to another. All calls come from one thread, and none blocks.

    Attributes:
        name: name of the engine.
        copies_offers: True if the caller may free the arrays of an offer when it is served
            (Offered); False if only when it is withdrawn (Withdrawn).
    """

    name: str
    copies_offers: bool

    @abstractmethod
    def offer(
        self,
        part_id: PartId,
        arrays: Sequence[PayloadArray],
        descriptor: Descriptor,
        *,
        ttl_s: float,
    ) -> None:
        """P: let D read arrays until they are withdrawn.

        Args:
            part_id: a new part id.
            arrays: NumPy arrays, which must not change until Offered, or JAX arrays, which may
                still be in computation.
            descriptor: the description of the arrays; see `describe`.
            ttl_s: time to live. The offer ends after it, even if it is never withdrawn.

        Raises:
            TransportArgumentError: if the arrays differ from the descriptor, or the part was
                offered before.
            TransportClosedError: after close.
        """

    @abstractmethod
    def withdraw(self, key: AttemptKey, *, was_read: bool = False) -> None:
        """P: stop serving all parts of an attempt. `Withdrawn` follows, also without any offer.

        Args:
            key: the attempt; nothing may be offered for it any more.
            was_read: whether D has confirmed that all parts arrived (ACK). Otherwise an engine may
                have to find out.

        Raises:
            TransportClosedError: after close.
        """

    @abstractmethod
    def pull(
        self, part_id: PartId, info: PullInfo, expected: Descriptor, *, timeout_s: float
    ) -> None:
        """D: read a part into staging memory. The pull ends with Received or PullFailed.

        Args:
            part_id: the part that the protocol wants; ``info`` must be of the same part.
            info: P's description of its offer, which is not trusted.
            expected: what the offer must be. Nothing is allocated for anything else.
            timeout_s: time after which the pull fails.

        Raises:
            TransportArgumentError: if the part is being pulled, or was received and not released.
            TransportClosedError: after close.
        """

    @abstractmethod
    def cancel(self, part_id: PartId) -> None:
        """D: end a pull as CANCELLED. A pull that has ended is ignored."""

    @abstractmethod
    def release(self, part_id: PartId) -> None:
        """D: free the arrays of a received part. A part that was not received is ignored."""

    @abstractmethod
    def poll(self) -> list[Event]:
        """Return the events since the last call, in order."""

    @abstractmethod
    def stats(self) -> TransportStats:
        """Return the counts so far."""

    @abstractmethod
    def close(self) -> None:
        """Stop, and free all memory that no transfer can write. Closing twice does nothing."""


def check_offer(
    part_id: PartId, arrays: Sequence[PayloadArray], descriptor: Descriptor, is_known: bool
) -> None:
    """Reject arrays that differ from their descriptor, and a part that is already offered.

    Raises:
        TransportArgumentError: with the first difference.
    """
    if is_known:
        raise TransportArgumentError(f"part {part_id.part} of {part_id.key} is already offered")
    found = describe(arrays, num_blocks=descriptor.num_blocks, group=descriptor.group)
    difference = _first_difference(found.arrays, descriptor.arrays)
    if difference:
        raise TransportArgumentError(f"the arrays differ from their descriptor: {difference}")


def check_pull(
    part_id: PartId, info: PullInfo, expected: Descriptor, transport: str
) -> PullFailed | None:
    """Compare P's offer with what D expects.

    Args:
        part_id, expected: the part that D expects.
        info: P's description of its offer.
        transport: name of D's transport.

    Returns:
        The failure, or None if the part may be pulled.
    """
    reason, offered = "", info.descriptor
    if info.part_id != part_id:
        reason = "the offer is of another part"
    elif info.transport != transport:
        reason = f"offered by {info.transport!r}, but this node uses {transport!r}"
    elif offered.namespace_digest != expected.namespace_digest:
        reason = "of another namespace or model"
    elif offered.group != expected.group or offered.num_blocks != expected.num_blocks:
        reason = (
            f"{offered.num_blocks} blocks of group {offered.group} are offered, "
            f"{expected.num_blocks} of group {expected.group} expected"
        )
    else:
        reason = _first_difference(offered.arrays, expected.arrays)
    if reason:
        return PullFailed(part_id, Fault.MISMATCH, reason)
    return None


def _first_difference(found: Sequence[ArraySpec], expected: Sequence[ArraySpec]) -> str:
    if len(found) != len(expected):
        return f"{len(found)} arrays, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            return f"array {number} is {one}, expected {other}"
    return ""
