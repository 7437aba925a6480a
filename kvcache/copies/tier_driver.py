"""Executes operations: JAX copies on the thread that owns the pools, the rest on other threads.

::

    the engine's loop                              elsewhere
    dispatch ──┬─ gather ──► staging ────────────► StagingWriter: threads write host blocks
               ├─ host blocks ──► staging ──► scatter
               ├─ copy within the pools
               └─ Storage.store, load ───────────► its threads read and write host blocks
    poll     ◄── results, deadlines
    fenced   ◄── what ended earlier, and nobody uses any more
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ..errors import StorageConfigError
from ..ids import OpId
from ..storage.errors import StorageError
from ..storage.interface import Storage
from ..tiers.operations import Operation, OpKind
from ..tokens import Int32Array, as_count
from .block_arrays import BlockArrays
from .block_copies import BlockCopies
from .host_arrays import HostArrays
from .in_flight import (
    InFlightOperation,
    InFlightTable,
    OperationResult,
    Outcome,
    StagedPiece,
    TierDriverStats,
)
from .staging_writer import StagedBlocks, StagingWriter
from .storage_copies import StorageCopies

_Part: TypeAlias = Callable[[InFlightOperation, BlockArrays], None]

_PAUSE_S = 0.001
"""How long `wait` leaves storage and deadlines, which wake nobody."""


class TierDriver:
    """Copies blocks between the device, the host tier and storage, as a manager decides.

    One thread calls it: the one that owns the arrays. No call but `warm_up`, `wait` and `close`
    waits for a copy. Each operation ends once: by `poll`, or by `fenced` alone if it is cancelled.

    From device to host go the blocks as they are at dispatch: they are gathered into staging, so
    that the next step may overwrite them. To the device go the host blocks as they are at dispatch;
    this ends at once, because every step that is dispatched later comes after it.
    """

    def __init__(
        self,
        host: HostArrays,
        storage: Storage | None = None,
        *,
        max_bytes_in_flight: int = 2**30,
        max_blocks_per_copy: int = 32,
        num_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. Storage stays the caller's, but only this may poll it.

        Args:
            host: the memory of the host tier.
            storage: for the operations that have keys.
            max_bytes_in_flight: of staging that waits to be written to the host tier, on the device
                beside the pools. What goes over it is dropped.
            max_blocks_per_copy: larger operations are copied in pieces; made a power of two.
            num_threads: that write to the host tier.
            clock: seconds, for deadlines.

        Raises:
            CountError: if a count is less than 1.
        """
        self._max_bytes = as_count("max_bytes_in_flight", max_bytes_in_flight, minimum=1)
        self._max_blocks = as_count("max_blocks_per_copy", max_blocks_per_copy, minimum=1)
        self._host = host
        self._clock = clock
        self._writer = StagingWriter(host, as_count("num_threads", num_threads, minimum=1))
        self._copies: BlockCopies | None = None
        self._table = InFlightTable(host.bytes_per_block)
        self._storage = None if storage is None else StorageCopies(storage, host, self._table)
        self._errors: Counter[str] = Counter()
        self._dropped_blocks = self._bytes_in_flight = 0

    def warm_up(self, arrays: BlockArrays) -> BlockArrays:
        """Compile every copy, so that none is compiled later; return arrays, unchanged in content.

        Raises:
            ValueError: if arrays and the host tier do not have blocks of one shape and dtype.
        """
        pool = arrays.keys[0]
        device = len(arrays.keys), tuple(pool.shape[1:]), np.dtype(pool.dtype)
        host = self._host.num_layers, self._host.block_shape, self._host.dtype
        if device != host:
            raise ValueError(f"layers, block and dtype are {device} on the device, {host} on host")
        self._copies = BlockCopies(arrays, self._max_blocks)
        return arrays

    def dispatch(self, operations: Sequence[Operation], arrays: BlockArrays) -> None:
        """Start operations as if at once; the pools of arrays are donated and replaced.

        An operation that cannot be started ends as failed, and its error is counted.

        Raises:
            StorageConfigError: if one has keys, and there is no storage; nothing is started.
            IndexError: if one has a block that the pools or the host tier have not, as they are
                smaller than the manager says; nothing is started.
            ValueError: if one writes a block twice, or reads it too; nothing is started.
            Exception: what ended a copy that had taken the pools: they are lost, and the cache is.
        """
        for operation in operations:
            _check_blocks(operation, self._warm_copies(), self._host)
        if any(operation.keys for operation in operations):
            self._need_storage()
        now = self._clock()
        entries = [self._table.add(each, now + each.timeout_s) for each in operations]
        # Two may exchange blocks: all is read before anything is written.
        for part in (self._read, self._copy, self._write):
            for entry in entries:
                self._attempt(part, entry, arrays)
        for entry in entries:
            self._end_if_done(entry)

    def _attempt(self, part: _Part, entry: InFlightOperation, arrays: BlockArrays) -> None:
        if entry.outcome is Outcome.FAILED:
            return
        try:
            part(entry, arrays)
        except AssertionError:
            raise
        except Exception as error:
            if any(pool.is_deleted() for pool in (*arrays.keys, *arrays.values)):
                raise
            self._errors[type(error).__name__] += 1
            entry.outcome = Outcome.FAILED
            if entry.operation.kind is OpKind.DEVICE_TO_HOST:  # no thread will write what was read
                num_blocks = sum(piece.size for piece in entry.staged)
                self._bytes_in_flight -= num_blocks * self._host.bytes_per_block

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell storage that keys were used, the last as the last; nobody hears what became of it.

        Call it before `dispatch`, with what `Tiers.take_used` hands out.

        Raises:
            StorageConfigError: if there is no storage.
        """
        if keys:
            try:
                self._need_storage().touch(keys)
            except StorageError as error:
                self._errors[type(error).__name__] += 1

    @property
    def is_touching(self) -> bool:
        """Whether storage is still being told of uses: only who is about to close it need care."""
        return self._storage is not None and self._storage.is_touching

    def cancel(self, op_ids: Sequence[OpId]) -> None:
        """End operations that nobody wants any more; `fenced` says when each is over."""
        for op_id in op_ids:
            self._table.retract(op_id)
            if entry := self._table.open.get(op_id):
                self._table.cancel(entry, fenced=self._withdraw(entry))

    def poll(self) -> list[OperationResult]:
        """Return the ends since the last call; call it once per step, for the deadlines."""
        self._collect()
        return self._table.take_results()

    def fenced(self) -> list[OpId]:
        """Return which operations are over now, of those that ended unfenced or were cancelled."""
        self._collect()
        return self._table.take_fenced()

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` or `fenced` has something to return, or nothing is under way."""
        end = time.monotonic() + timeout_s
        while True:
            self._collect()
            idle = not (self._table.open or self._table.unfenced or self.is_touching)
            left = end - time.monotonic()
            if self._table.has_news or idle or left <= 0:
                return
            self._writer.wait(min(left, _PAUSE_S))

    def stats(self) -> TierDriverStats:
        """Return counts."""
        return TierDriverStats(
            operations=dict(self._table.operations),
            copied_bytes=dict(self._table.copied_bytes),
            dropped_blocks=self._dropped_blocks,
            errors=dict(self._errors),
            open_operations=len(self._table.open),
            unfenced_operations=len(self._table.unfenced),
            bytes_in_flight=self._bytes_in_flight,
        )

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """End every operation and the threads; results and fences can still be taken.

        False if a thread was still writing after timeout_s: call it again then.
        """
        self._collect()
        for entry in list(self._table.open.values()):
            self._table.end(entry, Outcome.CANCELLED, fenced=self._withdraw(entry))
        return self._writer.close(timeout_s)

    # -- dispatch

    def _read(self, entry: InFlightOperation, arrays: BlockArrays) -> None:
        """Read what an operation copies between the tiers into staging."""
        operation, copies = entry.operation, self._warm_copies()
        if operation.kind is OpKind.HOST_TO_DEVICE:
            for piece, size in copies.pieces(operation.num_blocks):
                sources = np.zeros(size, np.int32)  # padded with the padding row
                ids = operation.sources[piece]
                sources[: len(ids)] = ids
                entry.staged.append(StagedPiece(piece, size, self._host.read(sources)))
        elif operation.kind is OpKind.DEVICE_TO_HOST:
            for piece, size in copies.pieces(operation.num_blocks):
                num_bytes = size * self._host.bytes_per_block
                if self._bytes_in_flight + num_bytes > self._max_bytes:
                    # The first blocks are of use without the last, not the other way round.
                    self._dropped_blocks += operation.num_blocks - piece.start
                    entry.outcome = Outcome.DROPPED
                    return
                staging = copies.to_host(copies.gather(arrays, operation.sources[piece], size))
                entry.staged.append(StagedPiece(piece, size, staging))
                self._bytes_in_flight += num_bytes

    def _copy(self, entry: InFlightOperation, arrays: BlockArrays) -> None:
        """Copy within the pools, before they are written from elsewhere."""
        operation, copies = entry.operation, self._warm_copies()
        if operation.kind is not OpKind.DEVICE_TO_DEVICE:
            return
        for piece, size in copies.pieces(operation.num_blocks):
            copies.copy(arrays, operation.sources[piece], operation.destinations[piece], size)
            entry.mark(piece)

    def _write(self, entry: InFlightOperation, arrays: BlockArrays) -> None:
        """Write what was staged, or let other threads do so."""
        operation = entry.operation
        if operation.keys:
            self._need_storage().start(entry)
        for piece, size, staging in entry.staged:
            destinations = operation.destinations[piece]
            if operation.kind is OpKind.HOST_TO_DEVICE:
                self._warm_copies().scatter(arrays, staging, destinations, size)
                entry.mark(piece)
            else:
                num_bytes = size * self._host.bytes_per_block
                staged = StagedBlocks(operation.id, piece, destinations, staging, num_bytes)
                self._writer.submit(staged)
                entry.writes += 1
        entry.staged = []

    def _need_storage(self) -> StorageCopies:
        if self._storage is None:
            raise StorageConfigError("the manager keeps blocks in storage, but the driver has none")
        return self._storage

    def _warm_copies(self) -> BlockCopies:
        assert self._copies is not None, "warm_up comes before the first copy"
        return self._copies

    # -- ends

    def _collect(self) -> None:
        self._collect_writes()
        self._expire()
        if self._storage is not None:
            self._storage.collect()

    def _collect_writes(self) -> None:
        for report in self._writer.reports():
            entry = self._table.get(report.op_id)
            entry.writes -= 1
            self._bytes_in_flight -= report.num_bytes
            if report.error:
                self._errors[report.error] += 1
            if report.op_id in self._table.unfenced:
                if entry.writes == 0:
                    self._table.fence(entry)
                continue
            if report.error:
                entry.outcome = Outcome.FAILED
            else:
                entry.mark(report.blocks)
            self._end_if_done(entry)

    def _expire(self) -> None:
        now = self._clock()
        for entry in list(self._table.open.values()):
            if entry.storage_id is None and entry.deadline <= now:  # storage expires its own
                self._table.end(entry, Outcome.TIMED_OUT, fenced=self._withdraw(entry))

    def _end_if_done(self, entry: InFlightOperation) -> None:
        if entry.writes == 0 and entry.storage_id is None:
            self._table.end(entry, entry.outcome or Outcome.DONE, fenced=True)

    def _withdraw(self, entry: InFlightOperation) -> bool:
        """Stop what has not begun of an operation; say whether nothing has, or all is over."""
        if entry.storage_id is not None and self._storage is not None:
            self._storage.withdraw(entry.storage_id)
            return False
        for write in self._writer.withdraw(entry.operation.id):
            entry.writes -= 1
            self._bytes_in_flight -= write.num_bytes
        return entry.writes == 0


def _check_blocks(operation: Operation, device: BlockCopies, host: HostArrays) -> None:
    """Refuse what no manager of these pools and this host tier decides.

    Raises:
        IndexError: for a block that they have not: the manager was made for more of them.
        ValueError: if a block is written twice, or read and written.
    """
    sources, destinations = operation.sources, operation.destinations
    match operation.kind:
        case OpKind.DEVICE_TO_HOST:
            device.check_ids(sources)
            host.check_ids(destinations)
        case OpKind.HOST_TO_DEVICE:
            host.check_ids(sources)
            device.check_ids(destinations)
        case OpKind.DEVICE_TO_DEVICE:
            device.check_ids(sources)
            device.check_ids(destinations)
            _check_apart(sources, destinations)
        case OpKind.HOST_TO_STORAGE:
            host.check_ids(sources)
        case OpKind.STORAGE_TO_HOST:
            host.check_ids(destinations)


def _check_apart(sources: Int32Array, destinations: Int32Array) -> None:
    """Refuse copies that differ by the order in which blocks are read and written."""
    shared = np.intersect1d(sources, destinations)
    if len(shared) or len(np.unique(destinations)) < len(destinations):
        raise ValueError("a block is written twice, or read and written, in one operation")
