"""The few calls that the file backend makes to the system; a simulated disk has the same."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from ..errors import OpenToOthersError

_MOST_PARTS: Final = 1024  # Linux: IOV_MAX
_TO_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_READ_UNNOTED: Final = _TO_READ | getattr(os, "O_NOATIME", 0)
"""Spares the system to note the time of the first read of a file; macOS has no such flag."""
_TO_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ONE_MORE: Final = memoryview(bytearray(1))
"""Where the byte goes that tells that a file is longer; nobody reads it."""


class FileApi(Protocol):
    """Files and directories by path. All raise OSError, as the system does."""

    def make_directory(self, path: str) -> None:
        """Make a directory for the owner alone (0700), if it is not there.

        Raises:
            OpenToOthersError: if it is there, and others may use it.
        """

    def lock(self, path: str) -> int:
        """Open a lock file and lock it, until it is closed; BlockingIOError if another has it."""

    def directories(self, path: str) -> list[str]:
        """Return the names of the directories in a directory."""

    def scan(self, path: str) -> Iterator[tuple[str, int, int]]:
        """Yield name, size in bytes and time (ns) of the last use of each file in a directory.

        What is no file (a directory, a link, a pipe) has none of these.
        """

    def create(self, path: str) -> int:
        """Make a new file for the owner alone (0600) and open it to write."""

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        """Append the parts; may write less, and returns how many bytes it did."""

    def read(self, path: str, into: Sequence[memoryview]) -> int:
        """Fill the buffers from the start of a file, and return its length in bytes."""

    def stamp(self, file: int | str, time_ns: int) -> None:
        """Set the time of the last use."""

    def sync(self, file: int) -> None:
        """Return when the data of a file would survive a power cut."""

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory would survive a power cut."""

    def close(self, file: int) -> None:
        """Close a file."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in one step; a file that had the name is gone."""

    def unlink(self, path: str) -> None:
        """Remove a name."""


class OsFiles:
    """The system's own files."""

    def __init__(self) -> None:
        """Begin with the flags that suit files of our own."""
        self._to_read = _TO_READ_UNNOTED

    def make_directory(self, path: str) -> None:
        """See FileApi."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            facts = os.stat(path)
            if not stat.S_ISDIR(facts.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a file has its name") from None
            if facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
                raise OpenToOthersError(path, stat.S_IMODE(facts.st_mode)) from None

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
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    yield entry.name, facts.st_size, facts.st_mtime_ns

    def create(self, path: str) -> int:
        """See FileApi."""
        return os.open(path, _TO_CREATE, 0o600)

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        """See FileApi."""
        return os.writev(file, parts[:_MOST_PARTS])

    def read(self, path: str, into: Sequence[memoryview]) -> int:
        """See FileApi.

        Three calls of the system, where they do what they nearly always do: each costs, and lets go
        of Python's lock besides.
        """
        try:
            file = os.open(path, self._to_read)
        except PermissionError:
            file = self._open_noted(path)
        try:
            if len(into) >= _MOST_PARTS:
                return _read_on(file, into, 0)
            done = os.preadv(file, [*into, _ONE_MORE], 0)
            if done == sum(map(len, into)):  # there was room for one more, so the file ends here
                return done
            return _read_on(file, into, done)
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

    def _open_noted(self, path: str) -> int:
        """Open a file that O_NOATIME is refused for, as it is another's; from now on without it.

        Raises:
            OSError: if it was refused for something else.
        """
        file = os.open(path, _TO_READ)
        self._to_read = _TO_READ
        return file


def write_all(files: FileApi, file: int, parts: Sequence[memoryview]) -> None:
    """Write all of the parts, in as many calls as the system takes."""
    rest = [part for part in parts if part.nbytes]
    while rest:
        count = files.write(file, rest)
        if count == 0:  # it would go on for ever
            raise OSError(errno.EIO, "nothing was written")
        rest = _after(rest, count)


def _read_on(file: int, into: Sequence[memoryview], done: int) -> int:
    """Fill the buffers after the first done bytes, and return the file's length.

    If it ends before it said that it would, somebody has cut it meanwhile: then that is its length.
    """
    size = os.fstat(file).st_size
    rest = _after(list(into), done)
    while rest:
        count = os.preadv(file, rest[:_MOST_PARTS], done)
        if count == 0:
            return done
        rest = _after(rest, count)
        done += count
    return size


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the parts after count bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[number + 1 :]]
        count -= len(part)
    return []
