"""Which connections came to nothing, and why: ZeroMQ says so only to who asks."""

from __future__ import annotations

import enum
from itertools import count
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

SPOKE_OTHERWISE: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
ANY: Final = SPOKE_OTHERWISE | int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MAX_EVENTS: Final = 100_000
"""Of some 128 bytes. With more that nobody has taken, ZeroMQ waits, with all it has to do."""
_NUMBERS: Final = count()


class Refused(enum.Enum):
    """Why a connection of somebody else to this node came to nothing."""

    OTHER_SECRET = "with another secret than that of this node"
    NO_SECRET = "without a secret, which this node has"
    UNWANTED_SECRET = "with a secret, which this node has not"
    BROKEN = "that ended before they were made"


def why_refused(code: int, *, has_secret: bool) -> Refused:
    """Say what a code of `FailedHandshakes` means at a node with a secret, or without one."""
    match code:
        case zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return Refused.OTHER_SECRET
        case zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return Refused.NO_SECRET if has_secret else Refused.UNWANTED_SECRET
        case _:
            return Refused.BROKEN


class FailedHandshakes:
    """Learns of a socket's connections that came to nothing."""

    def __init__(self, socket: zmq.Socket[bytes], kinds: int) -> None:
        """Ask ZeroMQ to tell.

        Args:
            socket: neither bound nor connected yet.
            kinds: `ANY`, or `SPOKE_OTHERWISE`. Who wants any must take them often.
        """
        address = f"inproc://failed-handshakes-{next(_NUMBERS)}"
        socket.monitor(address, kinds)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.set(zmq.RCVHWM, _MAX_EVENTS)
        self._events.connect(address)

    def take(self, limit: int) -> list[int]:
        """Return a code of ZeroMQ for each that failed since, up to a number of them."""
        codes: list[int] = []
        while len(codes) < limit and self._events.get(zmq.EVENTS) & zmq.POLLIN:
            codes.append(int(recv_monitor_message(self._events)["value"]))
        return codes

    def close(self) -> None:
        """Listen no more."""
        self._events.close()
