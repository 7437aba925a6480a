"""What goes over a socket: a packet, taken in once.

::

    0         4         5
    ├─────────┼─────────┼─ ─ ─ ─ ─ ─
    │ "RXKV"  │ version │ packet (msgpack)
    └─────────┴─────────┴─ ─ ─ ─ ─ ─

Who may send one is the connection's to know (`curve`). What is guaranteed here: a frame that is
taken in is for this receiver, and while that lives, none is taken in twice, nor after a later one
of the same sender. ZeroMQ alone would not see to that: what is left of a connection that has ended
may be read after what came over the next one, and two nodes may have one name.
"""

from __future__ import annotations

import enum
from typing import Final

from .codec import (
    MAX_FRAME_BYTES,
    Packet,
    decode,
    encode,
)
from .errors import DecodeError

_MAGIC: Final = b"RXKV"
VERSION: Final = 1
_PREFIX: Final = _MAGIC + bytes([VERSION])
HEADER_BYTES: Final = len(_PREFIX)
MAX_BYTES: Final = HEADER_BYTES + MAX_FRAME_BYTES
_MAX_SENDERS: Final = 1000
"""A node may answer each of them, and has sockets for as many."""


class Dropped(enum.Enum):
    """Why a frame was not taken in."""

    NO_FRAME = "not a frame"
    OTHER_VERSION = "of another version"
    NO_MESSAGE = "not a message"
    NOT_FOR_US = "for another node"
    OLD = "taken in before, or older than what was"
    TOO_MANY_SENDERS = "from one sender too many"


class DroppedError(Exception):
    """A frame is not to be taken in."""

    def __init__(self, reason: Dropped) -> None:
        super().__init__(reason.value)
        self.reason = reason


def seal(packet: Packet) -> bytes:
    """Return the frame of a packet.

    Raises:
        EncodeError: for a message that has no encoding.
    """
    return _PREFIX + encode(packet)


class FrameReader:
    """Takes in frames for one node, each once.

    Attributes:
        other_versions: of the frames that are like ours, and are not of our version.
    """

    def __init__(self, receiver: str) -> None:
        """Start, knowing no sender."""
        self._receiver = receiver
        self.other_versions: set[int] = set()
        self._last: dict[str, tuple[int, int]] = {}  # epoch and sequence, by sender

    def open(self, frame: bytes) -> Packet:
        """Return the packet of a frame.

        Raises:
            DroppedError: for what is not to be taken in; nothing else was changed.
        """
        if len(frame) > MAX_BYTES or len(frame) < HEADER_BYTES or not frame.startswith(_MAGIC):
            raise DroppedError(Dropped.NO_FRAME)
        prefix, body = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
        if prefix != _PREFIX:
            self.other_versions.add(prefix[-1])
            raise DroppedError(Dropped.OTHER_VERSION)
        try:
            packet = decode(body)
        except DecodeError:
            raise DroppedError(Dropped.NO_MESSAGE) from None
        if packet.receiver != self._receiver:
            raise DroppedError(Dropped.NOT_FOR_US)
        this, last = (packet.epoch, packet.sequence), self._last.get(packet.sender)
        if last is None and len(self._last) >= _MAX_SENDERS:
            raise DroppedError(Dropped.TOO_MANY_SENDERS)
        if last is not None and this <= last:
            raise DroppedError(Dropped.OLD)
        self._last[packet.sender] = this
        return packet
