"""A transfer engine over storage, for nodes without a common network: P stores, and D loads.

::

    P                                   storage                       D
    offer: store, under a random key ──► value
    Offered, when it is stored ───────── SEND with the key ─────────► pull: load
    withdraw: delete the value

Anybody who can write to the storage can only make pulls fail: their digests travel with SEND.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kvcache.cleanup import give_back
from ....kvcache.storage import (
    BackendError,
    BackendOptions,
    Completion,
    MissingPackageError,
    Status,
    Storage,
    StorageOpId,
    StorageWorkers,
    open_backend,
)
from ....kvcache.storage.keys import KEY_BYTES, NAMESPACE_DIGITS
from ....kvcache.storage.urls import is_server_url
from .base import Fault
from .descriptors import ArraySpec, Descriptor, PayloadArray
from .errors import TransportError, TransportUnavailableError
from .transfer_engine import (
    EngineOffer,
    EnginePull,
    PullError,
    TooLargeError,
    TransferEngine,
    seal,
    unseal,
)

NAME: Final = "storage"
NAMESPACE: Final = sha256(b"radixkv hand-off").hexdigest()[:NAMESPACE_DIGITS]
"""Namespace of the parts, apart from those of cached blocks, so that an operator can delete it."""

_OPERATION_S: Final = 600.0
"""The attempt ends earlier; this is a safety net."""
_TTL_S: Final = 600
_TEST_S: Final = 10.0
_DELETE_S: Final = 5.0
_MAINTAIN_S: Final = 0.05
# Together less than a transport waits for its thread.
_LAST_DELETES_S: Final = 2.0
_CLOSE_S: Final = 2.0
_POLL_S: Final = 1e-3


def open_storage_engine(url: str, staging_bytes: int) -> StorageEngine:
    """Open the storage of a URL, and test it.

    Args:
        url: of a server that both nodes reach; see `open_backend`.
        staging_bytes: memory for all parts that are stored, and for all that are loaded.

    Raises:
        TransportUnavailableError: if it is no server's, or does not answer.
        StorageError: for a wrong URL.
    """
    if not is_server_url(url):
        raise TransportUnavailableError(
            "a hand-off through storage needs a server that all nodes reach: redis://, rediss://, "
            "unix://, s3:// or mooncake://"
        )
    is_redis = url.partition("://")[0] in ("redis", "rediss", "unix")
    options = BackendOptions(namespace=NAMESPACE, ttl_s=_TTL_S if is_redis else None)
    test = BackendOptions(timeout_s=_TEST_S, connect_timeout_s=_TEST_S, namespace=NAMESPACE)
    try:
        with closing(open_backend(url, test)) as backend:
            backend.contains([bytes(KEY_BYTES)])
    except (BackendError, MissingPackageError) as error:
        raise TransportUnavailableError(f"the storage cannot be used: {error}") from None
    workers = StorageWorkers(open_backend(url, options), max_bytes_in_flight=staging_bytes)
    return StorageEngine(workers, staging_bytes)


class StorageEngine(TransferEngine):
    """Stores parts, and loads those of others.

    Attributes:
        storage: the storage of all nodes.
    """

    name = NAME
    copies_offers = False
    room = "room for loads"

    def __init__(self, storage: Storage, staging_bytes: int) -> None:
        """Use a storage, which `close` closes.

        Args:
            storage: for staging_bytes in flight at least.
            staging_bytes: memory for all parts that are stored, and for all that are loaded.
        """
        self.storage = storage
        self._capacity = staging_bytes
        self._ended: dict[StorageOpId, Completion] = {}
        self._offers: list[StorageOffer] = []  # until their values are deleted
        self._stored_bytes = self._loaded_bytes = 0
        self._quarantine: list[StoragePull] = []

    @property
    def quarantined_bytes(self) -> int:
        """See `TransferEngine.quarantined_bytes`."""
        return sum(pull.num_bytes for pull in self._quarantine)

    def offer(self, arrays: Sequence[PayloadArray]) -> StorageOffer | None:
        """See `TransferEngine.offer`."""
        hosts = [np.ascontiguousarray(each) for each in arrays]
        num_bytes = self._check(sum(each.nbytes for each in hosts))
        if self._stored_bytes + num_bytes > self._capacity:
            return None
        offer = StorageOffer(self, hosts)
        self._offers.append(offer)
        self._stored_bytes += num_bytes
        return offer

    def pull(self, route: bytes, descriptor: Descriptor, digest_key: bytes) -> StoragePull | None:
        """See `TransferEngine.pull`."""
        key = unseal(route)
        if len(key) != KEY_BYTES:
            raise PullError(Fault.MISMATCH, f"a key has {KEY_BYTES} bytes, got {len(key)}")
        num_bytes = self._check(descriptor.num_bytes)
        if self._loaded_bytes + num_bytes > self._capacity:
            return None
        pull = StoragePull(self, key, descriptor.arrays, digest_key)
        self._loaded_bytes += num_bytes
        return pull

    def _check(self, num_bytes: int) -> int:
        if num_bytes > self._capacity:
            raise TooLargeError(num_bytes, self._capacity)
        return num_bytes

    def status(self, operation: StorageOpId) -> Status | None:
        """Return how an operation has ended; None while it runs."""
        self._ended |= {each.operation: each for each in self.storage.poll()}
        completion = self._ended.get(operation)
        return None if completion is None else completion.statuses[0]

    def end_offer(self, offer: StorageOffer) -> None:
        """Forget a part, whose value is deleted."""
        for operation in offer.operations:
            self._ended.pop(operation, None)
        self._offers.remove(offer)
        self._stored_bytes -= offer.num_bytes

    def end_load(self, pull: StoragePull) -> None:
        """Forget a load, whose memory nothing writes any more."""
        self._ended.pop(pull.operation, None)
        self._loaded_bytes -= pull.num_bytes

    def quarantine(self, pull: StoragePull) -> None:
        """Keep the memory of a load that may still write it."""
        if pull not in self._quarantine:
            self._quarantine.append(pull)

    def maintain(self) -> None:
        """See `TransferEngine.maintain`."""
        for pull in list(self._quarantine):
            if self.status(pull.operation) is not None and self.storage.fenced(pull.operation):
                self._quarantine.remove(pull)
                self.end_load(pull)

    @property
    def maintain_every_s(self) -> float | None:
        """See `TransferEngine.maintain_every_s`."""
        return _MAINTAIN_S if self._quarantine else None

    def close(self) -> None:
        """See `TransferEngine.close`: delete all values, as far as storage answers in time.

        Threads that still write keep their memory.
        """
        give_back(self._delete_all, partial(self.storage.close, timeout_s=_CLOSE_S))

    def _delete_all(self) -> None:
        for offer in self._offers:
            offer.withdraw(was_read=False)
        end = time.monotonic() + _LAST_DELETES_S
        # A list, so that the deletes run beside each other.
        while not all([offer.is_withdrawn() for offer in list(self._offers)]):
            if time.monotonic() >= end:
                return
            time.sleep(_POLL_S)


class StorageOffer(EngineOffer):
    """A value that others may load.

    Attributes:
        num_bytes: size of the part.
    """

    def __init__(self, engine: StorageEngine, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self._key = secrets.token_bytes(KEY_BYTES)
        self.route = seal(self._key)
        self.num_bytes = sum(each.nbytes for each in arrays)
        self._engine = engine
        self._store = engine.storage.store([self._key], [arrays], timeout_s=_OPERATION_S)
        self._delete: StorageOpId | None = None

    @property
    def operations(self) -> list[StorageOpId]:
        """The store, and the delete once it has begun."""
        return [self._store] if self._delete is None else [self._store, self._delete]

    def is_ready(self) -> bool:
        """See `EngineOffer.is_ready`.

        Raises:
            TransportError: if storage has not taken it.
        """
        status = self._engine.status(self._store)
        if status not in (None, Status.STORED):
            raise TransportError(f"storage has not taken the part: {status.name.lower()}")
        return status is not None

    def was_read(self) -> bool:
        """See `EngineOffer.was_read`: storage does not tell."""
        return False

    def withdraw(self, was_read: bool) -> None:
        """See `EngineOffer.withdraw`."""
        self._engine.storage.cancel(self._store)

    def is_withdrawn(self) -> bool:
        """See `EngineOffer.is_withdrawn`: delete the value when no thread stores it any more.

        A value that cannot be deleted does no harm: it has the bytes that were offered.
        """
        engine = self._engine
        if self._delete is None:
            is_ended = engine.status(self._store) is not None
            if not (is_ended and engine.storage.fenced(self._store)):
                return False
            self._delete = engine.storage.delete([self._key], timeout_s=_DELETE_S)
        if engine.status(self._delete) is None:
            return False
        engine.end_offer(self)
        return True


class StoragePull(EnginePull):
    """A load into memory of its own.

    Attributes:
        operation: the load.
        num_bytes: size of the memory.
    """

    def __init__(
        self, engine: StorageEngine, key: bytes, specs: tuple[ArraySpec, ...], digest_key: bytes
    ) -> None:
        memory = [np.empty(spec.num_bytes, np.uint8) for spec in specs]
        self.digest_key = digest_key
        self.num_bytes = sum(spec.num_bytes for spec in specs)
        self.operation = engine.storage.load([key], [memory], timeout_s=_OPERATION_S)
        self.arrays = tuple(
            [_read_only(part, spec) for part, spec in zip(memory, specs, strict=True)]
        )
        self._engine = engine

    def advance(self) -> int:
        """See `EnginePull.advance`."""
        match self._engine.status(self.operation):
            case None:
                return 0
            case Status.LOADED:
                return len(self.arrays)
            case Status.MISSING:
                raise PullError(Fault.EXPIRED, "it is not in storage any more")
            case Status.CORRUPT:
                raise PullError(Fault.CORRUPT, "storage has a damaged value")
            case status:
                raise PullError(Fault.FAILED, f"storage: {status.name.lower()}")

    def free(self) -> None:
        """See `EnginePull.free`."""
        self._engine.end_load(self)

    def abandon(self) -> None:
        """See `EnginePull.abandon`."""
        give_back(
            lambda: self._engine.storage.cancel(self.operation),
            lambda: self._engine.quarantine(self),
        )


def _read_only(memory: npt.NDArray[np.uint8], spec: ArraySpec) -> npt.NDArray[Any]:
    view = memory.view(spec.dtype).reshape(spec.shape)
    view.flags.writeable = False
    return view
