"""Validation and conversion of caller input (tokens, block ids, counts, namespaces)."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import CountError, IdError, NamespaceError, TokenError

Int32Array: TypeAlias = npt.NDArray[np.int32]
"""A NumPy array of int32, such as token ids or block ids."""


class SupportsArray(Protocol):
    """An array of NumPy or of another library, for example of JAX or PyTorch."""

    def __array__(self) -> npt.NDArray[Any]:
        """Return the elements; an array on a device is copied to the host."""


Tokens: TypeAlias = Sequence[int] | SupportsArray
"""Token ids: a sequence of int, or a one-dimensional array of any integer dtype."""

INT32: Final = np.dtype(np.int32)
"""The dtype, created once instead of by every NumPy call."""


def as_tokens(tokens: Tokens) -> Int32Array:
    """Return tokens as a one-dimensional int32 array, without a copy if it is one already.

    A token is any int32: the cache only compares them. A list is copied into a read-only array. If
    several calls take the same list, convert it once and pass the array to each of them. An array
    on a device is copied to the host, and the call waits until its values are computed.

    Args:
        tokens: int32 ``[n]``; another integer dtype or a sequence of int is converted. A bool in a
            sequence counts as 0 or 1, unless it is the first item, because that is a mask.

    Raises:
        TokenError: for another dtype or shape, a value outside int32, or an array that cannot be
            read.
    """
    return _as_int32("token", tokens, TokenError)


def as_ids(name: str, ids: Sequence[int] | SupportsArray) -> Int32Array:
    """Return block ids, or rows, as a one-dimensional int32 array.

    Args:
        name: what one of them is called in an error.
        ids: the ids.

    Raises:
        IdError: for another dtype or shape, or a value outside int32.
    """
    return _as_int32(name, ids, IdError)


def _as_int32(
    name: str, values: Sequence[int] | SupportsArray, error: type[TokenError | IdError]
) -> Int32Array:
    if isinstance(values, np.ndarray):
        array = values
    elif hasattr(values, "__array__"):
        try:
            array = np.asarray(values)
        except (RuntimeError, TypeError, ValueError) as cause:
            kind = type(values).__name__
            raise error(f"{name}s cannot be read from {kind}: {cause}") from cause
    elif isinstance(values, Sequence) and not isinstance(values, bytes):
        return _pack(name, values, error)
    else:
        raise error(f"{name}s must be an int32 array or a list, got {values!r}")
    is_int32 = array.dtype is INT32 or array.dtype == INT32  # `is` is much faster
    if not is_int32 and array.dtype.kind not in "iu":
        raise error(f"{name}s must be int32, got {array.dtype}")
    if array.ndim != 1:
        raise error(f"{name}s must have one dimension, got shape {array.shape}")
    if is_int32:
        return array
    narrow = array.astype(INT32)
    if np.count_nonzero(narrow != array):
        raise error(_first_fault(name, array.tolist()))
    return narrow


def _pack(name: str, values: Sequence[int], error: type[TokenError | IdError]) -> Int32Array:
    """Convert a sequence.

    `struct` is three times as fast as NumPy, which would also cut a float to an integer.
    """
    try:
        if len(values) == 0 or not isinstance(values[0], bool):
            return np.frombuffer(struct.pack(f"{len(values)}i", *values), INT32)
    except (struct.error, TypeError):
        pass
    raise error(_first_fault(name, values))


def _first_fault(name: str, values: Sequence[object]) -> str:
    """Return why the first of the values that is not an int32 is none."""
    for position, value in enumerate(values):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            return f"{name} {position} must be an integer, got {value!r}"
        if not -(2**31) <= value < 2**31:
            return f"{name} {position} is {value}, outside int32"
    raise AssertionError(f"{name}s were refused without a fault")


def as_bytes(tokens: Int32Array) -> memoryview:
    """Return the bytes of tokens, without a copy if they are contiguous."""
    return np.ascontiguousarray(tokens).data.cast("B")


def as_count(name: str, value: int, minimum: int = 0) -> int:
    """Return value as an int.

    Raises:
        CountError: if it is not an integer, or less than minimum.
    """
    if type(value) is int and value >= minimum:  # the usual case
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise CountError(f"{name} must be an integer, got {value!r}")
    if value < minimum:
        raise CountError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def check_namespaces(name: str, namespaces: Collection[bytes]) -> None:
    """Check that namespaces is a collection of bytes, and not one namespace.

    Raises:
        NamespaceError: if it is not. The error quotes nothing: there may be a salt.
    """
    several = isinstance(namespaces, Collection) and not isinstance(namespaces, str | bytes)
    if not several or not all(isinstance(each, bytes) for each in namespaces):
        raise NamespaceError(f"{name} must be a list of namespaces, each of them bytes")


def make_namespace(**fields: str | bytes | int) -> bytes:
    """Encode named fields as a namespace. Different fields never give equal bytes.

    Requests share blocks only within a namespace. Include everything that changes the KV of equal
    tokens: model revision, LoRA adapter, tenant salt, content hashes of images.

    The encoding is the name, type and value of each field, each prefixed by its length, sorted by
    name. So ``lora="a"`` and ``salt="a"`` differ, and so do ``a="bc"`` and ``ab="c"``.

    Example:
        >>> make_namespace(lora="sql", salt="7") == make_namespace(salt="7", lora="sql")
        True

    Raises:
        NamespaceError: for a value that is not str, bytes or int, or a str without UTF-8 encoding.
    """
    parts = []
    for name, value in sorted(fields.items()):
        if isinstance(value, str):
            tag, encoded = b"s", _encode(value)
        elif isinstance(value, bytes):
            tag, encoded = b"b", value
        elif isinstance(value, int) and not isinstance(value, bool):
            tag, encoded = b"i", str(value).encode()
        else:
            raise NamespaceError(f"namespace field {name} must be str, bytes or int, got {value!r}")
        for item in (_encode(name), tag + encoded):
            parts += [len(item).to_bytes(4, "little"), item]
    return b"".join(parts)


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NamespaceError(f"namespace text {text!r} has no UTF-8 encoding") from error
