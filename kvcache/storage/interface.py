"""The asynchronous interface `Storage`, and the blocking interface `Backend` below it.

::

    TierDriver                      never waits, polls once per step
          │  Storage                lookup, load, store, touch, delete, poll, cancel, fenced
    StorageWorkers                  threads, deadlines and a byte budget, once for all backends
          │
    ChecksummedBackend              checksums, skips existing values, errors become statuses
          │  Backend                contains, get, put, delete, touch, list_values: may block
    files, Redis, object storage, Mooncake

A value is one block: all layers, K and V, in the order of the caller's buffers. A value is visible
under its key only when it is complete.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from .errors import PayloadError

StorageOpId = NewType("StorageOpId", int)
"""Id of an operation of one `Storage`. (`OpId` is the id of a manager's operation.)"""
Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any]"
"""Contiguous memory: a part of a block. What receives a block must be writable."""
Block: TypeAlias = Sequence[Buffer]
"""The parts of one block, in the order in which they are stored."""


class Status(enum.IntEnum):
    """The result of an operation for one block."""

    STORED = 1
    """The block was written, as durably as the backend promises."""
    EXISTS = 2
    """The block was in storage already and was not written again."""
    LOADED = 3
    """The destination holds exactly the bytes that were stored."""
    FOUND = 4
    """The key is in storage; a load may still find it missing or corrupt."""
    TOUCHED = 5
    """The block, if it is in storage, counts as just used."""
    DELETED = 6
    """The block was in storage and was removed."""
    MISSING = 7
    """The key is not in storage."""
    CORRUPT = 8
    """The stored value failed its check. It counts as a miss and was deleted."""
    FAILED = 9
    """The backend raised an error."""
    CANCELLED = 10
    """The operation was cancelled first; a store may still take effect."""
    TIMED_OUT = 11
    """The deadline came first; a store may still take effect."""
    DROPPED = 12
    """The block of a store was not attempted: too many bytes were in flight."""


