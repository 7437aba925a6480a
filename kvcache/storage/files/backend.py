"""The embedded backend: a directory with one file per block.

::

    DIRECTORY/            0700, one process at a time
      lock                held while it is open; the system lets go of it when a process dies
      3f/                 first byte of the key: 256 directories, made as they are needed
        3fa0…e1           a value, 0600, named by its key in hex
        .tmp-17           being written; whatever is left of these at a start is removed

A value is written to a temporary name and renamed when it is complete: a reader sees all of it or
nothing, also when the process is killed. What a power cut may take is the choice of `sync`:

- ``"none"``: any value may be lost or torn. The envelope makes a torn one a miss.
- ``"data"``: what `put` returned for is there and whole afterwards; what `delete` returned for
  does not come back. It costs two waits for the disk per call.

Evicted values may come back after a power cut in both: they are still right, and are evicted again.
What a process wrote with "none" is no safer for the next one that opens it with "data".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from os import PathLike, fspath
from os.path import abspath, dirname
from threading import Lock
from typing import Final, Literal, TypeAlias

from ...tokens import as_count
from ..errors import (
    BackendFullError,
    BackendIOError,
    StorageInUseError,
)
from ..interface import StoredValue
from ..keys import KEY_BYTES, check_key
from .lru_index import LruIndex, ScannedValue
from .system_calls import (
    FileApi,
    OsFiles,
    write_all,
)

Sync: TypeAlias = Literal["none", "data"]

_SYNCS: Final[tuple[Sync, ...]] = ("none", "data")

_TEMPORARY: Final = ".tmp-"
_NUM_STRIPES: Final = 16
_HEX: Final = frozenset("0123456789abcdef")


class FileBackend:
    """Values in files, at most max_bytes of them; the least recently used go first.

    Which keys there are is known in memory, and read from the directory at the start: `contains`
    asks no disk. Use by several threads is safe; writes of different keys run side by side.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        max_bytes: int,
        sync: Sync = "none",
        files: FileApi | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open a directory, and make it if it is not there; its parent must be.

        Args:
            directory: where; nobody else may use it.
            max_bytes: how many bytes of values, their headers included.
            sync: what a power cut may take; see the module.
            files: the system, or a simulation of it.
            clock_ns: orders values by last use, also across restarts.

        Raises:
            StorageInUseError: if it is open already, in this process or another.
            BackendIOError: if it cannot be made or read.
            OpenToOthersError: if other users may use it.
            ValueError: if max_bytes is less than 1, or there is no such sync.
        """
        as_count("max_bytes", max_bytes, minimum=1)
        if sync not in _SYNCS:
            raise ValueError(f"sync must be one of {_SYNCS}, got {sync!r}")
        self.directory = abspath(fspath(directory))
        self._durable = sync == "data"
        self._files = files if files is not None else OsFiles()
        self._index = LruIndex(max_bytes, clock_ns)
        self._evicted = 0
        self._swept = 0
        self._buckets: set[str] = set()  # directories that are there, and stay
        self._numbers = count()
        # The names of a bucket are changed by one thread at a time, which holds one of these.
        self._stripes = [Lock() for _ in range(_NUM_STRIPES)]
        with _typed(f"opening the directory {self.directory}"):
            self._files.make_directory(self.directory)
            try:
                self._lock_file = self._files.lock(f"{self.directory}/lock")
            except BlockingIOError:
                message = (
                    f"the directory {self.directory} is open already, here or in another process"
                )
                raise StorageInUseError(message) from None
            try:
                self._recover()
            except BaseException:
                self._files.close(self._lock_file)
                raise

    # -- Backend

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See Backend; from memory."""
        return self._index.contains(keys)

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """See Backend. It counts as a use of key."""
        try:
            num_bytes = self._files.read(self._path(key), into)
        except FileNotFoundError:
            if key in self._index:  # evicted just now, or removed by someone else
                self._forget(key)
            return None
        except OSError as error:
            raise BackendIOError("reading", error.errno) from error
        stamp_ns = self._index.use(key)
        if stamp_ns is None:  # a write that failed half-way may have left a file
            return None
        if stamp_ns:
            self._stamp(key, stamp_ns)
        return num_bytes

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """See Backend. Evicts first, as much as is needed.

        Raises:
            BackendFullError: if the value alone, or with others being written, is over max_bytes.
            BackendIOError: if the disk is full (ENOSPC) or broken (EIO): nothing is visible.
        """
        check_key(key)
        num_bytes = sum(len(part) for part in parts)
        max_bytes = self._index.max_bytes
        if num_bytes > max_bytes:
            raise BackendFullError(num_bytes, max_bytes)
        self._index.reserve(num_bytes)
        try:
            with _typed("writing"):
                if not self._evict():
                    raise BackendFullError(num_bytes, max_bytes)
                self._publish(key, self._write_temporary(key, parts), num_bytes)
        except BaseException:
            self._index.give_back(num_bytes)
            raise

    def delete(self, key: bytes) -> bool:
        """See Backend. With sync="data" it does not come back after a power cut."""
        with _typed("deleting"):
            there = self._remove(key)
            # Also if it is not there: it may have been evicted, which alone is not durable.
            if self._durable and key[:1].hex() in self._buckets:
                self._files.sync_directory(dirname(self._path(key)))
        return there

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Backend. The order of use outlives a restart, give or take a minute.

        The order among keys outlives it exactly: from the first on whose use is written down, all
        are.
        """
        is_due = False
        for key in keys:
            if stamp_ns := self._index.use(key, in_order=True, is_due=is_due):
                self._stamp(key, stamp_ns)
                is_due = True

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """See Backend. Always the least recently used first; from memory."""
        del coldest_first
        return iter(self._index.sizes())

    def stats(self) -> Mapping[str, int]:
        """Return how many values and bytes there are, and what was evicted or swept."""
        return {
            "values": len(self._index),
            "bytes": self._index.used_bytes,
            "max_bytes": self._index.max_bytes,
            "evicted_values": self._evicted,
            "swept_temporaries": self._swept,
        }

    def close(self) -> None:
        """Let another process have the directory."""
        self._files.close(self._lock_file)

    def check(self) -> None:
        """Assert that the bytes add up; call it when no thread is writing."""
        self._index.check()

    # -- the parts of these

    def _recover(self) -> None:
        """Learn what is there, remove temporaries, and make what is seen durable if promised.

        A process that was killed may have left names that a power cut would still take; from now
        on a caller is told that they exist.
        """
        found: list[ScannedValue] = []
        for bucket in _bucket_names(self._files, self.directory):
            path = f"{self.directory}/{bucket}"
            self._buckets.add(bucket)
            for name, num_bytes, used_ns in list(self._files.scan(path)):
                if name.startswith(_TEMPORARY):
                    self._files.unlink(f"{path}/{name}")
                    self._swept += 1
                elif (key := _key_of(bucket, name)) is not None:
                    found.append(ScannedValue(used_ns, key, num_bytes))
            if self._durable:
                self._files.sync_directory(path)
        if self._durable:
            self._files.sync_directory(self.directory)
            self._files.sync_directory(dirname(self.directory))
        self._index.fill(found)
        self._evict()

    def _evict(self) -> bool:
        """Remove the coldest values until the rest is within the budget; False if it cannot be."""
        while (coldest := self._index.coldest_over_budget()) is not None:
            if self._remove(coldest):
                self._evicted += 1
        return self._index.fits()

    def _remove(self, key: bytes) -> bool:
        with self._stripe(key):
            num_bytes = self._index.take(key)  # forget first, then unlink
            try:
                self._files.unlink(self._path(key))
            except FileNotFoundError:
                pass  # somebody else removed it
            except OSError:
                if num_bytes is not None:
                    self._index.put_back(key, num_bytes)  # it is still there
                raise
            if num_bytes is None:  # there may have been a file, of a write that failed
                return False
            self._index.give_back(num_bytes)
            return True

    def _write_temporary(self, key: bytes, parts: Sequence[memoryview]) -> str:
        """Write the parts to a new file, synced if promised, and return its path."""
        path = f"{self._bucket(key)}/{_TEMPORARY}{next(self._numbers)}"
        file = self._files.create(path)
        try:
            try:
                write_all(self._files, file, parts)
                self._files.stamp(file, self._index.next_stamp_ns())
                if self._durable:
                    self._files.sync(file)
            finally:
                self._files.close(file)
        except BaseException:
            with suppress(OSError):  # the next start tries again
                self._files.unlink(path)
            raise
        return path

    def _publish(self, key: bytes, temporary: str, num_bytes: int) -> None:
        """Give a complete file the name of its key, durably if promised; then it can be found."""
        path = self._path(key)
        with self._stripe(key):
            self._files.rename(temporary, path)
            try:
                if self._durable:
                    self._files.sync_directory(dirname(path))
            except OSError:
                self._index.forget(key)
                with suppress(OSError):  # nobody knows whether this name would last
                    self._files.unlink(path)
                raise
            self._index.commit(key, num_bytes)

    def _bucket(self, key: bytes) -> str:
        name = key[:1].hex()
        path = f"{self.directory}/{name}"
        with self._stripe(key):
            if name not in self._buckets:
                self._files.make_directory(path)
                if self._durable:
                    self._files.sync_directory(self.directory)
                self._buckets.add(name)
        return path

    def _stamp(self, key: bytes, stamp_ns: int) -> None:
        with suppress(OSError):  # the order is a help, not a promise
            self._files.stamp(self._path(key), stamp_ns)

    def _forget(self, key: bytes) -> None:
        """Drop a key whose file is gone, unless it was written again meanwhile."""
        with self._stripe(key):
            try:
                self._files.read(self._path(key), [])
            except FileNotFoundError:
                self._index.forget(key)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.directory}/{name[:2]}/{name}"

    def _stripe(self, key: bytes) -> Lock:
        return self._stripes[key[0] % _NUM_STRIPES]


@contextmanager
def _typed(doing: str) -> Iterator[None]:
    """Make an error of the system one of ours, without the path in it."""
    try:
        yield
    except OSError as error:
        raise BackendIOError(doing, error.errno) from error


def _bucket_names(files: FileApi, directory: str) -> list[str]:
    """Return the names of the directories that hold values."""
    names = files.directories(directory)
    return sorted(name for name in names if len(name) == 2 and _HEX.issuperset(name))


def _key_of(bucket: str, name: str) -> bytes | None:
    """Return the key whose file would have this name in this directory; None if none has."""
    if len(name) != 2 * KEY_BYTES or not name.startswith(bucket) or not _HEX.issuperset(name):
        return None
    return bytes.fromhex(name)
