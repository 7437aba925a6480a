"""Encoding of Redis commands without a copy of large values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

_COPY_BYTES: Final = 16 << 10
"""Parts below this size are copied together: a copy costs less than a separate send."""


class Value(list[memoryview]):
    """One word of a command, given in parts."""


Word: TypeAlias = bytes | str | int | Value


class Packer:
    """Encodes commands, and passes large parts on uncopied; redis-py's own packer copies them."""

    def pack(self, *words: Word) -> list[bytes | memoryview]:
        """Return the pieces to send in order; redis-py calls this for every command."""
        pieces: list[bytes | memoryview] = []
        small = [b"*%d\r\n" % len(words)]  # consecutive bytes to send in one piece
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
