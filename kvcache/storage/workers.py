"""Threads that call a blocking backend, so that no caller of `Storage` waits for it.

::

    caller                              threads
    submit ── refuse or enqueue ──► OperationTable ──► ChecksummedBackend ──► Backend
    poll   ◄── completions, deadlines ◄──┘ ▲              │
                                           └── report ◄───┘
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from threading import Condition, Lock, Thread
from typing import Final

from ..cleanup import give_back
from ..tokens import as_count
from .checksummed import ChecksummedBackend
from .errors import PayloadError, StorageClosedError
from .interface import (
    Backend,
    Block,
    Completion,
    Kind,
    NamingBackend,
    Status,
    StorageOpId,
    StorageStats,
    views,
)
from .keys import StorageNamespace, check_key
from .operation_table import OperationTable, Task

WAKING_S: Final = 0.0001
"""Time that it may take to wake a thread, or to get the GIL back from a running thread."""


class AdaptiveParallelism:
    """Decides whether several threads call the backend: once one thread was slow twice in a row.

    A block of 256 KiB from memory takes 20 us, and the thread releases the GIL four times in it.
    Several threads would spend most of their time on getting the GIL back, so one does all the
    work. When blocks come from a disk or a server, several threads wait for several blocks at once.

    Several threads use it without a lock. If one overwrites another's observation, it is soon made
    again.
    """

    def __init__(self) -> None:
        """Start with one thread."""
        self.use_all_threads = False
        self._was_slow = False

    def observe(self, took_s: float, *, alone: bool) -> bool:
        """Record how long a block took, and return whether to wake the other threads now.

        Args:
            took_s: duration of the backend's call.
            alone: whether no other thread was running. If one was, only a longer time is attributed
                to the backend.
        """
        slow = took_s > (WAKING_S if alone else 10 * WAKING_S)
        use_all = slow and (self.use_all_threads or self._was_slow)
        wake = use_all and not self.use_all_threads
        self.use_all_threads, self._was_slow = use_all, slow
        return wake


class StorageWorkers:
    """`Storage` over any backend, on a few threads.

    Lookups go first, then loads. If a store does not fit into the byte budget, its leading blocks
    are kept and the others are DROPPED at once: a lost write is only a future miss, and a chain of
    blocks is useful only from its start.

    Loads and stores run on several threads where that is faster; see ``AdaptiveParallelism``. If
    the only active thread is stuck, the next `poll` wakes another.

    Only `lookup_prefix` and `close` wait for the backend, up to their timeout_s. `poll` checks the
    deadlines: call it once per step.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_threads: int = 4,
        max_bytes_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. `close` closes the backend too.

        Args:
            backend: backend, which num_threads threads may call at once.
            num_threads: at least 1; 2 to 4 keep a disk busy.
            max_bytes_in_flight: limit of the payloads that stores hold. Loads have none: their
                destinations are the caller's.
            clock: time in seconds, for deadlines.

        Raises:
            CountError: if num_threads or max_bytes_in_flight is less than 1.
            RuntimeError: if there can be no more threads; the backend is closed then.
        """
        num_threads = as_count("num_threads", num_threads, minimum=1)
        max_bytes = as_count("max_bytes_in_flight", max_bytes_in_flight, minimum=1)
        self._backend = backend
        self._checksummed = ChecksummedBackend(backend)
        self._clock = clock
        self._lock = Lock()  # guards all attributes below; never held during I/O
        self._submitted = Condition(self._lock)
        self._reported = Condition(self._lock)
        self._table = OperationTable(max_bytes, num_threads)
        self._closed = False
        self._parallelism = AdaptiveParallelism()
        self._num_done = self._num_seen = 0  # blocks in total, and at the last poll
        # Daemon threads: a backend that never answers must not keep the process alive.
        self._threads = [
            Thread(target=self._live, name=f"radixkv-storage-{number}", daemon=True)
            for number in range(num_threads)
        ]
        # Python unwinds the stack of a daemon thread that needs the GIL after the interpreter's
        # end. In a backend in C++ or Rust, that aborts the process.
        try:
            atexit.register(self.close)
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._threads = [each for each in self._threads if each.is_alive()]
            give_back(self.close if self._threads else self._end)
            raise

    # -- Storage

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """See Storage. It makes one call of the backend for all keys."""
        return self._submit(Kind.LOOKUP, keys, (), timeout_s, epoch)

    def lookup_prefix(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """See Storage."""
        operation = self._submit(Kind.LOOKUP, keys, (), timeout_s, 0, quiet=True)
        with self._lock:
            try:
                self._reported.wait_for(lambda: self._table.ended(operation), timeout_s)
            except BaseException:
                give_back(partial(self._table.claim, operation))
                raise
            return self._table.claim(operation).prefix

    def load(
        self,
        keys: Sequence[bytes],
        destinations: Sequence[Block],
        *,
        timeout_s: float,
        epoch: int = 0,
    ) -> StorageOpId:
        """See Storage.

        Raises:
            PayloadError: if destinations and keys differ in number, or a destination is not
                contiguous and writable.
            StorageKeyError: if a key is not 32 bytes.
            StorageClosedError: after close.
        """
        blocks = [views(block, writable=True) for block in destinations]
        return self._submit(Kind.LOAD, keys, blocks, timeout_s, epoch)

    def store(
        self, keys: Sequence[bytes], payloads: Sequence[Block], *, timeout_s: float, epoch: int = 0
    ) -> StorageOpId:
        """See Storage. Existing blocks are not written again.

        Raises:
            PayloadError: if payloads and keys differ in number, or a payload is not contiguous.
            StorageKeyError: if a key is not 32 bytes.
            StorageClosedError: after close.
        """
        blocks = [views(block) for block in payloads]
        return self._submit(Kind.STORE, keys, blocks, timeout_s, epoch)

    def touch(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """See Storage. It makes one call of the backend, after all stores submitted before."""
        return self._submit(Kind.TOUCH, keys, (), timeout_s, epoch)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """See Storage."""
        return self._submit(Kind.DELETE, keys, (), timeout_s, epoch)

    def poll(self) -> list[Completion]:
        """See Storage."""
        now = self._clock()
        with self._lock:
            self._table.expire(now)
            if self._num_done == self._num_seen and self._table.has_work:
                self._submitted.notify()  # the running thread may be stuck
            self._num_seen = self._num_done
            return self._table.drain()

    def cancel(self, operation: StorageOpId) -> bool:
        """See Storage.

        Raises:
            OperationError: for an unknown id.
        """
        with self._lock:
            return self._table.cancel(operation)

    def fenced(self, operation: StorageOpId) -> bool:
        """See Storage.

        Raises:
            OperationError: for an unknown id.
        """
        with self._lock:
            return self._table.fenced(operation)

    def use_namespace(self, namespace: StorageNamespace) -> None:
        """Put another namespace into the names of blocks, if the backend was opened with one.

        Call it when the keys change, such as after `Tiers.storage`, and cancel the operations with
        other keys before it.
        """
        if isinstance(self._backend, NamingBackend) and self._backend.namespace is not None:
            self._backend.namespace = namespace.digits

    def stats(self) -> StorageStats:
        """See Storage."""
        backend = dict(self._backend.stats())
        with self._lock:
            table = self._table
            return StorageStats(
                blocks=dict(table.ended_blocks),
                stored_bytes=table.ended_bytes[Status.STORED],
                loaded_bytes=table.ended_bytes[Status.LOADED],
                dropped_bytes=table.ended_bytes[Status.DROPPED],
                late_blocks=table.late_blocks,
                errors=dict(table.errors),
                open_operations=table.num_open,
                unfenced_operations=table.num_unfenced,
                store_bytes_in_flight=table.bytes_in_flight[Kind.STORE],
                load_bytes_in_flight=table.bytes_in_flight[Kind.LOAD],
                backend=backend,
            )

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """See Storage. Open operations are cancelled; you can still poll their completions.

        The backend is closed once no thread is in it. If this returns False, call it again.
        """
        with self._lock:
            self._closed = True
            self._table.cancel_all()
            self._submitted.notify_all()
            self._reported.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._threads:
            self._end()
        return True

    def check(self) -> None:
        """Assert that the counts agree with the operations."""
        with self._lock:
            self._table.check()

    # -- internals

    def _end(self) -> None:
        """Close the backend; no thread is in it."""
        self._threads = []
        give_back(partial(atexit.unregister, self.close), self._backend.close)

    def _submit(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        blocks: Sequence[Sequence[memoryview]],
        timeout_s: float,
        epoch: int,
        *,
        quiet: bool = False,
    ) -> StorageOpId:
        for key in keys:
            check_key(key)
        if kind in (Kind.LOAD, Kind.STORE) and len(keys) != len(blocks):
            raise PayloadError(f"{len(keys)} keys, but {len(blocks)} blocks")
        deadline = self._clock() + timeout_s
        with self._lock:
            if self._closed:
                raise StorageClosedError("storage is closed")
            operation = self._table.submit(
                kind, keys, blocks, deadline=deadline, epoch=epoch, quiet=quiet
            )
            if self._parallelism.use_all_threads:
                self._submitted.notify(len(keys))
            elif kind is Kind.LOOKUP or not self._table.running[kind]:
                self._submitted.notify()
            return operation

    def _live(self) -> None:
        """Run tasks until closed, in each thread, which outlives its errors."""
        while True:
            try:
                self._work()
                return
            except Exception as error:
                with self._lock:
                    self._table.errors[type(error).__name__] += 1

    def _work(self) -> None:
        """Run tasks until closed. An operation that an error leaves open ends at its deadline."""
        while True:
            with self._lock:
                while (task := self._table.take()) is None:
                    if self._closed:
                        return
                    self._submitted.wait()
            try:
                errors = self._run(task)
            except BaseException as error:  # of ours: those of the backend are results
                task.results += [Status.FAILED] * (len(task.keys) - len(task.results))
                errors = [type(error).__name__]
            with self._lock:
                try:
                    self._table.report(task, errors)
                except BaseException:
                    if task in task.operation.tasks:
                        self._table.report(task)
                    raise
                self._reported.notify_all()
                if (
                    not self._parallelism.use_all_threads
                    and self._table.running[task.kind]
                    and not self._closed
                ):
                    self._submitted.wait()  # the other thread continues

    def _run(self, task: Task) -> list[str]:
        """Run a task while its operation is open, and return the names of its errors."""
        if task.kind in (Kind.LOOKUP, Kind.TOUCH):
            backend = self._checksummed
            call = backend.lookup if task.kind is Kind.LOOKUP else backend.touch
            statuses, error = call(task.keys)
            task.results.extend(statuses)
            return [error] if error else []
        errors = []
        for key, parts in zip(task.keys, task.blocks or repeat(()), strict=False):
            if not task.wanted:
                break
            start = time.perf_counter()
            status, error = self._run_block(task.kind, key, parts)
            task.results.append(status)
            if error:
                errors.append(error)
            self._num_done += 1
            took_s = time.perf_counter() - start
            if self._parallelism.observe(took_s, alone=self._table.num_running == 1):
                with self._lock:
                    self._submitted.notify_all()
        return errors

    def _run_block(self, kind: Kind, key: bytes, parts: Sequence[memoryview]) -> tuple[Status, str]:
        match kind:
            case Kind.LOAD:
                return self._checksummed.load(key, parts)
            case Kind.STORE:
                return self._checksummed.store(key, parts)
            case Kind.DELETE:
                return self._checksummed.delete(key)
        raise AssertionError(f"{kind} does not go block by block")
