"""Planted bugs: a text of a module is replaced, and its functions get the code of the new text.

Objects that exist already have the bug too, and no copy of the package is made. Only functions that
the module had before are changed, so a bug adds none, and no global name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType


@dataclass(frozen=True)
class Bug:
    """A bug.

    Attributes:
        name: what is wrong, in plain words.
        module: name of the module below ``radixkv``.
        edits: texts that the module has once, and what stands there instead.
    """

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.name


def bug(name: str, module: str, *edits: tuple[str, str]) -> Bug:
    """Write a bug with its edits in a row."""
    return Bug(name, module, edits)


def planted_source(planted: Bug) -> tuple[ModuleType, str]:
    """Return the module of a bug, and its text with the bug.

    Raises:
        AssertionError: if an edit does not fit exactly once.
    """
    module = importlib.import_module(f"radixkv.{planted.module}")
    assert module.__file__ is not None
    source = Path(module.__file__).read_text("utf-8")
    for old, new in planted.edits:
        fits = source.count(old)
        assert fits == 1, f"{module.__name__} has {old!r} {fits} times: write {planted.name!r} anew"
        source = source.replace(old, new)
    return module, source


@contextmanager
def planted(planted: Bug) -> Iterator[None]:
    """Give the functions of a module the code of its changed text.

    Raises:
        AssertionError: if an edit does not fit exactly once, or changes no function.
    """
    module, source = planted_source(planted)
    assert module.__file__ is not None
    new = _codes(compile(source, module.__file__, "exec", dont_inherit=True))
    changed = {}
    for name, function in _functions(module):
        code = function.__code__
        if name in new and not _is_same(code, new[name]):
            changed[function] = code
            function.__code__ = new[name]
    assert changed, f"{planted.name!r} changes no function"
    try:
        yield
    finally:
        for function, code in changed.items():
            function.__code__ = code


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Whether two functions do the same, wherever they stand in their file."""
    if (one.co_code, one.co_names, one.co_varnames) != (
        other.co_code, other.co_names, other.co_varnames
    ):  # fmt: skip
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return all(
        _is_same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else a == b
        for a, b in pairs
    )


def _codes(code: CodeType, prefix: str = "") -> dict[str, CodeType]:
    """Return the functions of a module's code and of its classes, by qualified name."""
    found = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            name = f"{prefix}{each.co_name}"
            found[_setter(name) if name in found else name] = each
            found |= _codes(each, f"{name}.")
    return found


def _setter(name: str) -> str:
    """Return another name for the setter of a property, which has that of the getter."""
    return f"{name}.setter"


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of a module and of its classes, with the accessors of properties."""
    for owner in [module, *(each for each in vars(module).values() if inspect.isclass(each))]:
        if owner.__dict__.get("__module__", module.__name__) != module.__name__:
            continue
        for value in list(vars(owner).values()):
            if isinstance(value, property):
                accessors = [value.fget]
                if inspect.isfunction(value.fset):
                    yield _setter(value.fset.__qualname__), value.fset
            elif isinstance(value, (staticmethod, classmethod)):
                accessors = [value.__func__]
            elif isinstance(value, functools.cached_property):
                accessors = [value.func]
            else:
                accessors = [value]
            for each in accessors:
                function = inspect.unwrap(each) if callable(each) else None
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    yield function.__qualname__, function
