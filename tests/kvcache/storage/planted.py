"""Planted bugs: copies of the storage package with one change, loaded in memory."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import ModuleType

import radixkv.kvcache.storage as real

FOLDER = Path(real.__file__).parent
_numbers = count(1)


@dataclass(frozen=True)
class Bug:
    """A bug: its description, and the text of a file that it replaces."""

    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Subject:
    """The modules under test: the real ones, or a copy with a bug."""

    files: ModuleType
    checksummed: ModuleType


REAL = Subject(
    importlib.import_module("radixkv.kvcache.storage.files.backend"),
    importlib.import_module("radixkv.kvcache.storage.checksummed"),
)

BUGS = (
    Bug(
        "a file is not synced before its name",
        "files/backend.py",
        "if self._durable:\n                    self._files.sync(file)",
        "if False:\n                    self._files.sync(file)",
    ),
    Bug(
        "a failed sync is ignored",
        "files/backend.py",
        "                    self._files.sync(file)",
        "                    with suppress(OSError):\n"
        "                        self._files.sync(file)",
    ),
    Bug(
        "a failed sync is tried again and believed",
        "files/backend.py",
        "                    self._files.sync(file)",
        "                    try:\n"
        "                        self._files.sync(file)\n"
        "                    except OSError:\n"
        "                        self._files.sync(file)",
    ),
    Bug(
        "a new name is not synced",
        "files/backend.py",
        "                if self._durable:\n"
        "                    self._files.sync_directory(dirname(path))",
        "                pass",
    ),
    Bug(
        "a failed sync of names is ignored",
        "files/backend.py",
        "                    self._files.sync_directory(dirname(path))\n            except",
        "                    with suppress(OSError):\n"
        "                        self._files.sync_directory(dirname(path))\n            except",
    ),
    Bug(
        "a new directory is not synced",
        "files/backend.py",
        "            if self._durable:\n"
        "                self._files.sync_directory(self.directory)\n"
        "            self._buckets.add",
        "            self._buckets.add",
    ),
    Bug(
        "a removed name is not synced",
        "files/backend.py",
        "if self._durable and key[:1].hex() in self._buckets:",
        "if False:",
    ),
    Bug(
        "deleting what was evicted is not synced",
        "files/backend.py",
        "if self._durable and key[:1].hex() in self._buckets:",
        "if existed and self._durable:",
    ),
    Bug(
        "names that a killed process left are not synced",
        "files/backend.py",
        "            if self._durable:\n                self._files.sync_directory(path)\n",
        "",
    ),
    Bug(
        "directories that a killed process left are not synced",
        "files/backend.py",
        "            self._files.sync_directory(self.directory)\n"
        "            self._files.sync_directory(dirname",
        "            self._files.sync_directory(dirname",
    ),
    Bug(
        "the directory itself is not synced",
        "files/backend.py",
        "            self._files.sync_directory(dirname(self.directory))\n",
        "",
    ),
    Bug(
        "a value is written under its own name",
        "files/backend.py",
        'path = f"{self._bucket(key)}/{_TEMPORARY}{next(self._numbers)}"',
        "self._bucket(key)\n        path = self._path(key)",
    ),
    Bug(
        "the name comes before the bytes are synced",
        "files/backend.py",
        "                self._files.rename(temporary, path)\n",
        "                self._files.rename(temporary, path)\n"
        "                self._files.sync(self._files._handle(self._files._file(path)))\n",
    ),
    Bug(
        "temporaries are not swept",
        "files/backend.py",
        '                    self._files.unlink(f"{path}/{name}")\n',
        "                    pass\n",
    ),
    Bug(
        "the temporary of a failed write stays",
        "files/backend.py",
        "next start removes it\n            self._files.unlink(path)",
        "next start removes it\n            pass",
    ),
    Bug(
        "a failed write keeps its room",
        "files/backend.py",
        "                self._index.give_back(num_bytes)\n                raise\n\n    def delete",
        "                raise\n\n    def delete",
    ),
    Bug(
        "a value that could not be removed is forgotten",
        "files/backend.py",
        "                self._index.put_back(key)  # it is still there\n",
        "                self._index.removed(key)\n",
    ),
    Bug(
        "a write that failed half-way is not deleted",  # a real bug that a trial found
        "files/backend.py",
        "                num_bytes = self._index.take(key)  # forget first, then unlink\n",
        "                num_bytes = self._index.take(key)  # forget first, then unlink\n"
        "                if num_bytes is None:\n                    return False\n",
    ),
    Bug(
        "a short write is taken for a whole one",
        "files/system_calls.py",
        "        count = files.write(file, rest)",
        "        files.write(file, rest)\n        count = sum(map(len, rest))",
    ),
    Bug(
        "no checksum",
        "value_format.py",
        "or Corruption.CHECKSUM",
        "",
    ),
)

# This bug needs another one: the bytes must not be synced before either.
_ALSO = {"the name comes before the bytes are synced": BUGS[0]}


def load(bug: Bug | None) -> Subject:
    """Load a copy of the package with a bug, or return the package itself without one."""
    if bug is None:
        return REAL
    bugs = [bug, _ALSO[bug.name]] if bug.name in _ALSO else [bug]
    package = f"radixkv.kvcache.planted_{next(_numbers)}"
    finder = _Copy(package, _sources(bugs))
    module = ModuleType(package)
    module.__path__ = []
    sys.modules[package] = module
    sys.meta_path.insert(0, finder)
    try:
        return Subject(
            importlib.import_module(f"{package}.files.backend"),
            importlib.import_module(f"{package}.checksummed"),
        )
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[name]


def _sources(bugs: Sequence[Bug]) -> dict[str, str]:
    folders = (FOLDER, FOLDER / "files")
    paths = [path for folder in folders for path in folder.glob("*.py")]
    sources = {path.relative_to(FOLDER).as_posix(): path.read_text("utf-8") for path in paths}
    for bug in bugs:
        fits = sources[bug.file].count(bug.old)
        assert fits == 1, f"{bug.file} has {bug.old!r} {fits} times: write {bug.name!r} anew"
        sources[bug.file] = sources[bug.file].replace(bug.old, bug.new)
    return sources


class _Copy(MetaPathFinder, InspectLoader):
    """Import finder for the modules of one copy."""

    def __init__(self, package: str, sources: Mapping[str, str]) -> None:
        self.package = package
        self.sources = sources

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{self.package}.") or self._file_of(fullname) is None:
            return None
        is_package = str(self._file_of(fullname)).endswith("__init__.py")
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def get_source(self, fullname: str) -> str:
        return self.sources[str(self._file_of(fullname))]

    def _file_of(self, fullname: str) -> str | None:
        path = fullname.removeprefix(f"{self.package}.").replace(".", "/")
        files = (f"{path}.py", f"{path}/__init__.py")
        return next((file for file in files if file in self.sources), None)
