"""What is around every value in every backend, so that a bad value is a miss and never data.

::

    0      4        6         8                16            32                64
    ├──────┼────────┼─────────┼────────────────┼─────────────┼─────────────────┼─ ─ ─ ─ ─ ─
    │ RXKV │version │ zero    │ payload length │ xxh3_128    │ key             │ payload
    └──────┴────────┴─────────┴────────────────┴─────────────┴─────────────────┴─ ─ ─ ─ ─ ─
     u32      u16      u16      u64, all little-endian

The digest is of the payload; every other byte of the header is known to whoever reads. So a flipped
bit, a cut, a value that grew, and another block's value are all found. It guards against accidents,
not against someone who writes into the storage on purpose.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final

import xxhash

from .keys import check_key

MAGIC: Final = b"RXKV"
VERSION: Final = 2
_HEADER: Final = struct.Struct("<4sHHQ16s32s")
HEADER_BYTES: Final = _HEADER.size


class Corruption(enum.Enum):
    """Why a value is not what was stored."""

    SHORT = "shorter than it says, or than its header"
    LONG = "longer than it says, or than its destination"
    WRONG_MAGIC = "not written by radixkv"
    WRONG_VERSION = "another version of the envelope"
    WRONG_KEY = "the value of another key"
    CHECKSUM = "not the bytes that were written"


def make_header(key: bytes, payload: Sequence[memoryview]) -> bytes:
    """Return the header to write in front of the parts of a payload.

    Raises:
        StorageKeyError: if key is not 32 bytes.
    """
    length, digest = _sum_up(payload)
    return _HEADER.pack(MAGIC, VERSION, 0, length, digest, check_key(key))


def check_header(
    key: bytes, header: bytes | bytearray, value_bytes: int, room_bytes: int
) -> Corruption | None:
    """Say what is wrong with a value by its header and sizes, before anything is made of it.

    Args:
        key: what was asked for.
        header: the first HEADER_BYTES of the value; if it has fewer, whatever follows them.
        value_bytes: the length of the whole value, header included, as the backend knows it.
        room_bytes: the length of the payload that is wanted.
    """
    if value_bytes < HEADER_BYTES:
        return Corruption.SHORT
    magic, version, zero, length, _, stored_key = _HEADER.unpack_from(header)
    if magic != MAGIC:
        return Corruption.WRONG_MAGIC
    if version != VERSION or zero:
        return Corruption.WRONG_VERSION
    if stored_key != key:
        return Corruption.WRONG_KEY
    payload_bytes = value_bytes - HEADER_BYTES
    if payload_bytes != length:
        return Corruption.SHORT if payload_bytes < length else Corruption.LONG
    if length != room_bytes:
        return Corruption.SHORT if length < room_bytes else Corruption.LONG
    return None


def check(
    key: bytes, header: bytes | bytearray, payload: Sequence[memoryview], value_bytes: int
) -> Corruption | None:
    """Say what is wrong with a value that was read into header and parts; None if nothing is."""
    room, digest = _sum_up(payload)
    if value_bytes == HEADER_BYTES + room and header == _HEADER.pack(
        MAGIC, VERSION, 0, room, digest, key
    ):
        return None
    return check_header(key, header, value_bytes, room) or Corruption.CHECKSUM


def payload_of(key: bytes, value: bytes | memoryview) -> memoryview | Corruption:
    """Return the payload of a whole value, without a copy, or why it has none."""
    data = memoryview(value).cast("B")
    payload = data[HEADER_BYTES:]
    fault = check(key, bytes(data[:HEADER_BYTES]), [payload], len(data))
    return payload if fault is None else fault


def _sum_up(payload: Sequence[memoryview]) -> tuple[int, bytes]:
    """Return the length and the digest of a payload."""
    if len(payload) == 1:  # at once it is half as long in the processor as in parts
        return len(payload[0]), xxhash.xxh3_128_digest(payload[0])
    state = xxhash.xxh3_128()
    for part in payload:
        state.update(part)
    return sum(map(len, payload)), state.digest()
