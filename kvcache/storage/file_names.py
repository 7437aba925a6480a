"""How the file backend names things, and how an operator finds them."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike, fspath
from os.path import abspath
from typing import Final

from .base import KEY_BYTES
from .file_api import FileApi, OsFiles
from .lru_index import FoundValue

_HEX: Final = frozenset("0123456789abcdef")


def find_values(
    directory: str | PathLike[str], files: FileApi | None = None
) -> Iterator[FoundValue]:
    """Yield the values in a directory, in no order; for an operator, who changes nothing."""
    files = files if files is not None else OsFiles()
    path = abspath(fspath(directory))
    for bucket in bucket_names(files, path):
        for name, num_bytes, used_ns in files.scan(f"{path}/{bucket}"):
            key = key_of(bucket, name)
            if key is not None:
                yield FoundValue(used_ns, key, num_bytes)


def bucket_names(files: FileApi, directory: str) -> list[str]:
    """Return the names of the directories that hold values."""
    names = files.directories(directory)
    return sorted(name for name in names if len(name) == 2 and _HEX.issuperset(name))


def key_of(bucket: str, name: str) -> bytes | None:
    """Return the key whose file would have this name in this directory; None if none has."""
    if len(name) != 2 * KEY_BYTES or not name.startswith(bucket) or not _HEX.issuperset(name):
        return None
    return bytes.fromhex(name)
