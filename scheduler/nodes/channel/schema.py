"""Wire types: one msgspec struct per message class, with a limit on every field.

The message classes know nothing of the wire. `wire_type` derives a struct from the annotations of a
class and the table of limits below. A struct is an array of its fields' values, without names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import NoneType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_type_hints

import msgspec
from msgspec import Meta

from ...handoff.gateway_messages import (
    MAX_NEW_TOKENS,
    MAX_PROGRESS_ATTEMPTS,
    MAX_PROGRESS_TOKENS,
    MAX_UPDATE_BLOCKS,
    AttemptMessage,
    CacheAsk,
    CacheUpdate,
    CancelAttempt,
    DecodeFailed,
    DeliveryAck,
    Finished,
    FollowAttempt,
    GatewayMessage,
    NewTokens,
    NodeStatus,
    Preempted,
    PrefillFailed,
    Progress,
    RunPrefill,
    Started,
)
from ...handoff.messages import Abort, Ack, Ask, Commit, Grant, Message, Refuse, Renew, Send
from ...handoff.records import MAX_RECORD_BYTES, MAX_RECORDS_BYTES, PAIR_BYTES
from ...request import MAX_FACTOR, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from ..transport.descriptors import DIGEST_BYTES, DIGEST_KEY_BYTES, ArraySpec, PullInfo
from .address import check_target

AnyMessage: TypeAlias = Message | GatewayMessage

MESSAGES: Final[tuple[type, ...]] = (
    Ask,
    Grant,
    Refuse,
    Send,
    Commit,
    Ack,
    Abort,
    Renew,
    RunPrefill,
    CancelAttempt,
    Started,
    Finished,
    PrefillFailed,
    DecodeFailed,
    NodeStatus,
    DeliveryAck,
    FollowAttempt,
    Progress,
    CacheUpdate,
    CacheAsk,
    Preempted,
)
"""The position of a class is its code on the wire: append new ones, and never remove one."""

MAX_PROMPT_TOKENS: Final = 1 << 20
MAX_NAME_CHARS: Final = 256
MAX_TEXT_CHARS: Final = 4096
MAX_UNHEARD: Final = 256
"""Nodes that a status names as unheard, at most."""
_MAX_ARRAYS: Final = 4096
_MAX_INT32: Final = 2**31 - 1


def _int(minimum: int = 0, maximum: int = _MAX_INT32) -> Any:
    return Annotated[int, Meta(ge=minimum, le=maximum)]


def _float(minimum: float, maximum: float) -> Any:
    return Annotated[float, Meta(ge=minimum, le=maximum)]  # rejects NaN, too


def _text(max_chars: int) -> Any:
    return Annotated[str, Meta(max_length=max_chars)]


def _bytes(max_bytes: int, min_bytes: int = 0) -> Any:
    return Annotated[bytes, Meta(min_length=min_bytes, max_length=max_bytes)]


def _tuple(item: Any, max_items: int) -> Any:
    return Annotated[tuple[item, ...], Meta(max_length=max_items)]


_U64: Final = Annotated[int, Meta(ge=0)]  # msgpack has no larger integer
_TOKEN: Final = _int(-(2**31))
_DIGEST: Final = _bytes(DIGEST_BYTES, DIGEST_BYTES)
_HASHES: Final = ("device_stored", "device_removed", "host_stored", "host_removed")
_HASH_BYTES: Final = 8
_KINDS: Final = tuple(message.__name__ for message in get_args(AttemptMessage))

# By field name, or by class and field name where two classes differ.
_LIMITS: Final[dict[str, Any]] = {
    # Packet
    "sender": _text(MAX_NAME_CHARS),
    "receiver": _text(MAX_NAME_CHARS),
    "sequence": _U64,
    # AttemptKey, PartId and Header
    "request_id": _text(MAX_NAME_CHARS),
    "attempt": _int(),
    "epoch": _U64,
    "peer_epoch": _U64,
    "grant": _U64,
    "part": _int(),
    "version": _int(),
    # Requests
    "prompt": _bytes(4 * MAX_PROMPT_TOKENS, 4),
    "namespace": _bytes(MAX_TEXT_CHARS),
    "max_new_tokens": _int(1, MAX_NEW_TOKENS),
    "priority": _int(-(2**31)),
    "stop_token_ids": _tuple(_TOKEN, MAX_STOP_TOKEN_IDS),
    "logprobs": _int(0, MAX_LOGPROBS),
    "first_record": _bytes(MAX_RECORD_BYTES),
    "records": _bytes(MAX_RECORDS_BYTES),
    "NewTokens.records": _bytes(PAIR_BYTES * MAX_PROGRESS_TOKENS),
    "temperature": _float(0.0, MAX_FACTOR),
    "top_k": _int(),
    "top_p": _float(0.0, 1.0),
    "seed": _int(0, 2**32 - 1),
    "min_p": _float(0.0, 1.0),
    "repetition_penalty": _float(0.0, MAX_FACTOR),
    "presence_penalty": _float(-2.0, 2.0),
    "frequency_penalty": _float(-2.0, 2.0),
    "min_tokens": _int(),
    "num_continued": _int(),
    # Messages between prefill and decode nodes
    "num_groups": _int(1, 1024),
    "Send.group": _int(0, 1023),
    "first_block": _int(),
    "needed": _int(),
    "available": _int(),
    "detail": _text(MAX_TEXT_CHARS),
    "reason": _text(MAX_TEXT_CHARS),
    "num_parts": _int(),
    "first_token": _TOKEN,
    "position": _int(),
    "device": _int(),
    "host": _int(),
    "storage": _int(),
    "missing": _tuple(_int(), 1 << 17),
    "unheard": _tuple(_text(MAX_NAME_CHARS), MAX_UNHEARD),
    # Messages between the gateway and nodes
    "decode_node": _text(MAX_NAME_CHARS),
    "decode_address": _text(256),
    "address": _text(256),
    "tokens": _tuple(_TOKEN, MAX_NEW_TOKENS),
    "num_tokens": _int(0, MAX_NEW_TOKENS),
    "start": _int(0, MAX_NEW_TOKENS),
    "NewTokens.tokens": _tuple(_TOKEN, MAX_PROGRESS_TOKENS),
    "num_preemptions": _int(),
    "block_size": _int(1),
    "num_blocks": _int(1),
    "max_model_len": _int(1),
    "model": _text(128),
    "kind": Literal[_KINDS],
    "num_updates": _U64,
    "num_running": _int(),
    "num_waiting": _int(),
    "num_used_blocks": _int(),
    **dict.fromkeys(
        ("prompt_tokens", "hit_tokens", "host_hit_tokens", "storage_hit_tokens", "preemptions"),
        _U64,
    ),
    "number": _U64,
    **dict.fromkeys(_HASHES, _bytes(_HASH_BYTES * MAX_UPDATE_BLOCKS)),
    # PullInfo
    "shape": _tuple(_int(1), 8),
    "dtype": _text(32),
    "group": _int(),
    "namespace_digest": _DIGEST,
    "digests": _tuple(_DIGEST, _MAX_ARRAYS),
    "digest_key": _bytes(DIGEST_KEY_BYTES, DIGEST_KEY_BYTES),
    "transport": _text(32),
    "route": _bytes(64 << 10),
}


def _check_prompt(prompt: bytes) -> None:
    if len(prompt) % 4:
        raise ValueError(f"prompt: {len(prompt)} bytes are not a multiple of 4")


def _check_hashes(hashes: bytes) -> None:
    if len(hashes) % _HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes of hashes are not a multiple of {_HASH_BYTES}")


def _check_records(records: bytes) -> None:
    if len(records) % PAIR_BYTES:
        raise ValueError(f"{len(records)} bytes of records are not a multiple of {PAIR_BYTES}")


_CHECKS: Final[dict[str, Callable[[Any], None]]] = {
    **dict.fromkeys(("first_record", "records"), _check_records),
    **dict.fromkeys(_HASHES, _check_hashes),
    "prompt": _check_prompt,
    "address": check_target,
    "decode_address": check_target,
}


def _check_fields(record: msgspec.Struct) -> None:
    """Check what no type can express; msgspec calls it after it has set the fields."""
    for name in record.__struct_fields__:
        if name in _CHECKS:
            _CHECKS[name](getattr(record, name))


def _define(name: str, fields: list[tuple[str, Any]], tag: int | None = None) -> Any:
    return msgspec.defstruct(
        name,
        fields,
        tag=tag,
        array_like=True,
        forbid_unknown_fields=True,
        namespace={"__post_init__": _check_fields},
    )


_CLASSES: Final[dict[type[msgspec.Struct], type]] = {}


@cache
def wire_type(cls: type) -> Any:
    """Return the struct of a dataclass or named tuple: the same fields, with limits.

    Raises:
        KeyError: for a field without a limit.
    """
    hints = get_type_hints(cls).items()
    struct = _define(cls.__name__, [(name, _wire_field(cls, name, hint)) for name, hint in hints])
    _CLASSES[struct] = cls
    return struct


def _wire_field(cls: type, name: str, hint: Any) -> Any:
    if hint is bool or set(map(type, get_args(hint))) == {str}:  # a Literal
        return hint
    if hasattr(hint, "__match_args__"):  # another dataclass or named tuple
        return wire_type(hint)
    for item, limit in ((ArraySpec, _MAX_ARRAYS), (NewTokens, MAX_PROGRESS_ATTEMPTS)):
        if hint == tuple[item, ...]:  # type: ignore[valid-type]
            return _tuple(wire_type(item), limit)
    limit = _LIMITS.get(f"{cls.__name__}.{name}") or _LIMITS[name]
    return limit | None if NoneType in get_args(hint) else limit


def from_wire(value: Any) -> Any:
    """Return the object that a struct stands for.

    Raises:
        ValueError: if its class refuses it.
    """
    if isinstance(value, msgspec.Struct):
        return _CLASSES[type(value)](*map(from_wire, msgspec.structs.astuple(value)))
    if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        return tuple(map(from_wire, value))
    return value


PACKETS: Final[dict[type, Any]] = {
    message: _define(
        f"{message.__name__}Packet",
        [
            *[(name, _LIMITS[name]) for name in ("sender", "receiver", "epoch", "sequence")],
            ("message", wire_type(message)),
            ("pull_info", wire_type(PullInfo) if message is Send else None),
        ],
        tag=code,
    )
    for code, message in enumerate(MESSAGES)
}
"""Wire type of a packet, by the class of its message. Only SEND has a `PullInfo`."""

AnyPacket: Final[Any] = Union[tuple(PACKETS.values())]  # noqa: UP007
