"""Counts the references that a manager holds, so that what it never drops is seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Final
from weakref import WeakKeyDictionary

_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_LEAVES: Final = frozenset(
    (ModuleType, FunctionType, MethodType, BuiltinFunctionType, NoneType, bool, int, float,
     str, bytes, bytearray)
)  # fmt: skip


def count_references(root: object, *leave_out: object) -> int:
    """Return how many references an object and all objects that it reaches hold.

    A reference is an attribute, or an entry of a list, tuple, set, deque or dict. Classes, members
    of enums, modules and functions are not followed.

    Args:
        root: the object.
        leave_out: objects that are not followed either, such as a free list that grows by doubling.

    Example:
        >>> from radixkv.spec.adapters.references import count_references
        >>> count_references([1, (2, 3)]), count_references({"a": [None] * 5})
        (4, 7)
    """
    number, stack = 0, [root]
    seen = {id(each) for each in leave_out}
    while stack:
        each = stack.pop()
        is_leaf = type(each) in _LEAVES or isinstance(each, type | Enum)
        if not is_leaf and id(each) not in seen:
            seen.add(id(each))
            before = len(stack)
            stack.extend(_references(each))
            number += len(stack) - before
    return number


def _references(each: object) -> Iterable[object]:
    held: list[Iterable[object]] = []
    if isinstance(each, dict):
        held += each.keys(), each.values()
    elif isinstance(each, _SEQUENCES):
        held.append(each)
    held.append(getattr(each, "__dict__", {}).values())
    held.append(getattr(each, name, None) for name in _slots(type(each)))
    return chain.from_iterable(held)


def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class and its bases, private ones as Python mangles them.

    ``__dict__`` is none of them, because what it holds is counted.
    """
    if kind not in _SLOTS:
        names: list[str] = []
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                is_private = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
        _SLOTS[kind] = tuple(name for name in names if name != "__dict__")
    return _SLOTS[kind]


_SLOTS: Final[WeakKeyDictionary[type, tuple[str, ...]]] = WeakKeyDictionary()
