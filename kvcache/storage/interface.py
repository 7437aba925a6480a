"""The one interface of storage, and the smaller one that a backend implements.

::

    the manager's driver            never waits, polls once per step
          │  Storage                lookup, load, store, touch, delete, poll, cancel, fenced
    StorageWorkers (workers.py)     threads, deadlines, byte budget: once for all backends
          │  ChecksummedBackend (sealed.py)     the envelope, skip what exists, errors as statuses
          │  Backend                contains, get, put, delete, touch, list_values: may block
    files, Redis, S3, Mooncake

A value is one block: all of its layers, K and V, in the order in which the caller gives its
buffers. It is visible under its key when it is complete, or not at all.
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
"""Names an operation of one storage; an `OpId` names one of a manager."""
Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any]"
Block: TypeAlias = Sequence[Buffer]
"""The parts of one block, in the order in which they are stored."""


class Status(enum.IntEnum):
    """What became of one block of an operation."""

    STORED = 1
    """It is in storage now, as durable as the backend promises."""
    EXISTS = 2
    """It was in storage already, and was not written again."""
    LOADED = 3
    """The destination holds exactly the bytes that were stored."""
    FOUND = 4
    """Storage has the key; a load may still find it gone or corrupt."""
    TOUCHED = 5
    """If it is in storage, it counts as just used."""
    DELETED = 6
    """It was in storage, and is no longer."""
    MISSING = 7
    """Storage does not have it."""
    CORRUPT = 8
    """What storage has is not what was stored: a miss; it was deleted."""
    FAILED = 9
    """The backend raised an error."""
    CANCELLED = 10
    """The operation was cancelled first; a store may have happened or may still happen."""
    TIMED_OUT = 11
    """The deadline came first; a store may have happened or may still happen."""
    DROPPED = 12
    """Too many bytes were in flight: it was not attempted."""


class Kind(enum.Enum):
    """What an operation does."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    TOUCH = "touch"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an operation; each has exactly one.

    Attributes:
        operation: what `load`, `store`, ... returned.
        epoch: as it was given with the operation.
        kind: what the operation was.
        statuses: one per key, in the order of the keys.
    """

    operation: StorageOpId
    epoch: int
    kind: Kind
    statuses: tuple[Status, ...]

    @property
    def prefix(self) -> int:
        """How many leading blocks are found, loaded, stored or there already."""
        good = (Status.FOUND, Status.LOADED, Status.STORED, Status.EXISTS)
        for position, status in enumerate(self.statuses):
            if status not in good:
                return position
        return len(self.statuses)


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Counts since the start, and what is going on now.

    Attributes:
        blocks: how many blocks ended with each status.
        stored_bytes: payload bytes of blocks that were STORED.
        loaded_bytes: payload bytes of blocks that were LOADED.
        dropped_bytes: payload bytes of blocks that were DROPPED.
        late_blocks: blocks that ended after their operation did; their results are ignored.
        errors: errors of the backend, by name of their type.
        open_operations: operations without a completion.
        unfenced_operations: operations with a completion, of which a thread may still be running.
        store_bytes_in_flight: payload bytes that stores still hold.
        load_bytes_in_flight: destination bytes that loads still hold.
        backend: the backend's own figures.
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
    """Blocks by key, asynchronously: every call returns at once, what became of it comes by poll.

    An operation ends exactly once, at the latest at its deadline, with a status per block. After
    its completion the buffers of a load or store are the caller's again only when `fenced` says
    so: a thread that is stuck in the backend may still use them.
    """

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """Ask which keys are there: FOUND or MISSING; `Completion.prefix` is the leading run.

        Storage may stop at the first that is MISSING, and say the same of all that follow.
        """

    def lookup_prefix(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Wait at most timeout_s for the number of leading keys that are there; 0 if not known."""

    def load(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[Block],
        *,
        timeout_s: float,
        epoch: int = 0,
    ) -> StorageOpId:
        """Fill destinations; what is not LOADED has undefined bytes in its destination."""

    def store(
        self, keys: Sequence[bytes], payloads: Sequence[Block], *, timeout_s: float, epoch: int = 0
    ) -> StorageOpId:
        """Write payloads, which must not change until the operation is fenced."""

    def touch(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """Make those of keys that are there the most recently used, the last the most."""

    def delete(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """Remove keys."""

    def poll(self) -> list[Completion]:
        """Return what has ended since the last call, expired operations included."""

    def cancel(self, operation: StorageOpId) -> bool:
        """End an operation now, if it has not; its completion comes by poll. False if it had."""

    def fenced(self, operation: StorageOpId) -> bool:
        """Say whether an operation has ended and nothing uses its buffers any more."""

    def stats(self) -> StorageStats:
        """Return counts."""

    def close(self, *, timeout_s: float) -> bool:
        """End everything; False if a thread was still in the backend after timeout_s."""


class StoredValue(NamedTuple):
    """A value that is listed: its key, and its length in bytes with its envelope."""

    key: bytes
    num_bytes: int


class Backend(Protocol):
    """Where values are: synchronous, may block, called by several threads at once.

    A method that cannot do its work raises BackendError (or OSError); any other exception is a bug
    of the backend, and is met in the same way. Keys are 32 bytes. Values are opaque: the envelope
    is inside.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether it is there.

        Of those after the first that is not, it may be said that they are not either: a chain is
        of use from its start.
        """

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """Fill the buffers, in order, and return the value's length in bytes; None if missing.

        The value may be shorter or longer than the buffers; what does not fit is not read.
        """

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Make the parts, one after the other, the value of key: all of them or none."""

    def delete(self, key: bytes) -> bool:
        """Remove key, and say whether it was there."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make those of keys that are there the most recently used, the last the most.

        Where no order of use is kept, or can be set, this does nothing.
        """

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """Yield what is there, each key once; for an operator, as it may take long.

        What is written or removed meanwhile may be listed or not.

        Args:
            coldest_first: the least recently used first; else in no order.

        Raises:
            UnsupportedError: if this backend cannot list, or not in that order; at the call.
        """

    def stats(self) -> Mapping[str, int]:
        """Return the backend's own figures, from memory: this one must not wait."""

    def close(self) -> None:
        """Let go of files and connections."""


@runtime_checkable
class SharedBackend(Backend, Protocol):
    """A backend in which namespaces have names of their own, and that can list them."""

    def list_namespaces(self) -> Iterator[tuple[str, StoredValue]]:
        """Yield what `list_values` does, under "", and each namespace's values under its digits.

        For a backend that was opened without a namespace. No value is read.
        """


def views(block: Block, *, writable: bool = False) -> list[memoryview]:
    """Return the bytes of each part of a block, without a copy.

    Raises:
        PayloadError: if a part is not contiguous, or must be writable and is not.
    """
    parts = []
    for number, buffer in enumerate(block):
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous:
                raise PayloadError(f"part {number} of a block is not contiguous")
            if buffer.dtype.char != "B":  # bfloat16 and its kin have no buffer of their own
                buffer = buffer.reshape(-1).view(np.uint8)
            buffer = buffer.data
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise PayloadError(f"part {number} of a block is not contiguous")
        if writable and view.readonly:
            raise PayloadError(f"part {number} of a destination is read-only")
        parts.append(view.cast("B") if view.nbytes else memoryview(b""))
    return parts


def scatter(value: bytes | memoryview, into: Sequence[memoryview]) -> int:
    """Copy the bytes of value into the buffers, in order, and return the length of value.

    For the `get` of a backend whose client returns whole values.
    """
    source, position = memoryview(value), 0
    for part in into:
        piece = source[position : position + len(part)]
        part[: len(piece)] = piece
        position += len(piece)
    return len(source)
