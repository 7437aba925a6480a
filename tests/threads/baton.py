"""Runs threads one at a time, in an order that a schedule decides, so that it can be replayed.

::

    thread A  ──run──┐                ┌──run──►
                     point: hand on   │
    thread B         └──────run───────┘ point: hand on, blocked, or ended

One thread runs; the others wait for its baton. It may hand the baton on at a *point*: before each
bytecode instruction of the traced files that uses an attribute, an item, a global or a call, and in
each operation of `primitives`. A blocked thread has a predicate instead of a real lock; it may run
when the predicate holds. Time is virtual: it passes when all threads are blocked, and now and then
at once, as if the others were late.
"""

from __future__ import annotations

import dis
import random
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from linecache import getline
from math import inf
from types import FrameType
from typing import Any, Final, NamedTuple

_MAX_POINTS: Final = 100_000
_HANG_S: Final = 60.0  # real time, without any point
_MAX_SHOWN: Final = 40
_LATENESS: Final = 0.1  # how often a short wait is over before any other thread has run
_LATE_S: Final = 0.02
# `dis.opname` of what reads or writes objects that threads may share; other instructions only use
# the thread's own frame.
_SHARED: Final = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("CALL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_GLOBAL", "FOR_"))
    or name.startswith(("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_"))
    or name.startswith(("BINARY_SUBSCR", "BINARY_SLICE", "STORE_SLICE", "CONTAINS_OP"))
)


class Stop(BaseException):
    """Ends a thread whose run is over."""


class Deadlock(AssertionError):
    """All threads wait for one another."""


class Livelock(AssertionError):
    """The run does not end."""


@dataclass(frozen=True)
class Schedule:
    """How the order of the threads is chosen.

    Attributes:
        seed: equal seeds, equal orders.
        preemptions: number of points at which a thread that could go on is preempted, as in PCT
            (Burckhardt et al., ASPLOS 2010). None: each point is one with a probability that
            the seed chooses. Otherwise the thread of the highest priority runs, and priorities are
            random.
        num_points: points of a run, among which those are chosen.
    """

    seed: int
    preemptions: int | None = 0
    num_points: int = 1


class _Segment(NamedTuple):
    """What a thread did while it had the baton."""

    thread: str
    place: tuple[str, int]


class Task:
    """A thread of a run."""

    def __init__(self, name: str, function: Callable[[], object], is_daemon: bool) -> None:
        self.name = name
        self.is_daemon = is_daemon
        self.has_ended = False
        self.is_ready: Callable[[], bool] | None = None  # None: not blocked
        self.deadline = inf
        self.priority = 0.0
        self.function = function
        self.place = ("", 0)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.run: Run | None = None

    def _run(self) -> None:
        assert self.run is not None
        self.baton.acquire()
        self.run.main_of(self)

    def can_run(self, now: float) -> bool:
        """Whether it is not blocked at this time."""
        if self.has_ended:
            return False
        return self.is_ready is None or now >= self.deadline or self.is_ready()


