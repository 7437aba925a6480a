"""Delay of ctrl-C while modules are loaded or processes are started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay ctrl-C until the end of the block.

    A ctrl-C that arrives while JAX or NumPy is loaded may be lost, or end the process silently.
    Threads and processes started in the block never receive one; their parent does.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
