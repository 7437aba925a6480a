"""Encoding of messages as frames, and the decoding and checks of received frames.

::

    0         4         5
    ├─────────┼─────────┼─ ─ ─ ─ ─ ─
    │ "RXKV"  │ version │ [code, sender, receiver, epoch, sequence, message, pull info or nil]
    └─────────┴─────────┴─ ─ ─ ─ ─ ─

The array is msgpack, and `schema` has its types. Nothing in a frame is trusted: every field has a
type and limits, and a length is checked before anything is allocated for it.

CURVE (`curve`) decides who may send. A `FrameReader` guarantees more than ZeroMQ: each frame is for
this node, is accepted at most once, and never after a later frame of the same sender. ZeroMQ may
deliver the rest of a closed connection after frames of the next one, and two nodes may have one
name. A sender that was silent for `FORGET_S` may begin again with any epoch: epochs are read from
wall clocks, and a node may restart on a machine whose clock is hours behind.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from ..transport.descriptors import PullInfo
from .errors import DecodeError, EncodeError
from .schema import MAX_PROMPT_TOKENS, MAX_TEXT_CHARS, PACKETS, AnyMessage, AnyPacket, from_wire

MAX_PACKET_BYTES: Final = 4 * MAX_PROMPT_TOKENS + (1 << 20)
_MAGIC: Final = b"RXKV"
VERSION: Final = 2
_PREFIX: Final = _MAGIC + bytes([VERSION])
HEADER_BYTES: Final = len(_PREFIX)
MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_PACKET_BYTES
MAX_SENDERS: Final = 4096
"""Names of senders that a reader remembers: those that were heard last."""
FORGET_S: Final = 30.0
"""Far longer than the last frames of a closed connection take, and than a node is silent."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(AnyPacket)
_INVALID: Final = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Packet:
    """A message with its sender and receiver.

    Attributes:
        sender, receiver: names of nodes.
        epoch: epoch of the sender; it grows with each restart.
        sequence: number of the packet in this epoch of the sender, ascending.
        pull_info: how to pull the part; only with SEND.
    """

    sender: str
    receiver: str
    epoch: int
    sequence: int
    message: AnyMessage
    pull_info: PullInfo | None = None


def encode(packet: Packet) -> bytes:
    """Encode a packet.

    Raises:
        EncodeError: for a value that `decode` would reject; the text names its field.
    """
    message = packet.message
    name = type(message).__name__
    if type(message) not in PACKETS:
        raise EncodeError(f"{name} is not a message")
    try:
        packet = replace(packet, message=_shortened(message))
        wire = msgspec.convert(packet, PACKETS[type(message)], from_attributes=True)
        data = _ENCODER.encode(wire)
    except _INVALID as error:
        raise EncodeError(f"{name}: {error}") from None
    if len(data) > MAX_PACKET_BYTES:
        raise EncodeError(f"{name} has {len(data)} bytes, the limit is {MAX_PACKET_BYTES}")
    return data


def _shortened(message: AnyMessage) -> AnyMessage:
    """Cut free text, often the words of a library, to what can be sent."""
    for name in ("reason", "detail"):
        text = getattr(message, name, None)
        if isinstance(text, str):
            short: Any = {name: text[:MAX_TEXT_CHARS].encode(errors="replace").decode()}
            message = replace(message, **short)
    return message


def decode(data: bytes) -> Packet:
    """Decode a packet.

    Raises:
        DecodeError: if the bytes are not a packet. No more memory was allocated than for their
            length.
    """
    if len(data) > MAX_PACKET_BYTES:
        raise DecodeError(f"{len(data)} bytes, the limit is {MAX_PACKET_BYTES}")
    try:
        wire = _DECODER.decode(data)
        return Packet(*map(from_wire, msgspec.structs.astuple(wire)))
    except _INVALID as error:
        raise DecodeError(str(error)) from None


class DroppedFrame(enum.Enum):
    """Why a frame was dropped."""

    NOT_A_FRAME = "not a frame"
    OTHER_VERSION = "of another version"
    NOT_A_MESSAGE = "not a message"
    OTHER_RECEIVER = "for another node"
    OLD = "repeated or out of order"
    TOO_MANY_SENDERS = "from too many senders"


class FrameDroppedError(Exception):
    """A frame must not be accepted."""

    def __init__(self, reason: DroppedFrame) -> None:
        super().__init__(reason.value)
        self.reason = reason


def encode_frame(packet: Packet) -> bytes:
    """Encode a packet as a frame.

    Raises:
        EncodeError: see `encode`.
    """
    return _PREFIX + encode(packet)


class FrameReader:
    """Accepts the frames for one node, each at most once.

    It knows the `MAX_SENDERS` senders that it heard last, so names that are not used again, as
    those of pods, take no more than that.

    Attributes:
        other_versions: versions of the dropped frames of OTHER_VERSION.
    """

    def __init__(self, receiver: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._receiver = receiver
        self._clock = clock
        self.other_versions: set[int] = set()
        # Epoch, sequence and time of the last frame, by sender; the longest silent one is first.
        self._last: dict[str, tuple[tuple[int, int], float]] = {}

    def read(self, frame: bytes) -> Packet:
        """Return the packet of a frame.

        Raises:
            FrameDroppedError: for a frame that must not be accepted. Nothing else changes.
        """
        if not HEADER_BYTES <= len(frame) <= MAX_FRAME_BYTES or not frame.startswith(_MAGIC):
            raise FrameDroppedError(DroppedFrame.NOT_A_FRAME)
        prefix, body = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
        if prefix != _PREFIX:
            self.other_versions.add(prefix[-1])
            raise FrameDroppedError(DroppedFrame.OTHER_VERSION)
        try:
            packet = decode(body)
        except DecodeError:
            raise FrameDroppedError(DroppedFrame.NOT_A_MESSAGE) from None
        if packet.receiver != self._receiver:
            raise FrameDroppedError(DroppedFrame.OTHER_RECEIVER)
        now = self._clock()
        self._forget(now)
        this, last = (packet.epoch, packet.sequence), self._last.get(packet.sender)
        if last is not None and this <= last[0]:
            raise FrameDroppedError(DroppedFrame.OLD)
        if last is None and len(self._last) == MAX_SENDERS:
            del self._last[next(iter(self._last))]
        self._last.pop(packet.sender, None)  # to the end
        self._last[packet.sender] = this, now
        return packet

    def _forget(self, now: float) -> None:
        """Forget senders that were silent for long."""
        while self._last:
            sender, (_, heard_at) = next(iter(self._last.items()))
            if now - heard_at < FORGET_S:
                return
            del self._last[sender]
