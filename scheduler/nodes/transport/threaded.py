"""A transport over a transfer engine, which runs in a thread so that the node's loop never waits.

::

    the node's loop                       the thread, the only caller of the engine
    offer, withdraw, pull, cancel ──────► commands, in order
    poll ◄────────────────────────────── events, in order
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Final

from ....kvcache.cleanup import give_back
from ...handoff.messages import AttemptKey, PartId
from .base import (
    Event,
    Fault,
    PullFailed,
    Received,
    Transport,
    TransportStats,
    Withdrawn,
    check_offer,
    check_pull,
)
from .descriptors import Descriptor, PayloadArray, PullInfo
from .errors import TransportArgumentError, TransportClosedError, TransportError
from .transfer_engine import TransferEngine
from .transfer_table import OfferEntry, PullEntry, TransferTable

_FIRST_SLEEP_S: Final = 2e-4
_LAST_SLEEP_S: Final = 5e-3
_SLEEP_GROWTH: Final = 1.15  # the thread notices the end of a pull at most 15 % late
_CLOSE_S: Final = 5.0


class ThreadedTransport(Transport):
    """A transport between processes, over any engine."""

    def __init__(self, engine: TransferEngine) -> None:
        """Start the thread, which owns the engine from now on.

        Raises:
            RuntimeError: if there can be no more threads; the engine is closed then.
        """
        self.name = engine.name
        self.copies_offers = engine.copies_offers
        self._offered: set[PartId] = set()
        self._pulling: dict[PartId, bool] = {}  # whether it was cancelled
        self._received: set[PartId] = set()
        self._taken: list[Event] = []  # from the thread, and not accounted yet
        self._accounted: list[Event] = []
        self._table = TransferTable(engine)
        self._changed = Condition()  # guards the next four
        self._commands: deque[Callable[[], None]] = deque()
        self._events: list[Event] = []
        self._crash: Exception | None = None
        self._is_closed = False
        # A daemon, because an engine that hangs must not keep the process from ending.
        self._thread = Thread(target=self._run, name=f"radixkv-{engine.name}", daemon=True)
        # Python unwinds the stack of a daemon thread that needs the GIL after the interpreter's
        # end. In the C++ of JAX or NIXL, that aborts the process.
        try:
            atexit.register(self.close)
            self._thread.start()
        except Exception:  # there is no thread
            give_back(partial(atexit.unregister, self.close), engine.close)
            raise

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
        check_offer(part_id, arrays, descriptor, part_id in self._offered)
        offer = OfferEntry(tuple(arrays), descriptor, time.monotonic() + ttl_s)
        try:
            self._offered.add(part_id)
            self._do(partial(self._table.offer, part_id, offer))
        except BaseException:
            self._offered.discard(part_id)
            raise

    def withdraw(self, key: AttemptKey, *, was_read: bool = False) -> None:
        """See `Transport.withdraw`."""
        self._check_open()
        self._do(partial(self._table.withdraw, key, was_read))

    def pull(
        self, part_id: PartId, info: PullInfo, expected: Descriptor, *, timeout_s: float
    ) -> None:
        """See `Transport.pull`."""
        self._check_open()
        if part_id in self._pulling or part_id in self._received:
            raise TransportArgumentError(f"part {part_id.part} of {part_id.key} is already pulled")
        self._pulling[part_id] = False
        try:
            failed = check_pull(part_id, info, expected, self.name)
            if failed is not None:
                self._do(partial(self._table.fail, failed))
            else:
                pull = PullEntry(info, expected, time.monotonic() + timeout_s)
                self._do(partial(self._table.pull, part_id, pull))
        except BaseException:
            del self._pulling[part_id]
            raise

    def cancel(self, part_id: PartId) -> None:
        """See `Transport.cancel`."""
        if part_id in self._pulling:
            self._do(partial(self._table.cancel, part_id))
            self._pulling[part_id] = True

    def release(self, part_id: PartId) -> None:
        """See `Transport.release`."""
        if part_id in self._received:
            try:
                self._received.remove(part_id)
                self._do(partial(self._table.release, part_id))
            except BaseException:
                self._received.add(part_id)
                raise

    def poll(self) -> list[Event]:
        """See `Transport.poll`.

        Raises:
            TransportError: if the engine raised an unexpected exception and the thread ended.
        """
        with self._changed:
            self._taken += self._events
            self._events = []
            crash = self._crash
        if crash is not None:
            raise TransportError(f"{self.name} has ended: {type(crash).__name__}") from crash
        while self._taken:  # an error loses none, and counts none twice
            self._accounted += [self._account(self._taken[0])]
            del self._taken[0]
        events, self._accounted = self._accounted, []
        return events

    def stats(self) -> TransportStats:
        """See `Transport.stats`."""
        table = self._table
        return TransportStats(
            offers=table.num_offers,
            pulls=len(self._pulling),
            received=len(self._received),
            quarantined_bytes=table.engine.quarantined_bytes,
            parts_received=table.parts_received,
            bytes_received=table.bytes_received,
            offers_expired=table.offers_expired,
            faults=table.faults.copy(),
        )

    def close(self) -> None:
        """See `Transport.close`; waits a few seconds at most for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            atexit.unregister(self.close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the transport is closed")

    def _account(self, event: Event) -> Event:
        """Update the caller's side, and return the event for the caller."""
        match event:
            case Received() if self._pulling[event.part_id]:
                failed = PullFailed(event.part_id, Fault.CANCELLED, "cancelled")
                self._do(partial(self._table.release, event.part_id))
                del self._pulling[event.part_id]
                return failed
            case Received():
                self._received.add(event.part_id)
                del self._pulling[event.part_id]
            case PullFailed():
                del self._pulling[event.part_id]
            case Withdrawn():
                self._offered = {each for each in self._offered if each.key != event.key}
        return event

    def _do(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._changed.notify()  # first, so that an error leaves no command
            self._commands.append(command)

    def _run(self) -> None:
        """Run the thread until `close`."""
        try:
            self._loop()
        except Exception as error:
            self._crash = error
        try:
            self._table.close()
        except Exception as error:
            self._crash = self._crash or error

    def _loop(self) -> None:
        table, sleep_s = self._table, _FIRST_SLEEP_S
        while not self._is_closed:
            with self._changed:
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            has_moved = table.step() or bool(commands)
            events = table.take_events()
            sleep_s = _FIRST_SLEEP_S if has_moved else min(sleep_s * _SLEEP_GROWTH, _LAST_SLEEP_S)
            wait_s = table.wait_s()
            with self._changed:
                self._events += events
                if not (has_moved and wait_s == 0) and not self._commands and not self._is_closed:
                    self._changed.wait(sleep_s if wait_s == 0 else wait_s)