class Run:
    """One execution of a function and of the threads that it starts.

    Attributes:
        now: virtual time in seconds.
        current: who has the baton.
        num_points: points so far.
        error: the first exception that left a thread.
    """

    def __init__(self, schedule: Schedule, traced: Collection[str]) -> None:
        self.now = 1_000.0
        self.num_points = 0
        self.error: BaseException | None = None
        self._schedule = schedule
        self._random = random.Random(schedule.seed)
        self._traced = frozenset(traced)
        self._tasks: list[Task] = []
        self._is_over = False
        self._ended = threading.Event()
        self._segments: list[_Segment] = []
        preemptions = schedule.preemptions
        self._probability = self._random.choice((0.3, 0.1, 0.03)) if preemptions is None else 0.0
        self._preempted = frozenset(
            self._random.randrange(schedule.num_points) + 1 for _ in range(preemptions or 0)
        )
        self.current: Task

    def execute(self, function: Callable[[], object]) -> None:
        """Run a function as the thread "main", until it and all threads but daemons have ended."""
        global _active
        assert _active is None, "one run at a time"
        _active = self
        try:
            self.current = self.start(Task("main", function, is_daemon=False))
            self.current.baton.release()
            points = -1
            while not self._ended.wait(_HANG_S):
                assert points != self.num_points, "a thread blocks outside of the scheduler"
                points = self.num_points
            for task in self._tasks:  # one after another, as they ran
                if not task.has_ended:
                    task.baton.release()
                task.thread.join()
        finally:
            _active = None

    def start(self, task: Task) -> Task:
        """Add a thread."""
        task.run = self
        task.priority = self._random.random()
        self._tasks.append(task)
        task.thread.start()
        return task

    def main_of(self, task: Task) -> None:
        """Run the function of a thread; called on it."""
        try:
            if not self._is_over:
                sys.settrace(self._trace)
                task.function()
        except Stop:
            pass
        except BaseException as error:
            sys.settrace(None)
            if not self._is_over:
                self._finish(error)
        finally:
            sys.settrace(None)
            task.has_ended = True
        if not self._is_over:
            self._record(task)
            self._hand_on(self._choose())

    # Points

    def point(self) -> None:
        """Let the schedule preempt the thread that runs."""
        if self._is_over:
            raise Stop
        self.num_points += 1
        if self.num_points > _MAX_POINTS:
            self._finish(Livelock(f"no end after {_MAX_POINTS} points"))
            raise Stop
        if self.num_points in self._preempted:
            self.current.priority = -self.num_points  # below all others
        elif not (self._probability and self._random.random() < self._probability):
            return
        self._switch()

    def operation(self) -> None:
        """Do as `point`, where another thread may have become ready."""
        self.point()
        if not self._probability:
            self._switch()

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block the thread that runs until a predicate holds; False if time was over before.

        When it returns True, the predicate holds still.
        """
        self.operation()
        task = self.current
        if not is_ready():
            deadline = inf if timeout_s is None else self.now + max(0.0, timeout_s)
            if deadline - self.now <= _LATE_S and self._random.random() < _LATENESS:
                self.now = deadline
            else:
                task.is_ready, task.deadline = is_ready, deadline
                self._switch()
                task.is_ready, task.deadline = None, inf
        return is_ready()

    def _switch(self) -> None:
        task, chosen = self.current, self._choose()
        if chosen is task:
            return
        self._record(task)
        self._hand_on(chosen)
        task.baton.acquire()
        if self._is_over:
            raise Stop

    def _hand_on(self, task: Task | None) -> None:
        if task is not None:
            self.current = task
            task.baton.release()

    def _choose(self) -> Task | None:
        """Choose who runs next; None if the run is over."""
        while not self._is_over:
            ready = [task for task in self._tasks if task.can_run(self.now)]
            if ready:
                if self._probability:
                    return self._random.choice(ready)
                return max(ready, key=lambda task: task.priority)
            if all(task.has_ended or task.is_daemon for task in self._tasks):
                self._finish(None)
                break
            deadline = min(task.deadline for task in self._tasks if not task.has_ended)
            if deadline == inf:
                self._finish(Deadlock("all threads wait\n" + self._stacks()))
                break
            self.now = deadline
        return None

    def _finish(self, error: BaseException | None) -> None:
        self._record(self.current)
        self.error = error
        self._is_over = True
        self._ended.set()

    # What happened

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._traced:
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _SHARED:
            self.current.place = (frame.f_code.co_filename, frame.f_lineno or 0)
            self.point()
        return self._trace_opcode

    def _record(self, task: Task) -> None:
        self._segments.append(_Segment(task.name, task.place))

    def _stacks(self) -> str:
        frames = sys._current_frames()
        lines = []
        for task in self._tasks:
            if not task.has_ended and task.thread.ident in frames:
                stack = traceback.extract_stack(frames[task.thread.ident])
                ours = [frame for frame in stack if frame.filename in self._traced]
                where = ours[-1] if ours else stack[-1]
                lines.append(f"  {task.name}: {_show((where.filename, where.lineno or 0))}")
        return "\n".join(lines)

    def interleaving(self) -> str:
        """Return who ran, and to where, in order."""
        merged = [
            each
            for each, after in pairwise([*self._segments, _Segment("", ("", 0))])
            if each.thread != after.thread
        ]
        hidden = len(merged) - _MAX_SHOWN
        lines = [f"  ({hidden} before)"] if hidden > 0 else []
        lines += [f"  {each.thread} ► {_show(each.place)}" for each in merged[-_MAX_SHOWN:]]
        return "\n".join(lines)


_active: Run | None = None


def active() -> Run:
    """Return the run of the calling thread."""
    assert _active is not None, "no run"
    return _active


def _show(place: tuple[str, int]) -> str:
    path, line = place
    if not path:
        return "its start or end"
    return f"{'/'.join(path.split('/')[-2:])}:{line}: {getline(path, line).strip()}"
