"""System calls of the file backend, behind an interface that a simulated disk implements too."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from ..errors import OpenToOthersError

_MAX_PARTS: Final = 1024  # Linux: IOV_MAX
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Without blocking, because opening a pipe in place of a file would wait for a writer."""
_READ_NO_ATIME: Final = _READ_FLAGS | getattr(os, "O_NOATIME", 0)
"""Reads without an update of the access time, which would cost; macOS has no such flag."""
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ONE_MORE_BYTE: Final = memoryview(bytearray(1))
"""Destination of one byte past the buffers, which shows that a file is longer; never read."""


class FileApi(Protocol):
    """Files and directories by path. All methods raise OSError, as the system does."""

    def make_directory(self, path: str) -> None:
        """Create a directory with mode 0700, unless it exists.

        Raises:
            OpenToOthersError: if it exists and other users can access it.
        """

    def lock(self, path: str) -> int:
        """Open and lock a lock file until it is closed; BlockingIOError if it is locked already."""

    def directories(self, path: str) -> list[str]:
        """Return the names of the subdirectories of a directory."""

    def scan(self, path: str) -> Iterator[tuple[str, int, int]]:
        """Yield name, size in bytes and time of last use in ns of each file in a directory.

        Skips everything else: directories, links, pipes.
        """

    def create(self, path: str) -> int:
        """Create a file with mode 0600 and open it for writing."""

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        """Append the parts; may write fewer bytes. Return the number of bytes written."""

    def read(self, path: str, into: Sequence[memoryview]) -> int:
        """Fill the buffers from the start of a file, and return its length in bytes."""

    def stamp(self, file: int | str, time_ns: int) -> None:
        """Set the time of the last use of a file."""

    def sync(self, file: int) -> None:
        """Wait until the data of a file would survive a power cut."""

    def sync_directory(self, path: str) -> None:
        """Wait until the names in a directory would survive a power cut."""

    def close(self, file: int) -> None:
        """Close a file."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file atomically; it replaces a file of the new name."""

    def unlink(self, path: str) -> None:
        """Remove a name."""


class OsFiles:
    """The operating system's files."""

    def __init__(self) -> None:
        """Start with the flags for files of this user."""
        self._read_flags = _READ_NO_ATIME

    def make_directory(self, path: str) -> None:
        """See FileApi."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            status = os.stat(path)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a file has its name") from None
            if status.st_mode & 0o077 or status.st_uid != os.geteuid():
                raise OpenToOthersError(path, stat.S_IMODE(status.st_mode)) from None

    def lock(self, path: str) -> int:
        """See FileApi."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(file)
            raise
        return file

    def directories(self, path: str) -> list[str]:
        """See FileApi."""
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def scan(self, path: str) -> Iterator[tuple[str, int, int]]:
        """See FileApi."""
        with os.scandir(path) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield entry.name, status.st_size, status.st_mtime_ns

    def create(self, path: str) -> int:
        """See FileApi."""
        return os.open(path, _CREATE_FLAGS, 0o600)

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        """See FileApi."""
        return os.writev(file, parts[:_MAX_PARTS])

    def read(self, path: str, into: Sequence[memoryview]) -> int:
        """See FileApi.

        Makes three system calls in the usual case. Each call costs time and releases the GIL.
        """
        try:
            file = os.open(path, self._read_flags)
        except PermissionError:  # another user's file, which O_NOATIME is refused for
            file = os.open(path, _READ_FLAGS)
            self._read_flags = _READ_FLAGS  # never use that flag again
        try:
            if len(into) >= _MAX_PARTS:
                return _read_rest(file, into, 0)
            done = os.preadv(file, [*into, _ONE_MORE_BYTE], 0)
            if done == sum(map(len, into)):  # room for one more byte was left: the file ends here
                return done
            return _read_rest(file, into, done)
        finally:
            os.close(file)

    def stamp(self, file: int | str, time_ns: int) -> None:
        """See FileApi."""
        os.utime(file, ns=(time_ns, time_ns))

    def sync(self, file: int) -> None:
        """See FileApi."""
        os.fdatasync(file)

    def sync_directory(self, path: str) -> None:
        """See FileApi."""
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self, file: int) -> None:
        """See FileApi."""
        os.close(file)

    def rename(self, old: str, new: str) -> None:
        """See FileApi."""
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        """See FileApi."""
        os.unlink(path)


def write_all(files: FileApi, file: int, parts: Sequence[memoryview]) -> None:
    """Write all parts, in as many calls as needed."""
    rest = [part for part in parts if part.nbytes]
    while rest:
        count = files.write(file, rest)
        if count == 0:  # avoids an endless loop
            raise OSError(errno.EIO, "nothing was written")
        rest = _after(rest, count)


def _read_rest(file: int, into: Sequence[memoryview], done: int) -> int:
    """Fill the buffers after the first done bytes, and return the file's length.

    A file that ends early was truncated meanwhile; its length is then the number of bytes read.
    """
    size = os.fstat(file).st_size
    rest = _after(list(into), done)
    while rest:
        count = os.preadv(file, rest[:_MAX_PARTS], done)
        if count == 0:
            return done
        rest = _after(rest, count)
        done += count
    return size


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return the parts without their first count bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[number + 1 :]]
        count -= len(part)
    return []
