"""What goes over a socket: a packet, signed, and taken in once.

::

    0         4         5                37
    ├─────────┼─────────┼────────────────┼─ ─ ─ ─ ─ ─
    │ "RXKV"  │ version │ HMAC-SHA256    │ packet (msgpack)
    └─────────┴─────────┴────────────────┴─ ─ ─ ─ ─ ─
                          of the version and the packet; zeros where nodes share no secret

What is guaranteed where they do: a frame that is taken in was made by a holder of the secret, for
this receiver, and says by whom. While a receiver lives, none is taken in twice, nor after a later
one of the same sender, so nothing that was recorded can be played back to it. A receiver that was
restarted may be played what was recorded from a sender that still lives, until that sender is heard
of. Such a message names the receiver's earlier epoch, and changes nothing; but ASK and the messages
of whole requests name none: an old ASK costs a reservation until its sender's silence ends it, and
an old request is computed for nobody.

A signature hides nothing: prompts and tokens can be read on the way.
"""

from __future__ import annotations

import enum
from typing import Final

from .codec import MAX_FRAME_BYTES, Packet, decode, encode
from .errors import DecodeError
from .secret import MAC_BYTES, Secret

_MAGIC: Final = b"RXKV"
VERSION: Final = 1
_PREFIX: Final = _MAGIC + bytes([VERSION])
_NO_MAC: Final = bytes(MAC_BYTES)
HEADER_BYTES: Final = len(_PREFIX) + MAC_BYTES
MAX_BYTES: Final = HEADER_BYTES + MAX_FRAME_BYTES
_MAX_SENDERS: Final = 1000
"""A node may answer each of them, and ZeroMQ has no more than 1,023 sockets."""


class Dropped(enum.Enum):
    """Why a frame was not taken in."""

    NO_FRAME = "not a frame"
    OTHER_VERSION = "of another version"
    BAD_MAC = "not signed with the secret of this node"
    NO_MESSAGE = "not a message"
    NOT_FOR_US = "for another node"
    OLD = "taken in before, or older than what was"
    TOO_MANY_SENDERS = "from one sender too many"


class DroppedError(Exception):
    """A frame is not to be taken in."""

    def __init__(self, reason: Dropped) -> None:
        super().__init__(reason.value)
        self.reason = reason


def seal(packet: Packet, secret: Secret | None) -> bytes:
    """Return the frame of a packet.

    Raises:
        EncodeError: for a message that has no encoding.
    """
    body = encode(packet)
    mac = _NO_MAC if secret is None else secret.sign(_PREFIX + body)
    return _PREFIX + mac + body


class FrameReader:
    """Takes in frames for one node, each once.

    Attributes:
        other_versions: of the frames that were signed as ours are, and are not of our version.
    """

    def __init__(self, receiver: str, secret: Secret | None) -> None:
        """Start, knowing no sender."""
        self._receiver = receiver
        self._secret = secret
        self.other_versions: set[int] = set()
        self._last: dict[str, tuple[int, int]] = {}  # epoch and sequence, by sender

    def open(self, frame: bytes) -> Packet:
        """Return the packet of a frame.

        Raises:
            DroppedError: for what is not to be taken in; nothing else was changed.
        """
        if len(frame) > MAX_BYTES or len(frame) < HEADER_BYTES or not frame.startswith(_MAGIC):
            raise DroppedError(Dropped.NO_FRAME)
        prefix, mac, body = frame[:5], frame[5:HEADER_BYTES], frame[HEADER_BYTES:]
        if self._secret is None:
            is_signed = mac == _NO_MAC
        else:
            is_signed = self._secret.verifies(mac, prefix + body)
        if not is_signed:
            raise DroppedError(Dropped.BAD_MAC)
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
