"""Our adapter of a manager with tiers passes on what it is given, and judges what only it sees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import numpy as np
import pytest

from radixkv import kvcache
from radixkv.kvcache.errors import OperationResultError
from radixkv.kvcache.stats import TierStats
from radixkv.kvcache.tiers import storage_recency
from radixkv.scheduler.fuzz.cache_adapter import CacheAdapter
from radixkv.scheduler.fuzz.tiered_scheduler_adapter import TieredMixedAdapter
from radixkv.scheduler.fuzz.tiers.adapter import TierAdapter, make_cost_factory
from radixkv.scheduler.fuzz.tiers.copies import KINDS
from radixkv.scheduler.fuzz.tiers.snapshot import snapshot_of
from radixkv.spec.adapters.tiers import Copy, TierEvents, TierSnapshot
from radixkv.spec.harness.tiers.configuration import window_of
from radixkv.spec.rules import tiers as rules
from radixkv.spec.rules.rule import Violation

from .recording import Recorder

CONFIG = {"num_blocks": 8, "block_size": 2, "host_blocks": 4, "write": "back", "hits": 0,
          "storage": 1, "law": 0, "at_once": 0}  # fmt: skip
TOKENS = [5, 6, 7]


def recorded(**answers: Any) -> tuple[TierAdapter, Recorder]:
    """Return an adapter whose manager notes the calls, as its tiers do."""
    adapter, recorder = TierAdapter(kvcache, CONFIG), Recorder(**answers)
    adapter.manager = adapter.tiers = recorder
    return adapter, recorder


@pytest.mark.parametrize(
    ("changes", "host", "keys"),
    [
        ({}, kvcache.HostConfig(4, "back", 0), 2),
        ({"host_blocks": 3, "write": "through", "hits": 2, "storage": 0},
         kvcache.HostConfig(3, "through", 2), None),
    ],
)  # fmt: skip
def test_a_manager_has_the_options_of_its_configuration(
    changes: dict[str, Any], host: kvcache.HostConfig, keys: int | None
) -> None:
    given: dict[str, Any] = {}
    made = SimpleNamespace(**{**vars(kvcache), "CacheManager": None})

    def manager(num_blocks: int, block_size: int, **named: Any) -> Any:
        given.update(named, sizes=(num_blocks, block_size))
        return kvcache.CacheManager(num_blocks, block_size, **named)

    made.CacheManager = manager
    made.tiers = kvcache.tiers
    for num_blocks, records in ((8, False), (9, True), (10, True), (11, False)):
        TierAdapter(made, {**CONFIG, "num_blocks": num_blocks, **changes})  # type: ignore[arg-type]
        assert given["sizes"] == (num_blocks, 2) and given["record_events"] == records
        assert given["host"] == host
        assert (given["storage"] and given["storage"].block_size) == keys


def test_tokens_are_passed_on() -> None:
    match = SimpleNamespace(num_blocks=3, num_host_blocks=4)
    adapter, recorder = recorded(match=match)
    assert adapter.tier_match(TOKENS, b"a") == (3, 4)
    assert adapter.prefetch("p1", TOKENS, b"a") is None
    recorder.answers["prefetch"] = made = SimpleNamespace(first_block=2, op_id=9)
    assert (adapter.prefetch("p1", TOKENS, b"a"), adapter.asking("p1")) == (2, 9)
    adapter.cancel("p1")
    assert recorder.calls == [
        ("match", TOKENS, b"a"), ("prefetch", TOKENS, b"a"), ("prefetch", TOKENS, b"a"),
        ("cancel", made),
    ]  # fmt: skip
    assert TOKENS == [5, 6, 7] and adapter.keys(TOKENS, b"a") != adapter.keys(TOKENS, b"b")
    assert len(adapter.keys([1, 2, 3, 4], b"")) == 2


def test_blocks_of_a_prefetch_before_its_end_are_a_violation() -> None:
    adapter, _ = recorded()
    for done, num_blocks, shown in ((True, 3, 3), (True, 0, 0), (False, 0, None)):
        adapter._prefetches["p1"] = SimpleNamespace(done=done, num_blocks=num_blocks)
        assert adapter.prefetched("p1") == shown
    adapter._prefetches["p1"] = SimpleNamespace(done=False, num_blocks=3)
    with pytest.raises(Violation, match="p1 has blocks before its end") as caught:
        adapter.prefetched("p1")
    assert caught.value.rule is rules.T5


def test_a_request_is_parked_and_given_up() -> None:
    adapter, recorder = recorded()
    adapter.leases["r1"] = lease = SimpleNamespace(
        loading=4, num_ready_tokens=5, num_promoted_blocks=6
    )
    assert (adapter.loading("r1"), adapter.ready("r1"), adapter.promoted("r1")) == (4, 5, 6)
    assert not adapter.park("r1", TOKENS, "storage")
    assert adapter.leases == {"r1": lease} and not adapter.parking and not adapter.parked_requests
    recorder.answers["park"] = parked = SimpleNamespace(op_id=7, saved=True, failed=False)
    assert adapter.park("r1", TOKENS, "host") and adapter.publisher == "r1"
    assert adapter.parking == {"r1": lease} and not adapter.leases
    assert adapter.parked("r1") == (7, True, False)
    adapter.unpark("r1")
    assert not adapter.parked_requests
    assert recorder.calls == [
        ("park", lease, TOKENS, "storage"), ("park", lease, TOKENS, "host"), ("unpark", parked)
    ]  # fmt: skip


@pytest.mark.parametrize("refused", [(), ("unpark",), ("admit",), ("unpark", "admit")])
def test_what_was_given_up_must_be_refused_twice(refused: tuple[str, ...]) -> None:
    error = kvcache.LeaseError("no")
    adapter, recorder = recorded(match="a match", **dict.fromkeys(refused, error))
    adapter._given_up["r1"] = parked = SimpleNamespace(num_tokens=3)
    assert adapter.park_misuse("r1") == (len(refused) == 2)
    assert recorder.calls[:2] == [("match", [0, 0, 0]), ("unpark", parked)]
    assert recorder.calls[2:] in ([], [("admit", "a match", parked)])


def test_operations_are_taken_as_they_are() -> None:
    kinds = [SimpleNamespace(value=value) for value in KINDS]
    operations = [
        SimpleNamespace(id=number, kind=kind, sources=np.array([1, number]),
                        destinations=np.array([number, 3]), keys=(b"k",))
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    shown = [Copy(number, kind, (1, number), (number, 3), (b"k",))
             for number, kind in enumerate(KINDS.values())]  # fmt: skip
    adapter, recorder = recorded(
        take_operations=operations, take_used=[b"u"], take_cancelled=[np.int64(4)]
    )
    assert adapter.take() == shown and adapter.used() == [b"u"]
    assert adapter.take_cancelled() == [4]
    other: Any = SimpleNamespace(tiers=recorder)
    assert TieredMixedAdapter.take(other) == shown
    assert TieredMixedAdapter.take_cancelled(other) == [4]
    assert recorder.calls[-3:] == [("take_used",), ("take_operations",), ("take_cancelled",)]


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("fenced", [True, False])
def test_results_are_passed_on(answer: bool, fenced: bool) -> None:
    adapter, recorder = recorded(complete=answer, fence=answer)
    adapter._loading[6] = "r4"
    assert adapter.complete(6, [True, None], fenced) == answer and adapter.publisher == "r4"
    assert adapter.fence(7) == answer and adapter.publisher == ""
    other: Any = SimpleNamespace(tiers=recorder)
    assert TieredMixedAdapter.complete(other, 8, [False], fenced) == answer
    assert TieredMixedAdapter.fence(other, 9) == answer
    assert recorder.calls == [
        ("complete", 6, [True, None], {"fenced": fenced}), ("fence", 7),
        ("complete", 8, [False], {"fenced": fenced}), ("fence", 9),
    ]  # fmt: skip
    assert adapter.fence(6) == answer and adapter.publisher == "r4"


@pytest.mark.parametrize(
    ("told", "is_right"),
    [((4, 3, 2), True), ((5, 3, 2), False), ((4, 2, 2), False), ((4, 3, 0), False), (None, False)],
)
def test_a_wrong_number_of_results_must_be_refused_with_its_numbers(
    told: tuple[int, int, int] | None, is_right: bool
) -> None:
    adapter, recorder = recorded()
    if told is not None:
        op_id, results, num_blocks = told
        error = OperationResultError(op_id, results, num_blocks)
        assert (error.op_id, error.results, error.num_blocks) == told
        recorder.answers["complete"] = error
    assert adapter.wrong_result(4, 3) == is_right
    assert recorder.calls == [("complete", 4, [True] * 3)]


@pytest.mark.parametrize("counts", [True, False])
def test_early_results_are_of_each_queued_operation(counts: bool) -> None:
    adapter, recorder = recorded(complete=counts)
    queued = {4: SimpleNamespace(num_blocks=2), 7: SimpleNamespace(num_blocks=1)}
    operations = SimpleNamespace(_queued=queued)
    vars(recorder)["state"] = SimpleNamespace(operations=operations)
    assert adapter.early() == (2, 2 * counts)
    assert recorder.calls == [("complete", 4, [True, True]), ("complete", 7, [True])]


@pytest.mark.parametrize("field", ["num_blocks", "num_host_blocks", "host_runs", ""])
@pytest.mark.parametrize("is_current", [True, False])
def test_a_match_that_counts_as_current_must_be_as_a_new_one(field: str, is_current: bool) -> None:
    adapter = TierAdapter(kvcache, CONFIG)
    adapter.match("r1", [1, 2, 3, 4], b"")
    match, tokens = adapter.matches["r1"]
    old = SimpleNamespace(num_blocks=match.num_blocks, num_host_blocks=match.num_host_blocks,
                          host_runs=match.host_runs, _namespace=b"",
                          _version=adapter.tiers.state.tree.version - (not is_current))  # fmt: skip
    if field:
        setattr(old, field, "other")
    adapter.matches["r1"] = old, tokens
    if field and is_current:
        with pytest.raises(Violation, match="the match of r1 is outdated, but") as caught:
            snapshot_of(adapter)
        assert caught.value.rule is rules.T1
    else:
        assert snapshot_of(adapter).host == {}


# What a manager holds after a history of calls

MOVING = {**CONFIG, "host_blocks": 6, "write": "exclusive", "storage": 0}
A, AB, TENANT = (b"", (1, 2)), (b"", (1, 2, 3, 4)), (b"a", (5, 6))


class Watcher:
    """Notes events, each with the free blocks of device and host when it is reported."""

    def __init__(self, adapter: TierAdapter) -> None:
        self.adapter = adapter
        self.noted: list[tuple[Any, ...]] = []
        adapter.report_to(cast(TierEvents, self))

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*given: Any) -> None:
            stats = self.adapter.manager.stats()
            free = (stats.free_blocks, stats.tiers.host_free_blocks)
            if given[-1] != []:
                self.noted.append((name, *given, *free))

        return note

    def take(self) -> list[tuple[Any, ...]]:
        noted, self.noted = self.noted, []
        return noted


def put(adapter: TierAdapter, name: str, tokens: list[int], namespace: bytes = b"") -> None:
    adapter.admit(name, tokens, namespace)
    adapter.publish(name, tokens)
    adapter.release(name)


def moved() -> tuple[TierAdapter, Watcher]:
    """Return an adapter whose manager has two prefixes on the host, and one on the device."""
    adapter = TierAdapter(kvcache, MOVING)
    watcher = Watcher(adapter)
    put(adapter, "r1", [1, 2, 3, 4])
    put(adapter, "r2", [5, 6], b"a")
    put(adapter, "r3", [7, 8])
    watcher.take()
    assert adapter.evict(3) == 3
    return adapter, watcher


def shown(adapter: TierAdapter, **counts: int) -> TierSnapshot:
    """Return the snapshot, after a check of its counts against all that the manager counts."""
    shot = adapter.tier_snapshot()
    nothing = dict.fromkeys(vars(TierStats)["__dataclass_fields__"], 0)
    assert shot.counts == {**nothing, "host_blocks": 6, "operations": 0, **counts}
    return shot


def test_the_host_tier_is_shown_as_it_is_in_each_state_of_a_copy() -> None:
    adapter, _ = moved()
    out = {A: 1, AB: 2, TENANT: 3}
    so_far = {"demoted_blocks": 3}
    assert shown(adapter, host_free_blocks=3, open_operations=1, operations=1, **so_far) == (
        TierSnapshot([6, 5, 4], {}, out, set(), [], ANY)
    )
    [copy] = adapter.take()
    assert copy == Copy(1, "out", (1, 2, 3), (1, 2, 3), ())
    assert adapter.complete(1, [True, True, False], fenced=True)
    so_far["dropped_blocks"] = 1
    assert shown(adapter, host_free_blocks=4, host_cached_blocks=2, **so_far) == (
        TierSnapshot([6, 5, 4, 3], {A: 1, AB: 2}, {}, set(), [2, 1], ANY)
    )
    assert (adapter.admit("r4", [1, 2, 3, 4, 9], b""), adapter.promoted("r4")) == (0, 0)
    assert shown(adapter, host_free_blocks=6, open_operations=1, operations=1, **so_far) == (
        TierSnapshot([6, 5, 4, 3, 1, 2], {}, {}, {A, AB}, [], ANY)
    )
    assert adapter.take() == [Copy(2, "in", (1, 2), (3, 2), ())]
    assert adapter.complete(2, [True, True], fenced=True) and adapter.promoted("r4") == 2
    assert shown(adapter, host_free_blocks=6, promoted_blocks=2, **so_far) == (
        TierSnapshot([6, 5, 4, 3, 1, 2], {}, {}, set(), [], ANY)
    )


@pytest.mark.parametrize("write", ["back", "through"])
def test_copies_are_shown_in_the_order_in_which_they_would_be_dropped(write: str) -> None:
    """Those that the device has go first, from the head, if the host writes back."""
    adapter = TierAdapter(kvcache, {**MOVING, "write": write, "num_blocks": 16})
    for number in (1, 2):
        put(adapter, f"r{number}", [number, 2, 3, 4])
        for num_blocks in (0, 8):
            adapter.evict(num_blocks)
            for copy in adapter.take():
                adapter.complete(copy.id, [True] * copy.num_blocks, fenced=True)
    adapter.admit("r3", [1, 2, 3, 4, 9], b"")
    [load] = adapter.take()
    adapter.complete(load.id, [True] * 2, fenced=True)
    adapter.release("r3")
    host = adapter.tier_snapshot().host
    one, other = ([host[b"", (number, 2)], host[b"", (number, 2, 3, 4)]] for number in (1, 2))
    order = [*one, *other[::-1]] if write == "back" else [*other[::-1], *one[::-1]]
    assert adapter.tier_snapshot().idle == order


def test_each_event_of_the_host_and_of_leases_is_told_when_it_is_true() -> None:
    adapter, watcher = moved()
    assert watcher.take() == [
        ("host_allocated", [1, 2, 3], 4, 3), ("evicted", [1, 2, 3], 4, 3),
        ("freed", [1, 2, 3], 7, 3),
    ]  # fmt: skip
    adapter.take()
    adapter.complete(1, [True, True, False], fenced=True)
    assert watcher.take() == [("host_freed", [3], 7, 4)]
    adapter.admit("r4", [1, 2, 3, 4, 9], b"")
    adapter.admit("r5", [7, 8, 1, 1], b"")
    assert watcher.take() == [
        ("host_freed", [1, 2], 7, 6), ("allocated", "r4", [3, 2, 1], 4, 6),
        ("allocated", "r5", [5], 3, 6),
    ]  # fmt: skip
    adapter.take()
    assert adapter.park("r5", [7, 8, 1, 1], "host") and adapter.parked("r5") == (3, False, False)
    assert watcher.take() == [("published", "r5", [5], 3, 6), ("host_allocated", [2, 1], 3, 4)]
    assert adapter._loading == {2: "r4"}
    adapter.release("r4")
    assert watcher.take() == [] and adapter._loading == {2: "op 2"}
    adapter.take()
    assert adapter.complete(2, [True, True], fenced=True)
    assert watcher.take() == [
        ("published", "op 2", [3, 2], 3, 4), ("ends", "op 2", 3, 4), ("freed", [1], 4, 4),
        ("ended", "op 2", 4, 4),
    ]  # fmt: skip
    assert list(adapter.parking) == ["r5"]
    assert adapter.complete(3, [True, True], fenced=True) and not adapter.parking
    assert watcher.take() == [("ends", "r5", 4, 4), ("ended", "r5", 4, 4)]
    assert adapter.parked("r5") == (None, True, False)
    parked = adapter.parked_requests["r5"]
    assert adapter.admit("r5", [7, 8, 1, 1], b"") == 4 and not adapter.parked_requests
    assert adapter._given_up == {"r5": parked} and adapter.park_misuse("r5")
    stats = adapter.tiers.stats()
    assert stats.parked == 0, "it is the parked request that was resumed"


def test_a_reset_ends_all_leases_and_forgets_what_loads_by_itself() -> None:
    adapter, watcher = moved()
    adapter.take()
    adapter.complete(1, [True] * 3, fenced=True)
    adapter.admit("r4", [1, 2, 3, 4, 9], b"")
    adapter.admit("r5", [5, 6, 9], b"a")
    adapter.admit("r6", [7, 8, 1], b"")
    adapter.admit("r7", [9], b"")
    adapter.take()
    parked, live = adapter.leases["r6"], adapter.leases["r7"]
    assert adapter.park("r6", [7, 8], "host")
    for name in ("r4", "r5"):
        adapter.release(name)
    watcher.take()
    detached = adapter.tiers.loader.detached
    left: list[tuple[str, int]] = []
    vars(watcher)["forgotten"] = lambda name: left.append((name, len(detached)))
    adapter.reset_but([b"a"])
    assert left == [("op 3", 2), ("op 2", 2)] and not detached, "it is told before it happens"
    told = [each for each in watcher.take() if each[0] in ("ends", "ended")]
    assert told == [
        ("ends", "r6", 0, 5), ("ended", "r6", 1, 5),
        ("ends", "r7", 1, 6), ("ended", "r7", 2, 6),
    ]  # fmt: skip
    assert not adapter.leases and not adapter.parking and not adapter._loading
    assert adapter.ended[-2:] == [live, parked] and len(adapter.ended) == 3


def test_a_reset_of_some_namespaces_begins_an_epoch() -> None:
    adapter, recorder = recorded(reset=5)
    for epoch in (4, 5, 3):
        vars(recorder)["epoch"] = epoch
        if epoch == 4:
            adapter.reset_but([b"a"])
            continue
        with pytest.raises(AssertionError, match="a reset begins an epoch"):
            adapter.reset_but([b"a"])
    assert recorder.calls == [("reset", [b"a"])] * 3


def test_a_fork_is_admitted_from_the_lease_of_another() -> None:
    adapter = TierAdapter(kvcache, MOVING)
    watcher = Watcher(adapter)
    adapter.admit("r1", [1, 2, 3], b"")
    adapter.publish("r1", [1, 2])
    watcher.take()
    adapter.publisher = ""
    adapter.fork("r2", "r1", [1, 2, 3])
    assert adapter.admit("r2", [1, 2, 3], b"") == 2 and adapter.publisher == "r1"
    assert adapter._loading == {adapter.loading("r2"): "r2"} and not adapter._forks
    [copy] = adapter.take()
    assert copy.kind == "fork" and copy.sources == (adapter.block_table("r1")[1],)


@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize("num_blocks", [8, 9])
def test_what_is_told_of_storage_is_bounded_in_some_worlds(
    num_blocks: int, block_size: int
) -> None:
    config = {**CONFIG, "num_blocks": num_blocks, "block_size": block_size}
    adapter = TierAdapter(kvcache, config)
    if num_blocks == 8:
        assert adapter.most_told is None
        return
    assert adapter.most_told is not None
    unbounded = kvcache.CacheManager(9, 2, record_events=True)._events
    assert unbounded is not None
    assert adapter.most_told() == (4 if block_size == 1 else unbounded.max_stored)


def test_each_world_has_an_interval_of_reports_of_its_own() -> None:
    for config in ({**CONFIG, "num_blocks": number} for number in (3, 4, 5, 8)):
        TierAdapter(kvcache, config)
        assert window_of(config) == storage_recency.REPORT_INTERVAL


def test_costs_are_counted_with_tiers_if_the_host_has_a_block() -> None:
    for host_blocks, kind in ((0, CacheAdapter), (1, TierAdapter)):
        made = make_cost_factory()({**CONFIG, "host_blocks": host_blocks, "storage": 0})
        assert type(made) is kind and made.manager.num_blocks == 8
