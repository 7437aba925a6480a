"""Errors at every call: each call that a module makes, or gets, raises once.

A test of a layer that gives back uses `injections` in a loop, and checks the layer after each.
"""

from __future__ import annotations

import _weakrefset
import enum
import gc
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any, Final

from radixkv.kvcache import cleanup

from .measure import without_collections

ERRORS: Final[tuple[type[BaseException], ...]] = (MemoryError, KeyboardInterrupt)
ALL_ERRORS: Final = (*ERRORS, OSError)
OF_THREADS: Final = (MemoryError, OSError)
"""Python interrupts its main thread only."""

NEITHER: Final = {"__exit__", "__del__", "close", "give_back", "len", "hash"}
"""Calls that neither allocate nor do I/O, or that clean up."""

IGNORED: Final = {enum.__file__, _weakrefset.__file__}
"""A member of an enumeration hashes its name, which does neither; and a set of weak references is
told of garbage at any time."""


class Injector:
    """Raises an error instead of a call: the one with a number, counted from 0, or at a new place.

    It raises once, in the thread that calls it, so that cleaning up is not disturbed, unless it is
    to raise a second error there. The end of a ``with`` is no place to raise: nothing could be
    given back after an interrupt there. Nor is the beginning of one that is written in C, of which
    Python tells since 3.14. Calls that clean up may raise when they return, as an interrupted one
    does, or a ``close`` that reports a disk's error: what they do is done, and the rest of the
    cleaning is left.

    Attributes:
        number: number of the call.
        places: places where earlier injectors have raised, if each is to raise at a new one. That
            is for operations whose calls differ from run to run.
        raised_in: the place where it has raised; empty before.
        second_in: the place where it has raised the second error; empty before.
    """

    def __init__(
        self,
        number: int,
        error: type[BaseException],
        files: frozenset[str],
        cleaning: frozenset[str],
        places: set[str] | None,
        after: frozenset[str] = frozenset(),
        second: tuple[int, type[BaseException]] | None = None,
    ) -> None:
        self.number = number
        self.error = error
        self.files = files
        self.places = places
        self.raised_in = self.second_in = ""
        self._cleaning = cleaning
        self._after = after
        self._second = second
        self._num_calls = 0
        self._raised: list[BaseException] = []

    def __str__(self) -> str:
        text = f"{self.error.__name__} in {self.raised_in}"
        if self.second_in and self._second:
            text += f", then {self._second[1].__name__} after {self.second_in}"
        return text

    def call(
        self,
        operation: Callable[[], Any],
        typed: tuple[type[BaseException], ...] = (),
        *,
        may_handle: bool = False,
    ) -> None:
        """Call an operation, and swallow its error if it is the injected one.

        Args:
            operation: what is called.
            typed: errors that it may make of the injected one.
            may_handle: whether it may handle the first error, and then meet the second.

        Raises:
            AssertionError: if the second error is reported in place of the first, or no interrupt
                is although one was raised.
        """
        reported: BaseException | None = None
        with without_collections():
            sys.setprofile(self._profile)
            try:
                operation()
            except BaseException as error:
                reported = error
            finally:
                sys.settrace(None)
                sys.setprofile(None)
        raised, self._raised = self._raised, []
        try:
            if reported is not None and not isinstance(
                reported, (*map(type, raised), *(typed if raised else ()))
            ):
                raise reported
            if len(raised) == 2 and not may_handle:
                self._check_reported(reported, *raised)
        finally:
            del reported, raised  # their frames have what was to be freed

    def _check_reported(
        self, reported: BaseException | None, first: BaseException, second: BaseException
    ) -> None:
        interrupts = [each for each in (first, second) if not isinstance(each, Exception)]
        if interrupts:
            assert reported in interrupts, f"the interrupt is lost: {self}"
            return
        assert reported is None or not (reported is second or _is_caused(reported, second)), (
            f"not the first error is reported: {self}"
        )

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._after and (self.raised_in or self._second is None):
            found = self._returned(frame, event, argument)
        else:
            found = self._called(frame, event, argument)
        if found is None:
            return
        place = f"{found[0]}, called at {found[1].f_code.co_qualname}:{found[1].f_lineno}"
        is_due = self._num_calls == (self._second[0] if self.raised_in and self._second else
                                     self.number)  # fmt: skip
        self._num_calls += 1
        if not self.raised_in:
            if self.places is None and not is_due:
                return
            if self.places is not None:
                if place in self.places:
                    return
                self.places.add(place)
            self.raised_in = place
            self._num_calls = 0
            if self._second is not None:
                self._profile_again(frame)
            self._raise(self.error, place)
        if is_due and self._second is not None and not self.second_in:
            self.second_in = place
            self._raise(self._second[1], place)

    def _raise(self, error: type[BaseException], place: str) -> None:
        self._raised.append(error(f"injected into {place}"))
        raise self._raised[-1]

    def _profile_again(self, frame: FrameType | None) -> None:
        """Go on when the error has been raised, which ends profiling."""

        def go_on(*_: object) -> None:
            sys.settrace(None)
            sys.setprofile(self._profile)

        while frame is not None:
            frame.f_trace = go_on
            frame = frame.f_back
        sys.settrace(go_on)

    def _returned(
        self, frame: FrameType, event: str, argument: Any
    ) -> tuple[str, FrameType] | None:
        """Name the call that cleans up and has returned, and who has made it."""
        caller = frame.f_back
        if event == "return":
            called, name, where = frame.f_code.co_name, frame.f_code.co_qualname, caller or frame
        elif event == "c_return":
            called, name, where = argument.__name__, argument.__qualname__, frame
        else:
            return None
        if called not in self._after:
            return None
        mine = self.files.intersection((frame.f_code.co_filename, where.f_code.co_filename))
        return (name, where) if mine else None

    def _called(self, frame: FrameType, event: str, argument: Any) -> tuple[str, FrameType] | None:
        """Name the call that is to be made, unless it cleans up, and who makes it."""
        if event == "call":
            caller = frame.f_back
            mine = frame.f_code.co_filename in self.files or (
                caller is not None and caller.f_code.co_filename in self.files
            )
            if not mine or frame.f_code.co_filename in IGNORED:
                return None
            is_end = caller is not None and caller.f_code.co_name == "__exit__"
            if is_end or self._is_cleaning(frame, frame.f_code.co_name):
                return None
            return frame.f_code.co_qualname, caller or frame
        if event == "c_call":
            if frame.f_code.co_filename not in self.files or argument.__name__ == "__enter__":
                return None
            if self._is_cleaning(frame, argument.__name__):
                return None
            return argument.__qualname__, frame
        return None

    def _is_cleaning(self, frame: FrameType | None, name: str) -> bool:
        """Whether a call cleans up, or is made while others clean up."""
        if name in NEITHER or name in self._cleaning:
            return True
        while frame is not None and self._cleaning:
            if frame.f_code.co_name in self._cleaning and frame.f_code.co_filename in self.files:
                return True
            frame = frame.f_back
        return False


