"""Errors at every call: each call that a module makes, or gets, raises once."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, Final

ERRORS: Final[tuple[type[BaseException], ...]] = (MemoryError, KeyboardInterrupt)


NEITHER: Final = {"__exit__", "close", "len", "hash"}
"""Calls that neither allocate nor do I/O, or that clean up."""

ENUM: Final = enum.__file__
"""A member of an enumeration in Python's library hashes its name, which does neither."""


class Injector:
    """Raises an error instead of the call with a number; calls are counted from 0.

    It raises once, in the thread that calls it, so that cleaning up is not disturbed. The end of a
    ``with`` is no place to raise: nothing could be given back after an interrupt there.
    """

    def __init__(self, number: int, error: type[BaseException], files: frozenset[str]) -> None:
        self.number = number
        self.error = error
        self.files = files
        self.num_calls = 0
        self.raised_in = ""

    def call(self, operation: Callable[[], Any]) -> None:
        """Call an operation; its error is swallowed if it is the injected one."""
        sys.setprofile(self._profile)
        try:
            operation()
        except self.error:
            if not self.raised_in:
                raise
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            caller = frame.f_back
            mine = frame.f_code.co_filename in self.files or (
                caller is not None and caller.f_code.co_filename in self.files
            )
            name = frame.f_code.co_qualname
            if not mine or frame.f_code.co_filename == ENUM:
                return
            is_end = caller is not None and caller.f_code.co_name == "__exit__"
            if is_end or frame.f_code.co_name in NEITHER:
                return
        elif event == "c_call":
            if frame.f_code.co_filename not in self.files:
                return
            name = argument.__qualname__
            if argument.__name__ in NEITHER:
                return
        else:
            return
        if self.num_calls == self.number:
            self.num_calls += 1
            self.raised_in = f"{name}, called at {frame.f_code.co_qualname}:{frame.f_lineno}"
            raise self.error(f"injected into {self.raised_in}")
        self.num_calls += 1


def injections(*modules: ModuleType) -> Iterator[Injector]:
    """Yield an injector for each call and error, until there is no such call."""
    files = frozenset(str(module.__file__) for module in modules)
    for error in ERRORS:
        for number in range(10_000):
            injector = Injector(number, error, files)
            yield injector
            if not injector.raised_in:
                break
        else:
            raise AssertionError("there is no end of calls")


def open_files() -> int:
    """Return the number of open descriptors of the process."""
    return len(os.listdir("/proc/self/fd"))
