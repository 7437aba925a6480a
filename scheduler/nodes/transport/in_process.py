"""The transport between nodes of one process, which passes arrays without a copy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from ....kvcache.cleanup import give_back
from ...handoff.messages import AttemptKey, PartId
from .base import (
    Event,
    Fault,
    Offered,
    PullFailed,
    Received,
    Transport,
    TransportStats,
    Withdrawn,
    check_offer,
    check_pull,
)
from .descriptors import Descriptor, PayloadArray, PullInfo
from .errors import TransportArgumentError, TransportClosedError

NAME: Final = "inprocess"


class InProcessExchange:
    """The offered parts of all nodes of a process.

    Nodes may run in different threads, because each access reads or writes one item.
    """

    def __init__(self) -> None:
        self.offers: dict[PartId, tuple[PayloadArray, ...]] = {}


class InProcessTransport(Transport):
    """Passes arrays from one node to another in the same process.

    JAX arrays are immutable, so they are passed as they are, computed or not. NumPy arrays are
    copied by `Transport.offer`. Nothing leaves the process, so there are no digests.

    In each call, what may raise comes before the first change.
    """

    name = NAME
    copies_offers = False

    def __init__(self, exchange: InProcessExchange) -> None:
        self._exchange = exchange
        self._expires_at: dict[PartId, float] = {}
        self._pulled: dict[PartId, Received] = {}  # not returned by `poll` yet
        self._received: set[PartId] = set()
        self._events: list[Event | PartId] = []  # a part id stands for its Received
        self._parts_received = self._bytes_received = self._offers_expired = 0
        self._faults: Counter[Fault] = Counter()
        self._is_closed = False

    def offer(
        self,
        part_id: PartId,
        arrays: Sequence[PayloadArray],
        descriptor: Descriptor,
        *,
        ttl_s: float,
    ) -> None:
        """See `Transport.offer`."""
        self._check_open()
        check_offer(part_id, arrays, descriptor, part_id in self._expires_at)
        expires_at = time.monotonic() + ttl_s
        served = tuple(
            [array.copy() if isinstance(array, np.ndarray) else array for array in arrays]
        )
        self._events.append(Offered(part_id, PullInfo(part_id, descriptor, (), NAME, b"")))
        self._expires_at[part_id] = expires_at
        self._exchange.offers[part_id] = served

    def withdraw(self, key: AttemptKey, *, was_read: bool = False) -> None:
        """See `Transport.withdraw`."""
        self._check_open()
        events = [
            event
            for event in self._events
            if not (isinstance(event, Offered) and event.part_id.key == key)
        ]
        events.append(Withdrawn(key))
        for part_id in [part_id for part_id in self._expires_at if part_id.key == key]:
            self._forget(part_id)
        self._events = events

    def pull(
        self, part_id: PartId, info: PullInfo, expected: Descriptor, *, timeout_s: float
    ) -> None:
        """See `Transport.pull`; the pull ends at once."""
        self._check_open()
        if part_id in self._pulled or part_id in self._received:
            raise TransportArgumentError(f"part {part_id.part} of {part_id.key} is already pulled")
        failed = check_pull(part_id, info, expected, NAME)
        arrays = self._exchange.offers.get(part_id)
        if failed is not None:
            self._fail(failed)
        elif arrays is None:
            self._fail(PullFailed(part_id, Fault.EXPIRED, "the part is not offered"))
        else:
            received = Received(part_id, arrays)
            self._events.append(part_id)
            self._pulled[part_id] = received

    def cancel(self, part_id: PartId) -> None:
        """See `Transport.cancel`."""
        if part_id in self._pulled:
            events = [each for each in self._events if each != part_id]
            self._fail(PullFailed(part_id, Fault.CANCELLED, "cancelled"), events)
            self._events = events
            del self._pulled[part_id]

    def release(self, part_id: PartId) -> None:
        """See `Transport.release`."""
        self._received.discard(part_id)

    def poll(self) -> list[Event]:
        """See `Transport.poll`."""
        now = time.monotonic()
        for part_id in [each for each, end in self._expires_at.items() if end <= now]:
            self._forget(part_id)
            self._offers_expired += 1
        events = [self._pulled[each] if isinstance(each, PartId) else each for each in self._events]
        received = [each for each in events if isinstance(each, Received)]
        self._bytes_received += sum([array.nbytes for each in received for array in each.arrays])
        self._events = []
        for each in received:
            del self._pulled[each.part_id]
            self._received |= {each.part_id}
            self._parts_received += 1
        return events

    def stats(self) -> TransportStats:
        """See `Transport.stats`."""
        return TransportStats(
            offers=len(self._expires_at),
            pulls=len(self._pulled),
            received=len(self._received),
            parts_received=self._parts_received,
            bytes_received=self._bytes_received,
            offers_expired=self._offers_expired,
            faults=self._faults.copy(),
        )

    def close(self) -> None:
        """See `Transport.close`."""
        self._is_closed = True
        give_back(*[partial(self._forget, part_id) for part_id in self._expires_at])

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the transport is closed")

    def _fail(self, failed: PullFailed, events: list[Event | PartId] | None = None) -> None:
        num_before = self._faults[failed.fault]
        (self._events if events is None else events).append(failed)
        self._faults[failed.fault] = num_before + 1

    def _forget(self, part_id: PartId) -> None:
        self._exchange.offers.pop(part_id, None)  # first: nobody else would take it back
        del self._expires_at[part_id]
