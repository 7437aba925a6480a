"""Our adapter of a manager passes on what it is given, and judges what only it sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import kvcache
from radixkv.kvcache.prefix import block_tables, radix_tree
from radixkv.scheduler.fuzz.cache_adapter import CacheAdapter, make_factory
from radixkv.scheduler.fuzz.kv_events import as_event
from radixkv.scheduler.fuzz.pool_adapter import PoolAdapter
from radixkv.scheduler.fuzz.pool_adapter import make_factory as make_pool_factory
from radixkv.spec.model.events import Cleared, Removed, Stored
from radixkv.spec.rules.rule import Violation

from .recording import Recorder


def recorded(**answers: Any) -> tuple[CacheAdapter, Recorder]:
    """Return an adapter whose manager notes the calls."""
    adapter, recorder = CacheAdapter(kvcache, 8, 2), Recorder(**answers)
    vars(recorder).update(block_size=2, available=5, epoch=1)
    adapter.manager = recorder
    return adapter, recorder


def lease(*table: int, row: int = 0) -> Any:
    return SimpleNamespace(row=row, block_table=np.array(table, np.int32), num_blocks=len(table),
                           num_hit_blocks=3, num_shared_blocks=1)  # fmt: skip


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (4, (16, 1_024, 64, 64, 16, 2**18)),
        (5, (0, 3, 2, 2, 1, 4)),
        (6, (16, 1_024, 64, 64, 16, 2**18)),
        (7, (1, 3, 2, 2, 1, 4)),
        (9, (0, 3, 2, 2, 1, 4)),
    ],
)
def test_every_other_world_uses_the_code_of_large_caches(
    num_blocks: int, sizes: tuple[int, ...]
) -> None:
    make_factory()(num_blocks, 2)
    leaves = (radix_tree._FEW, radix_tree._AT_ONCE)
    rooms = (block_tables._FIRST_ROWS, block_tables._FIRST_IDS, block_tables._LEAST_ROOM)
    assert (*leaves, *rooms, block_tables._KEPT_IDS) == sizes


def test_events_are_recorded_in_half_of_the_worlds_of_each_size() -> None:
    records = [make_factory()(num_blocks, 2).records_events for num_blocks in range(4, 12)]
    assert records == 2 * [False, True, True, False]
    for num_blocks in range(4, 8):
        adapter = make_factory()(num_blocks, 2)
        assert (adapter.kv_events is None) == (adapter.replay is None) == (num_blocks in (4, 7))


def test_a_match_is_used_once_and_only_for_its_tokens() -> None:
    adapter, recorder = recorded(match=SimpleNamespace(num_tokens=4), admit=lease(1, 2))
    assert adapter.match("r1", [1, 2, 3, 4, 5], b"a") == 4
    assert adapter.admit("r1", [1, 2, 3, 4, 5], b"a") == 3 * 2
    words = [call[0] for call in recorder.calls]
    assert recorder.calls[0] == ("match", [1, 2, 3, 4, 5], b"a") and words == ["match", "admit"]
    assert adapter.admit("r1", [1, 2, 3, 4, 5], b"a") == 6, "the match is gone"
    assert [call[0] for call in recorder.calls[2:]] == ["match", "admit"]
    adapter.match("r2", [1, 2], b"a")
    adapter.admit("r2", [1, 3], b"a")
    assert recorder.calls[-2][:2] == ("match", [1, 3])


@pytest.mark.parametrize(
    ("error", "numbers"),
    [(kvcache.OutOfBlocksError(9, 5), (9, 5)), (kvcache.RequestTooLargeError(1, 9, 8), (9, 8))],
)
def test_a_refusal_has_its_numbers(error: Exception, numbers: tuple[int, int]) -> None:
    adapter, recorder = recorded(admit=error)
    assert adapter.admit("r1", [1, 2], b"") is None and adapter.refusal() == numbers
    assert not adapter.leases
    adapter.leases["r1"] = lease(1)
    if isinstance(error, kvcache.OutOfBlocksError):
        recorder.answers.update(extend=error, extend_batch=error)
        for refused in (adapter.append("r1", [1]), adapter.append_batch(["r1"])):
            assert not refused and adapter.refusal() == numbers


def test_each_call_is_passed_on() -> None:
    adapter, recorder = recorded(evict=3)
    adapter.leases = {"r1": (one := lease(4, 5, row=6)), "r2": lease(row=9)}
    tokens = [1, 2, 3, 4]
    adapter.publish("r1", tokens)
    assert adapter.publisher == "r1" and tokens == [1, 2, 3, 4]
    assert adapter.append("r1", [7, 8, 9]) and adapter.append_batch(["r2", "r1"])
    assert (adapter.evict(6), adapter.block_table("r1"), adapter.available()) == (3, [4, 5], 5)
    adapter.begin_step()
    adapter.begin_step()
    adapter.end_step()
    assert (adapter.steps_begun, adapter.steps_ended) == (2, 1)
    adapter.check()
    adapter.release("r1")
    assert recorder.calls == [
        ("publish", one, tokens), ("extend", one, 3), ("extend_batch", [9, 6]), ("evict", 6),
        ("begin_step",), ("begin_step",), ("end_step",), ("check",), ("release", one),
    ]  # fmt: skip
    assert adapter.leases.keys() == {"r2"} and adapter.ended == [one]


def test_the_last_three_ended_leases_are_kept() -> None:
    adapter = CacheAdapter(kvcache, 8, 2)
    for number in range(5):
        adapter.admit(f"r{number}", [number], b"")
    leases = list(adapter.leases.values())
    for number in range(4):
        adapter.release(f"r{number}")
        assert adapter.ended == leases[max(0, number - 2) : number + 1]
    adapter.admit("r6", [1], b"")
    last = adapter.leases["r6"]
    adapter.begin_step()
    adapter.reset()
    assert adapter.ended == [leases[3], leases[4], last] and not adapter.leases
    assert adapter.steps_begun == adapter.steps_ended == 1


@pytest.mark.parametrize("epochs", [(1, 2), (2, 1)])
def test_a_reset_begins_an_epoch(epochs: tuple[int, int]) -> None:
    """The number that it returns and the one that it has must both be the next one."""
    adapter, recorder = recorded()

    def reset() -> int:
        vars(recorder)["epoch"] = epochs[0]
        return epochs[1]

    vars(recorder)["reset"] = reset
    with pytest.raises(AssertionError, match="a reset begins an epoch"):
        adapter.reset()


@pytest.mark.parametrize("number", range(1, 9))
def test_a_call_that_changes_what_it_is_given_is_found(number: int) -> None:
    """Read-only arrays cannot be changed; their number of entries is a multiple of four."""

    def change(*given: Any) -> None:
        lent = given[-1]
        if isinstance(lent, list) or lent.flags.writeable:
            lent[0] += 1

    adapter = CacheAdapter(kvcache, 8, 2)
    names = [f"r{each}" for each in range(number)]
    adapter.leases = {name: lease(row=place) for place, name in enumerate(names)}
    recorder = Recorder()
    vars(recorder).update(next_block=change, extend_batch=change, block_size=2)
    adapter.manager = recorder
    before = list(range(number))
    after = [1, *before[1:]]
    calls = {
        "extend_batch": lambda: adapter.append_batch(names),
        "next_block": lambda: adapter._next_block("r0", before),
    }
    for word, call in calls.items():
        if number % 4 == 0:
            call()
            continue
        with pytest.raises(Violation) as caught:
            call()
        assert caught.value.rule.code == "C3"
        assert caught.value.why == f"{word} was given {before}, and it is now {after}"


def test_a_match_whose_tokens_change_later_is_found() -> None:
    adapter = CacheAdapter(kvcache, 8, 2)
    adapter.match("r1", [1, 2, 3], b"")
    adapter.snapshot()
    adapter.matches["r1"][1][0] = 9
    with pytest.raises(Violation, match="the match of r1 was given") as caught:
        adapter.snapshot()
    assert caught.value.rule.code == "C3"


# The pool, and KV events


def test_a_pool_gets_each_call() -> None:
    adapter, recorder = PoolAdapter(kvcache, 4), Recorder(free_ids=np.array([3, 1]))
    adapter.pool = recorder
    recorder.answers["allocate"] = np.array([2, 0])
    assert adapter.allocate(2) == [2, 0] and adapter.free_ids() == [3, 1]
    assert adapter.recycle([2, 0]) == []
    adapter.reset()
    adapter.check()
    assert recorder.calls == [
        ("allocate", 2), ("free_ids",), ("recycle", [2, 0]), ("reset",), ("check",)
    ]  # fmt: skip
    recorder.answers["allocate"] = kvcache.OutOfBlocksError(2, 1)
    assert adapter.allocate(2) is None
    assert sorted(make_pool_factory()(3).free_ids()) == [1, 2, 3]


@pytest.mark.parametrize("recycled", [0, 1, 2, 3])
def test_each_id_is_recycled_or_refused(recycled: int) -> None:
    adapter = PoolAdapter(kvcache, 4)
    adapter.pool = Recorder(recycle=kvcache.RecycleError([7, 8], recycled))
    ids = [7, 8, 1]
    if recycled == 1:
        assert adapter.recycle(ids) == [7, 8]
    else:
        with pytest.raises(Violation) as caught:
            adapter.recycle(ids)
        assert caught.value.rule.code == "F3"
        assert caught.value.why == f"the error counts {2 + recycled} of 3 ids"
    assert ids == [7, 8, 1]


def test_kv_events_are_shown_as_they_are() -> None:
    class BlockStored:
        medium, block_hashes, parent_block_hash = "GPU", [b"a", b"b"], b"c"
        token_ids, block_size, namespace = np.array([1, 2]), 3, b"n"

    class BlockRemoved:
        medium, block_hashes = "CPU", [b"d"]

    assert as_event(BlockStored()) == Stored("GPU", [b"a", b"b"], b"c", [1, 2], 3, b"n")
    assert as_event(BlockRemoved()) == Removed("CPU", [b"d"])
    assert as_event(kvcache.AllBlocksCleared()) == Cleared()


def test_batches_of_events_are_taken_once_and_replayed() -> None:
    adapter, recorder = recorded()
    batches = [SimpleNamespace(seq=number, events=[]) for number in range(6)]
    adapter.records_events = True
    taken: list[int] = []
    for batch in batches:
        recorder.answers["take_events"] = batch
        taken += [each.seq for each in adapter.kv_events()]  # type: ignore[misc]
    recorder.answers["take_events"] = None
    assert adapter.kv_events() == [] and taken == list(range(6))  # type: ignore[misc]
    assert [each.seq for each in adapter.replay(4)] == [4, 5]  # type: ignore[misc]
    for seq in (2, 0):  # no more than four are kept
        assert [each.seq for each in adapter.replay(seq)] == [2, 3, 4, 5]  # type: ignore[misc]


# What a manager holds after a history of calls


class Watcher:
    """Notes events, each with the free blocks when it is reported."""

    def __init__(self, adapter: CacheAdapter) -> None:
        self.adapter = adapter
        self.noted: list[tuple[Any, ...]] = []
        adapter.report_to(self)

    def __getattr__(self, name: str) -> Any:
        def note(*given: Any) -> None:
            if given[-1] != []:
                self.noted.append((name, *given, self.adapter.manager.stats().free_blocks))

        return note

    def take(self) -> list[tuple[Any, ...]]:
        noted, self.noted = self.noted, []
        return noted


@pytest.mark.parametrize("in_step", [True, False])
def test_the_events_and_the_state_of_a_manager_are_shown_whole(in_step: bool) -> None:
    adapter = CacheAdapter(kvcache, 8, 2)
    manager, watcher = adapter.manager, Watcher(adapter)
    adapter.admit("r1", [1, 2, 3, 4], b"")
    adapter.admit("r5", [1, 2, 3, 4], b"")
    adapter.publish("r1", [1, 2, 3, 4])
    assert adapter.admit("r2", [1, 2, 3, 4, 5], b"") == 4
    assert adapter.append("r2", [6, 7])
    assert watcher.take() == [
        ("allocated", "r1", [1, 2], 6), ("allocated", "r5", [3, 4], 4),
        ("published", "r1", [1, 2], 4), ("allocated", "r2", [5], 3), ("allocated", "r2", [6], 2),
    ]  # fmt: skip
    if in_step:
        adapter.begin_step()
    adapter.publish("r2", [1, 2, 3, 4, 5, 6, 7])
    for name in ("r3", "r4"):
        adapter.admit(name, [9], b"a")
    assert adapter.append_batch(["r3", "r4"])
    for name in ("r3", "r4"):
        adapter.publish(name, [9, 8])
    told = [("published", "r2", [5], 2), ("allocated", "r3", [7], 1), ("allocated", "r4", [8], 0),
            ("published", "r3", [7], 0)]  # fmt: skip
    assert watcher.take() == [*told, ("replaced", "r4", [8], 0) if in_step else ("freed", [8], 1)]
    if in_step:
        adapter.end_step()
    for name, tokens, namespace in (("r6", [1, 2, 3], b""), ("r7", [9, 8, 1], b"a")):
        adapter.match(name, tokens, namespace)
    shot, tables = adapter.snapshot(), manager.tables
    prefixes = [(b"", (1, 2)), (b"", (1, 2, 3, 4)), (b"", (1, 2, 3, 4, 5, 6)), (b"a", (9, 8))]
    assert shot.cached == dict(zip(prefixes, [1, 2, 5, 7], strict=True))
    assert shot.users == dict(zip(prefixes, [2, 2, 1, 2], strict=True))
    assert shot.free == manager._pool.free_ids().tolist() and shot.idle == []
    assert shot.rows.keys() == adapter.leases.keys()
    for name, row in shot.rows.items():
        held = adapter.block_table(name)
        start = tables._starts[adapter.leases[name].row]
        room = tables._rooms[adapter.leases[name].row]
        assert row == tables._ids[start : start + room].tolist() and row[: len(held)] == held
        assert len(row) > len(held) and not any(row[len(held) :])
    given = {"r1": [1, 2, 3, 4], "r5": [1, 2, 3, 4], "r2": [1, 2, 3, 4, 5, 6, 7]}
    assert shot.next_blocks == {
        name: manager.next_block(adapter.leases[name], tokens) for name, tokens in given.items()
    }
    assert shot.waiting_blocks.keys() == shot.available_after.keys() == {"r6", "r7"}
    for name, tokens, namespace in (("r6", [1, 2, 3], b""), ("r7", [9, 8, 1], b"a")):
        match = manager.match(tokens, namespace)
        assert shot.waiting_blocks[name] == match.next_block
        assert shot.available_after[name] == manager.available_after(match)
    stats = vars(manager.stats()).copy()
    assert stats.pop("tiers") is None and shot.counts == stats and stats["live_leases"] == 5
    for name in ("r1", "r2"):
        adapter.release(name)
    assert adapter.snapshot().idle == [5, 2, 1] and "r2" not in adapter.snapshot().next_blocks
    left = [manager.available_after(adapter.matches[name][0]) for name in ("r6", "r7")]
    assert [*adapter.snapshot().available_after.values()] == left and left[0] < manager.available
    watcher.take()
    assert adapter.evict(2) == 2
    evicted, freed = watcher.take()
    assert evicted[:2] == ("evicted", [5, 2]) and freed[:2] == ("freed", [5, 2])
    assert freed[2] == evicted[2] + 2
    adapter.reset()
    adapter.admit("r8", [1], b"")
    adapter.release("r8")
    assert watcher.take() == [("allocated", "r8", [1], 7), ("freed", [1], 8)]


def test_what_is_the_next_block_of_requests_with_equal_tokens() -> None:
    adapter = CacheAdapter(kvcache, 8, 2)
    for name in ("r1", "r2"):
        adapter.admit(name, [7], b"")
        assert adapter.append(name, [8, 9])
    keys = adapter.snapshot().next_blocks
    direct = {name: adapter.manager.next_block(adapter.leases[name], [7, 8, 9]) for name in keys}
    assert keys == direct and keys["r1"] is not None


def test_tokens_of_an_admission_are_overwritten_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = CacheAdapter(kvcache, 8, 2)
    kept: list[Any] = []
    match = adapter.manager.match

    def keep(lent: Any, namespace: bytes) -> Any:
        kept.append(lent)
        return match(lent, namespace)

    monkeypatch.setattr(adapter.manager, "match", keep)
    tokens = [1, 2, 3, 4, 5]
    adapter.match("r1", tokens, b"")
    adapter.admit("r1", tokens, b"")
    adapter.admit("r2", tokens, b"")
    assert [each.tolist() for each in kept] == [[-7] * 5] * 2 and tokens == [1, 2, 3, 4, 5]
