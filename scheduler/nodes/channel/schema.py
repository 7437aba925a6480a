"""Encodings of fixed schema: every field has a type and limits, which hold in both directions.

A record is a list of its fields' values, without names; msgpack makes bytes of lists, numbers,
strings and bytes, and has nothing else to decode into.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final

from .errors import DecodeError


class Field(ABC):
    """One type of value."""

    def pack(self, value: Any) -> Any:
        """Return what stands for a value; it has been checked then.

        Raises:
            DecodeError: if the value is not of the type, or out of its limits.
        """
        packed = self.simplify(value)
        self.unpack(packed)
        return packed

    def simplify(self, value: Any) -> Any:
        """Return what stands for a value."""
        return value

    @abstractmethod
    def unpack(self, packed: Any) -> Any:
        """Return the value that something stands for.

        Raises:
            DecodeError: if it stands for none.
        """


class Int(Field):
    """An integer in a range."""

    def __init__(self, minimum: int = 0, maximum: int = 2**31 - 1) -> None:
        self._minimum = minimum
        self._maximum = maximum

    def unpack(self, packed: Any) -> int:
        """See `Field.unpack`."""
        if type(packed) is not int:  # True is an int, too
            raise DecodeError(f"needs an integer, got {type(packed).__name__}")
        if not self._minimum <= packed <= self._maximum:
            raise DecodeError(f"needs {self._minimum} to {self._maximum}, got {packed}")
        return packed


class Float(Field):
    """A finite number in a range."""

    def __init__(self, minimum: float, maximum: float) -> None:
        self._minimum = minimum
        self._maximum = maximum

    def simplify(self, value: Any) -> Any:
        """See `Field.simplify`."""
        return float(value) if type(value) is int else value

    def unpack(self, packed: Any) -> float:
        """See `Field.unpack`."""
        if type(packed) is not float:
            raise DecodeError(f"needs a float, got {type(packed).__name__}")
        if not (isfinite(packed) and self._minimum <= packed <= self._maximum):
            raise DecodeError(f"needs {self._minimum} to {self._maximum}, got {packed}")
        return packed


class Bool(Field):
    """True or False."""

    def unpack(self, packed: Any) -> bool:
        """See `Field.unpack`."""
        if type(packed) is not bool:
            raise DecodeError(f"needs a bool, got {type(packed).__name__}")
        return packed


class Text(Field):
    """A string of limited length."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars

    def unpack(self, packed: Any) -> str:
        """See `Field.unpack`."""
        if type(packed) is not str:
            raise DecodeError(f"needs a string, got {type(packed).__name__}")
        if len(packed) > self._max_chars:
            raise DecodeError(f"has {len(packed)} characters, the limit is {self._max_chars}")
        if any("\ud800" <= char <= "\udfff" for char in packed):
            raise DecodeError("has half of a character")
        return packed


class OneOf(Field):
    """One of a few strings."""

    def __init__(self, *choices: str) -> None:
        self._choices = choices

    def unpack(self, packed: Any) -> str:
        """See `Field.unpack`."""
        if type(packed) is not str or packed not in self._choices:
            raise DecodeError(f"needs one of {', '.join(self._choices)}")
        return packed


class Bytes(Field):
    """Bytes of limited length."""

    def __init__(self, max_bytes: int, *, min_bytes: int = 0, multiple_of: int = 1) -> None:
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._multiple_of = multiple_of

    def unpack(self, packed: Any) -> bytes:
        """See `Field.unpack`."""
        if type(packed) is not bytes:
            raise DecodeError(f"needs bytes, got {type(packed).__name__}")
        if not self._min_bytes <= len(packed) <= self._max_bytes:
            limits = f"{self._min_bytes} to {self._max_bytes}"
            raise DecodeError(f"has {len(packed)} bytes, the limits are {limits}")
        if len(packed) % self._multiple_of:
            raise DecodeError(f"has {len(packed)} bytes, no multiple of {self._multiple_of}")
        return packed


class Maybe(Field):
    """A value of some type, or None."""

    def __init__(self, field: Field) -> None:
        self._field = field

    def simplify(self, value: Any) -> Any:
        """See `Field.simplify`."""
        return None if value is None else self._field.simplify(value)

    def unpack(self, packed: Any) -> Any:
        """See `Field.unpack`."""
        return None if packed is None else self._field.unpack(packed)


class Many(Field):
    """A tuple of values of one type."""

    def __init__(self, field: Field, max_items: int) -> None:
        self._field = field
        self._max_items = max_items

    def simplify(self, value: Any) -> Any:
        """See `Field.simplify`."""
        return [self._field.simplify(item) for item in value]

    def unpack(self, packed: Any) -> tuple[Any, ...]:
        """See `Field.unpack`."""
        if type(packed) is not list:
            raise DecodeError(f"needs a list, got {type(packed).__name__}")
        if len(packed) > self._max_items:
            raise DecodeError(f"has {len(packed)} items, the limit is {self._max_items}")
        return tuple([self._field.unpack(item) for item in packed])


class Record(Field):
    """A dataclass or named tuple: the values of its fields, in order."""

    def __init__(self, make: Callable[..., Any], fields: Mapping[str, Field]) -> None:
        """Make the encoding.

        Args:
            make: takes the fields by position, and may refuse them with a ValueError.
            fields: name and type of each.
        """
        self.make: Final = make
        self._fields: Final = dict(fields)

    def simplify(self, value: Any) -> Any:
        """See `Field.simplify`."""
        return [field.simplify(getattr(value, name)) for name, field in self._fields.items()]

    def unpack(self, packed: Any) -> Any:
        """See `Field.unpack`."""
        if type(packed) is not list or len(packed) != len(self._fields):
            raise DecodeError(f"needs a list of {len(self._fields)}")
        values = []
        for (name, field), item in zip(self._fields.items(), packed, strict=True):
            try:
                values.append(field.unpack(item))
            except DecodeError as error:
                raise DecodeError(f"{name}: {error}") from None
        try:
            return self.make(*values)
        except ValueError as error:
            raise DecodeError(str(error)) from None
