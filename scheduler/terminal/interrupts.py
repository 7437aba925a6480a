"""Ctrl-C while modules are loaded, processes are started, or an engine is made."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_STATUS: Final = 130


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


def admit_interrupt() -> None:
    """Raise `KeyboardInterrupt` if `hold_interrupts` has delayed a ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def remember_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether there was a ctrl-C since the begin of the block.

    For a loop that asks often. Only the second ctrl-C raises `KeyboardInterrupt`: Python prints and
    loses one that is raised in the callback of a weak reference or in ``__del__``.
    """
    interrupts: list[int] = []

    def remember(number: int, _: object) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def delay_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` if there was a ctrl-C since the begin.

    The end of the block raises it, too; what is done in between is done as a whole. The second
    ctrl-C raises it at once. In other threads, or if the program has a handler of its own, the
    block changes nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    with remember_interrupts() as has_interrupt:

        def raise_interrupt() -> None:
            if has_interrupt():
                raise KeyboardInterrupt

        yield raise_interrupt
    raise_interrupt()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let ctrl-C end the process at once, with exit status 130, until the end of the block.

    For what loads a model or compiles programs, and has nothing yet that must be closed. JAX calls
    Python from its own code there, such as at a garbage collection. A `KeyboardInterrupt` raised in
    such a call is printed and lost. And an interpreter that ends in the middle of a compilation may
    crash, because its threads go on.
    """
    before = signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(*_: object) -> None:
    # Not `print`, which may be what was interrupted. A terminal's line may be half full.
    os.write(2, (b"\n" if os.isatty(2) else b"") + b"radixkv: interrupted\n")
    os._exit(_STATUS)
