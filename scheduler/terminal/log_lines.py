"""What a logger of this package is told, as calls of a function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def listen(name: str, take: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Call a function with each record of a logger and those below it, from INFO on.

    Args:
        name: Name of the logger.
        take: Called on the thread that logs.
    """
    handler = _Handler(take)
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Handler(logging.Handler):
    """Passes each record to a function."""

    def __init__(self, take: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)
