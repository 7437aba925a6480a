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
    Block,
    Completion,
    Kind,
    Status,
    StorageClosedError,
    StorageOpId,
    StorageUrlError,
    StorageWorkers,
    open_backend,
)
from radixkv.kvcache.storage.interface import views
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
    storage_engine,
)
from radixkv.scheduler.nodes.transport.descriptors import make_digest_key
from radixkv.scheduler.nodes.transport.storage_engine import (
    NAMESPACE,
    StorageEngine,
    open_storage_engine,
)
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
        self.is_storing = threading.Event()
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
        self.is_storing.set()
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


@pytest.mark.parametrize("is_withdrawn", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_node_that_closes_leaves_no_value(
    pair: Pair, shared: Shared, *, is_stored: bool, is_withdrawn: bool
) -> None:
    given = arrays()
    if not is_stored:
        shared.may_store.clear()
    pair.prefill.offer(part_id(), given, describe(given, num_blocks=3), ttl_s=LATE_S)
    if is_stored:
        wait(pair.prefill, Offered)
    else:
        assert shared.is_storing.wait(LATE_S)
    if is_withdrawn:
        pair.prefill.withdraw(KEY, was_read=True)
    shared.may_store.set()
    pair.prefill.close()
    assert list(shared.list_values()) == []


def test_a_part_that_storage_does_not_take_ends_the_attempt(pair: Pair, shared: Shared) -> None:
    shared.error = BackendUnreachableError("put", "it is away")
    given = arrays()
    pair.prefill.offer(part_id(), given, describe(given, num_blocks=3), ttl_s=LATE_S)
    failed = wait(pair.prefill, OfferFailed)
    assert failed.reason == "TransportError: storage has not taken the part: failed"
    shared.error = None
    with pytest.raises(TransportArgumentError, match=r"is already offered$"):
        offer(pair.prefill)  # the memory of the first may still be in use
    pair.prefill.withdraw(KEY)
    wait(pair.prefill, Withdrawn)
    assert pair.prefill.stats().offers == 0
    offer(pair.prefill)


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


class ByHand:
    """A storage whose operations end, and whose fences fall, when the test says so."""

    def __init__(self) -> None:
        self.open: list[StorageOpId] = []
        self.cancelled: list[StorageOpId] = []
        self.timeouts_s: list[float] = []
        self.is_closed = False
        self.unfenced: set[StorageOpId] = set()
        self._ended: list[Completion] = []
        self._num_begun = 0

    def _begin(
        self, keys: Sequence[bytes], blocks: Sequence[Block] = (), *, timeout_s: float
    ) -> StorageOpId:
        for block in blocks:
            views(block)  # refuses what is not contiguous
        self._num_begun += 1
        self.timeouts_s.append(timeout_s)
        self.open.append(StorageOpId(self._num_begun))
        return self.open[-1]

    store = load = delete = _begin

    def end(self, status: Status) -> None:
        """End the oldest operation."""
        self._ended.append(Completion(self.open.pop(0), 0, Kind.LOAD, (status,)))

    def poll(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, operation: StorageOpId) -> bool:
        self.cancelled.append(operation)
        return True

    def fenced(self, operation: StorageOpId) -> bool:
        return operation not in self.unfenced

    def close(self, *, timeout_s: float) -> bool:
        self.is_closed = True
        return True


PART = describe([np.zeros(60, np.uint8)], num_blocks=1)


def by_hand() -> tuple[ByHand, StorageEngine]:
    storage = ByHand()
    return storage, StorageEngine(storage, 100)  # type: ignore[arg-type]


def nothing_is_left(engine: StorageEngine) -> bool:
    """Whether no part takes memory, and no operation is remembered."""
    counts = engine._stored_bytes, engine._loaded_bytes, engine.quarantined_bytes
    return counts == (0, 0, 0) and not engine._ended and engine.maintain_every_s is None


def begin_pull(engine: StorageEngine) -> Any:
    return engine.pull(seal(bytes(32)), PART, make_digest_key())


@pytest.mark.parametrize(
    ("status", "fault", "reason"),
    [
        (Status.LOADED, None, ""),
        (Status.MISSING, Fault.EXPIRED, "it is not in storage any more"),
        (Status.CORRUPT, Fault.CORRUPT, "storage has a damaged value"),
        (Status.FAILED, Fault.FAILED, "storage: failed"),
        (Status.TIMED_OUT, Fault.FAILED, "storage: timed_out"),
        (Status.CANCELLED, Fault.FAILED, "storage: cancelled"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_load_takes_its_memory_until_nothing_writes_it(
    status: Status, fault: Fault | None, reason: str, is_late: bool
) -> None:
    storage, engine = by_hand()
    pull = begin_pull(engine)
    assert (pull.advance(), begin_pull(engine)) == (0, None), "there is room for one"
    if is_late:
        storage.unfenced.add(pull.operation)
        pull.abandon()
        assert storage.cancelled == [pull.operation] and engine.quarantined_bytes == 60
        storage.end(status)
        engine.maintain()
        assert begin_pull(engine) is None, "a thread may still write"
        storage.unfenced.clear()
    else:
        storage.end(status)
        if fault is None:
            assert pull.advance() == 1 and not pull.arrays[0].flags.writeable
            pull.free()
        else:
            with pytest.raises(PullError, match=f"^{reason}$") as caught:
                pull.advance()
            assert caught.value.fault is fault
            pull.abandon()
    engine.maintain()
    assert nothing_is_left(engine) and begin_pull(engine)


@pytest.mark.parametrize("status", [Status.STORED, Status.FAILED])
def test_a_store_takes_its_memory_until_its_value_is_deleted(status: Status) -> None:
    storage, engine = by_hand()
    given = [np.zeros(60, np.uint8)]
    offer = engine.offer(given)
    assert offer is not None and engine.offer(given) is None, "there is room for one"
    offer.withdraw(was_read=False)
    assert not offer.is_withdrawn()
    storage.unfenced.add(storage.open[0])
    storage.end(status)
    assert not offer.is_withdrawn() and storage.open == [], "a thread may still store it"
    storage.unfenced.clear()
    assert not offer.is_withdrawn() and len(storage.open) == 1
    storage.end(Status.DELETED)
    assert offer.is_withdrawn() and nothing_is_left(engine) and engine.offer(given)


def test_parts_of_all_of_the_memory_have_room_and_those_of_the_other_way_take_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_engine, "_LAST_DELETES_S", 0.0)
    storage, engine = by_hand()
    whole = describe([np.zeros(100, np.uint8)], num_blocks=1)
    assert engine.offer([np.zeros(40, np.uint8)]) and engine.offer([np.zeros((5, 12), np.uint8).T])
    pull = engine.pull(seal(bytes(32)), whole, make_digest_key())
    assert pull is not None and engine.offer([np.zeros(1, np.uint8)]) is None
    pull.abandon()
    pull.abandon()
    assert engine.quarantined_bytes == 100 and engine.maintain_every_s is not None
    engine.close()
    assert storage.cancelled == [3, 3, 1, 2]


def test_an_operation_ends_long_after_its_attempt_but_a_delete_soon() -> None:
    storage, engine = by_hand()
    offer = engine.offer([np.zeros(60, np.uint8)])
    assert offer is not None and begin_pull(engine) is not None
    offer.withdraw(was_read=True)
    storage.end(Status.STORED)
    assert not offer.is_withdrawn()
    assert storage.timeouts_s == [600.0, 600.0, 5.0]


def test_a_storage_that_does_not_answer_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_engine, "_LAST_DELETES_S", 0.0)
    storage, engine = by_hand()
    assert engine.offer([np.zeros(60, np.uint8)])
    engine.close()
    assert storage.cancelled == [1] and storage.is_closed


@pytest.mark.parametrize("error", [StorageClosedError, MemoryError, KeyboardInterrupt])
def test_what_cannot_begin_takes_no_memory(error: type[BaseException]) -> None:
    storage, engine = by_hand()

    def fail(*_: object, **__: object) -> StorageOpId:
        raise error

    storage.store = storage.load = fail  # type: ignore[method-assign]
    with pytest.raises(error):
        engine.offer([np.zeros(60, np.uint8)])
    with pytest.raises(error):
        begin_pull(engine)
    assert nothing_is_left(engine)
    storage.store = storage.load = storage._begin  # type: ignore[method-assign]
    assert engine.offer([np.zeros(60, np.uint8)]) and begin_pull(engine)


@pytest.mark.parametrize(
    ("url", "ttl_s"),
    [
        ("redis://h:1", 600),
        ("rediss://h:1", 600),
        ("unix:///run/x", 600),
        ("s3://bucket/x", None),
        ("mooncake://h", None),
    ],
)
def test_the_engine_of_a_url_has_its_own_namespace_and_lets_values_expire(
    monkeypatch: pytest.MonkeyPatch, url: str, ttl_s: int | None
) -> None:
    opened: list[Any] = []

    def open_memory(url: str, options: Any) -> Backend:
        opened.append(options)
        return open_backend("memory://")

    monkeypatch.setattr(storage_engine, "open_backend", open_memory)
    engine = open_storage_engine(url, 100)
    test, options = opened
    assert (test.timeout_s, test.connect_timeout_s) == (10.0, 10.0)
    assert test.namespace == options.namespace == NAMESPACE and options.ttl_s == ttl_s
    assert engine.offer([np.zeros(60, np.uint8)]) and engine.offer([np.zeros(60, np.uint8)]) is None
    assert isinstance(engine.storage, StorageWorkers)
    assert engine.storage._table.max_bytes_in_flight == 100
    engine.close()
