"""A simulated disk with a write-back cache. A power cut keeps any legal part of unsynced data.

The model, after ALICE (Pillai et al., OSDI 2014):

- A file's bytes reach the disk in sectors of 64 bytes, in any order, until the file is synced.
- Changes of the names in a directory (create, rename, remove) reach the disk in order, until the
  directory is synced; changes of different directories are not ordered.
- A rename is one change. A failed sync drops unwritten data: syncing again does not help.
- A process may also be killed without a power cut: then nothing is lost yet.

It implements `FileApi`. Each call and each written sector is a moment at which a crash may happen.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

SECTOR = 64  # small, so that small values can be torn

Below = Callable[[int], int]
"""Draws a number below its argument."""


class PowerCut(BaseException):
    """The crash. Error handlers must not catch it."""


@dataclass(eq=False)
class SimFile:
    """Bytes as a reader sees them, bytes on the disk, and the sectors not written yet."""

    seen: bytearray = field(default_factory=bytearray)
    on_disk: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    used_ns: int = 0

    def reaches_disk(self, offset: int, data: bytes) -> None:
        missing = offset + len(data) - len(self.on_disk)
        if missing > 0:
            self.on_disk.extend(bytes(missing))
        self.on_disk[offset : offset + len(data)] = data


@dataclass(eq=False)
class SimDirectory:
    """Names as a reader sees them, names on the disk, and the changes not written yet.

    A change maps names to their new files; None removes a name.
    """

    seen: dict[str, SimFile | SimDirectory] = field(default_factory=dict)
    on_disk: dict[str, SimFile | SimDirectory] = field(default_factory=dict)
    pending: list[dict[str, SimFile | SimDirectory | None]] = field(default_factory=list)

    def change(self, change: dict[str, SimFile | SimDirectory | None]) -> None:
        apply(change, self.seen)
        self.pending.append(change)


def apply(
    change: dict[str, SimFile | SimDirectory | None], names: dict[str, SimFile | SimDirectory]
) -> None:
    for name, what in change.items():
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


@dataclass
class Faults:
    """Other faults: one call in this many fails; 0 means never."""

    short_write: int = 0
    no_space: int = 0
    sync_fails: int = 0
    unlink_fails: int = 0
    rename_fails: int = 0


class CrashDisk:
    """A disk, and one process's view of it until `restart`."""

    def __init__(self, below: Below, faults: Faults | None = None) -> None:
        self.below = below
        self.faults = faults or Faults()
        self.root = SimDirectory()
        self.handles: dict[int, SimFile] = {}
        self.moments = 0
        self.cut_at: int | None = None

    def moment(self) -> None:
        self.moments += 1
        self.alive()

    def alive(self) -> None:
        """Raise after the crash, so that cleanup code changes nothing any more."""
        if self.cut_at is not None and self.moments >= self.cut_at:
            raise PowerCut

    def restart(self, *, power_cut: bool, cut_at: int | None) -> None:
        """Start the next process, which crashes at its cut_at-th moment."""
        if power_cut:
            self._lose(self.root)
        self.handles = {}
        self.moments = 0
        self.cut_at = cut_at

    def _lose(self, directory: SimDirectory) -> None:
        kept = self.below(len(directory.pending) + 1)
        for change in directory.pending[:kept]:
            apply(change, directory.on_disk)
        directory.pending = []
        directory.seen = dict(directory.on_disk)
        for what in directory.seen.values():
            if isinstance(what, SimDirectory):
                self._lose(what)
            elif what.pending:
                self._tear(what)
            else:
                what.seen = bytearray(what.on_disk)

    def _tear(self, file: SimFile) -> None:
        mode = self.below(4)  # no sector, all, the first ones, any subset
        first = self.below(len(file.pending) + 1)
        for number, (offset, data) in enumerate(file.pending):
            if (False, True, number < first, self.below(2))[mode]:
                file.reaches_disk(offset, data)
        file.pending = []
        file.seen = bytearray(file.on_disk)

    def _fails(self, one_in: int) -> bool:
        return one_in > 0 and self.below(one_in) == 0

    # -- path lookup; a path is /DIRECTORY/BUCKET/NAME

    def _directory(self, path: str) -> SimDirectory:
        directory = self.root
        for name in path.split("/"):
            if name:
                found = directory.seen.get(name)
                if not isinstance(found, SimDirectory):
                    raise FileNotFoundError(errno.ENOENT, "no such directory")
                directory = found
        return directory

    def _parent(self, path: str) -> tuple[SimDirectory, str]:
        parent, _, name = path.rpartition("/")
        return self._directory(parent), name

    def _file(self, path: str) -> SimFile:
        directory, name = self._parent(path)
        found = directory.seen.get(name)
        if not isinstance(found, SimFile):
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return found

    def _handle(self, file: SimFile) -> int:
        handle = len(self.handles) + 1
        while handle in self.handles:
            handle += 1
        self.handles[handle] = file
        return handle

    # -- FileApi

    def make_directory(self, path: str) -> None:
        self.alive()
        directory, name = self._parent(path)
        if name not in directory.seen:
            directory.change({name: SimDirectory()})
            self.moment()

    def lock(self, path: str) -> int:
        directory, name = self._parent(path)
        if name not in directory.seen:
            directory.change({name: SimFile()})
        return self._handle(self._file(path))

    def directories(self, path: str) -> list[str]:
        names = self._directory(path).seen
        return [name for name, what in names.items() if isinstance(what, SimDirectory)]

    def scan(self, path: str) -> Iterator[tuple[str, int, int]]:
        for name, what in list(self._directory(path).seen.items()):
            if isinstance(what, SimFile):
                yield name, len(what.seen), what.used_ns

    def create(self, path: str) -> int:
        self.alive()
        directory, name = self._parent(path)
        if name in directory.seen:
            raise FileExistsError(errno.EEXIST, "it is there")
        if self._fails(self.faults.no_space):
            raise OSError(errno.ENOSPC, "no space")
        file = SimFile()
        directory.change({name: file})
        self.moment()
        return self._handle(file)

    def write(self, file: int, parts: Sequence[memoryview]) -> int:
        self.alive()
        data = b"".join(parts)
        if self._fails(self.faults.short_write):
            data = data[: 1 + self.below(len(data))]
        what, done = self.handles[file], 0
        while done < len(data):
            if self._fails(self.faults.no_space):
                if done:
                    break
                raise OSError(errno.ENOSPC, "no space")
            offset = len(what.seen)
            piece = data[done : done + SECTOR - offset % SECTOR]
            what.seen += piece
            what.pending.append((offset, piece))
            done += len(piece)
            self.moment()
        return done

    def read(self, path: str, into: Sequence[memoryview]) -> int:
        data, done = self._file(path).seen, 0
        for part in into:
            piece = data[done : done + len(part)]
            part[: len(piece)] = piece
            done += len(piece)
        return len(data)

    def stamp(self, file: int | str, time_ns: int) -> None:
        self.alive()
        (self._file(file) if isinstance(file, str) else self.handles[file]).used_ns = time_ns

    def sync(self, file: int) -> None:
        self.alive()
        self.moment()
        what = self.handles[file]
        failed = self._fails(self.faults.sync_fails)
        for offset, data in what.pending:
            if not failed or self.below(2):
                what.reaches_disk(offset, data)
        what.pending = []  # also after a failure: the system considers the data written
        if failed:
            raise OSError(errno.EIO, "sync failed")
        self.moment()

    def sync_directory(self, path: str) -> None:
        self.alive()
        self.moment()
        directory = self._directory(path)
        if self._fails(self.faults.sync_fails):
            raise OSError(errno.EIO, "sync failed")
        for change in directory.pending:
            apply(change, directory.on_disk)
        directory.pending = []
        self.moment()

    def close(self, file: int) -> None:
        del self.handles[file]

    def rename(self, old: str, new: str) -> None:
        self.alive()
        directory, name = self._parent(old)
        target, new_name = self._parent(new)
        assert target is directory, "a rename across directories is not one change"
        if self._fails(self.faults.rename_fails):
            raise OSError(errno.ENOSPC, "no space for the name")
        directory.change({name: None, new_name: self._file(old)})
        self.moment()

    def unlink(self, path: str) -> None:
        self.alive()
        self._file(path)
        if self._fails(self.faults.unlink_fails):
            raise OSError(errno.EIO, "unlink failed")
        directory, name = self._parent(path)
        directory.change({name: None})
        self.moment()
