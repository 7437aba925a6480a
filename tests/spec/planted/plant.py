"""Planted bugs: a substitution in the source of a package, compiled into a fresh copy in memory.

No file is copied and the production code has no hook. A bug must fit exactly once: a change of the
source that it no longer fits fails loudly, and the bug is to be written anew.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, TypeAlias

import radixkv.kvcache

World: TypeAlias = Literal[
    "cache", "costs", "handoff", "pool", "scheduler", "tiered_scheduler", "tiers"
]

FOLDER = Path(radixkv.kvcache.__file__).parent
_numbers = count(1)


@dataclass(frozen=True)
class Bug:
    """A bug that our source could have.

    Attributes:
        name: what is wrong, in plain words.
        file: the file of the package that has it.
        edits: texts, each found exactly once in the file, and what stands there instead.
        seen_in: where somebody had this bug, or "own".
        elsewhere: edits of other files, as (file, old, new).
        world: what it is looked for in: all of the cache, its costs, its pool alone, its tiers,
            the scheduler, the scheduler over tiers, or the hand-off.
        unclaimed: promises that the cache does not make in this hunt.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    seen_in: str = "own"
    elsewhere: tuple[tuple[str, str, str], ...] = ()
    world: World = "cache"
    unclaimed: tuple[str, ...] = ()

    def all_edits(self) -> Iterator[tuple[str, str, str]]:
        """Yield file, old and new text of each edit."""
        for old, new in self.edits:
            yield self.file, old, new
        yield from self.elsewhere


def bug(
    name: str,
    file: str,
    *edits: tuple[str, str],
    seen_in: str = "own",
    elsewhere: tuple[tuple[str, str, str], ...] = (),
    world: World = "cache",
    unclaimed: tuple[str, ...] = (),
) -> Bug:
    """Write a bug with its edits in a row."""
    return Bug(name, file, edits, seen_in, elsewhere, world, unclaimed)


def planted_sources(bug: Bug) -> dict[str, str]:
    """Return the source of each file that a bug changes, with its edits.

    Raises:
        AssertionError: if an edit does not fit exactly once.
    """
    changed: dict[str, str] = {}
    for file, old, new in bug.all_edits():
        source = changed.get(file, sources()[file])
        fits = source.count(old)
        assert fits == 1, f"{file} has {old!r} {fits} times: write the bug {bug.name!r} anew"
        changed[file] = source.replace(old, new)
    return changed


@cache
def sources() -> Mapping[str, str]:
    """Return the text of each file of the package, by its path in it; read once."""
    paths = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py")]
    return {
        path: (FOLDER / path).read_text("utf-8")
        for path in paths
        if not path.startswith("storage/")  # the worlds replace it, and no copy loads it
    }


@cache
def _code(file: str) -> CodeType:
    return _compiled(file, sources()[file])


def _compiled(file: str, source: str) -> CodeType:
    return compile(source, str(FOLDER / file), "exec", dont_inherit=True)


def load(bug: Bug | None) -> ModuleType:
    """Load a copy of the package, with a bug if one is given.

    It is used as any other module, but `sys.modules` does not have it: the garbage collector takes
    it when it is done with.
    """
    changed = planted_sources(bug) if bug is not None else {}
    return load_code({file: _compiled(file, source) for file, source in changed.items()})


def load_code(changed: Mapping[str, CodeType]) -> ModuleType:
    """Load a copy of the package in which some files have other code."""
    with _importing(f"planted_{next(_numbers)}", changed) as name:
        return importlib.import_module(name)


class _Copies(MetaPathFinder, InspectLoader):
    """Finds and loads the modules of one copy, and nothing else."""

    def __init__(self, package: str, changed: Mapping[str, CodeType]) -> None:
        self.package = package
        self.changed = changed

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = _file_of(fullname)
        if fullname.partition(".")[0] != self.package or file not in sources():
            return None
        is_package = file.endswith("__init__.py")
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def get_code(self, fullname: str) -> CodeType:
        file = _file_of(fullname)
        return self.changed.get(file) or _code(file)

    def get_source(self, fullname: str) -> None:
        return None


def _file_of(fullname: str) -> str:
    """Return the path, in the package, of the file that a module of a copy is loaded from."""
    path = fullname.partition(".")[2].replace(".", "/")
    return f"{path}.py" if f"{path}.py" in sources() else f"{path}/__init__.py".lstrip("/")


@contextmanager
def _importing(package: str, changed: Mapping[str, Any]) -> Iterator[str]:
    finder = _Copies(package, changed)
    sys.meta_path.insert(0, finder)
    try:
        yield package
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
