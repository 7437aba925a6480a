"""How the file backend names things."""

from __future__ import annotations

from typing import Final

from ..base import KEY_BYTES
from .system_calls import FileApi

_HEX: Final = frozenset("0123456789abcdef")


def bucket_names(files: FileApi, directory: str) -> list[str]:
    """Return the names of the directories that hold values."""
    names = files.directories(directory)
    return sorted(name for name in names if len(name) == 2 and _HEX.issuperset(name))


def key_of(bucket: str, name: str) -> bytes | None:
    """Return the key whose file would have this name in this directory; None if none has."""
    if len(name) != 2 * KEY_BYTES or not name.startswith(bucket) or not _HEX.issuperset(name):
        return None
    return bytes.fromhex(name)
