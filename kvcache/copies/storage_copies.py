"""The half of a tier driver that talks to storage."""

from __future__ import annotations

from collections.abc import Sequence

from ..storage.interface import (
    Block,
    Status,
    Storage,
    StorageOpId,
)
from ..tiers.operations import OpKind
from ..tokens import Int32Array
from .host_arrays import HostArrays
from .in_flight import (
    InFlightOperation,
    InFlightTable,
    Outcome,
)

_GOOD = (Status.STORED, Status.EXISTS, Status.LOADED, Status.FOUND)
_ANSWERED = (*_GOOD, Status.MISSING)  # of a lookup: that storage has not a block is an answer
_COPIED = (Status.STORED, Status.LOADED)
# By what requests wait for: what does not tell whether storage answers. One value may be bad; but
# a lookup fails for storage itself, also when a client's own limit comes before the deadline.
_NO_NEWS = {
    OpKind.LOOKUP: {Status.DROPPED},
    OpKind.STORAGE_TO_HOST: {Status.DROPPED, Status.FAILED},
}
_IN_VAIN = {Status.TIMED_OUT, Status.FAILED}
_MOST_TOUCHES = 16
_TOUCH_TIMEOUT_S = 5.0
_OUTCOMES = {
    Status.TIMED_OUT: Outcome.TIMED_OUT,
    Status.CANCELLED: Outcome.CANCELLED,
    Status.DROPPED: Outcome.DROPPED,
}


class StorageCopies:
    """Brings operations to storage, and their ends into the table.

    Storage ends each at its deadline, and reads and writes the rows of the host tier itself.

    While storage hangs, every request would wait for it in vain. So when a lookup or load has run
    out of time, or a lookup has failed, one at a time is asked, until one is answered; the others
    are told at once that nothing is there.
    """

    def __init__(self, storage: Storage, host: HostArrays, table: InFlightTable) -> None:
        self._storage = storage
        self._host = host
        self._table = table
        self._entries: dict[StorageOpId, InFlightOperation] = {}  # until they are fenced
        self._touches: set[StorageOpId] = set()  # that have not ended
        self._hangs = False  # the last was asked in vain

    def start(self, entry: InFlightOperation) -> None:
        """Give an operation to storage, or the outcome that it has not been asked.

        Raises:
            IndexError: for a host block that there is not.
            StorageError: what storage refuses.
        """
        operation, storage = entry.operation, self._storage
        if self._hangs and operation.kind is OpKind.LOOKUP and self._is_asked:
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
                raise AssertionError(f"storage has no part in {operation.kind}")
        entry.storage_id = storage_id
        self._entries[storage_id] = entry

    @property
    def is_touching(self) -> bool:
        """Whether storage is still being told of uses."""
        return bool(self._touches)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell storage what was used, unless it is behind with what it was told before.

        Raises:
            StorageError: what storage refuses.
        """
        if len(self._touches) < _MOST_TOUCHES:
            self._touches.add(self._storage.touch(keys, timeout_s=_TOUCH_TIMEOUT_S))

    def withdraw(self, storage_id: StorageOpId) -> None:
        """End an operation now; `collect` says when nothing uses its blocks any more."""
        self._storage.cancel(storage_id)

    def collect(self) -> None:
        """Take in what ended, by its deadline too, and what is fenced."""
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
                del self._entries[storage_id]
                self._table.fence(entry)

    @property
    def _is_asked(self) -> bool:
        """Whether a request waits for storage."""
        asked = [entry.operation for entry in self._entries.values()]
        return any(each.kind in _NO_NEWS and each.id in self._table.open for each in asked)

    def _end(self, entry: InFlightOperation, statuses: Sequence[Status]) -> None:
        kind = entry.operation.kind
        if kind in _NO_NEWS and (said := {*statuses} - _NO_NEWS[kind]):
            self._hangs = said <= _IN_VAIN
        entry.ok = [status in _GOOD for status in statuses]
        entry.copied = sum(status in _COPIED for status in statuses)
        outcome = next((_OUTCOMES[each] for each in statuses if each in _OUTCOMES), Outcome.FAILED)
        well = _ANSWERED if kind is OpKind.LOOKUP else _GOOD
        outcome = Outcome.DONE if all(status in well for status in statuses) else outcome
        self._table.end(entry, outcome, fenced=False)  # `collect` sees whether it is

    def _rows(self, block_ids: Int32Array) -> list[Block]:
        return [[block] for block in self._host.blocks(block_ids)]
