"""Imports the factory to test, given as ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cache import AdapterError

Make = Callable[..., Any]


class TargetError(ValueError):
    """A target cannot be imported; the message is one line."""


def load_target(target: str) -> Make:
    """Import a factory.

    The working directory, or the directory of the file, is importable, as if the target were run
    as a script.

    Returns:
        The factory; exceptions of its calls become an `AdapterError`.

    Raises:
        TargetError: the module, file or name does not exist, or cannot be called.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise TargetError("expected package.module:factory or path/to/file.py:factory")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{where} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{name} in {where} cannot be called, it is {found!r}")
    return _explained(found, name)


def target_beside(target: str, file: Path) -> str:
    """Return a target whose file, if there is one beside another file, is meant to be that."""
    where, colon, name = target.rpartition(":")
    if where.endswith(".py") and (beside := file.parent / where).is_file():
        return f"{beside}{colon}{name}"
    return target


def _load_module(name: str) -> Any:
    _make_importable(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise TargetError(f"there is no module {name}") from None
        raise _failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    _make_importable(str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses and pickle look up a class's module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
        raise _failed(str(path), error) from error
    return module


def _make_importable(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _failed(what: str, error: Exception | SystemExit) -> TargetError:
    return TargetError(f"importing {what} raised {type(error).__name__}: {error}")


def _explained(factory: Make, name: str) -> Make:
    def make(*sizes: Any) -> Any:
        try:
            return factory(*sizes)
        except AdapterError:
            raise
        except (Exception, SystemExit) as error:
            shown = ", ".join(map(repr, sizes))
            raise AdapterError(f"{name}({shown}) raised {type(error).__name__}: {error}") from error

    make.__wrapped__ = factory  # type: ignore[attr-defined]  # it may restrict the sizes
    return make
