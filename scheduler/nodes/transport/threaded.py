"""A transport over an engine, with a thread of its own, so that the node's loop never waits.

::

    the node's loop                       the thread, which alone calls the engine
    offer, withdraw, pull, cancel ──────► commands, in order
    poll ◄────────────────────────────── events, in order
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Final

from ...handoff.messages import AttemptKey, Ticket
from .base import (
    Event,
    Fault,
    OfferFailed,
    PullFailed,
    Received,
    Transport,
    TransportStats,
    Withdrawn,
    check_offer,
    refusal,
)
from .descriptors import (
    Descriptor,
    PayloadArray,
    WireTicket,
)
from .errors import (
    TransportArgumentError,
    TransportClosedError,
    TransportError,
)
from .transfer_engine import Engine
from .transfer_table import (
    EngineWork,
    PartOffer,
    PartPull,
)

_FIRST_SLEEP_S: Final = 2e-4
_LAST_SLEEP_S: Final = 5e-3
_SLEEP_GROWTH: Final = 1.15  # so that a pull that ended is found out 15 % later at most
_CLOSE_S: Final = 5.0


class ThreadedTransport(Transport):
    """Any engine as a transport."""

    def __init__(self, engine: Engine) -> None:
        """Start the thread; the engine is its own from now on."""
        self.name = engine.name
        self.copies_offers = engine.copies_offers
        self._offered: set[Ticket] = set()
        self._pulling: dict[Ticket, bool] = {}  # whether it was cancelled
        self._received: set[Ticket] = set()
        self._work = EngineWork(engine)
        self._changed = Condition()  # of the next four
        self._commands: deque[Callable[[], None]] = deque()
        self._events: list[Event] = []
        self._crash: Exception | None = None
        self._is_closed = False
        # A daemon: an engine that never answers must not keep the process from ending.
        self._thread = Thread(target=self._run, name=f"radixkv-{engine.name}", daemon=True)
        self._thread.start()

    def offer(
        self,
        ticket: Ticket,
        arrays: Sequence[PayloadArray],
        descriptor: Descriptor,
        *,
        ttl_s: float,
    ) -> None:
        """See `Transport.offer`."""
        self._check_open()
        check_offer(ticket, arrays, descriptor, ticket in self._offered)
        self._offered.add(ticket)
        offer = PartOffer(tuple(arrays), descriptor, time.time() + ttl_s)
        self._do(partial(self._work.offer, ticket, offer))

    def withdraw(self, key: AttemptKey, *, was_read: bool = False) -> None:
        """See `Transport.withdraw`."""
        self._check_open()
        self._do(partial(self._work.withdraw, key, was_read))

    def pull(self, ticket: Ticket, wire: WireTicket, want: Descriptor, *, timeout_s: float) -> None:
        """See `Transport.pull`."""
        self._check_open()
        if ticket in self._pulling or ticket in self._received:
            raise TransportArgumentError(f"part {ticket.part} of {ticket.key} is pulled already")
        self._pulling[ticket] = False
        refused = refusal(ticket, wire, want, self.name)
        if refused is not None:
            self._do(partial(self._work.fail, refused))
        else:
            pull = PartPull(wire, want, time.monotonic() + timeout_s)
            self._do(partial(self._work.pull, ticket, pull))

    def cancel(self, ticket: Ticket) -> None:
        """See `Transport.cancel`."""
        if ticket in self._pulling:
            self._pulling[ticket] = True
            self._do(partial(self._work.cancel, ticket))

    def release(self, ticket: Ticket) -> None:
        """See `Transport.release`."""
        if ticket in self._received:
            self._received.remove(ticket)
            self._do(partial(self._work.release, ticket))

    def poll(self) -> list[Event]:
        """See `Transport.poll`.

        Raises:
            TransportError: if the engine raised what it never should: nothing goes on then.
        """
        with self._changed:
            events, self._events = self._events, []
            crash = self._crash
        if crash is not None:
            raise TransportError(f"{self.name} has ended: {type(crash).__name__}") from crash
        return [self._told(event) for event in events]

    def stats(self) -> TransportStats:
        """See `Transport.stats`."""
        work = self._work
        return TransportStats(
            offers=work.num_offers,
            pulls=len(self._pulling),
            received=len(self._received),
            quarantined_bytes=work.engine.quarantined_bytes,
            parts_received=work.parts_received,
            bytes_received=work.bytes_received,
            offers_expired=work.offers_expired,
            faults=work.faults.copy(),
        )

    def close(self) -> None:
        """See `Transport.close`; waits for what the thread is doing, a few seconds at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the transport is closed")

    def _told(self, event: Event) -> Event:
        """Keep the caller's books of what it is told."""
        match event:
            case Received() if self._pulling.pop(event.ticket):
                self._do(partial(self._work.release, event.ticket))
                return PullFailed(event.ticket, Fault.CANCELLED, "cancelled")
            case Received():
                self._received.add(event.ticket)
            case PullFailed():
                del self._pulling[event.ticket]
            case OfferFailed():
                self._offered.discard(event.ticket)
            case Withdrawn():
                self._offered = {each for each in self._offered if each.key != event.key}
        return event

    def _do(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        """Do what is asked for and look at what goes on, until closed; the thread."""
        try:
            self._loop()
        except Exception as error:
            self._crash = error
        self._work.close()

    def _loop(self) -> None:
        work, sleep_s = self._work, _FIRST_SLEEP_S
        while not self._is_closed:
            with self._changed:
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            has_moved = work.step() or bool(commands)
            events = work.take_events()
            sleep_s = _FIRST_SLEEP_S if has_moved else min(sleep_s * _SLEEP_GROWTH, _LAST_SLEEP_S)
            wait_s = work.wait_s()
            with self._changed:
                self._events += events
                if not (has_moved and wait_s == 0) and not self._commands and not self._is_closed:
                    self._changed.wait(sleep_s if wait_s == 0 else wait_s)
