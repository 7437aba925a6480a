"""Maintenance for operators: verify the values of a backend, and remove some of them.

These functions ask the backend about every value and may take long; a running engine never calls
them. They raise the backend's error if its server cannot be reached. A single unreadable value is
counted and skipped.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, replace
from os import listdir
from os.path import exists, isdir, isfile
from typing import Final

from .errors import BackendError, BackendIOError, StorageError, StorageUrlError
from .interface import Backend, StoredValue
from .urls import BackendOptions, directory_of, open_backend
from .value_format import HEADER_BYTES, Corruption, check_header, payload_of

_NO_LIMIT: Final = 2**63 - 1
_MAX_FAILED_IN_A_ROW: Final = 3
"""Number of unreadable values in a row after which the server is considered broken."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of `verify_values`.

    Attributes:
        good: number of intact values.
        corrupt: number of values whose check failed.
        missing: number of values that were evicted or removed before they were read.
        unreadable: number of values that could not be read or do not fit into memory.
        deleted: number of corrupt values that were removed.
        good_bytes: bytes of the good values, including their headers.
    """

    good: int = 0
    corrupt: int = 0
    missing: int = 0
    unreadable: int = 0
    deleted: int = 0
    good_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """Result of `remove_values`: the values and bytes that it removed and left."""

    removed: int
    removed_bytes: int
    left: int
    left_bytes: int


def open_existing(url: str, options: BackendOptions | None = None) -> Backend:
    """Open a backend like `open_backend`, but create and evict nothing.

    A directory must exist and must have been created by `FileBackend`; it needs no max_bytes. As at
    every start, unfinished files of a dead writer are removed.

    Raises:
        BackendIOError: if the directory does not exist (ENOENT).
        StorageUrlError: if `FileBackend` did not create it; the text lists the storage directories
            inside it. Also for a namespace with a directory, whose file names show no namespace.
        StorageError: see open_backend.
    """
    options = options or BackendOptions()
    directory = directory_of(url)
    if directory is not None:
        if options.namespace is not None:  # else a command for one namespace would remove all
            raise StorageUrlError("a directory does not separate namespaces: leave out namespace")
        if not isfile(f"{directory}/lock"):
            raise _no_storage(directory)
        options = replace(options, max_bytes=options.max_bytes or _NO_LIMIT)
    return open_backend(url, options)


def _no_storage(directory: str) -> StorageError:
    """Return the error for a directory that `FileBackend` did not create."""
    if not isdir(directory):
        number = errno.ENOTDIR if exists(directory) else errno.ENOENT
        return BackendIOError(f"opening the directory {directory}", number)
    # Nodes that were started together have one subdirectory each.
    inside = sorted(name for name in listdir(directory) if isfile(f"{directory}/{name}/lock"))
    why = f", but it has some: {', '.join(inside)}" if inside else ": it has no file named lock"
    return StorageUrlError(f"{directory} is not a storage directory{why}")


def verify_values(backend: Backend, *, delete: bool = False) -> Verified:
    """Read every value and check its magic, version, length, key and checksum.

    Args:
        backend: backend to verify. Reading all values keeps their LRU order.
        delete: whether to remove corrupt values.

    Raises:
        UnsupportedError: if the backend cannot list its values.
        BackendError: if the first read fails, or several reads in a row: the server is unreachable.
    """
    counts: Counter[str] = Counter()
    reader = _Reader(backend)
    failed_in_a_row = 0
    for value in backend.list_values():
        try:
            result = reader.check(value)
        except (BackendIOError, MemoryError, OverflowError):
            counts["unreadable"] += 1
            continue
        except BackendError:
            failed_in_a_row += 1
            if failed_in_a_row == _MAX_FAILED_IN_A_ROW or not counts:
                raise
            counts["unreadable"] += 1
            continue
        failed_in_a_row = 0
        if result is None:
            counts["missing"] += 1
        elif isinstance(result, Corruption):
            counts["corrupt"] += 1
            counts["deleted"] += delete and backend.delete(value.key)
        else:
            counts["good"] += 1
            counts["good_bytes"] += HEADER_BYTES + result
    return Verified(**counts)


def remove_values(backend: Backend, max_bytes: int) -> Removed:
    """Remove the least recently used values until the rest fits into max_bytes; 0 removes all.

    Raises:
        UnsupportedError: if the backend cannot list its values or, unless max_bytes is 0, does not
            know their LRU order. Nothing was removed.
        BackendError: if the server is unreachable, or a value cannot be removed.
    """
    values = list(backend.list_values(coldest_first=max_bytes > 0))
    left = sum(value.num_bytes for value in values)
    removed = removed_bytes = 0
    gone = 0  # removed by this call or by somebody else
    for value in values:
        if left <= max_bytes and max_bytes > 0:
            break
        if backend.delete(value.key):
            removed += 1
            removed_bytes += value.num_bytes
        gone += 1
        left -= value.num_bytes
    return Removed(removed, removed_bytes, len(values) - gone, left)


class _Reader:
    """Reads and checks whole values, and checks the header before it allocates for the payload."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = memoryview(bytearray(HEADER_BYTES))

    def check(self, value: StoredValue) -> int | Corruption | None:
        """Return the length of a value's payload, why the value is corrupt, or None if missing."""
        key, num_bytes = value
        if num_bytes > len(self._buffer):
            header = self._buffer[:HEADER_BYTES]
            found = self._backend.get(key, [header])
            if found is None:
                return None
            corruption = check_header(key, bytes(header), found, found - HEADER_BYTES)
            if corruption is not None:
                return corruption
            self._buffer, num_bytes = memoryview(bytearray(found)), found
        found = self._backend.get(key, [self._buffer[:num_bytes]])
        if found is None:
            return None
        if found > num_bytes:  # it was rewritten since it was listed
            return self.check(StoredValue(key, found))
        payload = payload_of(key, self._buffer[:found])
        return payload if isinstance(payload, Corruption) else len(payload)
