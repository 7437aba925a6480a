"""StorageEngine: parts through a storage that two nodes share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from radixkv.kvcache.storage import (
    Backend,
    BackendUnreachableError,
    StorageUrlError,
    StorageWorkers,
    open_backend,
)
from radixkv.scheduler.nodes.transport import (
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    TransportArgumentError,
    TransportUnavailableError,
    Withdrawn,
    describe,
    open_transport,
)
from radixkv.scheduler.nodes.transport.descriptors import make_digest_key
from radixkv.scheduler.nodes.transport.storage_engine import StorageEngine
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport
from radixkv.scheduler.nodes.transport.transfer_engine import PullError, seal

from .conformance import KEY, LATE_S, EngineConformance, Pair, arrays, equal, offer, part_id, wait

STAGING_BYTES = 1 << 20


class Shared:
    """A backend that several nodes use and none of them closes; it can fail and damage values."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.may_store = threading.Event()
        self.may_store.set()
        self.error: BackendUnreachableError | None = None
        self.damages = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self.backend.contains(keys)

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        found = self.backend.get(key, into)
        if self.damages and found is not None:
            into[-1][0] ^= 1
        return found

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self.may_store.wait(LATE_S)
        if self.error is not None:
            raise self.error
        self.backend.put(key, parts)

    def delete(self, key: bytes) -> bool:
        return self.backend.delete(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        raise AssertionError("parts have no order")

    def list_values(self, *, coldest_first: bool = False) -> Any:
        return self.backend.list_values(coldest_first=coldest_first)

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """Leave it open for the other node."""


@pytest.fixture
def shared() -> Iterator[Shared]:
    backend = Shared(open_backend("memory://"))
    yield backend
    backend.may_store.set()
    backend.backend.close()


@pytest.fixture
def pair(shared: Shared) -> Iterator[Pair]:
    def end() -> ThreadedTransport:
        workers = StorageWorkers(shared, max_bytes_in_flight=2 * STAGING_BYTES)
        return ThreadedTransport(StorageEngine(workers, STAGING_BYTES))

    ends = Pair(end(), end())
    yield ends
    shared.may_store.set()
    for each in ends:
        each.close()


class TestStorage(EngineConformance):
    withdrawn_fault = Fault.EXPIRED


def test_a_part_is_offered_when_it_is_stored_and_deleted_when_it_is_withdrawn(
    pair: Pair, shared: Shared
) -> None:
    shared.may_store.clear()
    given = arrays()
    pair.prefill.offer(part_id(), given, describe(given, num_blocks=3), ttl_s=LATE_S)
    while not pair.prefill.stats().offers:
        assert pair.prefill.poll() == []
    assert pair.prefill.poll() == []
    shared.may_store.set()
    info = wait(pair.prefill, Offered).info
    assert len(list(shared.list_values())) == 1
    pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
    assert equal(wait(pair.decode, Received).arrays, given)
    pair.decode.release(part_id())
    pair.prefill.withdraw(KEY, was_read=True)
    wait(pair.prefill, Withdrawn)
    assert list(shared.list_values()) == []


def test_a_part_that_is_withdrawn_while_it_is_stored_leaves_no_value(
    pair: Pair, shared: Shared
) -> None:
    shared.may_store.clear()
    given = arrays()
    pair.prefill.offer(part_id(), given, describe(given, num_blocks=3), ttl_s=LATE_S)
    pair.prefill.withdraw(KEY)
    shared.may_store.set()
    wait(pair.prefill, Withdrawn)
    assert list(shared.list_values()) == [] and pair.prefill.stats().offers == 0


def test_a_part_that_storage_does_not_take_ends_the_attempt(pair: Pair, shared: Shared) -> None:
    shared.error = BackendUnreachableError("put", "it is away")
    given = arrays()
    pair.prefill.offer(part_id(), given, describe(given, num_blocks=3), ttl_s=LATE_S)
    failed = wait(pair.prefill, OfferFailed)
    assert failed.reason == "TransportError: storage has not taken the part: failed"
    pair.prefill.withdraw(KEY)
    wait(pair.prefill, Withdrawn)
    assert pair.prefill.stats().offers == 0


def test_a_damaged_value_is_not_received(pair: Pair, shared: Shared) -> None:
    info = offer(pair.prefill)
    shared.damages = True
    pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
    failed = wait(pair.decode, PullFailed)
    assert (failed.fault, failed.reason) == (Fault.CORRUPT, "storage has a damaged value")


def test_a_part_waits_for_room_and_one_that_is_too_large_fails(pair: Pair) -> None:
    for part, size in ((0, STAGING_BYTES), (1, STAGING_BYTES), (2, STAGING_BYTES + 1)):
        given = [np.full(size, part, np.uint8)]
        pair.prefill.offer(part_id(part), given, describe(given, num_blocks=1), ttl_s=LATE_S)
    events: list[Any] = []
    info = wait(pair.prefill, Offered, events).info
    while not events:
        events += pair.prefill.poll()
    [failed] = events
    assert isinstance(failed, OfferFailed) and failed.part_id.part == 2
    assert failed.reason == (
        f"it has {STAGING_BYTES + 1} bytes, and staging memory has {STAGING_BYTES} (staging_bytes)"
    )
    assert info.part_id.part == 0
    pair.prefill.withdraw(KEY)  # the second has had no room
    wait(pair.prefill, Withdrawn)


def test_a_route_that_is_no_key_is_refused(shared: Shared) -> None:
    workers = StorageWorkers(shared, max_bytes_in_flight=STAGING_BYTES)
    engine = StorageEngine(workers, STAGING_BYTES)
    with pytest.raises(PullError, match=r"^a key has 32 bytes, got 3$") as caught:
        engine.pull(seal(b"abc"), describe(arrays(), num_blocks=3), make_digest_key())
    assert caught.value.fault is Fault.MISMATCH
    engine.close()


def test_what_no_other_node_reaches_is_refused() -> None:
    with pytest.raises(TransportArgumentError, match=r"^the transport storage needs the URL of a"):
        open_transport("storage")
    for url in ("memory://", "file:///tmp/x"):
        with pytest.raises(
            TransportUnavailableError,
            match=r"^a hand-off through storage needs a server that all nodes reach: redis://, ",
        ):
            open_transport("storage", storage=url)
    with pytest.raises(TransportUnavailableError, match=r"^the storage cannot be used: "):
        open_transport("storage", storage="redis://127.0.0.1:1")
    with pytest.raises(StorageUrlError):
        open_transport("storage", storage="redis://127.0.0.1:1/x/y")
