"""The names of `threading`, `queue`, `time` and `concurrent.futures`, for threads of a `Run`."""

from __future__ import annotations

import concurrent.futures
import queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import ModuleType
from typing import Any, Generic, TypeVar

from .baton import Task, active

T = TypeVar("T")


class Lock:
    """`threading.Lock`."""

    def __init__(self) -> None:
        self.owner: Task | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        run = active()
        limit = 0.0 if not blocking else None if timeout < 0 else timeout
        if not run.wait_until(lambda: self.owner is None, limit):
            return False
        self.owner = run.current
        return True

    def release(self) -> None:
        if self.owner is None:
            raise RuntimeError("release unlocked lock")
        self.owner = None
        active().operation()

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`, over a lock that is not reentrant."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = Lock() if lock is None else lock
        self._waiters: deque[list[bool]] = deque()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def _check_owned(self, doing: str) -> None:
        if self._lock.owner is not active().current:
            raise RuntimeError(f"cannot {doing} on un-acquired lock")

    def wait(self, timeout: float | None = None) -> bool:
        self._check_owned("wait")
        waiter = [False]
        self._waiters.append(waiter)
        self._lock.owner = None
        try:
            notified = active().wait_until(lambda: waiter[0], timeout)
        finally:
            if not waiter[0]:
                self._waiters.remove(waiter)
        self._lock.acquire()
        return notified

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        run = active()
        end = None if timeout is None else run.now + timeout
        while not (result := predicate()):
            if end is not None and run.now >= end:
                break
            self.wait(None if end is None else end - run.now)
        return result

    def notify(self, n: int = 1) -> None:
        self._check_owned("notify")
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        active().operation()

    def wait(self, timeout: float | None = None) -> bool:
        return active().wait_until(lambda: self._is_set, timeout)


class Thread:
    """`threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., object],
        name: str = "thread",
        args: Iterable[object] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool = False,
    ) -> None:
        def function() -> object:
            return target(*args, **(kwargs or {}))

        self.name = name
        self._task = Task(name, function, daemon)

    @property
    def ident(self) -> int | None:
        return None if self._task.run is None else id(self._task)

    def start(self) -> None:
        active().start(self._task)
        active().operation()

    def join(self, timeout: float | None = None) -> None:
        active().wait_until(lambda: self._task.has_ended, timeout)

    def is_alive(self) -> bool:
        return self._task.run is not None and not self._task.has_ended


class SimpleQueue(Generic[T]):
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        self._items.append(item)
        active().operation()

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        if not active().wait_until(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor`; its futures have no real waiters."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        for number in range(max_workers):
            Thread(self._work, f"{thread_name_prefix}-{number}", daemon=True).start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = _Future()
        self._queue.put((future, lambda: function(*args)))
        return future

    def _work(self) -> None:
        while True:
            future, function = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and self._queue.qsize():
            self._queue.get()[0].cancel()


class _Future(Future[T]):
    def result(self, timeout: float | None = None) -> T:
        if not active().wait_until(self.done, timeout):
            raise TimeoutError
        return super().result(0)


def result_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Wait for a future of the module under test."""
    if not active().wait_until(future.done, timeout_s):
        raise AssertionError("the future never ends")
    return future.result(0)


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    active().wait_until(lambda: False, seconds)


def now() -> float:
    """`time.monotonic`, and all others."""
    return active().now


def together(*functions: Callable[[], object]) -> None:
    """Run functions in a thread each, until all have ended."""
    threads = [Thread(each, f"caller {number}") for number, each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _module(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(names)
    return module


MODULES = {
    "atexit": _module("atexit", register=lambda *_: None, unregister=lambda _: None),
    "threading": _module("threading", Lock=Lock, Condition=Condition, Event=Event, Thread=Thread),
    "queue": _module("queue", SimpleQueue=SimpleQueue, Empty=queue.Empty),
    "time": _module(
        "time",
        monotonic=now,
        time=now,
        perf_counter=now,
        time_ns=lambda: int(now() * 1e9),
        sleep=sleep,
    ),
    "concurrent.futures": _module(
        "concurrent.futures",
        **{name: getattr(concurrent.futures, name) for name in ("Future", "wait", "as_completed")},
        ThreadPoolExecutor=ThreadPoolExecutor,
    ),
}
