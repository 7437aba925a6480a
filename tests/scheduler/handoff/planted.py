"""A copy of the scheduler and its hand-off with a planted bug."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Final

from radixkv import scheduler

from .bugs import Bug

SOURCE: Final = Path(scheduler.__file__).parent
PACKAGES: Final = ("batching", "handoff", "gateway", "fuzz")
_numbers = count(1)


def gateway_of(handoff: ModuleType) -> ModuleType:
    """Return the gateway beside a copy of the hand-off, or beside the hand-off itself."""
    return importlib.import_module(f"{handoff.__name__.removesuffix('handoff')}gateway")


@contextmanager
def patched_classes(scenarios: ModuleType, package: ModuleType) -> Iterator[None]:
    """Replace the classes that a test module has imported by those of a copy.

    Args:
        scenarios: a module of tests that names classes of the scheduler.
        package: what `planted` has loaded.
    """
    copy = package.__name__.removesuffix(".handoff")
    before = dict(vars(scenarios))
    for name, value in before.items():
        home = getattr(value, "__module__", None) or ""
        if isinstance(value, type) and home.startswith("radixkv.scheduler."):
            module = copy + home.removeprefix("radixkv.scheduler")
            setattr(scenarios, name, getattr(importlib.import_module(module), name))
    try:
        yield
    finally:
        vars(scenarios).update(before)


@contextmanager
def planted(bug: Bug | None) -> Iterator[ModuleType]:
    """Load a copy of the hand-off and of the schedulers below it, with a bug if one is given.

    Raises:
        AssertionError: if an edit does not fit exactly once.
    """
    name = f"radixkv.scheduler_planted_{next(_numbers)}"
    with TemporaryDirectory() as folder:
        for package in PACKAGES:
            (Path(folder) / package).mkdir()
        for path in (
            path for package in ("", *PACKAGES) for path in (SOURCE / package).glob("*.py")
        ):
            file = path.relative_to(SOURCE).as_posix()
            text = path.read_text("utf-8")
            for old, new in bug.edits if bug is not None and bug.file == file else ():
                fits = text.count(old)
                assert fits == 1, f"{file} has {old!r} {fits} times: write the bug anew"
                text = text.replace(old, new)
            (Path(folder) / file).write_text(text, "utf-8")
        spec = importlib.util.spec_from_file_location(
            name, Path(folder) / "__init__.py", submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            importlib.import_module(f"{name}.fuzz.handoff_adapter")
            yield sys.modules[f"{name}.handoff"]
        finally:
            for each in [each for each in sys.modules if each.split(".")[:2] == name.split(".")]:
                del sys.modules[each]
