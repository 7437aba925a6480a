"""The few calls that the file backend makes to the system; a simulated disk has the same."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

_MOST_PARTS: Final = 1024  # Linux: IOV_MAX
_ONE_MORE: Final = memoryview(bytearray(1))
"""Where the byte goes that tells that a file is longer; nobody reads it."""


class FileApi(Protocol):
    """Files and directories by path. All raise OSError, as the system does."""

    def make_directory(self, path: str) -> bool:
        """Make a directory for the owner alone (0700); False if it is there.

        Raises:
            PermissionError: if it is there, and others may use it.
        """

    def lock(self, path: str) -> int:
        """Open a lock file and lock it, until it is closed; BlockingIOError if another has it."""

    def scan(self, path: str) -> Iterator[tuple[str, int, int]]:
        """Yield name, size in bytes and time (ns) of the last use of each file in a directory."""

    def create(self, path: str) -> int:
        """Make a new file for the owner alone (0600) and open it to write."""

    def open(self, path: str) -> int:
        """Open a file to read."""

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        """Append the parts; may write less, and returns how many bytes it did."""

    def read(self, file: int, into: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers with what is at offset; may read less; 0 at the end."""

    def size(self, file: int) -> int:
        """Return the length of an open file in bytes."""

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

    def make_directory(self, path: str) -> bool:
        """See FileApi."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            facts = os.stat(path)
            if facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
                raise PermissionError(errno.EACCES, "others may use this directory") from None
            return False
        return True

    def lock(self, path: str) -> int:
        """See FileApi."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(file)
            raise
        return file

    def scan(self, path: str) -> Iterator[tuple[str, int, int]]:
        """See FileApi."""
        with os.scandir(path) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                yield entry.name, facts.st_size, facts.st_mtime_ns

    def create(self, path: str) -> int:
        """See FileApi."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: str) -> int:
        """See FileApi."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        """See FileApi."""
        return os.writev(file, parts[:_MOST_PARTS])

    def read(self, file: int, into: Sequence[memoryview], offset: int) -> int:
        """See FileApi."""
        return os.preadv(file, into if len(into) <= _MOST_PARTS else into[:_MOST_PARTS], offset)

    def size(self, file: int) -> int:
        """See FileApi."""
        return os.fstat(file).st_size

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
    """Write all of the parts, in as many calls as the system takes."""
    rest = [part for part in parts if part.nbytes]
    while rest:
        count = files.write(file, rest)
        if count == 0:  # it would go on for ever
            raise OSError(errno.EIO, "nothing was written")
        rest = _after(rest, count)


def read_value(files: FileApi, file: int, into: Sequence[memoryview]) -> int:
    """Fill the buffers from the start of a file, and return its length, or how much could be read.

    One call of the system, where it does what it nearly always does: each call costs, and lets go
    of Python's lock besides.
    """
    done = files.read(file, [*into, _ONE_MORE], 0)
    room = sum(map(len, into))
    if done == room:  # there was room for one more, so the file ends here
        return room
    size = files.size(file)
    rest = _after(list(into), done)
    while done < room:
        count = files.read(file, rest, done)
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
