"""KV events of a manager, by hand. The specification compares them with the state: chapter K."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from radixkv.kvcache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheManager,
    CountError,
    HostConfig,
    KVEvent,
    ReplayBuffer,
    events,
)
from radixkv.kvcache.events import MAX_STORED, EventRecorder, hash_blocks
from radixkv.kvcache.storage import StorageNamespace

from .helpers import serve, start

STORAGE = StorageNamespace("model", "1", "float32", 2, (0, 1), (0, 1))


def taken(manager: CacheManager) -> list[KVEvent]:
    batch = manager.take_events()
    return [] if batch is None else list(batch.events)


def stored(event: KVEvent) -> BlockStored:
    assert isinstance(event, BlockStored)
    return event


def test_without_recording_there_are_no_events() -> None:
    manager = CacheManager(4, 2)
    serve(manager, [1, 2, 3, 4])
    manager.evict(1)
    manager.reset()
    assert manager.take_events() is None


def test_events_have_plain_numbers_whatever_the_counts_of_the_manager_are() -> None:
    """The wire format encodes no number of numpy."""
    four, two = cast("list[int]", list(np.array([4, 2], np.int64)))
    host = HostConfig(four, "through")
    manager = CacheManager(four, two, host=host, record_events=True)
    serve(manager, [1, 2, 3, 4, 5])
    [event] = taken(manager)
    assert type(stored(event).block_size) is int


def test_a_publication_an_eviction_and_a_reset() -> None:
    manager = CacheManager(4, 2, record_events=True)
    assert manager.take_events() is None
    serve(manager, [1, 2, 3, 4, 5])
    [event] = taken(manager)
    first = stored(event)
    assert (first.medium, first.parent_block_hash, first.block_size) == ("GPU", None, 2)
    assert first.token_ids.tolist() == [1, 2, 3, 4] and first.namespace == b""
    assert len(set(first.block_hashes)) == 2
    assert all(0 < each < 2**64 for each in first.block_hashes)
    serve(manager, [1, 2, 3, 4, 5, 6])
    [event] = taken(manager)
    assert stored(event).parent_block_hash == first.block_hashes[-1]
    assert stored(event).token_ids.tolist() == [5, 6]
    manager.evict(2)
    [event] = taken(manager)
    assert isinstance(event, BlockRemoved) and event.medium == "GPU"
    assert set(event.block_hashes) == {first.block_hashes[1], *_last(manager, [3, 4, 5, 6])}
    manager.reset()
    assert taken(manager) == [AllBlocksCleared()]
    assert manager.take_events() is None


def _last(manager: CacheManager, tokens: list[int]) -> tuple[int, ...]:
    other = CacheManager(4, 2, record_events=True)
    serve(other, [1, 2, *tokens])
    return stored(taken(other)[0]).block_hashes[2:]


def test_hashes_depend_on_namespace_tokens_and_path_alone() -> None:
    def hashes(tokens: list[int], namespace: bytes = b"", block_size: int = 2) -> tuple[int, ...]:
        manager = CacheManager(9, block_size, record_events=True)
        serve(manager, [8, 8])
        manager.take_events()
        serve(manager, tokens, namespace)
        return stored(taken(manager)[0]).block_hashes

    assert hashes([1, 2, 3, 4]) == hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3, 4])[0] == hashes([1, 2, 3, 5])[0]
    assert hashes([1, 2, 3, 4])[1] != hashes([2, 2, 3, 4])[1]
    assert set(hashes([1, 2, 3, 4])).isdisjoint(hashes([1, 2, 3, 4], b"tenant"))


def test_batches_are_numbered_and_an_empty_one_has_no_number() -> None:
    manager = CacheManager(4, 2, record_events=True)
    numbers = []
    for token in range(3):
        serve(manager, [token, token])
        batch = manager.take_events()
        assert batch is not None and manager.take_events() is None
        numbers.append(batch.seq)
    assert numbers == [0, 1, 2]


def test_a_duplicate_is_not_reported_and_what_follows_it_is() -> None:
    manager = CacheManager(8, 2, record_events=True)
    first, second = start(manager, [1, 2, 3]), start(manager, [1, 2, 3, 4])
    manager.publish(first, [1, 2, 3])
    [event] = taken(manager)
    manager.publish(second, [1, 2, 3, 4])
    [after] = taken(manager)
    assert stored(after).parent_block_hash == stored(event).block_hashes[0]
    assert stored(after).token_ids.tolist() == [3, 4]


def test_each_tier_has_its_own_events_with_the_same_hash() -> None:
    manager = CacheManager(2, 2, host=HostConfig(2, "back"), storage=STORAGE, record_events=True)
    tiers = manager.tiers
    assert tiers is not None
    serve(manager, [1, 2])
    manager.evict(1)
    [on_device, off_device] = taken(manager)
    hashes = stored(on_device).block_hashes
    assert off_device == BlockRemoved("GPU", hashes)
    [copy] = tiers.take_operations()
    assert manager.take_events() is None
    tiers.complete(copy.id, [True])
    [on_host] = taken(manager)
    assert stored(on_host).medium == "CPU" and stored(on_host).block_hashes == hashes
    [write] = tiers.take_operations()
    tiers.complete(write.id, [True])
    [in_storage] = taken(manager)
    assert stored(in_storage).medium == "STORAGE" and stored(in_storage).block_hashes == hashes
    assert stored(in_storage).token_ids.tolist() == [1, 2]
    # Another namespace of storage has none of its blocks.
    tiers.storage = StorageNamespace("model", "2", "float32", 2, (0, 1), (0, 1))
    assert taken(manager) == [BlockRemoved("STORAGE", hashes)]


def test_what_storage_has_is_told_again_after_a_reset() -> None:
    """The reset has told the consumer that nothing can be found there."""
    recorder = EventRecorder(2, 4, 4)
    tokens = np.array([1, 2, 3, 4], np.int32).tobytes()
    for _ in range(2):
        recorder.looked_up(b"", tokens, [True, True])
        batch = recorder.take()
        assert batch is not None
        [event] = batch.events
        assert stored(event).token_ids.tolist() == [1, 2, 3, 4]
        recorder.cleared()
        batch = recorder.take()
        assert batch is not None and batch.events == (AllBlocksCleared(),)
    recorder.forget_storage()
    assert recorder.take() is None


def test_no_block_has_the_hash_of_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros:
        def digest(self) -> bytes:
            return bytes(8)

    monkeypatch.setattr(events, "blake2b", lambda *args, **options: Zeros())
    assert hash_blocks(np.arange(4, dtype=np.int32), 2) == [1, 1]


def test_blocks_in_storage_are_forgotten_when_there_are_too_many() -> None:
    recorder = EventRecorder(2, 4, 4)
    assert recorder.max_stored == MAX_STORED == 2**20
    recorder.max_stored = 3

    def found(*tokens: int) -> list[KVEvent]:
        recorder.looked_up(b"", np.array(tokens, np.int32).tobytes(), [True] * (len(tokens) // 2))
        batch = recorder.take()
        return [] if batch is None else list(batch.events)

    def names(*tokens: int) -> tuple[int, ...]:
        return tuple(hash_blocks(np.array(tokens, np.int32), 2))

    [first] = found(1, 2, 3, 4)
    assert stored(first).block_hashes == names(1, 2, 3, 4)
    [second, gone] = found(5, 6, 7, 8)
    assert stored(second).block_hashes == names(5, 6, 7, 8)
    assert gone == BlockRemoved("STORAGE", names(1, 2, 3, 4)[1:]), "of a path, its end goes first"
    assert found(1, 2) == [], "what was found again is no news, and goes last"
    [third, gone] = found(9, 9)
    assert stored(third).block_hashes == names(9, 9)
    assert gone == BlockRemoved("STORAGE", names(5, 6, 7, 8)[1:])
    recorder.forget_storage()
    batch = recorder.take()
    assert batch is not None
    known = sorted(names(1, 2) + names(5, 6) + names(9, 9))
    assert batch.events == (BlockRemoved("STORAGE", tuple(known)),)


@pytest.mark.parametrize("max_stored", [MAX_STORED, 3])
@pytest.mark.parametrize("failed", [None, *range(5)])
def test_a_write_of_several_paths_tells_of_each_block_that_was_stored(
    failed: int | None, max_stored: int
) -> None:
    manager = CacheManager(8, 2, host=HostConfig(8, "back"), storage=STORAGE, record_events=True)
    tiers, recorder = manager.tiers, manager._events
    assert tiers is not None and recorder is not None
    recorder.max_stored = max_stored
    names: dict[bytes, int] = {}
    for tokens in ([1, 2], [3, 4, 5, 6], [7, 8, 9, 10]):
        serve(manager, tokens)
        hashes = hash_blocks(np.array(tokens, np.int32), 2)
        names.update(zip(STORAGE.block_keys(tokens), hashes, strict=True))
    manager.evict(8)
    for copy in tiers.take_operations():
        tiers.complete(copy.id, [True] * copy.num_blocks)
    taken(manager)
    [write] = tiers.take_operations()
    assert len(write.keys) == 5
    tiers.complete(write.id, [place != failed for place in range(5)])
    good = [names[key] for place, key in enumerate(write.keys) if place != failed]
    told = taken(manager)
    gone = good[:2:-1] if max_stored == 3 else []  # of a path, its end goes first
    if gone:
        assert told.pop() == BlockRemoved("STORAGE", tuple(gone))
    assert [each for event in told for each in stored(event).block_hashes] == good


@pytest.mark.parametrize("ok", [[True], [False]])
def test_a_lookup_tells_what_storage_has(ok: list[bool]) -> None:
    manager = CacheManager(2, 2, host=HostConfig(2), storage=STORAGE, record_events=True)
    assert manager.tiers is not None
    manager.tiers.prefetch([1, 2])
    [lookup] = manager.tiers.take_operations()
    manager.tiers.complete(lookup.id, ok)
    media = [stored(event).medium for event in taken(manager)]
    assert media == ["STORAGE"] * sum(ok)


@pytest.mark.parametrize(
    ("ok", "lost"),
    [
        ([None, None, None], []),
        ([True, None, None], []),
        ([True, None, False], [2]),
        ([False, None, None], [0]),
        ([None, True, False], [2]),
        ([True, False, False], [1, 2]),
        ([False, True, False], [0, 2]),
    ],
)
def test_what_storage_does_not_answer_is_as_before(ok: list[bool | None], lost: list[int]) -> None:
    manager = CacheManager(3, 2, host=HostConfig(3), storage=STORAGE, record_events=True)
    assert manager.tiers is not None
    tokens = [1, 2, 3, 4, 5, 6]
    names = hash_blocks(np.array(tokens, np.int32), 2)
    for results in ([True] * 3, ok):
        taken(manager)
        prefetch = manager.tiers.prefetch(tokens)
        assert prefetch is not None
        [lookup] = manager.tiers.take_operations()
        assert manager.tiers.complete(lookup.id, results)
        manager.tiers.cancel(prefetch)  # what it found is not loaded
    removed = [BlockRemoved("STORAGE", tuple(names[place] for place in lost))] if lost else []
    assert taken(manager) == removed


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_blocks_from_storage_come_after_those_that_were_there(num_before: int) -> None:
    manager = CacheManager(4, 2, host=HostConfig(4), storage=STORAGE, record_events=True)
    assert manager.tiers is not None
    tokens = [1, 2, 3, 4, 5, 6]
    serve(manager, tokens[: 2 * num_before])
    names = hash_blocks(np.array(tokens, np.int32), 2)
    manager.tiers.take_operations()
    taken(manager)
    manager.tiers.prefetch(tokens)
    for _ in range(2):
        [operation] = manager.tiers.take_operations()
        manager.tiers.complete(operation.id, [True] * (3 - num_before))
    for event, medium in zip(taken(manager), ["STORAGE", "CPU"], strict=True):
        assert stored(event).medium == medium
        assert stored(event).block_hashes == tuple(names[num_before:])
        assert stored(event).parent_block_hash == (names[num_before - 1] if num_before else None)
        assert stored(event).token_ids.tolist() == tokens[2 * num_before :]


@pytest.mark.parametrize("is_dispatched", [False, True])
def test_a_cancelled_lookup_tells_nothing(is_dispatched: bool) -> None:
    manager = CacheManager(2, 2, host=HostConfig(2), storage=STORAGE, record_events=True)
    tiers = manager.tiers
    assert tiers is not None
    for _ in range(2):
        prefetch = tiers.prefetch([1, 2])
        assert prefetch is not None
        operations = tiers.take_operations() if is_dispatched or not prefetch.op_id > 1 else []
        if prefetch.op_id == 1:
            tiers.complete(operations[0].id, [True])
            assert [stored(event).medium for event in taken(manager)] == ["STORAGE"]
        tiers.cancel(prefetch)
        assert taken(manager) == []


def test_a_replay_buffer_keeps_the_last_batches() -> None:
    buffer: ReplayBuffer[str] = ReplayBuffer(2)
    assert buffer.since(0) == []
    for seq in range(3):
        buffer.add(seq, str(seq))
    assert buffer.since(0) == [(1, "1"), (2, "2")] == buffer.since(1)
    assert buffer.since(2) == [(2, "2")]
    assert buffer.since(3) == []
    with pytest.raises(CountError, match="num_batches must be at least 0, got -1"):
        ReplayBuffer(-1)


def test_tokens_of_an_event_stay_as_they_are() -> None:
    manager = CacheManager(4, 2, record_events=True)
    tokens = np.array([1, 2], np.int32)
    lease = manager.admit(manager.match(tokens))
    manager.publish(lease, tokens)
    tokens[:] = 9
    assert stored(taken(manager)[0]).token_ids.tolist() == [1, 2]
