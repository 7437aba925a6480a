"""Accepts the connections of others, and bounds what they occupy until they prove the secret.

::

    others ── TCP ──► Gate (a thread) ── a local socket ──► the inbox of ZeroMQ

ZeroMQ itself accepts as many connections as the process may open files: strangers would take the
descriptors that the rest of the process needs. The gate passes bytes on in both directions, and
knows no keys. The inbox sends its greeting to everybody, WELCOME to whoever knows the public key
(`curve`), and a third answer, READY, only after the proof. So a connection is proven as soon as the
inbox has sent more than a greeting and WELCOME. Until then

- it is one of `MAX_UNPROVEN`. One more takes the place of one that has come less far, or equally
  far, chosen at random, so a flood of connections does not keep a node out that proves quickly;
- it takes one descriptor until it has sent the first byte of a greeting, then three;
- it may send `MAX_UNPROVEN_BYTES`, and lasts `PROOF_S`.

Of the proven connections, which can be left over from peers that are gone, the one that was silent
the longest is closed when there are too many.
"""

from __future__ import annotations

import os
import random
import secrets
import selectors
import socket
import time
from collections import Counter
from contextlib import suppress
from threading import Lock, Thread
from typing import Final

import zmq

from .address import host_of
from .curve import (
    GREETING_BYTES,
    WELCOME_BYTES,
    CurveKeys,
    HandshakeMonitor,
    RefusedConnection,
    refused_connection,
)

MAX_UNPROVEN: Final = 48
MAX_UNPROVEN_BYTES: Final = 1024
"""A greeting, HELLO and INITIATE have fewer than 700 bytes."""
PROOF_S: Final = 5.0
FILES_PER_CONNECTION: Final = 3
"""The connection, and both ends of the local one."""

_SIGNATURE: Final = 0xFF  # the first byte of a greeting
_CHUNK_BYTES: Final = 1 << 16
_ACCEPTED_PER_TURN: Final = 4  # so that connections make progress between two newcomers
_BACKLOG: Final = 512
_PAUSE_S: Final = 0.1  # without a free descriptor; to try again at once would take a whole core


class _End:
    """One of the two sockets of a connection, and the bytes that it could not take yet."""

    __slots__ = ("connection", "other", "socket", "unsent")

    def __init__(self, end: socket.socket, connection: _Connection) -> None:
        end.setblocking(False)
        self.socket = end
        self.connection = connection
        self.other: _End | None = None
        self.unsent = b""


class _Connection:
    """A connection of a peer: the end at the peer, and once it has spoken, that at the inbox."""

    __slots__ = ("inside", "is_open", "num_answered", "num_said", "outside", "since")

    def __init__(self, outside: socket.socket, now: float) -> None:
        self.outside = _End(outside, self)
        self.inside: _End | None = None
        self.is_open = True
        self.num_said = 0  # bytes from the peer
        self.num_answered = 0  # bytes from the inbox
        self.since = now  # accepted, or once it is proven, last heard

    @property
    def progress(self) -> int:
        """How far the handshake has come: 0 to 2, and 3 when the peer is proven."""
        if self.num_answered > GREETING_BYTES:
            return 3 if self.num_answered > GREETING_BYTES + WELCOME_BYTES else 2
        return 0 if self.inside is None else 1


