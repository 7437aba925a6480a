"""The transfers of an engine in flight: offers, pulls and withdrawals, from request to event.

All calls come from one thread, which need not be the node's; `threaded` has a thread for them.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from ....kvcache.cleanup import give_back
from ...handoff.messages import AttemptKey, PartId
from .base import Event, Fault, Offered, OfferFailed, PullFailed, Received, Withdrawn
from .descriptors import (
    Descriptor,
    PayloadArray,
    PullInfo,
    digest_arrays,
    is_ready,
    make_digest_key,
)
from .transfer_engine import EngineOffer, EnginePull, PullError, TooLargeError, TransferEngine


@dataclass(eq=False, slots=True)
class OfferEntry:
    """A part that is served, or will be.

    Attributes:
        arrays: the arrays; empty as soon as others can read them.
        expires_at: end of the offer by the monotonic clock of this process.
        served: the engine's offer; None until there is room and the arrays are computed.
        is_ending: whether the engine's offer was withdrawn.
    """

    arrays: tuple[PayloadArray, ...]
    descriptor: Descriptor
    expires_at: float
    served: EngineOffer | None = None
    is_ending: bool = False


@dataclass(eq=False, slots=True)
class PullEntry:
    """A part that is read, or will be.

    Attributes:
        deadline: end of the pull by the monotonic clock.
        running: the engine's pull; None until there is room.
        num_arrived: number of arrays that have arrived.
        digests: digests of these arrays.
    """

    info: PullInfo
    expected: Descriptor
    deadline: float
    running: EnginePull | None = None
    num_arrived: int = 0
    digests: list[bytes] = field(default_factory=list)


class TransferTable:
    """Drives an engine: each `step` visits every transfer in flight once."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.parts_received = self.bytes_received = self.offers_expired = 0
        self.faults: Counter[Fault] = Counter()
        self._offers: dict[PartId, OfferEntry] = {}
        self._withdrawn: set[AttemptKey] = set()  # not reported yet
        self._pulls: dict[PartId, PullEntry] = {}
        self._received: dict[PartId, EnginePull] = {}
        self._events: list[Event] = []
        self._maintained_at = 0.0

    @property
    def num_offers(self) -> int:
        """Number of offers whose memory is not free yet."""
        return len(self._offers)

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def wait_s(self) -> float | None:
        """Time until `step` is needed again; None: not before another call."""
        offers = self._offers.values()
        if self._pulls or any(offer.arrays or offer.is_ending for offer in offers):
            return 0.0
        waits = [max(0.0, offer.expires_at - time.monotonic()) for offer in offers]
        if self.engine.maintain_every_s is not None:
            waits.append(self.engine.maintain_every_s)
        return min(waits, default=None)

    # Requests

    def offer(self, part_id: PartId, offer: OfferEntry) -> None:
        """Begin to serve a part."""
        self._offers[part_id] = offer

    def withdraw(self, key: AttemptKey, was_read: bool) -> None:
        """Stop serving all parts of an attempt."""
        self._withdrawn.add(key)
        for part_id in [part_id for part_id in self._offers if part_id.key == key]:
            self._end_offer(part_id, was_read)

    def pull(self, part_id: PartId, pull: PullEntry) -> None:
        """Begin to read a part."""
        self._pulls[part_id] = pull

    def fail(self, failed: PullFailed) -> None:
        """End a pull as failed."""
        pull = self._pulls.get(failed.part_id)
        if pull is not None:
            if pull.running is not None:
                pull.running.abandon()
            del self._pulls[failed.part_id]  # now: if it is not abandoned, `close` has to do it
        self.faults[failed.fault] += 1
        self._events.append(failed)

    def cancel(self, part_id: PartId) -> None:
        """End a pull as cancelled, unless it has ended."""
        if part_id in self._pulls:
            self.fail(PullFailed(part_id, Fault.CANCELLED, "cancelled"))

    def release(self, part_id: PartId) -> None:
        """Free the memory of a received part."""
        self._received.pop(part_id).free()

    def close(self) -> None:
        """Abandon the pulls in flight, and close the engine."""
        running = [pull.running for pull in self._pulls.values() if pull.running is not None]
        give_back(*[pull.abandon for pull in running], self.engine.close)

    # Progress

    def step(self) -> bool:
        """Visit all transfers in flight; return whether any of them has advanced."""
        every_s = self.engine.maintain_every_s
        if every_s is not None and time.monotonic() >= self._maintained_at + every_s:
            self._maintained_at = time.monotonic()
            self.engine.maintain()
        now = time.monotonic()
        for part_id, offer in list(self._offers.items()):
            if offer.is_ending:
                assert offer.served is not None, "an offer that was never served ends at once"
                if offer.served.is_withdrawn():
                    del self._offers[part_id]
                continue
            if offer.arrays:
                self._serve(part_id, offer)
            elif offer.served is not None and offer.served.was_read():
                self._end_offer(part_id, was_read=True)
                continue
            # `_serve` may have ended it: then it is gone, or ending.
            if offer.expires_at <= now and part_id in self._offers and not offer.is_ending:
                self.offers_expired += 1
                if offer.arrays:
                    self._events.append(OfferFailed(part_id, "expired before it could be served"))
                self._end_offer(part_id, was_read=False)
        for key in self._withdrawn - {part_id.key for part_id in self._offers}:
            self._withdrawn.remove(key)
            self._events.append(Withdrawn(key))
        pulls = list(self._pulls.items())
        return any([self._advance(part_id, pull) for part_id, pull in pulls]) or bool(self._events)

    def _serve(self, part_id: PartId, offer: OfferEntry) -> None:
        """Serve a part if its arrays are computed and there is room."""
        arrays = offer.arrays
        if not all(is_ready(array) for array in arrays):
            return
        try:
            if offer.served is None:
                offer.served = self.engine.offer(arrays)
            if offer.served is None or not offer.served.is_ready():
                return
            offer.arrays = ()
            key = make_digest_key()
            digests = digest_arrays(arrays, key)
        except Exception as error:  # raised by the computation or the engine: the part is lost
            is_ours = isinstance(error, TooLargeError)
            reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
            self._events.append(OfferFailed(part_id, reason))
            self._end_offer(part_id, was_read=False)
            return
        name, route = self.engine.name, offer.served.route
        info = PullInfo(part_id, offer.descriptor, digests, name, route, key)
        self._events.append(Offered(part_id, info))

    def _end_offer(self, part_id: PartId, was_read: bool) -> None:
        offer = self._offers[part_id]
        if offer.served is None:
            del self._offers[part_id]
        elif not offer.is_ending:
            offer.is_ending = True
            offer.served.withdraw(was_read)

    def _advance(self, part_id: PartId, pull: PullEntry) -> bool:
        """Begin or continue a pull; return whether any array has arrived or the pull failed."""
        num_arrived = pull.num_arrived
        try:
            if pull.running is None:
                info = pull.info
                pull.running = self.engine.pull(info.route, pull.expected, info.digest_key)
            if pull.running is not None:
                self._check_arrived(pull, pull.running)
        except PullError as error:
            self.fail(PullFailed(part_id, error.fault, error.reason))
            return True
        except TooLargeError as error:
            self.fail(PullFailed(part_id, Fault.TOO_LARGE, str(error)))
            return True
        except AssertionError:
            raise
        except Exception as error:  # what a route or a peer makes an engine raise
            reason = f"{type(error).__name__}: {error}"
            self.fail(PullFailed(part_id, Fault.FAILED, reason))
            return True
        if pull.running is not None and pull.num_arrived == len(pull.expected.arrays):
            self._received[part_id] = pull.running
            del self._pulls[part_id]
            self.parts_received += 1
            self.bytes_received += pull.expected.num_bytes
            self._events.append(Received(part_id, pull.running.arrays))
        elif time.monotonic() >= pull.deadline:
            what = f"there was no {self.engine.room}" if pull.running is None else "it ran"
            self.fail(PullFailed(part_id, Fault.TIMED_OUT, f"{what} until the deadline"))
        return pull.num_arrived > num_arrived

    def _check_arrived(self, pull: PullEntry, running: EnginePull) -> None:
        """Digest the arrays that have arrived since the last call.

        Raises:
            PullError: if the pull failed, or all arrays have arrived and a digest is wrong.
        """
        num_arrived = running.advance()
        pull.digests += running.digests(pull.num_arrived, num_arrived)
        pull.num_arrived = num_arrived
        if num_arrived == len(running.arrays) and tuple(pull.digests) != pull.info.digests:
            raise PullError(Fault.CORRUPT, "not the bytes that were offered")
