"""Counts of work, waiting and objects, which are the same on every machine and need no clock."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

import radixkv

SOURCES: Final = str(Path(radixkv.__file__).parent)
"""Start of the paths of all modules under test."""

Operations: TypeAlias = Generator[tuple[str, Callable[[], Any]], Any, None]
"""Calls with their names, in order; each gets its result back."""


class Work(NamedTuple):
    """What a call does.

    Attributes:
        ours: instructions of radixkv that it executes.
        total: instructions of all Python code that it executes.
        peak_bytes: memory that it allocates, at its peak. A walk inside of one call of a C function
            that copies what it walks over shows here.
    """

    ours: int
    total: int
    peak_bytes: int


class _Counter:
    """Counts the instructions that a thread executes."""

    def __init__(self) -> None:
        self.ours = self.total = 0

    if sys.version_info >= (3, 12):

        @contextmanager
        def counting(self) -> Iterator[None]:
            monitoring = sys.monitoring
            tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION

            def count(code: CodeType, offset: int) -> None:
                self.total += 1
                self.ours += code.co_filename.startswith(SOURCES)

            monitoring.use_tool_id(tool, "costs")
            monitoring.register_callback(tool, event, count)
            monitoring.set_events(tool, event)
            try:
                yield
            finally:
                monitoring.set_events(tool, 0)
                monitoring.register_callback(tool, event, None)
                monitoring.free_tool_id(tool)

    else:

        @contextmanager
        def counting(self) -> Iterator[None]:
            def trace(frame: FrameType, event: str, argument: object) -> Any:
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                if event == "opcode":
                    self.total += 1
                    self.ours += frame.f_code.co_filename.startswith(SOURCES)
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                yield
            finally:
                sys.settrace(before)


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn the garbage collector off, which runs finalizers of others wherever it wants."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def work_of(call: Callable[[], Any]) -> tuple[Any, Work]:
    """Return the result of a call, and the work of the thread that calls."""
    counter = _Counter()
    with without_collections():
        tracemalloc.start()
        try:
            with counter.counting():
                result = call()
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return result, Work(counter.ours, counter.total, peak_bytes)


def run(operations: Operations) -> None:
    """Run operations without counting."""
    measured(operations, lambda call: (call(), None))


def measured(
    operations: Operations, measure: Callable[[Callable[[], Any]], tuple[Any, Any]]
) -> dict[str, list[Any]]:
    """Run operations, and return what `measure` says of each call, by name."""
    found: dict[str, list[Any]] = {}
    result = None
    while True:
        try:
            name, call = operations.send(result)
        except StopIteration:
            return found
        result, value = measure(call)
        found.setdefault(name, []).append(value)


def waits_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result of a call, and the C functions that it calls and that may wait.

    Only calls of Python's library and ZeroMQ's `poll` count. Taking a lock by `with` is none of
    them: a lock is held for a moment only.
    """
    found: list[str] = []

    def profile(frame: FrameType, event: str, function: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_qualname == "Socket.poll" and "zmq" in code.co_filename:
            found.append(f"{code.co_qualname} in {Path(code.co_filename).name}")
        if event != "c_call" or frame.f_code.co_name == "_is_owned":  # asks, and does not wait
            return
        name = function.__name__
        module = function.__module__ or type(getattr(function, "__self__", None)).__module__
        if name in WAITING and module in MODULES:
            found.append(f"{module}.{name} in {Path(frame.f_code.co_filename).name}")

    before = sys.getprofile()
    with without_collections():
        sys.setprofile(profile)
        try:
            result = call()
        finally:
            sys.setprofile(before)
    return result, found


WAITING: Final = {"sleep", "acquire", "select", "poll", "wait", "join", "recv", "accept"}
MODULES: Final = {"time", "_thread", "select", "_socket", "_queue", "threading"}

_PASSED_OVER: Final = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, CodeType, FrameType
)  # fmt: skip


def census(*roots: object) -> Counter[str]:
    """Count the objects that can be reached from some, by type; the small ones too.

    A growing count of entries is seen also where each is an object that exists anyway: entries are
    counted per container, under the path that leads there.
    """
    found: Counter[str] = Counter()
    seen = {id(None), id(True), id(False)}
    queue: deque[tuple[str, object]] = deque((type(root).__name__, root) for root in roots)
    while queue:
        path, each = queue.popleft()
        if id(each) in seen or isinstance(each, _PASSED_OVER):
            continue
        seen.add(id(each))
        kind = type(each)
        if kind in (dict, list, set, deque, tuple, Counter, frozenset) or hasattr(kind, "__len__"):
            if isinstance(each, (dict, list, set, deque, frozenset)):
                found[path] += len(each)
        elif kind not in (int, float):  # Python has the small ones already
            found[kind.__qualname__] += 1
        if kind.__module__.split(".")[0] in FOREIGN:
            continue
        queue.extend(_parts(path, each))
    return found


FOREIGN: Final = {"numpy", "jax", "jaxlib", "threading", "_thread", "xxhash", "zmq"}
"""What is theirs is counted, but not looked into."""


def _parts(path: str, each: object) -> Iterator[tuple[str, object]]:
    if isinstance(each, dict):
        for key, value in each.items():
            yield f"{path}.keys", key
            yield f"{path}[]", value
        return
    names = dict.fromkeys(
        slot for base in type(each).__mro__ for slot in getattr(base, "__slots__", ())
    )
    attributes = {name: getattr(each, name) for name in names if hasattr(each, name)}
    attributes |= getattr(each, "__dict__", {})
    attributes.pop("__dict__", None)
    if attributes:
        for name, value in attributes.items():
            yield f"{type(each).__name__}.{name}", value
        return
    for part in gc.get_referents(each):
        yield f"{path}[]", part


def growth(before: Counter[str], after: Counter[str], bound: int) -> dict[str, tuple[int, int]]:
    """Return the counts that have grown by at least a bound."""
    return {
        name: (before[name], number)
        for name, number in after.items()
        if number - before[name] >= bound
    }


def all_objects() -> Counter[str]:
    """Count all objects of the process that the garbage collector knows, by type."""
    gc.collect()
    return Counter(
        f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects()
    )