class Kind(enum.Enum):
    """The kind of an operation."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    TOUCH = "touch"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an operation. Each operation has exactly one.

    Attributes:
        operation: id that `Storage.load`, `Storage.store`, ... returned.
        epoch: epoch given with the operation.
        kind: kind of the operation.
        statuses: one status per key, in the order of the keys.
    """

    operation: StorageOpId
    epoch: int
    kind: Kind
    statuses: tuple[Status, ...]

    @property
    def prefix(self) -> int:
        """Number of leading blocks that were found, loaded, stored or already there."""
        good = (Status.FOUND, Status.LOADED, Status.STORED, Status.EXISTS)
        for position, status in enumerate(self.statuses):
            if status not in good:
                return position
        return len(self.statuses)


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Counts since the start, and the current load.

    Attributes:
        blocks: number of blocks that ended with each status.
        stored_bytes: payload bytes of STORED blocks.
        loaded_bytes: payload bytes of LOADED blocks.
        dropped_bytes: payload bytes of DROPPED blocks.
        late_blocks: blocks that finished after their operation ended; their results are ignored.
        errors: number of backend errors by type name.
        open_operations: operations without a completion.
        unfenced_operations: completed operations whose buffers a thread may still use.
        store_bytes_in_flight: payload bytes held by stores.
        load_bytes_in_flight: destination bytes held by loads.
        backend: the backend's own counts.
    """

    blocks: Mapping[Status, int]
    stored_bytes: int
    loaded_bytes: int
    dropped_bytes: int
    late_blocks: int
    errors: Mapping[str, int]
    open_operations: int
    unfenced_operations: int
    store_bytes_in_flight: int
    load_bytes_in_flight: int
    backend: Mapping[str, int]


class Storage(Protocol):
    """Asynchronous access to blocks by key. Calls return at once; `poll` returns the results.

    An operation ends exactly once, at its deadline at the latest, with one status per block. After
    the completion of a load or store, wait for `fenced` before you reuse its buffers: a thread that
    is stuck in the backend may still use them.
    """

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """Ask which keys are in storage: FOUND or MISSING. `Completion.prefix` is the leading run.

        After the first missing key, storage may report all following keys as MISSING too.
        """

    def lookup_prefix(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Wait up to timeout_s for the number of leading keys in storage; 0 if unknown by then."""

    def load(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[Block],
        *,
        timeout_s: float,
        epoch: int = 0,
    ) -> StorageOpId:
        """Fill destinations. The bytes of a destination that is not LOADED are undefined."""

    def store(
        self, keys: Sequence[bytes], payloads: Sequence[Block], *, timeout_s: float, epoch: int = 0
    ) -> StorageOpId:
        """Write payloads. They must not change until the operation is fenced."""

    def touch(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """Mark the keys that exist as most recently used; the last key is the warmest."""

    def delete(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """Remove keys."""

    def poll(self) -> list[Completion]:
        """Return the completions since the last call, including expired operations."""

    def cancel(self, operation: StorageOpId) -> bool:
        """End an operation now; `poll` returns its completion. False if it had already ended."""

    def fenced(self, operation: StorageOpId) -> bool:
        """Return whether an operation has ended and no thread uses its buffers."""

    def stats(self) -> StorageStats:
        """Return counts."""

    def close(self, *, timeout_s: float) -> bool:
        """End all operations. False if a thread is still in the backend after timeout_s."""


class StoredValue(NamedTuple):
    """A listed value: its key, and its length in bytes including the header."""

    key: bytes
    num_bytes: int


class Backend(Protocol):
    """A place for values. Calls are synchronous, may block, and come from several threads at once.

    A method that fails raises BackendError or OSError. Any other exception is a bug of the backend
    and is handled the same way. Keys are 32 bytes. Values are opaque and include the checksum.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it exists.

        After the first missing key, a backend may report all following keys as missing: a chain of
        blocks is useful only from its start.
        """

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """Fill the buffers in order and return the value's length in bytes; None if missing.

        The value may be shorter or longer than the buffers. Bytes that do not fit are not read.
        """

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Store the concatenated parts as the value of key, completely or not at all."""

    def delete(self, key: bytes) -> bool:
        """Remove key and return whether it existed."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the keys that exist as most recently used; the last key is the warmest.

        Does nothing in a backend that keeps no LRU order or cannot change it.
        """

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """Yield each value once. This is for operators; it may take long.

        Values that are written or removed meanwhile may or may not be listed.

        Args:
            coldest_first: yield the least recently used values first; otherwise in any order.

        Raises:
            UnsupportedError: at the call, if this backend cannot list, or not in this order.
        """

    def stats(self) -> Mapping[str, int]:
        """Return the backend's own counts, from memory, without waiting."""

    def close(self) -> None:
        """Close files and connections."""


@runtime_checkable
class NamingBackend(Backend, Protocol):
    """A backend on a server or in a bucket, where names tell the namespace of a block.

    Attributes:
        namespace: digits in the names of later calls; None without a namespace.
    """

    namespace: str | None


@runtime_checkable
class SharedBackend(Backend, Protocol):
    """A backend that separates namespaces by name and can list them."""

    def list_namespaces(self) -> Iterator[tuple[str, StoredValue]]:
        """Yield (namespace digits, value) for all values; the digits are "" outside a namespace.

        Call it on a backend that was opened without a namespace. It reads no value.
        """


def views(block: Block, *, writable: bool = False) -> list[memoryview]:
    """Return the bytes of each part of a block, without a copy.

    Raises:
        PayloadError: if a part is not contiguous, or is read-only and must be writable.
    """
    parts = []
    for number, buffer in enumerate(block):
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous:
                raise PayloadError(f"part {number} of a block is not contiguous")
            if buffer.dtype.char != "B":  # bfloat16 and similar dtypes have no buffer interface
                buffer = buffer.reshape(-1).view(np.uint8)
            buffer = buffer.data
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise PayloadError(f"part {number} of a block is not contiguous")
        if writable and view.readonly:
            raise PayloadError(f"part {number} of a destination is read-only")
        parts.append(view.cast("B") if view.nbytes else memoryview(b""))
    return parts
