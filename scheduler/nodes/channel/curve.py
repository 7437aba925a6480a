"""CURVE, the encryption and authentication of ZeroMQ (its RFC 26), and refused connections.

Everything on a connection is encrypted. Nobody can change or replay it, and a recording stays
unreadable to somebody who learns the secret later: each connection has its own session keys.

**Authentication.** All nodes use one key pair, derived from the secret. Its public half is as
confidential as the secret: nothing prints it, and on the wire it travels only in boxes that a
holder of the secret can open. A client's first command, HELLO, is a box for that key, so a peer
without the secret cannot start a handshake. A replayed HELLO leads nowhere, because the answer is
encrypted for the ephemeral key of the recorded client. The server makes the answer with the private
half, so the client knows that the server has the secret, too. A list of allowed clients (ZAP, which
needs a thread per process) would name only this one key, which every peer that can say HELLO has:
it would refuse nobody.

**What a stranger can occupy.** ZeroMQ closes a connection at the first command that is not CURVE,
or that comes from an older ZeroMQ without it. Messages of strangers are neither kept nor seen. The
`gate` bounds the connections that have not come so far.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import count, islice
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from .errors import SecretError
from .secret import Secret

_LABEL: Final = b"radixkv control channel, CURVE, 1"
OVERHEAD_BYTES: Final = 33
"""Bytes per frame that CURVE adds: a command name, a nonce, flags and a MAC."""

GREETING_BYTES: Final = 64
WELCOME_BYTES: Final = 2 + 168
"""Of the inbox's first two answers, in frames."""

PROTOCOL_FAILURES: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
ALL_FAILURES: Final = PROTOCOL_FAILURES | int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MAX_EVENTS: Final = 100_000
"""Events of about 128 bytes each. ZeroMQ blocks, with all its work, when this queue is full."""
_MONITOR_NUMBERS: Final = count()


class CurveKeys:
    """The key pair that all holders of a secret share; nothing prints it."""

    def __init__(self, secret: Secret) -> None:
        """Derive the keys.

        Raises:
            SecretError: if ZeroMQ was built without CURVE.
        """
        if not zmq.has("curve"):
            raise SecretError(
                f"this build of ZeroMQ ({zmq.zmq_version()}) has no CURVE, without which a secret "
                "protects nothing: install pyzmq from a wheel, or libzmq with libsodium"
            )
        self._private = secret.key(_LABEL)
        self._public = zmq.curve_public(z85.encode(self._private))

    def guard(self, socket: zmq.Socket[bytes], *, is_server: bool) -> None:
        """Restrict a socket to connections with holders of the secret.

        Args:
            socket: neither bound nor connected yet.
            is_server: whether the socket will be bound.
        """
        socket.set(zmq.CURVE_SECRETKEY, self._private)
        socket.set(zmq.CURVE_PUBLICKEY, self._public)
        if is_server:
            socket.set(zmq.CURVE_SERVER, 1)
        else:
            socket.set(zmq.CURVE_SERVERKEY, self._public)


class RefusedConnection(enum.Enum):
    """Why a connection to this node was refused."""

    OTHER_SECRET = "with another secret than that of this node"
    NO_SECRET = "without a secret, which this node has"
    UNWANTED_SECRET = "with a secret, which this node does not have"
    BROKEN = "that closed during the handshake"
    TOO_MANY = "silent for the longest, of more than this process may have"


def refused_connection(code: int, *, has_secret: bool) -> RefusedConnection:
    """Return the meaning of a code of `HandshakeMonitor`, at a node with or without a secret."""
    match code:
        case zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return RefusedConnection.OTHER_SECRET
        case zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return RefusedConnection.NO_SECRET if has_secret else RefusedConnection.UNWANTED_SECRET
        case _:
            return RefusedConnection.BROKEN


class HandshakeMonitor:
    """Collects the failed handshakes of a socket, which ZeroMQ reports only to a monitor."""

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        """Start to monitor.

        Args:
            socket: neither bound nor connected yet.
            events: `ALL_FAILURES`, which must be taken often, or `PROTOCOL_FAILURES`.
        """
        address = f"inproc://handshakes-{next(_MONITOR_NUMBERS)}"
        socket.monitor(address, events)
        self._events = socket.context.socket(zmq.PAIR)
        try:
            self._events.set(zmq.RCVHWM, _MAX_EVENTS)
            self._events.connect(address)
        except BaseException:
            self._events.close()
            raise

    @property
    def file(self) -> int:
        """Descriptor that becomes readable with new events; take all of them then."""
        return int(self._events.FD)

    def take(self, limit: int) -> list[int]:
        """Return ZeroMQ's codes of the handshakes that failed since the last call, up to limit."""
        return list(islice(self.take_all(), limit))

    def take_all(self) -> Iterator[int]:
        """Yield ZeroMQ's codes of all handshakes that failed since the last call."""
        while self._events.get(zmq.EVENTS) & zmq.POLLIN:
            yield int(recv_monitor_message(self._events)["value"])

    def close(self) -> None:
        """Stop to monitor."""
        self._events.close()
