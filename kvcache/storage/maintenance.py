"""What an operator does to the values of a backend: look at each, and remove some.

All of this may take long, as it asks the backend about every value; nothing here is called by a
running engine. A server that cannot be reached ends it with the backend's error. A value that
cannot be read, while others can, is counted and passed over.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, replace
from os import listdir
from os.path import exists, isdir, isfile
from typing import Final

from .errors import (
    BackendError,
    BackendIOError,
    StorageError,
    StorageUrlError,
)
from .interface import Backend, StoredValue
from .urls import (
    BackendOptions,
    directory_of,
    open_backend,
)
from .value_format import (
    HEADER_BYTES,
    Corruption,
    check_header,
    payload_of,
)

_NO_LIMIT: Final = 2**63 - 1
_MOST_IN_A_ROW: Final = 3
"""When so many values of a server cannot be read, it is the server."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify_values` found.

    Attributes:
        good: values that are what was stored.
        corrupt: values that are not.
        missing: values that were gone when they were read: evicted or removed meanwhile.
        unreadable: values that the disk did not give, or that memory has no room for.
        deleted: of the corrupt, how many were removed.
        good_bytes: bytes of the good ones, with their envelopes.
    """

    good: int = 0
    corrupt: int = 0
    missing: int = 0
    unreadable: int = 0
    deleted: int = 0
    good_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """What `remove_values` did: values and bytes that it removed, and that are left."""

    removed: int
    removed_bytes: int
    left: int
    left_bytes: int


def open_existing(url: str, options: BackendOptions | None = None) -> Backend:
    """Open a backend as `open_backend` does, but make and evict nothing.

    A directory must be there and have been made by `FileBackend`, and needs no max_bytes. What a
    dead writer left unfinished in it is removed, as by every start.

    Raises:
        BackendIOError: if the directory is not there (ENOENT).
        StorageUrlError: if it is not one of ours; with the names of those that are in it. And for a
            namespace with a directory, which holds all of them under names that do not tell.
        StorageError: see open_backend.
    """
    options = options or BackendOptions()
    directory = directory_of(url)
    if directory is not None:
        if options.namespace is not None:  # else all would be meant, and removed
            raise StorageUrlError("a directory does not tell namespaces apart: leave it out")
        if not isfile(f"{directory}/lock"):
            raise _no_storage(directory)
        options = replace(options, max_bytes=options.max_bytes or _NO_LIMIT)
    return open_backend(url, options)


def _no_storage(directory: str) -> StorageError:
    """Say what a directory is that `FileBackend` has not made."""
    if not isdir(directory):
        number = errno.ENOTDIR if exists(directory) else errno.ENOENT
        return BackendIOError(f"opening the directory {directory}", number)
    # Nodes that were started together have one each in it.
    inside = sorted(name for name in listdir(directory) if isfile(f"{directory}/{name}/lock"))
    if not inside:
        return StorageUrlError(f"{directory} is no storage: there is no file lock in it")
    return StorageUrlError(f"{directory} is no storage, but these in it are: {', '.join(inside)}")


def verify_values(backend: Backend, *, delete: bool = False) -> Verified:
    """Read every value and check its envelope: magic, version, length, key and checksum.

    Args:
        backend: whose values. Reading them all leaves the order of their use as it is.
        delete: remove what is corrupt.

    Raises:
        UnsupportedError: if the backend cannot list its values.
        BackendError: if it cannot be reached: it gave nothing, or failed several times in a row.
    """
    counts: Counter[str] = Counter()
    reader = _Reader(backend)
    failed_in_a_row = 0
    for value in backend.list_values():
        try:
            outcome = reader.look_at(value)
        except (BackendIOError, MemoryError, OverflowError):
            counts["unreadable"] += 1
            continue
        except BackendError:
            failed_in_a_row += 1
            if failed_in_a_row == _MOST_IN_A_ROW or not counts:
                raise
            counts["unreadable"] += 1
            continue
        failed_in_a_row = 0
        if outcome is None:
            counts["missing"] += 1
        elif isinstance(outcome, Corruption):
            counts["corrupt"] += 1
            counts["deleted"] += delete and backend.delete(value.key)
        else:
            counts["good"] += 1
            counts["good_bytes"] += HEADER_BYTES + outcome
    return Verified(**counts)


def remove_values(backend: Backend, max_bytes: int) -> Removed:
    """Remove the least recently used values until the rest is within max_bytes; 0 removes all.

    Raises:
        UnsupportedError: if the backend cannot list its values or, unless max_bytes is 0, does not
            know the order of their use. Nothing was removed.
        BackendError: if it cannot be reached, or a value cannot be removed.
    """
    values = list(backend.list_values(coldest_first=max_bytes > 0))
    left = sum(value.num_bytes for value in values)
    removed = removed_bytes = 0
    gone = 0  # by us or by somebody else
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
    """Reads whole values; it takes no memory for a length that the value's own header denies."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = memoryview(bytearray(HEADER_BYTES))

    def look_at(self, value: StoredValue) -> int | Corruption | None:
        """Return a value's length without its header, what is wrong, or None if it is gone."""
        key, num_bytes = value
        if num_bytes > len(self._buffer):
            header = self._buffer[:HEADER_BYTES]
            found = self._backend.get(key, [header])
            if found is None:
                return None
            fault = check_header(key, bytes(header), found, found - HEADER_BYTES)
            if fault is not None:
                return fault
            self._buffer, num_bytes = memoryview(bytearray(found)), found
        found = self._backend.get(key, [self._buffer[:num_bytes]])
        if found is None:
            return None
        if found > num_bytes:  # written again since it was listed
            return self.look_at(StoredValue(key, found))
        payload = payload_of(key, self._buffer[:found])
        return payload if isinstance(payload, Corruption) else len(payload)
