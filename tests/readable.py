"""Waiting for sockets and pipes with any descriptor: `select.select` refuses those above 1,023."""

from __future__ import annotations

import selectors
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import HasFileno

File = TypeVar("File", bound="HasFileno | int")


def readable(files: Iterable[File], timeout_s: float) -> list[File]:
    """Those of the files that can be read, or have ended; none after the timeout."""
    with selectors.DefaultSelector() as selector:
        for each in files:
            selector.register(each, selectors.EVENT_READ)
        return [cast("File", key.fileobj) for key, _ in selector.select(timeout_s)]
