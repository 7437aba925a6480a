"""Messages as bytes, and back; what comes in is checked field by field, and never trusted.

::

    [sender, receiver, epoch, sequence, code, [fields of the message], wire ticket or nil]

A wire ticket goes with SEND alone: without it, D could not pull, and with it, no other message is
needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args

import msgpack

from ...errors import RefusalReason
from ...handoff.gateway_messages import (
    ClientMessage,
    DecodeFailed,
    Finished,
    GiveUp,
    Heard,
    NodeStatus,
    OfAttempt,
    PrefillFailed,
    RunPrefill,
    Started,
)
from ...handoff.messages import (
    Abort,
    Ack,
    Ask,
    Commit,
    Grant,
    Head,
    Hits,
    Key,
    Message,
    Refuse,
    Renew,
    Send,
    Ticket,
)
from ...request import SamplingParams
from ..transport.descriptors import (
    DIGEST_BYTES,
    ArraySpec,
    Descriptor,
    WireTicket,
)
from .address import check_target
from .errors import (
    ChannelAddressError,
    DecodeError,
    EncodeError,
)
from .schema import (
    Bool,
    Bytes,
    Field,
    Float,
    Int,
    Many,
    Maybe,
    OneOf,
    Record,
    Text,
)

AnyMessage: TypeAlias = Message | ClientMessage

MAX_PROMPT_TOKENS: Final = 1 << 20
MAX_FRAME_BYTES: Final = 4 * MAX_PROMPT_TOKENS + (1 << 20)
_MAX_ITEMS: Final = 1 << 17
_MAX_CHARS: Final = 4096
MAX_NAME_CHARS: Final = 256
MAX_NEW_TOKENS: Final = _MAX_ITEMS
"""Of a request, whose tokens go back in one message."""


class _Address(Text):
    """Where a node can be connected to."""

    def unpack(self, packed: Any) -> str:
        """See `Field.unpack`."""
        address = super().unpack(packed)
        try:
            check_target(address)
        except ChannelAddressError as error:
            raise DecodeError(str(error)) from None
        return address


class _Reason(Text):
    """Words for people, often those of an engine or a library: what is too long is cut."""

    def simplify(self, value: Any) -> Any:
        """See `Field.simplify`."""
        return value[:_MAX_CHARS].encode(errors="replace").decode()


_U64: Final = Int(0, 2**64 - 1)
_NAME: Final = Text(MAX_NAME_CHARS)
_ADDRESS: Final = _Address(256)
_COUNT: Final = Int()
_TOKEN: Final = Int(-(2**31))
_KEY: Final = Record(Key, {"request_id": _NAME, "attempt": _COUNT})
_REASON: Final = _Reason(_MAX_CHARS)
_PROMPT: Final = Bytes(4 * MAX_PROMPT_TOKENS, min_bytes=4, multiple_of=4)
_NAMESPACE: Final = Bytes(_MAX_CHARS)
_TOKENS: Final = Many(_TOKEN, MAX_NEW_TOKENS)
_LIMIT: Final = Int(1, MAX_NEW_TOKENS)
_STOPS: Final = Many(_TOKEN, 1024)

_KINDS: Final = [message.__name__ for message in get_args(OfAttempt)]

_TICKET: Final = Record(
    Ticket, {"key": _KEY, "epoch": _U64, "peer_epoch": _U64, "grant": _U64, "part": _COUNT}
)
_HEAD: Final = Record(
    Head,
    {"key": _KEY, "epoch": _U64, "peer_epoch": Maybe(_U64), "grant": _U64, "version": _COUNT},
)
_HITS: Final = Record(Hits, {"device": _COUNT, "host": _COUNT, "storage": _COUNT})
_ARRAY: Final = Record(ArraySpec, {"shape": Many(Int(1), 8), "dtype": Text(32)})
_DESCRIPTOR: Final = Record(
    Descriptor,
    {
        "arrays": Many(_ARRAY, 4096),
        "num_blocks": Int(1),
        "group": _COUNT,
        "namespace_digest": Bytes(DIGEST_BYTES, min_bytes=DIGEST_BYTES),
    },
)
_WIRE: Final = Record(
    WireTicket,
    {
        "ticket": _TICKET,
        "descriptor": _DESCRIPTOR,
        "digests": Many(Bytes(DIGEST_BYTES, min_bytes=DIGEST_BYTES), 4096),
        "expires_at": Float(0.0, 1e11),
        "transport": Text(32),
        "route": Bytes(64 << 10),
    },
)
_SAMPLING: Final = Record(
    SamplingParams,
    {
        "temperature": Float(0.0, 1e6),
        "top_k": _COUNT,
        "top_p": Float(0.0, 1.0),
        "seed": Int(0, 2**32 - 1),
    },
)


def _of_peer(make: type[Message], **fields: Field) -> Record:
    return Record(make, {"head": _HEAD, **fields})


# The place of a message is its code: new ones go to the end, none is ever taken out.
MESSAGES: Final[tuple[Record, ...]] = (
    _of_peer(
        Ask,
        prompt=_PROMPT,
        namespace=_NAMESPACE,
        block_size=Int(1),
        num_groups=Int(1, 1024),
        max_new_tokens=_LIMIT,
        priority=Int(-(2**31)),
    ),
    _of_peer(Grant, first_block=_COUNT),
    _of_peer(
        Refuse,
        reason=OneOf(*get_args(RefusalReason)),
        needed=_COUNT,
        available=_COUNT,
        detail=_REASON,
    ),
    _of_peer(Send, part=_COUNT, first_block=_COUNT, num_blocks=Int(1), group=Int(0, 1023)),
    _of_peer(
        Commit,
        num_parts=_COUNT,
        first_token=_TOKEN,
        position=_COUNT,
        hits=_HITS,
        sampling=_SAMPLING,
        stop_token_ids=_STOPS,
    ),
    _of_peer(Ack),
    _of_peer(Abort, reason=_REASON, fenced=Bool()),
    _of_peer(Renew, missing=Many(_COUNT, _MAX_ITEMS)),
    Record(
        RunPrefill,
        {
            "key": _KEY,
            "epoch": _U64,
            "prompt": _PROMPT,
            "max_new_tokens": _LIMIT,
            "priority": Int(-(2**31)),
            "sampling": _SAMPLING,
            "stop_token_ids": _STOPS,
            "namespace": _NAMESPACE,
            "decode_node": _NAME,
            "decode_address": _ADDRESS,
        },
    ),
    Record(GiveUp, {"key": _KEY, "reason": _REASON}),
    Record(Started, {"key": _KEY}),
    Record(Finished, {"key": _KEY, "tokens": _TOKENS, "hits": _HITS, "num_preemptions": _COUNT}),
    Record(PrefillFailed, {"key": _KEY, "reason": _REASON, "is_final": Bool(), "is_busy": Bool()}),
    Record(DecodeFailed, {"key": _KEY, "reason": _REASON}),
    Record(
        NodeStatus,
        {
            "role": OneOf("prefill", "decode"),
            "address": _ADDRESS,
            "transport": Text(32),
            "block_size": Int(1),
            "num_blocks": Int(1),
            "model": Text(128),
        },
    ),
    Record(Heard, {"key": _KEY, "kind": OneOf(*_KINDS)}),
)
_CODES: Final = {record.make: code for code, record in enumerate(MESSAGES)}


@dataclass(frozen=True, slots=True)
class Packet:
    """A message with where it comes from and goes to.

    Attributes:
        sender, receiver: names of nodes.
        epoch: of the sender: another after each restart, and higher.
        sequence: of the sender's packets in its epoch, ascending.
        wire: with SEND, how to pull the part.
    """

    sender: str
    receiver: str
    epoch: int
    sequence: int
    message: AnyMessage
    wire: WireTicket | None = None


def encode(packet: Packet) -> bytes:
    """Return the bytes of a packet.

    Raises:
        EncodeError: for a value that its field cannot have; the text names it.
    """
    message = packet.message
    code = _CODES.get(type(message))
    if code is None:
        raise EncodeError(f"{type(message).__name__} is no message")
    if (packet.wire is not None) != isinstance(message, Send):
        raise EncodeError("a wire ticket goes with SEND, and with nothing else")
    try:
        values = [
            _NAME.pack(packet.sender),
            _NAME.pack(packet.receiver),
            _U64.pack(packet.epoch),
            _U64.pack(packet.sequence),
            code,
            MESSAGES[code].pack(message),
            Maybe(_WIRE).pack(packet.wire),
        ]
    except DecodeError as error:
        raise EncodeError(f"{type(message).__name__}: {error}") from None
    data: bytes = msgpack.packb(values, use_bin_type=True)
    if len(data) > MAX_FRAME_BYTES:
        raise EncodeError(
            f"{type(message).__name__} has {len(data)} bytes, the limit is {MAX_FRAME_BYTES}"
        )
    return data


def decode(data: bytes) -> Packet:
    """Return the packet that some bytes are.

    Raises:
        DecodeError: if they are none; nothing larger than they say was allocated.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise DecodeError(f"{len(data)} bytes, the limit is {MAX_FRAME_BYTES}")
    values = _unpack(data)
    if type(values) is not list or len(values) != 7:
        raise DecodeError("needs a list of 7")
    sender, receiver = _NAME.unpack(values[0]), _NAME.unpack(values[1])
    epoch, sequence = _U64.unpack(values[2]), _U64.unpack(values[3])
    record = MESSAGES[Int(0, len(MESSAGES) - 1).unpack(values[4])]
    message = record.unpack(values[5])
    wire = Maybe(_WIRE).unpack(values[6])
    if (wire is not None) != isinstance(message, Send):
        raise DecodeError("a wire ticket goes with SEND, and with nothing else")
    return Packet(sender, receiver, epoch, sequence, message, wire)


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=_MAX_CHARS * 4,
            max_bin_len=4 * MAX_PROMPT_TOKENS,
            max_array_len=_MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise DecodeError(f"no msgpack: {type(error).__name__}") from None
