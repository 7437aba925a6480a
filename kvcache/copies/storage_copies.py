"""Storage operations of a tier driver: stores, loads, lookups, and a circuit breaker."""

from __future__ import annotations

from collections.abc import Sequence

from ..storage.interface import Block, Status, Storage, StorageOpId
from ..tiers.operations import OpKind
from ..tokens import Int32Array
from .host_arrays import HostArrays
from .in_flight import InFlightOperation, InFlightTable, Outcome

_GOOD = (Status.STORED, Status.EXISTS, Status.LOADED)
_ANSWERS = {Status.FOUND: True, Status.MISSING: False}  # of a lookup
_COPIED = (Status.STORED, Status.LOADED)
# Statuses that do not show whether storage answers, by the kinds that requests wait for. A load may
# fail because of one bad value. A lookup fails only if storage fails, be it by a time limit of the
# backend that is below the deadline.
_INCONCLUSIVE = {
    OpKind.LOOKUP: {Status.DROPPED},
    OpKind.STORAGE_TO_HOST: {Status.DROPPED, Status.FAILED},
}
_UNANSWERED = {Status.TIMED_OUT, Status.FAILED}
_MAX_TOUCHES = 16
_TOUCH_TIMEOUT_S = 5.0
_OUTCOMES = {
    Status.TIMED_OUT: Outcome.TIMED_OUT,
    Status.CANCELLED: Outcome.CANCELLED,
    Status.DROPPED: Outcome.DROPPED,
}


class StorageCopies:
    """Starts operations in storage and records their ends in the table.

    Storage itself reads and writes the rows of the host tier and keeps the deadlines.

    While storage hangs, requests must not wait for it. After a lookup or load timed out or a lookup
    failed, only one lookup at a time goes to storage, until one of the same kind is answered:
    storage may answer lookups from memory while its disk hangs. Other lookups end at once as
    NOT_ASKED, which counts as a miss.
    """

    def __init__(self, storage: Storage, host: HostArrays, table: InFlightTable) -> None:
        self._storage = storage
        self._host = host
        self._table = table
        self._entries: dict[StorageOpId, InFlightOperation] = {}  # not fenced yet
        self._touches: set[StorageOpId] = set()  # not ended yet
        self._unanswered: set[OpKind] = set()  # kinds whose last operation was not answered

    def start(self, entry: InFlightOperation) -> None:
        """Start an operation in storage, or set its outcome to NOT_ASKED.

        Raises:
            IndexError: for the id of an unusable host block.
            StorageError: if storage refuses the operation.
        """
        operation, storage = entry.operation, self._storage
        if self._unanswered and operation.kind is OpKind.LOOKUP and self._is_waiting:
            entry.outcome = Outcome.NOT_ASKED
            return
        keys, timeout_s, epoch = operation.keys, operation.timeout_s, operation.epoch
        match operation.kind:
            case OpKind.HOST_TO_STORAGE:
                payloads = self._rows(operation.sources)
                storage_id = storage.store(keys, payloads, timeout_s=timeout_s, epoch=epoch)
            case OpKind.STORAGE_TO_HOST:
                rows = self._rows(operation.destinations)
                storage_id = storage.load(keys, rows, timeout_s=timeout_s, epoch=epoch)
            case OpKind.LOOKUP:
                storage_id = storage.lookup(keys, timeout_s=timeout_s, epoch=epoch)
            case _:
                raise AssertionError(f"{operation.kind} does not use storage")
        entry.storage_id = storage_id
        self._entries[storage_id] = entry

    @property
    def is_touching(self) -> bool:
        """Whether a touch has not ended yet."""
        return bool(self._touches)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark keys as used in storage, unless too many earlier touches have not ended.

        Raises:
            StorageError: if storage refuses the operation.
        """
        if len(self._touches) < _MAX_TOUCHES:
            self._touches.add(self._storage.touch(keys, timeout_s=_TOUCH_TIMEOUT_S))

    def withdraw(self, storage_id: StorageOpId) -> None:
        """Cancel an operation; `collect` fences it once nothing uses its blocks."""
        self._storage.cancel(storage_id)

    def collect(self) -> None:
        """Record the operations that ended, also by their deadline, and those that are fenced."""
        if not self._entries and not self._touches:
            return
        for completion in self._storage.poll():
            self._touches.discard(completion.operation)
            entry = self._entries.get(completion.operation)
            if entry is not None and entry.operation.id in self._table.open:
                self._end(entry, completion.statuses)
        for storage_id, entry in list(self._entries.items()):
            ended = entry.operation.id not in self._table.open
            if ended and self._storage.fenced(storage_id):
                self._table.fence(entry)  # first: an error leaves it to the next call
                del self._entries[storage_id]

    @property
    def _is_waiting(self) -> bool:
        """Whether a lookup or load has not ended."""
        started = [entry.operation for entry in self._entries.values()]
        return any(each.kind in _INCONCLUSIVE and each.id in self._table.open for each in started)

    def _end(self, entry: InFlightOperation, statuses: Sequence[Status]) -> None:
        kind = entry.operation.kind
        if kind in _INCONCLUSIVE and (conclusive := {*statuses} - _INCONCLUSIVE[kind]):
            self._unanswered.discard(kind)
            if conclusive <= _UNANSWERED:
                self._unanswered.add(kind)
        if kind is OpKind.LOOKUP:
            entry.ok = [_ANSWERS.get(status) for status in statuses]
            is_done = None not in entry.ok
        else:
            entry.ok = [status in _GOOD for status in statuses]
            is_done = all(entry.ok)
        entry.copied = sum(status in _COPIED for status in statuses)
        outcome = next((_OUTCOMES[each] for each in statuses if each in _OUTCOMES), Outcome.FAILED)
        outcome = Outcome.DONE if is_done else outcome
        self._table.end(entry, outcome, fenced=False)  # `collect` fences it

    def _rows(self, block_ids: Int32Array) -> list[Block]:
        return [[block] for block in self._host.blocks(block_ids)]
