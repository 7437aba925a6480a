"""How a command goes over the wire to Redis, without a copy of large values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

_COPY_BYTES: Final = 16 << 10
"""A part that is smaller is copied beside its neighbours: that costs less than a call to send."""


class Value(list[memoryview]):
    """One word of a command, in parts."""


Word: TypeAlias = bytes | str | int | Value


class Packer:
    """How a command goes over the wire: large parts as they are, where redis-py would copy them."""

    def pack(self, *words: Word) -> list[bytes | memoryview]:
        """Return what to send, one after the other. Called by redis-py for every command."""
        pieces: list[bytes | memoryview] = []
        small = [b"*%d\r\n" % len(words)]  # bytes that can be sent in one piece
        for word in words:
            if isinstance(word, Value):
                parts: Sequence[bytes | memoryview] = word
            else:
                parts = [word if isinstance(word, bytes) else str(word).encode()]
            small.append(b"$%d\r\n" % sum(len(part) for part in parts))
            for part in parts:
                if len(part) < _COPY_BYTES:
                    small.append(bytes(part))
                else:
                    pieces += [b"".join(small), part]
                    small = []
            small.append(b"\r\n")
        return [*pieces, b"".join(small)]
