"""Our adapter of a manager with tiers passes on what it is given, and judges what only it sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import kvcache
from radixkv.kvcache.errors import OperationResultError
from radixkv.scheduler.fuzz.tiered_scheduler_adapter import TieredMixedAdapter
from radixkv.scheduler.fuzz.tiers.adapter import KINDS, TierAdapter
from radixkv.scheduler.fuzz.tiers.snapshot import snapshot_of
from radixkv.spec.adapters.tiers import Copy
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
