"""File backend: a directory with one file per block.

::

    DIRECTORY/            0700, one process at a time
      lock                locked while it is open; the system unlocks it when the process dies
      3f/                 first byte of the key: up to 256 directories, created on demand
        3fa0…e1           a value, 0600, named by its key in hex
        .tmp-17           a value being written; leftovers are removed at the next start

A value is written to a temporary name and renamed when it is complete. A reader sees all of it or
nothing, even if the process is killed. ``sync`` chooses what a power cut may take:

- ``"none"``: any value may be lost or torn. Its checksum makes a torn value a miss.
- ``"data"``: a value is there and whole once `FileBackend.put` has returned; a deleted value does
  not come back once `FileBackend.delete` has returned. Each call waits for the disk twice.

With both, evicted values may come back after a power cut. They are still correct and are evicted
again. Values written with "none" do not become safer when you reopen the directory with "data".
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
from ..errors import BackendFullError, BackendIOError, StorageInUseError
from ..interface import StoredValue
from ..keys import KEY_BYTES, check_key
from .lru_index import LruIndex, ScannedValue
from .system_calls import FileApi, OsFiles, write_all

Sync: TypeAlias = Literal["none", "data"]
"""What a power cut may take: any value ("none"), or nothing that was stored ("data")."""

_SYNCS: Final[tuple[Sync, ...]] = ("none", "data")

_TEMPORARY: Final = ".tmp-"
_NUM_STRIPES: Final = 16
_HEX: Final = frozenset("0123456789abcdef")


class FileBackend:
    """Values in files, at most max_bytes of them; the least recently used are evicted first.

    The keys are kept in memory and read from the directory at the start, so `contains` needs no
    disk access. All methods are thread-safe; writes of different keys run in parallel.
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
        """Open a directory, and create it if it does not exist. Its parent must exist.

        Args:
            directory: path of the directory; no other user may access it.
            max_bytes: budget in bytes for values, including their headers.
            sync: durability after a power cut; see the module.
            files: the file system, or a simulation of it.
            clock_ns: time in ns, which orders values by last use, also across restarts.

        Raises:
            StorageInUseError: if the directory is open already, in this process or another.
            BackendIOError: if it cannot be created or read.
            OpenToOthersError: if other users can access it.
            ValueError: if max_bytes is less than 1, or sync is unknown.
        """
        max_bytes = as_count("max_bytes", max_bytes, minimum=1)
        if sync not in _SYNCS:
            raise ValueError(f"sync must be one of {_SYNCS}, got {sync!r}")
        self.directory = abspath(fspath(directory))
        self._durable = sync == "data"
        self._files = files if files is not None else OsFiles()
        self._index = LruIndex(max_bytes, clock_ns)
        self._evicted = 0
        self._swept = 0
        self._buckets: set[str] = set()  # subdirectories that exist; none is ever removed
        self._numbers = count()
        # One thread makes room at a time. Otherwise two would evict more than is needed, or find no
        # room while the other one is about to make it.
        self._room_lock = Lock()
        # A thread holds one of these to change the names in a subdirectory.
        self._stripes = [Lock() for _ in range(_NUM_STRIPES)]
        with _typed(f"opening the directory {self.directory}"):
            self._files.make_directory(self.directory)
            try:
                lock_file = self._files.lock(f"{self.directory}/lock")
            except BlockingIOError:
                message = (
                    f"the directory {self.directory} is open already, here or in another process"
                )
                raise StorageInUseError(message) from None
            try:
                self._recover()
            except BaseException:
                self._files.close(lock_file)
                raise
            self._lock_file: int | None = lock_file

    # -- Backend

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See Backend; answered from memory."""
        return self._index.contains(keys)

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """See Backend. Counts as a use of key."""
        try:
            num_bytes = self._files.read(self._path(key), into)
        except FileNotFoundError:
            if key in self._index:  # evicted just now, or removed by somebody else
                self._forget(key)
            return None
        except OSError as error:
            raise BackendIOError("reading", error.errno) from error
        stamp_ns = self._index.use(key)
        if stamp_ns is None:  # a failed write may have left a file
            return None
        if stamp_ns:
            self._stamp(key, stamp_ns)
        return num_bytes

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """See Backend. Evicts first, as much as needed.

        Raises:
            BackendFullError: if the value, or all values being written, exceed max_bytes.
            BackendIOError: if the disk is full (ENOSPC) or broken (EIO); nothing becomes visible.
        """
        check_key(key)
        num_bytes = sum(len(part) for part in parts)
        if num_bytes > self._index.max_bytes:
            raise BackendFullError(num_bytes, self._index.max_bytes)
        with _typed("writing"):
            self._make_room(num_bytes)
            try:
                self._publish(key, self._write_temporary(key, parts), num_bytes)
            except BaseException:
                self._index.give_back(num_bytes)
                raise

    def delete(self, key: bytes) -> bool:
        """See Backend. With sync="data" the value does not come back after a power cut."""
        with _typed("deleting"):
            with self._room_lock:
                existed = self._remove(key)
            # Also if it did not exist: it may have been evicted, and an eviction is not durable.
            if self._durable and key[:1].hex() in self._buckets:
                self._files.sync_directory(dirname(self._path(key)))
        return existed

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Backend. The LRU order survives a restart to within a minute.

        The order among keys survives exactly: from the first key whose use time is written, the
        times of all following keys are written too.
        """
        is_due = False
        for key in keys:
            if stamp_ns := self._index.use(key, in_order=True, is_due=is_due):
                self._stamp(key, stamp_ns)
                is_due = True

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """See Backend. Always in LRU order, the coldest first; answered from memory."""
        del coldest_first
        return iter(self._index.sizes())

    def stats(self) -> Mapping[str, int]:
        """Return the numbers of values, bytes, evicted values and removed temporary files."""
        return {
            "values": len(self._index),
            "bytes": self._index.used_bytes,
            "max_bytes": self._index.max_bytes,
            "evicted_values": self._evicted,
            "swept_temporaries": self._swept,
        }

    def close(self) -> None:
        """Release the directory for another process. A second call does nothing."""
        lock_file, self._lock_file = self._lock_file, None
        if lock_file is not None:
            self._files.close(lock_file)

    def check(self) -> None:
        """Assert that the byte counts agree; call it while no thread writes."""
        self._index.check()

    # -- internals

    def _recover(self) -> None:
        """Read the directory, remove temporary files, and sync what is visible if promised.

        A killed process may have left names that a power cut could still take. From now on callers
        are told that these values exist.
        """
        found: list[ScannedValue] = []
        names = self._files.directories(self.directory)
        for bucket in sorted(name for name in names if len(name) == 2 and _HEX.issuperset(name)):
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

    def _make_room(self, num_bytes: int) -> None:
        """Reserve bytes, and evict until they fit the budget."""
        with self._room_lock:
            self._index.reserve(num_bytes)
            try:
                if not self._evict():
                    raise BackendFullError(num_bytes, self._index.max_bytes)
            except BaseException:
                self._index.give_back(num_bytes)
                raise

    def _evict(self) -> bool:
        """Remove the coldest values until the rest fits the budget; False if it cannot fit."""
        while (coldest := self._index.coldest_over_budget()) is not None:
            if self._remove(coldest):
                self._evicted += 1
        return self._index.fits()

    def _remove(self, key: bytes) -> bool:
        path = self._path(key)
        with self._stripe(key):
            try:
                num_bytes = self._index.take(key)  # forget first, then unlink
                with suppress(FileNotFoundError):  # somebody else removed it
                    self._files.unlink(path)
                self._index.removed(key)
            except BaseException:
                self._index.put_back(key)  # it is still there
                raise
            return num_bytes is not None  # else the file, if any, was left by a failed write

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
            self._remove_temporary(path)
            raise
        return path

    def _remove_temporary(self, path: str) -> None:
        with suppress(OSError):  # the next start removes it
            self._files.unlink(path)

    def _publish(self, key: bytes, temporary: str, num_bytes: int) -> None:
        """Rename a complete file to the name of its key, durably if promised, and index it."""
        path = self._path(key)
        with self._stripe(key):
            try:
                self._files.rename(temporary, path)
            except BaseException:
                self._remove_temporary(temporary)
                raise
            try:
                if self._durable:
                    self._files.sync_directory(dirname(path))
            except BaseException:
                self._index.forget(key)
                with suppress(OSError):  # the new name may or may not survive a power cut
                    self._files.unlink(path)
                raise
            self._index.commit(key, num_bytes)

    def _bucket(self, key: bytes) -> str:
        """Return the subdirectory of a key, and create it if needed."""
        name = key[:1].hex()
        path = f"{self.directory}/{name}"
        if name not in self._buckets:  # two threads may both create it
            self._files.make_directory(path)
            if self._durable:
                self._files.sync_directory(self.directory)
            self._buckets.add(name)
        return path

    def _stamp(self, key: bytes, stamp_ns: int) -> None:
        with suppress(OSError):  # the LRU order is best effort
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
    """Turn an OSError into a BackendIOError, which does not show the path."""
    try:
        yield
    except OSError as error:
        raise BackendIOError(doing, error.errno) from error


def _key_of(bucket: str, name: str) -> bytes | None:
    """Return the key of a file in a subdirectory; None if the name is not that of a value."""
    if len(name) != 2 * KEY_BYTES or not name.startswith(bucket) or not _HEX.issuperset(name):
        return None
    return bytes.fromhex(name)
