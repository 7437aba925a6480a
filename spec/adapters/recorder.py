"""Records the calls that an adapter makes on its manager, as lines of a script.

An adapter wraps the classes and functions of its manager that it calls::

    self.manager = recorded(BlockManager)(num_blocks)

That changes nothing, except while a ``Recording`` is active: then the object is a stand-in that
writes down each call with its arguments.
"""

from __future__ import annotations

import builtins
import math
import re
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

Made = TypeVar("Made")

PLAIN: Final = (type(None), bool, int, float, str, bytes, slice, Enum)
CONTAINERS: Final = (list, tuple, set, frozenset, deque, dict)


@dataclass
class Line:
    """One line of a script.

    Attributes:
        text: a call, an assignment to an attribute, or the read of an attribute.
        name: variable for its result; "" for none.
        result: its result as text; "" if it has none, or one that no text stands for.
        answer: its result, if it has a text.
        error: what it raised.
        is_read: whether it only reads an attribute.
        is_look: whether the adapter only looked at the manager to answer.
    """

    text: str
    name: str = ""
    result: str = ""
    answer: Any = None
    error: str = ""
    is_read: bool = False
    is_look: bool = False


@dataclass
class Recording:
    """The lines so far, and the imports that they need."""

    lines: list[Line] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    _names: Counter[str] = field(default_factory=Counter)
    _objects: dict[int, tuple[Any, str]] = field(default_factory=dict)

    def call(self, text: str, function: Callable[..., Any], given: Any, named: Any) -> Any:
        """Call a function and write it down; its result is a stand-in unless it is plain."""
        shown = [self.text(each) for each in given]
        shown += [f"{name}={self.text(each)}" for name, each in named.items()]
        line = Line(f"{text}({', '.join(shown)})")
        self.lines.append(line)
        real = [_real(each) for each in given]
        try:
            result = function(*real, **{name: _real(each) for name, each in named.items()})
        except BaseException as error:
            line.error = repr(error)
            raise
        return self.note(line, result)

    def read(self, text: str, value: Any) -> Any:
        """Write down an attribute; a stand-in for its value unless it is plain."""
        line = Line(f"list({text})" if isinstance(value, deque) else text, is_read=True)
        if _is_plain(value):
            self.lines.append(line)
            return self.note(line, value)
        return self._objects[id(value)][0] if id(value) in self._objects else _StandIn(
            self, value, text
        )  # fmt: skip

    def note(self, line: Line, result: Any) -> Any:
        """Write down a result; return a stand-in for it unless it is plain."""
        if _is_plain(result):
            line.result = self.text(result) if result is not None else ""
            line.answer = result
            return result
        if id(result) in self._objects:
            return self._objects[id(result)][0]
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(result).__name__).lower().strip("_")
        kind = "items" if hasattr(builtins, kind) else kind
        self._names[kind] += 1
        line.name = f"{kind}{self._names[kind]}" if self._names[kind] > 1 else kind
        if isinstance(result, tuple):
            parts = (
                each if _is_plain(each) else _StandIn(self, each, f"{line.name}[{place}]")
                for place, each in enumerate(result)
            )
            return _like(result, parts)
        stand_in = _StandIn(self, result, line.name)
        self._objects[id(result)] = stand_in, line.name
        return stand_in

    def add_import(self, made: Any) -> str:
        """Import a class or function by its name; return the name."""
        name: str = made.__qualname__.split(".")[0]
        self.imports.add(f"from {made.__module__} import {name}")
        module = sys.modules.get(made.__module__)
        path = Path(getattr(module, "__file__", None) or "").resolve()
        root = path.parents[made.__module__.count(".") + (path.name == "__init__.py")]
        installed = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")}
        if path.suffix and not installed & set(path.parents):
            self.folders.add(str(root))
        return str(made.__qualname__)

    def text(self, value: Any) -> str:
        """Write a value as an expression."""
        if isinstance(value, _StandIn):
            return _of(value)[2]
        if isinstance(value, Enum):
            kind = self.add_import(type(value))
            is_member = value.name in type(value).__members__  # or several flags
            return f"{kind}.{value.name}" if is_member else f"{kind}({self.text(value.value)})"
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self.text, value))
            if _is_named(value) and "<" not in type(value).__qualname__:
                return f"{self.add_import(type(value))}({inner})"
            comma = "," if len(value) == 1 else ""
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{comma})"
        if isinstance(value, dict):
            pairs = (f"{self.text(key)}: {self.text(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, set | frozenset) and value:
            text = f"{{{', '.join(sorted(map(self.text, value)))}}}"
            return text if isinstance(value, set) else f"frozenset({text})"
        if isinstance(value, deque):
            return self.text(list(value))
        if isinstance(value, SimpleNamespace):
            self.imports.add("from types import SimpleNamespace")
            pairs = (f"{name}={self.text(each)}" for name, each in vars(value).items())
            return f"SimpleNamespace({', '.join(pairs)})"
        module = type(value).__module__.partition(".")[0]
        if module in ("torch", "numpy") and hasattr(value, "tolist"):
            self.imports.add(f"import {module}")
            make = "tensor" if module == "torch" else "array"
            kind = str(value.dtype) if module == "torch" else f"{str(value.dtype)!r}"
            return f"{module}.{make}({self.text(value.tolist())}, dtype={kind})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({repr(value)!r})"
        return repr(value)


def _index_text(recording: Recording, index: Any) -> str:
    if isinstance(index, tuple) and index:
        text = ", ".join(_index_text(recording, each) for each in index)
        return f"{text}," if len(index) == 1 else text
    if isinstance(index, slice):
        ends = ["" if each is None else str(each) for each in (index.start, index.stop)]
        return ":".join(ends if index.step is None else [*ends, str(index.step)])
    return recording.text(index)


class _StandIn:
    """Stands for an object of the manager, and writes down what is done with it."""

    __slots__ = ("_recorded",)

    def __init__(self, recording: Recording, real: Any, text: str) -> None:
        object.__setattr__(self, "_recorded", (recording, real, text))

    def __getattr__(self, name: str) -> Any:
        recording, real, text = _of(self)
        value = getattr(real, name)
        text = f"{text}.{name}"
        if callable(value) and not isinstance(value, type):
            return lambda *given, **named: recording.call(text, value, given, named)
        return recording.read(text, value)

    def __setattr__(self, name: str, value: Any) -> None:
        recording, real, text = _of(self)
        recording.lines.append(Line(f"{text}.{name} = {recording.text(value)}"))
        setattr(real, name, _real(value))

    def __getitem__(self, index: Any) -> Any:
        recording, real, text = _of(self)
        return recording.read(f"{text}[{_index_text(recording, index)}]", real[_real(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        recording, real, text = _of(self)
        place = f"{text}[{_index_text(recording, index)}]"
        recording.lines.append(Line(f"{place} = {recording.text(value)}"))
        real[_real(index)] = _real(value)

    def __len__(self) -> int:
        return len(_of(self)[1])

    def __bool__(self) -> bool:
        return bool(_of(self)[1])

    def __iter__(self) -> Iterator[Any]:
        recording, real, text = _of(self)
        if not isinstance(real, list | tuple):
            line = Line(f"list({text})", is_read=True)
            recording.lines.append(line)
            return iter(recording.note(line, list(real)))
        parts = enumerate(real)
        return (recording.read(f"{text}[{place}]", each) for place, each in parts)

    def __int__(self) -> int:
        return int(_of(self)[1])

    def __repr__(self) -> str:
        return repr(_of(self)[1])


def _of(stand_in: _StandIn) -> tuple[Recording, Any, str]:
    found: tuple[Recording, Any, str] = object.__getattribute__(stand_in, "_recorded")
    return found


def _real(value: Any) -> Any:
    """Replace stand-ins by their objects, also within lists, tuples and dictionaries."""
    if isinstance(value, _StandIn):
        return _of(value)[1]
    if isinstance(value, SimpleNamespace):
        for name, each in vars(value).items():
            setattr(value, name, _real(each))
    elif isinstance(value, list | tuple) and any(_real(each) is not each for each in value):
        return _like(value, map(_real, value))
    elif isinstance(value, dict) and any(_real(each) is not each for each in value.values()):
        return {key: _real(each) for key, each in value.items()}
    return value


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")


def _like(value: Any, parts: Iterable[Any]) -> Any:
    """Return a list, a tuple or a named tuple of other parts."""
    return type(value)._make(parts) if _is_named(value) else type(value)(parts)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in CONTAINERS or _is_named(value):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


_active: Recording | None = None


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what is made with `recorded` from now on."""
    global _active
    _active = made = Recording()
    try:
        yield made
    finally:
        _active = None


def recorded(make: Callable[..., Made]) -> Callable[..., Made]:
    """Return a class or function of a manager, so that a script can repeat what is done with it.

    Example:
        >>> from fractions import Fraction
        >>> from radixkv.spec.adapters.recorder import recorded, recording
        >>> with recording() as log:
        ...     number = recorded(Fraction)(3, 6)
        ...     number.limit_denominator(10) and None
        >>> [line.text for line in log.lines]
        ['Fraction(3, 6)', 'fraction.limit_denominator(10)']
    """
    if _active is None:
        return make
    log = _active
    name = log.add_import(make)

    def recording_make(*given: Any, **named: Any) -> Made:
        made: Made = log.call(name, make, given, named)
        return made

    return partial(recording_make)
