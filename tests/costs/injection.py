"""Errors at every call: each call that a module makes, or gets, raises once.

A test of a layer that gives back uses `injections` in a loop, and checks the layer after each.
"""

from __future__ import annotations

import _weakrefset
import enum
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any, Final

from .measure import without_collections

ERRORS: Final[tuple[type[BaseException], ...]] = (MemoryError, KeyboardInterrupt)
ALL_ERRORS: Final = (*ERRORS, OSError)
OF_THREADS: Final = (MemoryError, OSError)
"""Python interrupts its main thread only."""

NEITHER: Final = {"__exit__", "__del__", "close", "len", "hash"}
"""Calls that neither allocate nor do I/O, or that clean up."""

IGNORED: Final = {enum.__file__, _weakrefset.__file__}
"""A member of an enumeration hashes its name, which does neither; and a set of weak references is
told of garbage at any time."""


class Injector:
    """Raises an error instead of a call: the one with a number, counted from 0, or at a new place.

    It raises once, in the thread that calls it, so that cleaning up is not disturbed. The end of a
    ``with`` is no place to raise: nothing could be given back after an interrupt there. Nor is the
    beginning of one that is written in C, of which Python tells since 3.14. Calls that clean up may
    raise when they return, as an interrupted one does, or a ``close`` that reports a disk's error:
    what they do is done, and the rest of the cleaning is left.

    Attributes:
        number: number of the call.
        places: places where earlier injectors have raised, if each is to raise at a new one. That
            is for operations whose calls differ from run to run.
        raised_in: the place where it has raised; empty before.
    """

    def __init__(
        self,
        number: int,
        error: type[BaseException],
        files: frozenset[str],
        cleaning: frozenset[str],
        places: set[str] | None,
        after: frozenset[str] = frozenset(),
    ) -> None:
        self.number = number
        self.error = error
        self.files = files
        self.places = places
        self.raised_in = ""
        self._cleaning = cleaning
        self._after = after
        self._num_calls = 0

    def call(self, operation: Callable[[], Any]) -> None:
        """Call an operation; its error is swallowed if it is the injected one."""
        with without_collections():
            sys.setprofile(self._profile)
            try:
                operation()
            except self.error:
                if not self.raised_in:
                    raise
            finally:
                sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._after:
            if event == "return":
                called, name = frame.f_code.co_name, frame.f_code.co_qualname
                where = frame.f_back or frame
            elif event == "c_return":
                called, name, where = argument.__name__, argument.__qualname__, frame
            else:
                return
            if called not in self._after or frame.f_code.co_filename not in self.files:
                return
        elif event == "call":
            caller = frame.f_back
            mine = frame.f_code.co_filename in self.files or (
                caller is not None and caller.f_code.co_filename in self.files
            )
            name, where = frame.f_code.co_qualname, caller or frame
            if not mine or frame.f_code.co_filename in IGNORED:
                return
            is_end = caller is not None and caller.f_code.co_name == "__exit__"
            if is_end or self._is_cleaning(frame, frame.f_code.co_name):
                return
        elif event == "c_call":
            if frame.f_code.co_filename not in self.files or argument.__name__ == "__enter__":
                return
            name, where = argument.__qualname__, frame
            if self._is_cleaning(frame, argument.__name__):
                return
        else:
            return
        is_due = self._num_calls == self.number
        self._num_calls += 1
        if self.raised_in or (self.places is None and not is_due):
            return
        place = f"{name}, called at {where.f_code.co_qualname}:{where.f_lineno}"
        if self.places is not None:
            if place in self.places:
                return
            self.places.add(place)
        self.raised_in = place
        raise self.error(f"injected into {place}")

    def _is_cleaning(self, frame: FrameType | None, name: str) -> bool:
        """Whether a call cleans up, or is made while others clean up."""
        if name in NEITHER or name in self._cleaning:
            return True
        while frame is not None and self._cleaning:
            if frame.f_code.co_name in self._cleaning and frame.f_code.co_filename in self.files:
                return True
            frame = frame.f_back
        return False


def injections(
    *modules: ModuleType,
    errors: Sequence[type[BaseException]] = ERRORS,
    cleaning: Collection[str] = (),
    once_per_place: bool = False,
    after: Collection[str] = (),
) -> Iterator[Injector]:
    """Yield an injector for each call and error, until there is no such call.

    Args:
        modules: modules whose calls raise.
        errors: what they raise.
        cleaning: names of functions of the modules that clean up, in which nothing raises.
        once_per_place: whether to raise at each place once, not at each call.
        after: names of calls, of the modules or by them, which raise when they return; then no
            other call raises.
    """
    files = frozenset(str(module.__file__) for module in modules)
    for error in errors:
        places: set[str] | None = set() if once_per_place else None
        for number in range(10_000):
            injector = Injector(number, error, files, frozenset(cleaning), places, frozenset(after))
            yield injector
            if not injector.raised_in:
                break
        else:
            raise AssertionError("there is no end of calls")


def open_descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors of the process, each with what it is of.

    What earlier tests have left may be closed meanwhile: compare with ``<=``.
    """
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.add((each, os.readlink(f"/proc/self/fd/{each}")))
    return found


def open_files() -> int:
    """Return the number of open descriptors of the process."""
    return len(os.listdir("/proc/self/fd"))
