"""Tokens that our cache is given in a call, in each of the forms that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Lent: TypeAlias = list[int] | npt.NDArray[np.signedinteger]
"""A list, an array of int32 or int64, or a read-only view of one."""


def lend(tokens: list[int]) -> Lent:
    """Return tokens in the form to pass to the cache, which depends on their number.

    A list is the caller's own. Call `take_back` after an array.
    """
    form = len(tokens) % 4
    if form == 3:
        return tokens
    dtype = np.int64 if len(tokens) % 8 == 5 else np.int32
    array: npt.NDArray[np.signedinteger] = np.array(tokens, dtype)
    if form == 0:
        array = array[:]
        array.flags.writeable = False
    return array


def listed(lent: Lent) -> list[int]:
    """Return lent tokens as a list."""
    return lent if isinstance(lent, list) else lent.tolist()


def take_back(lent: Lent, tokens: list[int]) -> None:
    """Write the tokens of an array back to the caller's list, which reveals a change by the cache.

    Then overwrite the array, because the cache must not keep a reference to it.
    """
    if not isinstance(lent, list):
        tokens[:] = lent.tolist()
        array = lent if lent.base is None else lent.base
        array[:] = -7


@contextmanager
def lending(tokens: list[int]) -> Iterator[Lent]:
    """Lend tokens for one call, and take them back however it ends."""
    lent = lend(tokens)
    try:
        yield lent
    finally:
        take_back(lent, tokens)
