"""Format of a stored value: a 64-byte header with a checksum, then the payload.

::

    0      4        6         8                16            32                64
    ├──────┼────────┼─────────┼────────────────┼─────────────┼─────────────────┼─ ─ ─ ─ ─ ─
    │ RXKV │version │ zero    │ payload length │ xxh3_128    │ key             │ payload
    └──────┴────────┴─────────┴────────────────┴─────────────┴─────────────────┴─ ─ ─ ─ ─ ─
     u32      u16      u16      u64, all little-endian

Every backend stores values in this format. The checksum covers the payload; the reader knows every
other byte of the header. So a flipped bit, a truncated value, a value that grew and the value of
another block are all found: a bad value is a miss, never data. The checksum protects against
accidents, not against an attacker who can write to the storage.
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

    SHORT = "shorter than its header says, or than its destination"
    LONG = "longer than its header says, or than its destination"
    WRONG_MAGIC = "not written by radixkv"
    WRONG_VERSION = "written in another version of the format"
    WRONG_KEY = "the value of another key"
    CHECKSUM = "its checksum does not match"


def make_header(key: bytes, payload: Sequence[memoryview]) -> bytes:
    """Return the header to write in front of the parts of a payload.

    Raises:
        StorageKeyError: if key is not 32 bytes.
    """
    num_bytes, checksum = _checksum(payload)
    return _HEADER.pack(MAGIC, VERSION, 0, num_bytes, checksum, check_key(key))


def check_header(
    key: bytes, header: bytes | bytearray, value_bytes: int, room_bytes: int
) -> Corruption | None:
    """Check a value by its header and sizes, before its payload is used.

    Args:
        key: key that was read.
        header: first HEADER_BYTES of the value; of a shorter value, any bytes after its end.
        value_bytes: length of the whole value, including the header, as the backend reports it.
        room_bytes: length of the payload that the caller expects.
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


def check_value(
    key: bytes, header: bytes | bytearray, payload: Sequence[memoryview], value_bytes: int
) -> Corruption | None:
    """Check a value that was read into header and payload; None if it is intact."""
    room_bytes, checksum = _checksum(payload)
    if value_bytes == HEADER_BYTES + room_bytes and header == _HEADER.pack(
        MAGIC, VERSION, 0, room_bytes, checksum, key
    ):
        return None
    return check_header(key, header, value_bytes, room_bytes) or Corruption.CHECKSUM


def payload_of(key: bytes, value: bytes | memoryview) -> memoryview | Corruption:
    """Return the payload of a whole value, without a copy, or why it is corrupt."""
    data = memoryview(value).cast("B")
    payload = data[HEADER_BYTES:]
    corruption = check_value(key, bytes(data[:HEADER_BYTES]), [payload], len(data))
    return payload if corruption is None else corruption


def _checksum(payload: Sequence[memoryview]) -> tuple[int, bytes]:
    """Return the length and the checksum of a payload."""
    if len(payload) == 1:  # one call takes half the CPU time of the loop below
        return len(payload[0]), xxhash.xxh3_128_digest(payload[0])
    state = xxhash.xxh3_128()
    for part in payload:
        state.update(part)
    return sum(map(len, payload)), state.digest()