class Gate:
    """Accepts connections at an address, and passes what they say to an inbox of CURVE.

    Attributes:
        address: ``host:port``.
    """

    def __init__(
        self,
        listener: socket.socket,
        inbox: str,
        monitor: HandshakeMonitor | None,
        *,
        max_connections: int,
    ) -> None:
        """Start to accept.

        Args:
            listener: a bound socket, which is the gate's from now on.
            inbox: address of the inbox: the name of an abstract socket.
            monitor: that of the inbox; the gate takes its events, in its thread. Without one, it
                does not know the reasons of refusals.
            max_connections: number of proven connections.
        """
        host, port, *_ = listener.getsockname()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener = listener
        self._inbox = f"\0{inbox}"
        self._monitor = monitor
        self._max_connections = max_connections
        self._unproven: dict[_Connection, None] = {}  # oldest first
        self._proven: dict[_Connection, None] = {}
        self._paused_until: float | None = None
        self._num_failed = self._num_too_many = 0
        self._reasons: Counter[RefusedConnection] = Counter()
        self._lock = Lock()  # guards the next one, which is written once in a turn
        self._refused: Counter[RefusedConnection] = Counter()
        self._crash: Exception | None = None
        self._end_s: float | None = None  # of monotonic time, once it is closing
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._selector.register(listener, selectors.EVENT_READ)
        if monitor is not None:
            self._selector.register(monitor.file, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="radixkv-gate", daemon=True)
        self._thread.start()

    @classmethod
    def bind(
        cls,
        inbox: zmq.Socket[bytes],
        keys: CurveKeys,
        monitor: HandshakeMonitor | None,
        address: str,
        *,
        max_connections: int,
    ) -> Gate:
        """Bind a socket of ZeroMQ that nobody reaches but through a gate at an address.

        Args:
            inbox: neither bound nor connected yet.
            keys: what peers must have.
            monitor: that of the inbox, with ``ALL_FAILURES``, or None.
            address: ``host:port`` with a numeric host; port 0 takes any free port.
            max_connections: number of proven connections.

        Raises:
            OSError, zmq.ZMQError: if it cannot be bound.
        """
        keys.guard(inbox, is_server=True)
        inbox.set(zmq.IPC_FILTER_PID, os.getpid())  # the gate alone may connect
        name = f"radixkv-{secrets.token_hex(16)}"
        inbox.bind(f"ipc://@{name}")
        is_ipv6 = host_of(address).version == 6
        host, _, port = address.rpartition(":")
        listener = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), int(port)))
            return cls(listener, name, monitor, max_connections=max_connections)
        except BaseException:
            listener.close()
            raise

    @property
    def crash(self) -> Exception | None:
        """The exception that ended the thread, if one did."""
        return self._crash

    def refused(self) -> Counter[RefusedConnection]:
        """Return the number of refused connections so far, by reason."""
        with self._lock:
            return self._refused.copy()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Close the listener and all connections.

        Args:
            drain_s: longest wait for peers to take what an inbox that is closed has said.
        """
        self._end_s = time.monotonic() + drain_s
        with suppress(OSError):  # a close that was interrupted has shut it down already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        except Exception as error:
            self._crash = error
        for connection in [*self._unproven, *self._proven]:
            self._close(connection)
        self._selector.close()

    def _is_over(self) -> bool:
        return self._end_s is not None and not (self._proven and time.monotonic() < self._end_s)

    def _turn(self) -> None:
        is_called = False
        for key, events in self._selector.select(self._wait_s()):
            if isinstance(key.data, _End):
                self._serve(key.data, events)
            elif key.fileobj is self._listener:
                is_called = True
            else:
                self._count_refused()
        now = time.monotonic()
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._unproven and now - (late := next(iter(self._unproven))).since >= PROOF_S:
            self._close(late)
        if is_called and self._end_s is not None:
            self._selector.unregister(self._listener)
        elif is_called:  # last, so that the others have said what they had to
            self._accept(now)

    def _wait_s(self) -> float | None:
        ends = [next(iter(self._unproven)).since + PROOF_S] if self._unproven else []
        ends += [end for end in (self._paused_until, self._end_s) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _count_refused(self) -> None:
        """Count the connections that ended unproven; of some, the inbox knows the reason."""
        for code in self._monitor.take_all() if self._monitor is not None else ():
            reason = refused_connection(code, has_secret=True)
            if reason is not RefusedConnection.BROKEN:
                self._reasons[reason] += 1
        refused = self._reasons.copy()
        refused[RefusedConnection.BROKEN] = self._num_failed - self._reasons.total()
        refused[RefusedConnection.TOO_MANY] = self._num_too_many
        with self._lock:
            self._refused = +refused  # without what is 0

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                if len(self._unproven) == MAX_UNPROVEN:
                    self._make_room()  # also for the descriptor
                    continue
                self._selector.unregister(self._listener)
                self._paused_until = now + _PAUSE_S
                return
            if len(self._unproven) == MAX_UNPROVEN:
                self._make_room()
            connection = _Connection(accepted, now)
            self._unproven[connection] = None
            try:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(accepted, selectors.EVENT_READ, connection.outside)
            except OSError:  # of this connection, not of the gate
                self._close(connection)
                continue
            self._serve(connection.outside, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """Close one of the unproven connections that have come least far."""
        least = min(connection.progress for connection in self._unproven)
        victims = [each for each in self._unproven if each.progress == least]
        self._close(random.choice(victims))

    def _serve(self, end: _End, events: int) -> None:
        """Write to a socket what has waited for it, and pass on what it has to say."""
        connection = end.connection
        if not connection.is_open:  # closed since the events were collected
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(end, end.unsent)
            if events & selectors.EVENT_READ:
                self._pass_on(connection, end)
        except OSError:  # also of an inbox that has no room for another connection
            self._close(connection)

    def _pass_on(self, connection: _Connection, end: _End) -> None:
        is_outside, is_proven = end is connection.outside, connection in self._proven
        limit = _CHUNK_BYTES
        if is_outside and not is_proven:
            limit = MAX_UNPROVEN_BYTES - connection.num_said
        try:
            data = end.socket.recv(limit)
        except (BlockingIOError, InterruptedError):
            return
        if data and end.other is None and data[0] == _SIGNATURE:
            self._open_inside(connection)
        if not data or end.other is None:  # limit was 0, or a peer that does not speak ZeroMQ
            self._close(connection)
            return
        if is_outside:
            connection.num_said += len(data)
        else:
            connection.num_answered += len(data)
        if is_proven:
            connection.since = time.monotonic()
        elif connection.progress == 3:
            self._prove(connection)
        self._send(end.other, data)

    def _open_inside(self, connection: _Connection) -> None:
        end, outside = socket.socket(socket.AF_UNIX), connection.outside
        inside = connection.inside = _End(end, connection)
        inside.other, outside.other = outside, inside
        end.connect(self._inbox)
        self._selector.register(end, selectors.EVENT_READ, inside)

    def _prove(self, connection: _Connection) -> None:
        del self._unproven[connection]
        if len(self._proven) == self._max_connections:
            self._num_too_many += 1
            self._close(min(self._proven, key=lambda each: each.since))
        connection.since = time.monotonic()
        self._proven[connection] = None

    def _send(self, end: _End, data: bytes) -> None:
        """Send; while something is left, read no more from the other side."""
        try:
            sent = end.socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        was_waiting, end.unsent = bool(end.unsent), data[sent:]
        if bool(end.unsent) == was_waiting or end.other is None:
            return
        # In both directions at once, the proof and heartbeats have at most a few hundred bytes.
        self._watch(end)
        self._watch(end.other)

    def _watch(self, end: _End) -> None:
        events = selectors.EVENT_WRITE if end.unsent else 0
        if end.other is None or not end.other.unsent:
            events |= selectors.EVENT_READ
        key = self._selector.get_map().get(end.socket)
        if key is not None and not events:
            self._selector.unregister(end.socket)
        elif key is not None:
            self._selector.modify(end.socket, events, end)
        elif events:
            self._selector.register(end.socket, events, end)

    def _close(self, connection: _Connection) -> None:
        connection.is_open = False
        if connection in self._proven:
            del self._proven[connection]
        else:
            del self._unproven[connection]
            self._num_failed += 1
        self._count_refused()  # before the peer can know
        for end in (connection.outside, connection.inside):
            if end is not None:
                if end.socket in self._selector.get_map():
                    self._selector.unregister(end.socket)
                end.socket.close()
