"""Holding ctrl-C back where it would break something."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let a ctrl-C wait until the end of the block.

    Threads and processes that are started in it never get one: it is their parent's. Loading JAX
    or NumPy in the middle, it may be lost, or end the process without a word.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
