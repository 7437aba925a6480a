"""Tier driver: executes a manager's operations with JAX copies, writer threads and storage.

::

    the engine's loop                              elsewhere
    dispatch ──┬─ host blocks ──► staging ──► scatter
               ├─ gather ──► staging ────────────► BackgroundWriter: threads write host blocks
               ├─ copy within the pools
               └─ Storage.store, load ───────────► its threads read and write host blocks
    poll     ◄── results, deadlines
    fenced   ◄── ended operations whose blocks are no longer in use
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
from .background_writer import BackgroundWriter, StagedBlocks, WriteReport
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
from .storage_copies import StorageCopies

_Part: TypeAlias = Callable[[InFlightOperation, BlockArrays], None]

_PAUSE_S = 0.001
"""Interval at which `wait` checks storage and deadlines, which do not wake it."""


class TierDriver:
    """Copies blocks between the device, the host tier and storage, as a manager decides.

    Call it from the thread that owns the arrays. Only `warm_up`, `wait` and `close` block, and a
    `dispatch` for which staging has no room. Each operation ends once: `poll` returns its result,
    or, if it was cancelled, only `fenced` returns its id.

    An offload copies device blocks as they are at dispatch: it gathers them into staging, so that
    the next step may overwrite them. While staging is full, `dispatch` waits for earlier pieces to
    be written. A load to the device copies host blocks as they are at
    dispatch. It ends at once, because every later dispatch runs after it.
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
        """Start the threads. The caller closes storage, but only the driver may poll it.

        Args:
            host: memory of the host tier.
            storage: storage for the operations that have keys.
            max_bytes_in_flight: limit of the staging that waits for the host tier, which needs
                device memory beside the pools. A piece over the limit waits until there is room, at
                most until the deadline of its operation; one alone may exceed it.
            max_blocks_per_copy: size of a piece, rounded up to a power of two; larger operations
                are copied in pieces.
            num_threads: number of threads that write to the host tier.
            clock: time in seconds, for deadlines.

        Raises:
            CountError: if a count is less than 1.
        """
        self._max_bytes = as_count("max_bytes_in_flight", max_bytes_in_flight, minimum=1)
        self._max_blocks = as_count("max_blocks_per_copy", max_blocks_per_copy, minimum=1)
        self._host = host
        self._clock = clock
        self._writer = BackgroundWriter(host, as_count("num_threads", num_threads, minimum=1))
        self._copies: BlockCopies | None = None
        self._table = InFlightTable(host.bytes_per_block)
        self._storage = None if storage is None else StorageCopies(storage, host, self._table)
        self._reports: list[WriteReport] = []  # of the writer, and not collected yet
        self._errors: Counter[str] = Counter()
        self._dropped_blocks = self._bytes_in_flight = 0

    def warm_up(self, arrays: BlockArrays) -> BlockArrays:
        """Compile every copy in advance; return arrays, with unchanged content.

        Raises:
            ValueError: if the blocks of arrays and of the host tier differ in shape or dtype.
        """
        pool = arrays.keys[0]
        device = len(arrays.keys), tuple(pool.shape[1:]), np.dtype(pool.dtype)
        host = self._host.num_layers, self._host.block_shape, self._host.dtype
        if device != host:
            raise ValueError(f"layers, block and dtype are {device} on the device, {host} on host")
        self._copies = BlockCopies(arrays, self._max_blocks)
        return arrays

    def replace_copies(self, make: Callable[[BlockCopies], BlockCopies]) -> None:
        """Replace the copies of `warm_up` by others made of them, such as ones that are watched."""
        self._copies = make(self._warm_copies())

    def dispatch(self, operations: Sequence[Operation], arrays: BlockArrays) -> None:
        """Start operations as if simultaneously; the pools of arrays are donated and replaced.

        An operation that cannot be started ends as FAILED, and its error is counted.

        Raises:
            StorageConfigError: if an operation has keys and the driver has no storage; nothing is
                started.
            IndexError: if the pools or the host tier are smaller than the manager assumes; nothing
                is started.
            ValueError: if an operation writes a block twice, or reads and writes it; nothing is
                started.
            Exception: the error of a copy that consumed the donated pools. The cache is lost.
        """
        for operation in operations:
            _check_blocks(operation, self._warm_copies(), self._host)
        if any(operation.keys for operation in operations):
            self._need_storage()
        now = self._clock()
        entries = [self._table.add(each, now + each.timeout_s) for each in operations]
        # Operations may exchange blocks: read everything before writing anything.
        for part in (self._read, self._offload, self._copy, self._write):
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
            self._drop_staged(entry)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark keys as used in storage; the last key is the warmest. There is no result.

        Call it before `dispatch`, with the keys from `Tiers.take_used`.

        Raises:
            StorageConfigError: if the driver has no storage.
        """
        if keys:
            try:
                self._need_storage().touch(keys)
            except StorageError as error:
                self._errors[type(error).__name__] += 1

    @property
    def is_touching(self) -> bool:
        """Whether a `touch` is in progress; wait for it before you close storage."""
        return self._storage is not None and self._storage.is_touching

    def cancel(self, op_ids: Sequence[OpId]) -> None:
        """End operations early; `fenced` returns each once its blocks are no longer in use."""
        for op_id in op_ids:
            self._table.retract(op_id)
            if entry := self._table.open.get(op_id):
                self._table.cancel(entry, fenced=self._withdraw(entry))

    def poll(self) -> list[OperationResult]:
        """Return the results since the last call. Call it once per step: it checks deadlines."""
        self._collect()
        return self._table.take_results()

    def fenced(self) -> list[OpId]:
        """Return the operations that ended unfenced or were cancelled and are fenced now."""
        self._collect()
        return self._table.take_fenced()

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` or `fenced` has something to return, or nothing is in flight."""
        end = time.monotonic() + timeout_s
        while True:
            self._collect()
            idle = not (self._table.open or self._table.unfenced or self.is_touching)
            left = end - time.monotonic()
            if self._table.has_results or idle or left <= 0:
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
        """End every operation and stop the threads; results and fences can still be read.

        Returns False if a thread is still writing after timeout_s; call it again then.
        """
        self._collect()
        for entry in list(self._table.open.values()):
            self._table.end(entry, Outcome.CANCELLED, fenced=self._withdraw(entry))
        return self._writer.close(timeout_s)

    # -- dispatch

    def _read(self, entry: InFlightOperation, arrays: BlockArrays) -> None:
        """Read the blocks of a load to the device into staging."""
        operation, copies = entry.operation, self._warm_copies()
        if operation.kind is not OpKind.HOST_TO_DEVICE:
            return
        for piece, size in copies.pieces(operation.num_blocks):
            sources = np.zeros(size, np.int32)  # 0 is the padding row
            ids = operation.sources[piece]
            sources[: len(ids)] = ids
            entry.staged.append(StagedPiece(piece, size, self._host.read(sources)))

    def _offload(self, entry: InFlightOperation, arrays: BlockArrays) -> None:
        """Gather the blocks of an offload into staging and submit them to the writer."""
        operation = entry.operation
        if operation.kind is not OpKind.DEVICE_TO_HOST:
            return
        for piece, size in self._warm_copies().pieces(operation.num_blocks):
            num_bytes = size * self._host.bytes_per_block
            if not self._has_room(num_bytes, entry.deadline):
                # Leading blocks are useful without later ones, but not the reverse.
                self._dropped_blocks += operation.num_blocks - piece.start
                entry.outcome = Outcome.DROPPED
                return
            self._offload_piece(entry, arrays, piece, size)

    def _offload_piece(
        self, entry: InFlightOperation, arrays: BlockArrays, piece: slice, size: int
    ) -> None:
        operation, copies = entry.operation, self._warm_copies()
        num_bytes = size * self._host.bytes_per_block
        staging = copies.to_host(copies.gather(arrays, operation.sources[piece], size))
        entry.staged.append(StagedPiece(piece, size, staging))
        self._bytes_in_flight += num_bytes
        destinations = operation.destinations[piece]
        self._writer.submit(StagedBlocks(operation.id, piece, destinations, staging, num_bytes))
        entry.writes += 1
        del entry.staged[0]  # the report gives its bytes back now

    def _has_room(self, num_bytes: int, deadline: float) -> bool:
        """Wait until num_bytes fit into staging, or it is empty; False if the deadline is first."""
        while True:
            self._reports += self._writer.reports()  # to collect when the dispatch is complete
            used = self._bytes_in_flight - sum([report.num_bytes for report in self._reports])
            if used == 0 or used + num_bytes <= self._max_bytes:
                return True
            if self._clock() >= deadline:
                return False
            self._writer.wait(_PAUSE_S)

    def _copy(self, entry: InFlightOperation, arrays: BlockArrays) -> None:
        """Copy within the pools, before other operations write to them."""
        operation, copies = entry.operation, self._warm_copies()
        if operation.kind is not OpKind.DEVICE_TO_DEVICE:
            return
        for piece, size in copies.pieces(operation.num_blocks):
            copies.copy(arrays, operation.sources[piece], operation.destinations[piece], size)
            entry.mark(piece)

    def _write(self, entry: InFlightOperation, arrays: BlockArrays) -> None:
        """Start a storage operation, or scatter staged blocks."""
        operation = entry.operation
        if operation.keys:
            self._need_storage().start(entry)
        while entry.staged:
            piece, size, staging = entry.staged[0]
            self._warm_copies().scatter(arrays, staging, operation.destinations[piece], size)
            entry.mark(piece)
            del entry.staged[0]

    def _need_storage(self) -> StorageCopies:
        if self._storage is None:
            raise StorageConfigError("the manager uses storage, but the driver has none")
        return self._storage

    def _warm_copies(self) -> BlockCopies:
        assert self._copies is not None, "call warm_up before the first copy"
        return self._copies

    # -- ends

    def _collect(self) -> None:
        self._collect_writes()
        self._expire()
        if self._storage is not None:
            self._storage.collect()

    def _collect_writes(self) -> None:
        self._reports += self._writer.reports()
        while self._reports:  # an error loses none, and counts no bytes twice
            self._collect_write(self._reports[0])
            del self._reports[0]

    def _collect_write(self, report: WriteReport) -> None:
        entry = self._table.get(report.op_id)
        if report.error:
            self._errors[report.error] += 1
        if report.op_id in self._table.unfenced:
            if entry.writes == 1:
                self._table.fence(entry)
        else:
            if report.error:
                entry.outcome = Outcome.FAILED
            elif not entry.ok[report.blocks.start]:
                entry.mark(report.blocks)
            if entry.writes == 1 and entry.storage_id is None:
                self._drop_staged(entry)  # of a dispatch that was interrupted
                self._table.end(entry, entry.outcome or Outcome.DONE, fenced=True)
        entry.writes -= 1  # last: the report is taken again after an error
        self._bytes_in_flight -= report.num_bytes

    def _expire(self) -> None:
        now = self._clock()
        for entry in list(self._table.open.values()):
            if entry.storage_id is None and entry.deadline <= now:  # storage has its own deadlines
                self._table.end(entry, Outcome.TIMED_OUT, fenced=self._withdraw(entry))

    def _end_if_done(self, entry: InFlightOperation) -> None:
        if entry.writes == 0 and entry.storage_id is None:
            self._table.end(entry, entry.outcome or Outcome.DONE, fenced=True)

    def _drop_staged(self, entry: InFlightOperation) -> None:
        """Drop the blocks of an operation that are staged and will not be submitted."""
        if entry.operation.kind is OpKind.DEVICE_TO_HOST:
            num_blocks = sum([piece.size for piece in entry.staged])
            self._bytes_in_flight -= num_blocks * self._host.bytes_per_block
        entry.staged = []

    def _withdraw(self, entry: InFlightOperation) -> bool:
        """Cancel an operation in storage, or its unstarted writes; return whether it is fenced."""
        if entry.storage_id is not None and self._storage is not None:
            self._storage.withdraw(entry.storage_id)
            return False
        for write in self._writer.withdraw(entry.operation.id):
            entry.writes -= 1
            self._bytes_in_flight -= write.num_bytes
        self._drop_staged(entry)
        return entry.writes == 0


def _check_blocks(operation: Operation, device: BlockCopies, host: HostArrays) -> None:
    """Reject operations that no manager of these pools and this host tier would create.

    Raises:
        IndexError: for a block outside the pools or the host tier: they have fewer blocks than the
            manager.
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
    """Reject copies whose result depends on the order of reads and writes."""
    shared = np.intersect1d(sources, destinations)
    if len(shared) or len(np.unique(destinations)) < len(destinations):
        raise ValueError("a block is written twice, or read and written, in one operation")
