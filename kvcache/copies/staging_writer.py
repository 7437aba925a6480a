"""Threads that bring gathered blocks into the host tier, so that no step waits for a transfer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread

import jax
import numpy as np

from ..ids import OpId
from ..tokens import Int32Array
from .host_arrays import HostArrays


@dataclass(frozen=True, eq=False, slots=True)
class StagedBlocks:
    """Blocks on their way from the device.

    Attributes:
        op_id: of the operation they are a piece of.
        blocks: which of its blocks they are.
        destinations: their ids in the host tier.
        staging: what was gathered, padding included; a thread waits until it is there.
        num_bytes: held by staging.
    """

    op_id: OpId
    blocks: slice
    destinations: Int32Array
    staging: Sequence[jax.Array]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The end of a write; error names the type of what it raised, if it did."""

    op_id: OpId
    blocks: slice
    num_bytes: int
    error: str


class StagingWriter:
    """Writes in the order in which they were submitted, a few at a time."""

    def __init__(self, host: HostArrays, num_threads: int) -> None:
        """Start the threads."""
        self._host = host
        self._changed = Condition()  # of all that follows; held for no copy
        self._queue: deque[StagedBlocks] = deque()
        self._reports: list[WriteReport] = []
        self._closed = False
        # Daemons: a device that never answers must not keep the process from ending.
        self._threads = [
            Thread(target=self._work, name=f"radixkv-host-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, staged: StagedBlocks) -> None:
        """Queue a write.

        Raises:
            RuntimeError: after close.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("the threads that write to the host tier were ended")
            self._queue.append(staged)
            self._changed.notify_all()

    def withdraw(self, op_id: OpId) -> list[StagedBlocks]:
        """Take back the writes of an operation that no thread has begun; they have no report."""
        with self._changed:
            withdrawn = [staged for staged in self._queue if staged.op_id == op_id]
            if withdrawn:
                self._queue = deque(each for each in self._queue if each.op_id != op_id)
        return withdrawn

    def reports(self) -> list[WriteReport]:
        """Return what has ended since the last call."""
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a report."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the threads when the queue is empty; False if one still writes after timeout_s."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        """Do one write after the other, until closed; the loop of each thread."""
        while (staged := self._take()) is not None:
            error = self._write(staged)
            report = WriteReport(staged.op_id, staged.blocks, staged.num_bytes, error)
            del staged  # its memory is free before anybody counts on that
            with self._changed:
                self._reports.append(report)
                self._changed.notify_all()

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
