"""The wire format of KV events: MessagePack, as vLLM and SGLang write it.

::

    batch          [ts, [event, ...], data_parallel_rank]
    event          {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., ...}
                   {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU"}
                   {"type": "AllBlocksCleared"}
    or, of old     ["BlockStored", [hash, ...], parent, [token, ...], block_size, lora_id, medium]

    on PUB         topic | number of the batch, 8 bytes, big endian | batch

Source: vllm/distributed/kv_events.py of vLLM 0.33 and sglang/srt/disaggregation/kv_events.py of
SGLang 0.5.23; the old form is that of vLLM up to 0.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgspec

from ...kvcache import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from .errors import EventFormatError

SEQ_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""Stands where the number of a batch would, in the message after the last one of a replay."""

_ExtraKeys: TypeAlias = list[list[Any] | None] | None


class Stored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """See `radixkv.kvcache.BlockStored`.

    Attributes:
        lora_id, lora_name: of other engines; here both are None, since the namespace covers them.
        extra_keys: what a hash depends on besides tokens, for each block. Here it is a digest of
            the namespace, which may have a secret; None for the default namespace.
        cache_salt: of SGLang.
        group_idx: of vLLM with several kinds of layers.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: _ExtraKeys = None
    cache_salt: str | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """See `radixkv.kvcache.BlockRemoved`."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    """See `radixkv.kvcache.AllBlocksCleared`."""


WireEvent: TypeAlias = Stored | Removed | Cleared


class WireBatch(msgspec.Struct, array_like=True):
    """A batch.

    Attributes:
        ts: Unix time in seconds at which it was taken.
        events: in order.
        data_parallel_rank: rank of the publisher; 0 with one.
    """

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


# What others send: fields that they may leave out have defaults, and events may be arrays.


class _AnyStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: _ExtraKeys = None
    cache_salt: str | None = None
    group_idx: int | None = None


class _AnyRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _OldStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _OldRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class _OldCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _AnyBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_ENCODER: Final = msgspec.msgpack.Encoder()
_BATCH: Final = msgspec.msgpack.Decoder(_AnyBatch)
_EVENT: Final = msgspec.msgpack.Decoder(_AnyStored | _AnyRemoved | Cleared)
_OLD_EVENT: Final = msgspec.msgpack.Decoder(_OldStored | _OldRemoved | _OldCleared)


def encode_batch(ts: float, events: Sequence[KVEvent]) -> bytes:
    """Return a batch as bytes."""
    return _ENCODER.encode(WireBatch(ts, [_to_wire(event) for event in events], 0))


def _to_wire(event: KVEvent) -> WireEvent:
    match event:
        case BlockStored():
            return Stored(
                list(event.block_hashes),
                event.parent_block_hash,
                event.token_ids.tolist(),
                event.block_size,
                None,
                event.medium,
                None,
                extra_keys=_extra_keys(event.namespace, len(event.block_hashes)),
            )
        case BlockRemoved():
            return Removed(list(event.block_hashes), event.medium)
        case AllBlocksCleared():
            return Cleared()


def _extra_keys(namespace: bytes, num_blocks: int) -> _ExtraKeys:
    if not namespace:
        return None
    digest = blake2b(namespace, digest_size=16, person=b"radixkv").hexdigest()
    return [[digest]] * num_blocks


def decode_batch(payload: bytes) -> WireBatch:
    """Return the batch in a message of any engine.

    Raises:
        EventFormatError: if it is none.
    """
    try:
        batch = _BATCH.decode(payload)
        events = [_decode_event(raw) for raw in batch.events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventFormatError(f"{len(payload)} bytes are no batch of KV events: {error}") from None
    return WireBatch(batch.ts, events, batch.data_parallel_rank)


def _decode_event(raw: msgspec.Raw) -> WireEvent:
    first = bytes(raw)[0]
    is_map = first >> 4 == 0x8 or first in (0xDE, 0xDF)
    event = (_EVENT if is_map else _OLD_EVENT).decode(raw)
    if isinstance(event, _AnyStored | _OldStored):
        return Stored(
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            getattr(event, "lora_name", None),
            getattr(event, "extra_keys", None),
            getattr(event, "cache_salt", None),
            getattr(event, "group_idx", None),
        )
    if isinstance(event, _AnyRemoved | _OldRemoved):
        return Removed(event.block_hashes, event.medium, getattr(event, "group_idx", None))
    return Cleared()
