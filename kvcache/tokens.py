"""What comes in through the door: token ids, counts and namespaces, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import CountError, NamespaceError, TokenError

Int32Array: TypeAlias = npt.NDArray[np.int32]
Tokens: TypeAlias = Int32Array | Sequence[int]

INT32: Final = np.dtype(np.int32)
"""What a call of numpy would make of the type, each time anew."""


def as_tokens(tokens: Tokens) -> Int32Array:
    """Return tokens as a one-dimensional int32 array, without a copy where it is one already.

    A token is any int32: the cache compares ids and gives them no meaning.

    Raises:
        TokenError: for another dtype or shape, or an id outside int32.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.dtype is not INT32 and tokens.dtype != INT32:  # `is` is much the faster
            raise TokenError(f"tokens must be int32, got {tokens.dtype}")
        if tokens.ndim != 1:
            raise TokenError(f"tokens must have one dimension, got shape {tokens.shape}")
        return tokens
    for position, token in enumerate(tokens):
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise TokenError(f"token {position} must be an integer, got {token!r}")
        if not -(2**31) <= token < 2**31:
            raise TokenError(f"token {position} is {token}, outside int32")
    return np.asarray(tokens, dtype=INT32)


def as_bytes(tokens: Int32Array) -> memoryview:
    """Return the bytes of tokens, without a copy where they lie side by side."""
    return np.ascontiguousarray(tokens).data.cast("B")


def as_count(name: str, value: int, minimum: int = 0) -> int:
    """Return value if it is an integer of at least minimum.

    Raises:
        CountError: if it is not.
    """
    if type(value) is int and value >= minimum:  # nearly always
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise CountError(f"{name} must be an integer, got {value!r}")
    if value < minimum:
        raise CountError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def make_namespace(**fields: str | bytes | int) -> bytes:
    """Encode named fields as a namespace: different fields never give equal bytes.

    Requests share blocks only inside one namespace. Put into it all that changes the KV of equal
    tokens: model revision, LoRA adapter, tenant salt, content hashes of images.

    Each field is name, type and value, each with its length in front, sorted by name; so
    ``lora="a"`` and ``salt="a"`` differ, and so do ``a="bc"`` and ``ab="c"``.

    Example:
        >>> make_namespace(lora="sql", salt="7") == make_namespace(salt="7", lora="sql")
        True

    Raises:
        NamespaceError: for a value that is neither str, bytes nor int, or a str without UTF-8.
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
