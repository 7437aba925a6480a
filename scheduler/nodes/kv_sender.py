"""A prefill node's offers: copies of blocks, and the SENDs that wait until these are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from ..handoff import AttemptKey, NodeId, Offer, PartId, Send, Withdraw
from .node import PeerMessage
from .transport import Descriptor, Offered, PayloadArray, PullInfo, Transport

_OFFER_TTL_S: Final = 600.0
"""Every offer is withdrawn at the end of its attempt; this is a safety net."""


class GatherKV(Protocol):
    """Copies blocks into arrays; see `KVParts`."""

    def describe(self, num_blocks: int, group: int, num_groups: int) -> Descriptor:
        """Describe the arrays of a part of so many blocks in one group of layers."""

    def read(self, blocks: Sequence[int], group: int, num_groups: int) -> Sequence[PayloadArray]:
        """Copy the current content of blocks in one group of layers."""


class KVSender:
    """Offers parts to decode nodes, with a limit on the memory of the copies.

    A copy that would exceed the limit is made later. Until then its blocks stay pinned and
    unchanged, its SEND waits, and the node computes on. The oldest attempt ignores the limit,
    because the others may wait for it, and it must not wait for them. The copies thus take at most
    max_bytes and one prompt.

    Attributes:
        num_bytes: current size of the copies.
    """

    def __init__(
        self, kv: GatherKV, transport: Transport, *, max_bytes: int, num_groups: int = 1
    ) -> None:
        """Set up.

        Args:
            kv: copies blocks.
            transport: serves the copies.
            max_bytes: limit of all copies.
            num_groups: number of groups of layers that are sent separately.
        """
        self.num_bytes = 0
        self._kv = kv
        self._transport = transport
        self._max_bytes = max_bytes
        self._num_groups = num_groups
        # Attempts in order of their first offers; None: not served yet.
        self._offers: dict[AttemptKey, dict[PartId, PullInfo | None]] = {}
        self._uncopied: list[Offer] = []
        self._copy_bytes: dict[PartId, int] = {}
        self._waiting_sends: dict[PartId, PeerMessage] = {}

    @property
    def num_waiting(self) -> int:
        """Number of SENDs that wait for the transport to serve their parts."""
        return len(self._waiting_sends)

    def offer(self, offer: Offer) -> None:
        """Offer a copy of blocks, which must not change until `withdraw`."""
        self._offers.setdefault(offer.part_id.key, {})[offer.part_id] = None
        self._uncopied.append(offer)
        self._copy()

    def send(self, peer: NodeId, send: Send) -> list[PeerMessage]:
        """Add the `PullInfo` to SEND; return nothing if `offered` will return it later."""
        header = send.header
        assert header.peer_epoch is not None, "SEND needs the epoch of its receiver"
        part_id = PartId(header.key, header.epoch, header.peer_epoch, header.grant, send.part)
        info = self._offers[header.key][part_id]
        if info is not None:
            return [PeerMessage(peer, send, info)]
        self._waiting_sends[part_id] = PeerMessage(peer, send)
        return []

    def offered(self, event: Offered) -> list[PeerMessage]:
        """Record that a part is served; return the SEND that has waited for it, if any."""
        if self._transport.copies_offers:
            self._free([event.part_id])
        offers = self._offers.get(event.part_id.key)
        if offers is None:
            return []  # withdrawn meanwhile
        offers[event.part_id] = event.info
        send = self._waiting_sends.pop(event.part_id, None)
        return [] if send is None else [send._replace(pull_info=event.info)]

    def withdraw(self, withdraw: Withdraw) -> None:
        """Stop serving all parts of an attempt."""
        for part_id in self._offers.pop(withdraw.key, {}):
            self._waiting_sends.pop(part_id, None)
        self._uncopied = [each for each in self._uncopied if each.part_id.key != withdraw.key]
        self._transport.withdraw(withdraw.key, was_read=withdraw.was_read)

    def withdrawn(self, key: AttemptKey) -> None:
        """Record that the copies of an attempt are free."""
        self._free([part_id for part_id in self._copy_bytes if part_id.key == key])

    def _free(self, part_ids: Sequence[PartId]) -> None:
        self.num_bytes -= sum([self._copy_bytes.pop(part_id, 0) for part_id in part_ids])
        self._copy()

    def _copy(self) -> None:
        """Copy and offer waiting parts in order while they fit; all parts of the oldest attempt."""
        oldest = next(iter(self._offers), None)
        uncopied, self._uncopied = self._uncopied, []
        for offer in uncopied:
            group = offer.group, self._num_groups
            descriptor = self._kv.describe(len(offer.blocks), *group)
            fits = self.num_bytes + descriptor.num_bytes <= self._max_bytes
            if offer.part_id.key != oldest and (self._uncopied or not fits):
                self._uncopied.append(offer)
                continue
            self.num_bytes += descriptor.num_bytes
            self._copy_bytes[offer.part_id] = descriptor.num_bytes
            arrays = self._kv.read(offer.blocks, *group)
            self._transport.offer(offer.part_id, arrays, descriptor, ttl_s=_OFFER_TTL_S)
