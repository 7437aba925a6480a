"""What is under way in an engine: offers, pulls and withdrawals, from their begin to their event.

Called by one thread, which need not be the node's; `threaded.py` has one.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from ...handoff.messages import AttemptKey, Ticket
from .base import (
    Event,
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    Withdrawn,
)
from .descriptors import (
    Descriptor,
    PayloadArray,
    WireTicket,
    digest_arrays,
    is_computed,
)
from .transfer_engine import (
    Engine,
    EngineOffer,
    EnginePull,
    PullError,
    TooLargeError,
)


@dataclass(eq=False, slots=True)
class PartOffer:
    """A part that is to be served, or is.

    Attributes:
        arrays: until they are served.
        expires_at: by the wall clock.
        served: None until there is room for it, and its arrays are computed.
    """

    arrays: tuple[PayloadArray, ...]
    descriptor: Descriptor
    expires_at: float
    served: EngineOffer | None = None
    is_ending: bool = False


@dataclass(eq=False, slots=True)
class PartPull:
    """A part that is to be read, or is being read.

    Attributes:
        deadline: by the monotonic clock.
        running: None until there is room for it.
        num_arrived: how many arrays.
        digests: of those.
    """

    wire: WireTicket
    want: Descriptor
    deadline: float
    running: EnginePull | None = None
    num_arrived: int = 0
    digests: list[bytes] = field(default_factory=list)


class EngineWork:
    """Drives an engine: every `step` looks at all that is under way once."""

    def __init__(self, engine: Engine) -> None:
        """Start with nothing."""
        self.engine = engine
        self.parts_received = self.bytes_received = self.offers_expired = 0
        self.faults: Counter[Fault] = Counter()
        self._offers: dict[Ticket, PartOffer] = {}
        self._withdrawn: set[AttemptKey] = set()  # and not reported
        self._pulls: dict[Ticket, PartPull] = {}
        self._received: dict[Ticket, EnginePull] = {}
        self._events: list[Event] = []
        self._tended_at = 0.0

    @property
    def num_offers(self) -> int:
        """Parts that are to be served, are, or whose memory is not free yet."""
        return len(self._offers)

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        return events

    def wait_s(self) -> float | None:
        """How long `step` is not needed; 0: it is; None: until something new is begun."""
        offers = self._offers.values()
        if self._pulls or any(offer.served is None or offer.is_ending for offer in offers):
            return 0.0
        waits = [max(0.0, offer.expires_at - time.time()) for offer in offers]
        if self.engine.tend_s is not None:
            waits.append(self.engine.tend_s)
        return min(waits, default=None)

    # What is begun

    def offer(self, ticket: Ticket, offer: PartOffer) -> None:
        """Begin to serve a part."""
        self._offers[ticket] = offer

    def withdraw(self, key: AttemptKey, was_read: bool) -> None:
        """Stop serving all parts of an attempt."""
        self._withdrawn.add(key)
        for ticket in [ticket for ticket in self._offers if ticket.key == key]:
            self._end_offer(ticket, was_read)

    def pull(self, ticket: Ticket, pull: PartPull) -> None:
        """Begin to read a part."""
        self._pulls[ticket] = pull

    def fail(self, failed: PullFailed) -> None:
        """End a pull as failed."""
        pull = self._pulls.pop(failed.ticket, None)
        if pull is not None and pull.running is not None:
            pull.running.abandon()
        self.faults[failed.fault] += 1
        self._events.append(failed)

    def cancel(self, ticket: Ticket) -> None:
        """End a pull, unless it has ended."""
        if ticket in self._pulls:
            self.fail(PullFailed(ticket, Fault.CANCELLED, "cancelled"))

    def release(self, ticket: Ticket) -> None:
        """Give back the memory of a part that was received."""
        self._received.pop(ticket).free()

    def close(self) -> None:
        """Abandon what is running, and close the engine."""
        for pull in self._pulls.values():
            if pull.running is not None:
                pull.running.abandon()
        self.engine.close()

    # What goes on

    def step(self) -> bool:
        """Look at all that is under way; return whether any of it has gone on."""
        self._tend()
        now = time.time()
        for ticket, offer in list(self._offers.items()):
            if offer.is_ending:
                assert offer.served is not None, "what was never served ends at once"
                if offer.served.is_withdrawn():
                    del self._offers[ticket]
                continue
            if offer.served is None:
                self._serve(ticket, offer)
            elif offer.served.was_read():
                self._end_offer(ticket, was_read=True)
                continue
            if offer.expires_at <= now and ticket in self._offers:
                self.offers_expired += 1
                if offer.served is None:
                    self._events.append(OfferFailed(ticket, "expired before it could be served"))
                self._end_offer(ticket, was_read=False)
        for key in self._withdrawn - {ticket.key for ticket in self._offers}:
            self._withdrawn.remove(key)
            self._events.append(Withdrawn(key))
        pulls = list(self._pulls.items())
        return any([self._advance(ticket, pull) for ticket, pull in pulls]) or bool(self._events)

    def _tend(self) -> None:
        """Tend the engine if that is due."""
        tend_s, now = self.engine.tend_s, time.monotonic()
        if tend_s is not None and now >= self._tended_at + tend_s:
            self._tended_at = now
            self.engine.tend()

    def _serve(self, ticket: Ticket, offer: PartOffer) -> None:
        """Serve a part whose arrays are computed, if there is room."""
        if not all(is_computed(array) for array in offer.arrays):
            return
        try:
            served = self.engine.offer(offer.arrays)
            if served is None:
                return
            digests = digest_arrays(offer.arrays)
        except Exception as error:  # of the computation, or of the engine: the part is lost
            is_ours = isinstance(error, TooLargeError)
            reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
            del self._offers[ticket]
            self._events.append(OfferFailed(ticket, reason))
            return
        offer.served, offer.arrays = served, ()
        name, expires_at = self.engine.name, offer.expires_at
        wire = WireTicket(ticket, offer.descriptor, digests, expires_at, name, served.route)
        self._events.append(Offered(ticket, wire))

    def _end_offer(self, ticket: Ticket, was_read: bool) -> None:
        offer = self._offers[ticket]
        if offer.served is None:
            del self._offers[ticket]
        elif not offer.is_ending:
            offer.is_ending = True
            offer.served.withdraw(was_read)

    def _advance(self, ticket: Ticket, pull: PartPull) -> bool:
        """Begin a pull that had no room, or take in what has arrived; False if nothing has."""
        num_arrived = pull.num_arrived
        try:
            if pull.running is None:
                pull.running = self.engine.pull(pull.wire.route, pull.want)
            if pull.running is not None:
                self._take_in(pull, pull.running)
        except PullError as error:
            self.fail(PullFailed(ticket, error.fault, error.reason))
            return True
        except TooLargeError as error:
            self.fail(PullFailed(ticket, Fault.TOO_LARGE, str(error)))
            return True
        if pull.running is not None and pull.num_arrived == len(pull.want.arrays):
            self._received[ticket] = pull.running
            del self._pulls[ticket]
            self.parts_received += 1
            self.bytes_received += pull.want.num_bytes
            self._events.append(Received(ticket, pull.running.arrays))
        elif time.monotonic() >= pull.deadline:
            what = "there was no room in staging memory" if pull.running is None else "it ran"
            self.fail(PullFailed(ticket, Fault.TIMED_OUT, f"{what} until the deadline"))
        return pull.num_arrived > num_arrived

    def _take_in(self, pull: PartPull, running: EnginePull) -> None:
        """Take in what has arrived since the last time.

        Raises:
            PullError: if the pull has failed, or all is here and some of it is not what it was.
        """
        num_arrived = running.advance()
        pull.digests += running.digests(pull.num_arrived, num_arrived)
        pull.num_arrived = num_arrived
        if num_arrived == len(running.arrays) and tuple(pull.digests) != pull.wire.digests:
            raise PullError(Fault.CORRUPT, "not the bytes that were offered")
