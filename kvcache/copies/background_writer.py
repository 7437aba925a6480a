"""Threads that copy staged blocks into the host tier, so that no step waits for a transfer."""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import Final

import jax
import numpy as np

from ..cleanup import give_back
from ..ids import OpId
from ..tokens import Int32Array
from .host_arrays import HostArrays

_EXIT_S: Final = 10.0
"""How long the end of the program waits for the threads, if the writer was not closed."""


@dataclass(frozen=True, eq=False, slots=True)
class StagedBlocks:
    """A piece of an operation on its way from the device to the host tier.

    Attributes:
        op_id: id of the operation.
        blocks: slice of the operation's blocks.
        destinations: ids of the blocks in the host tier.
        staging: gathered blocks, including padding; a thread waits until they have arrived.
        num_bytes: bytes of staging.
    """

    op_id: OpId
    blocks: slice
    destinations: Int32Array
    staging: Sequence[jax.Array]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The end of a write; error is the name of its exception's type, or empty."""

    op_id: OpId
    blocks: slice
    num_bytes: int
    error: str


class BackgroundWriter:
    """Writes staged blocks in the order of submission, one per thread at a time."""

    def __init__(self, host: HostArrays, num_threads: int) -> None:
        """Start the threads.

        Raises:
            RuntimeError: if there can be no more threads; those that run are stopped.
        """
        self._host = host
        self._changed = Condition()  # guards the attributes below; never held during a copy
        self._queue: deque[StagedBlocks] = deque()
        self._reports: list[WriteReport] = []
        self._closed = False
        # Daemon threads: a device that never answers must not keep the process alive.
        self._threads = [
            Thread(target=self._work, name=f"radixkv-host-{number}", daemon=True)
            for number in range(num_threads)
        ]
        # Python unwinds the stack of a daemon thread that needs the GIL after the interpreter's
        # end. In a copy, it meets frames of JAX's C++, and the process aborts.
        try:
            atexit.register(self.close, _EXIT_S)
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._threads = [each for each in self._threads if each.is_alive()]
            give_back(partial(self.close, _EXIT_S))
            raise

    def submit(self, staged: StagedBlocks) -> None:
        """Queue a write.

        Raises:
            RuntimeError: after close.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("the writer of the host tier is closed")
            self._changed.notify_all()  # first, so that an error leaves nothing queued
            self._queue.append(staged)

    def withdraw(self, op_id: OpId) -> list[StagedBlocks]:
        """Remove and return the unstarted writes of an operation; they get no report."""
        with self._changed:
            withdrawn = [staged for staged in self._queue if staged.op_id == op_id]
            if withdrawn:
                self._queue = deque(each for each in self._queue if each.op_id != op_id)
        return withdrawn

    def reports(self) -> list[WriteReport]:
        """Return the writes that ended since the last call."""
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a report."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Stop the threads once the queue is empty; False if one still writes after timeout_s."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        atexit.unregister(self.close)
        return True

    def _work(self) -> None:
        """Write until closed; the loop of each thread, which outlives its errors."""
        while True:
            try:
                staged = self._take()
            except Exception:  # before it has taken anything
                continue
            if staged is None:
                return
            op_id, blocks, num_bytes = staged.op_id, staged.blocks, staged.num_bytes
            error, is_reported = "", False
            try:
                error = self._write(staged)
            except Exception as failure:
                error = type(failure).__name__
            del staged  # free its memory before reporting it as free
            while not is_reported:  # else nobody would ever give its bytes back
                try:
                    is_reported = self._report(op_id, blocks, num_bytes, error)
                except Exception as failure:
                    error = error or type(failure).__name__

    def _report(self, op_id: OpId, blocks: slice, num_bytes: int, error: str) -> bool:
        """Report a write, and return True; an error leaves no report."""
        report = WriteReport(op_id, blocks, num_bytes, error)
        with self._changed:
            self._changed.notify_all()
            self._reports.append(report)
        return True

    def _take(self) -> StagedBlocks | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None

    def _write(self, staged: StagedBlocks) -> str:
        try:
            self._host.write(staged.destinations, [np.asarray(each) for each in staged.staging])
        except Exception as error:
            return type(error).__name__
        return ""
