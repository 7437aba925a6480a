"""The driver: threads that call a blocking backend, so that nobody else waits for it.

::

    caller                              threads
    submit ── refuse or enqueue ──► OperationTable ──► ChecksummedBackend ──► Backend
    poll   ◄── completions, deadlines ◄──┘ ▲              │
                                           └── report ◄───┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from threading import Condition, Lock, Thread
from typing import Final

from ..tokens import as_count
from .checksummed import ChecksummedBackend
from .errors import PayloadError, StorageClosedError
from .interface import (
    Backend,
    Block,
    Completion,
    Kind,
    Status,
    StorageOpId,
    StorageStats,
    views,
)
from .keys import check_key
from .operation_table import OperationTable, Task

WAKING_S: Final = 0.0001
"""What it may take to wake a thread, or to get Python's lock back from one that runs."""


class AdaptiveParallelism:
    """One thread does all, until it has waited for the backend twice in a row.

    A block of 256 KiB that is in memory takes 20 us, in which a thread lets go of Python's lock
    four times; where several do that, most of their time goes into getting it back. Where blocks
    come from a disk or a server, several threads wait for several at once.

    For several threads without a lock: what one overwrites of another's is learned again.
    """

    def __init__(self) -> None:
        """Begin with one thread."""
        self.several = False
        self._was_slow = False

    def learn(self, took_s: float, *, alone: bool) -> bool:
        """Take in how long a block took, and say whether to wake other threads now.

        Args:
            took_s: of the call of the backend.
            alone: whether no other thread was at work. If one was, it takes more to believe that
                the wait was for the backend.
        """
        slow = took_s > (WAKING_S if alone else 10 * WAKING_S)
        several = slow and (self.several or self._was_slow)
        wake = several and not self.several
        self.several, self._was_slow = several, slow
        return wake


class StorageWorkers:
    """Storage over any backend, on a few threads of its own.

    Lookups go first, then loads. A load or store for which there is no room keeps its leading
    blocks; the others are DROPPED at once: a lost write is a future miss, and a chain is of use
    from its start.

    Loads and stores run on several threads where that is faster; see `AdaptiveParallelism`. If the
    only active thread is stuck, the next `poll` wakes another.

    No call but `lookup_prefix` and `close`, which say how long, waits for the backend. Deadlines
    are seen by `poll`: call it once per step.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_threads: int = 4,
        max_bytes_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. The backend belongs to this, and is closed with it.

        Args:
            backend: called by num_threads threads at once.
            num_threads: at least 1; 2 to 4 keep a disk busy.
            max_bytes_in_flight: of payloads that stores may hold, and the same again of
                destinations for loads.
            clock: seconds, for deadlines.

        Raises:
            CountError: if one of the two is less than 1.
        """
        as_count("num_threads", num_threads, minimum=1)
        as_count("max_bytes_in_flight", max_bytes_in_flight, minimum=1)
        self._backend = backend
        self._sealed = ChecksummedBackend(backend)
        self._clock = clock
        self._lock = Lock()  # of all that follows; held for no I/O
        self._submitted = Condition(self._lock)
        self._reported = Condition(self._lock)
        self._table = OperationTable(max_bytes_in_flight, num_threads)
        self._closed = False
        self._sharing = AdaptiveParallelism()
        self._num_done = self._num_seen = 0  # blocks, in all and at the last poll
        # Daemons: a backend that never answers must not keep the process from ending.
        self._threads = [
            Thread(target=self._work, name=f"radixkv-storage-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- Storage

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """See Storage. One call of the backend, however many keys."""
        return self._submit(Kind.LOOKUP, keys, (), timeout_s, epoch)

    def lookup_prefix(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """See Storage. It waits for a thread and the backend, but not longer than timeout_s."""
        operation = self._submit(Kind.LOOKUP, keys, (), timeout_s, 0, quiet=True)
        with self._lock:
            self._reported.wait_for(lambda: self._table.ended(operation), timeout_s)
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
            PayloadError: if there are more or fewer destinations than keys, or one of them cannot
                be written to as bytes side by side.
            StorageKeyError: if a key is not 32 bytes.
            StorageClosedError: after close.
        """
        blocks = [views(block, writable=True) for block in destinations]
        return self._submit(Kind.LOAD, keys, blocks, timeout_s, epoch)

    def store(
        self, keys: Sequence[bytes], payloads: Sequence[Block], *, timeout_s: float, epoch: int = 0
    ) -> StorageOpId:
        """See Storage. What exists is not written again.

        Raises:
            PayloadError: if there are more or fewer payloads than keys, or one of them is not bytes
                side by side.
            StorageKeyError: if a key is not 32 bytes.
            StorageClosedError: after close.
        """
        blocks = [views(block) for block in payloads]
        return self._submit(Kind.STORE, keys, blocks, timeout_s, epoch)

    def touch(self, keys: Sequence[bytes], *, timeout_s: float, epoch: int = 0) -> StorageOpId:
        """See Storage. One call of the backend, after the stores that were submitted before."""
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
                self._submitted.notify()  # whoever is at work may be stuck
            self._num_seen = self._num_done
            return self._table.drain()

    def cancel(self, operation: StorageOpId) -> bool:
        """See Storage.

        Raises:
            OperationError: for an id that was never given out.
        """
        with self._lock:
            return self._table.cancel(operation)

    def fenced(self, operation: StorageOpId) -> bool:
        """See Storage.

        Raises:
            OperationError: for an id that was never given out.
        """
        with self._lock:
            return self._table.fenced(operation)

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
        """See Storage. What is open is cancelled; its completions can still be polled.

        The backend is closed when no thread is in it: call this again if one was.
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
            self._threads = []
            self._backend.close()
        return True

    def check(self) -> None:
        """Assert that the counts agree with the operations."""
        with self._lock:
            self._table.check()

    # -- the parts of these

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
            if self._sharing.several:
                self._submitted.notify(len(keys))
            elif kind is Kind.LOOKUP or not self._table.running[kind]:
                self._submitted.notify()
            return operation

    def _work(self) -> None:
        """Do one task after the other, until closed; the loop of each thread."""
        while True:
            with self._lock:
                while (task := self._table.take()) is None:
                    if self._closed:
                        return
                    self._submitted.wait()
            errors = self._run(task)
            with self._lock:
                self._table.report(task, errors)
                self._reported.notify_all()
                if (
                    not self._sharing.several
                    and self._table.running[task.kind]
                    and not self._closed
                ):
                    self._submitted.wait()  # another one goes on

    def _run(self, task: Task) -> list[str]:
        """Do a task, as far as it is wanted, and return the names of the errors in it."""
        if task.kind in (Kind.LOOKUP, Kind.TOUCH):
            sealed = self._sealed
            all_at_once = sealed.lookup if task.kind is Kind.LOOKUP else sealed.touch
            statuses, error = all_at_once(task.keys)
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
            if self._sharing.learn(took_s, alone=self._table.num_running == 1):
                with self._lock:
                    self._submitted.notify_all()
        return errors

    def _run_block(self, kind: Kind, key: bytes, parts: Sequence[memoryview]) -> tuple[Status, str]:
        match kind:
            case Kind.LOAD:
                return self._sealed.load(key, parts)
            case Kind.STORE:
                return self._sealed.store(key, parts)
            case Kind.DELETE:
                return self._sealed.delete(key)
        raise AssertionError(f"{kind} is not done block by block")