def _is_caused(error: BaseException, by: BaseException) -> bool:
    """Whether an error was made of another one."""
    while (cause := error.__cause__ or error.__context__) is not None:
        if cause is by:
            return True
        error = cause
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
    files = frozenset(str(module.__file__) for module in (*modules, *([cleanup] if after else [])))
    for error in errors:
        places: set[str] | None = set() if once_per_place else None
        for number in range(10_000):
            injector = Injector(number, error, files, frozenset(cleaning), places, frozenset(after))
            yield injector
            if not injector.raised_in:
                break
        else:
            raise AssertionError("there is no end of calls")


PAIRS: Final = (
    (OSError, MemoryError),
    (MemoryError, KeyboardInterrupt),
    (KeyboardInterrupt, OSError),
)
PAIRS_OF_THREADS: Final = ((OSError, MemoryError), (MemoryError, OSError))


def second_injections(
    *modules: ModuleType,
    after: Collection[str],
    pairs: Sequence[tuple[type[BaseException], type[BaseException]]] = PAIRS,
    cleaning: Collection[str] = (),
) -> Iterator[Injector]:
    """Yield an injector for each place, and each call that cleans up when it has raised there.

    Each raises a first error in place of a call, and then a second one when a call that cleans up
    returns.

    Args:
        modules: modules whose calls raise.
        after: names of calls that clean up, of the modules or by them.
        pairs: what is raised first and second.
        cleaning: see `injections`.
    """
    files = frozenset(str(module.__file__) for module in (*modules, cleanup))
    hidden, shown = frozenset([*cleaning, *after, "give_back"]), frozenset(after)
    for first, second in pairs:
        done: set[str] = set()
        seen: set[tuple[str, str]] = set()
        number = 0
        for _ in range(10_000):
            injector = Injector(0, first, files, hidden, set(done), shown, (number, second))
            yield injector
            if not injector.raised_in:
                break
            is_new = (injector.raised_in, injector.second_in) not in seen
            seen.add((injector.raised_in, injector.second_in))
            number += 1
            if not injector.second_in or (not is_new and number > 8):
                done.add(injector.raised_in)
                number = 0
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


def has_open_files(most: int) -> bool:
    """Whether the process comes to have at most so many open descriptors.

    The frames of an error may have views of memory whose file is open. Threads that earlier tests
    have left open and close sockets, as those of ZeroMQ do while they connect: they are waited for.
    """
    end = time.monotonic() + 20
    while open_files() > most and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return open_files() <= most
