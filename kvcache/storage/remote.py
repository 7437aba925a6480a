"""Helpers of the backends that call a server: request counts, time limits, whole-value reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final

from .errors import BackendError

DEFAULT_PREFIX: Final = "radixkv:"
"""Prefix of every key in a server that has one flat set of names."""


class RequestCounts:
    """Thread-safe counts of requests and failed requests."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = Lock()
        self._requests = 0
        self._failed = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request, and a failed one if the block raises BackendError."""
        with self._lock:
            self._requests += 1
        try:
            yield
        except BackendError:
            with self._lock:
                self._failed += 1
            raise

    def read(self) -> dict[str, int]:
        """Return the counts by name."""
        with self._lock:
            return {"requests": self._requests, "failed_requests": self._failed}


def check_timeouts(timeout_s: float, connect_timeout_s: float) -> None:
    """Validate the time limits of a backend.

    Raises:
        ValueError: if one is not positive.
    """
    for name, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def scatter(value: bytes | memoryview, into: Sequence[memoryview]) -> int:
    """Copy the bytes of value into the buffers in order, and return the length of value.

    For the `get` of a backend whose client returns whole values.
    """
    source, position = memoryview(value), 0
    for part in into:
        piece = source[position : position + len(part)]
        part[: len(piece)] = piece
        position += len(piece)
    return len(source)
