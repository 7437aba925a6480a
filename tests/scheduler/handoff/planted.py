"""A copy of the hand-off with a planted bug."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Final

from radixkv.scheduler import handoff

from .bugs import Bug

SOURCE: Final = Path(handoff.__file__).parent
_numbers = count(1)


@contextmanager
def planted(bug: Bug | None) -> Iterator[ModuleType]:
    """Load a copy of the package, with a bug if one is given.

    Raises:
        AssertionError: if an edit does not fit exactly once.
    """
    name = f"radixkv.scheduler.handoff_planted_{next(_numbers)}"
    with TemporaryDirectory() as folder:
        for path in SOURCE.glob("*.py"):
            text = path.read_text("utf-8")
            for old, new in bug.edits if bug is not None and bug.file == path.name else ():
                fits = text.count(old)
                assert fits == 1, f"{path.name} has {old!r} {fits} times: write the bug anew"
                text = text.replace(old, new)
            (Path(folder) / path.name).write_text(text, "utf-8")
        spec = importlib.util.spec_from_file_location(
            name, Path(folder) / "__init__.py", submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            importlib.import_module(f"{name}.drive")
            yield module
        finally:
            for each in [each for each in sys.modules if each.split(".")[:3] == name.split(".")]:
                del sys.modules[each]
