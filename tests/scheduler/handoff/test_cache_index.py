"""The gateway's index of what nodes have cached, its planted bugs, and the choice by it."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import BlockRemoved, BlockStored, CacheManager, EventBatch
from radixkv.kvcache.events import Medium, hash_blocks
from radixkv.scheduler import handoff
from radixkv.scheduler.errors import RoutingError
from radixkv.scheduler.gateway import cache_index
from radixkv.scheduler.gateway.cache_index import CacheIndex, CacheReporter
from radixkv.scheduler.gateway.router import CacheSize, Route, Router
from radixkv.scheduler.handoff import AttemptKey
from radixkv.scheduler.handoff.gateway_messages import MAX_UPDATE_BLOCKS, CacheAsk
from radixkv.spec.rules.events import K9
from radixkv.spec.rules.rule import Violation

from .bugs import Bug
from .index_bugs import INDEX_BUGS
from .index_worlds import check_repeats, run_index
from .planted import planted

NUM_SEEDS = 60


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_the_index_equals_the_manager_after_a_quiet_moment(seed: int) -> None:
    check_repeats(handoff)
    run_index(handoff, seed)


def test_planted_bugs_break_the_rule() -> None:
    broken = set()
    for bug in INDEX_BUGS:
        with planted(bug) as package, suppress(AssertionError):
            for seed in range(NUM_SEEDS):
                try:
                    run_index(package, seed)
                except Violation as violation:
                    broken.add(violation.rule.name)
                    break
    assert K9.name in broken


@pytest.mark.parametrize("bug", INDEX_BUGS, ids=lambda bug: bug.name)
def test_every_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug) as package, pytest.raises((Violation, AssertionError)):
        check_repeats(package)
        for seed in range(NUM_SEEDS):
            run_index(package, seed)


def test_hashes_are_those_of_the_events() -> None:
    manager = CacheManager(8, 2, record_events=True)
    tokens = np.array([1, 2, 3, 4, 5], np.int32)
    lease = manager.admit(manager.match(tokens, b"tenant"))
    manager.publish(lease, tokens)
    batch = manager.take_events()
    assert batch is not None
    [event] = batch.events
    assert isinstance(event, BlockStored)
    assert list(event.block_hashes) == hash_blocks(tokens, 2, b"tenant")
    assert hash_blocks(tokens, 2) != hash_blocks(tokens, 2, b"tenant")
    assert hash_blocks(tokens[:1], 2) == []


def stored(*hashes: int, medium: Medium = "GPU") -> EventBatch:
    tokens = np.zeros(len(hashes), np.int32)
    return EventBatch(0, (BlockStored(medium, hashes, None, tokens, 1, b""),))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_many_blocks_come_in_several_updates(extra: int) -> None:
    reporter, index = CacheReporter(), CacheIndex()
    hashes = range(1, 2 * MAX_UPDATE_BLOCKS + extra + 1)
    reporter.take_in(stored(*hashes))
    updates = reporter.take_messages()
    assert len(updates) == reporter.num_updates == 2 + (extra > 0)
    assert all(index.apply(update) for update in updates)
    assert index.held["GPU"] == set(hashes)


@pytest.mark.parametrize("on_device", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("on_host", [0, 1, 3, 4, 9])
def test_an_update_has_a_limited_number_of_blocks_of_all_tiers_together(
    on_device: int, on_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were stored and removed; and no update is sent in vain."""
    monkeypatch.setattr(cache_index, "MAX_UPDATE_BLOCKS", 4)
    reporter, index = CacheReporter(), CacheIndex()
    assert all(index.apply(update) for update in reporter.take_messages())
    numbers: dict[Medium, int] = {"GPU": on_device, "CPU": on_host}
    for medium, number in numbers.items():
        reporter.take_in(stored(*range(number), medium=medium))
        if number:
            reporter.take_in(EventBatch(1, (BlockRemoved(medium, (number - 1,)),)))
    updates = reporter.take_messages()
    assert len(updates) == -(-(on_device + on_host) // 4)
    for update in updates:
        fields = (
            update.device_stored,
            update.device_removed,
            update.host_stored,
            update.host_removed,
        )
        assert 0 < sum(map(len, fields)) <= 4 * 8
        assert index.apply(update)
    assert index.held == {medium: set(range(number - 1)) for medium, number in numbers.items()}


def test_a_late_ask_is_not_answered_and_storage_is_not_indexed() -> None:
    reporter = CacheReporter()
    assert [update.is_first for update in reporter.take_messages()] == [True]
    reporter.answer(CacheAsk(1))
    tokens = np.zeros(1, np.int32)
    in_storage = BlockStored("STORAGE", (7,), None, tokens, 1, b"")
    reporter.take_in(EventBatch(0, (in_storage, BlockRemoved("STORAGE", (8,)))))
    assert reporter.take_messages() == []


def test_a_request_goes_to_the_node_that_says_it_has_the_prefix() -> None:
    size = CacheSize(10, 1)
    router = Router(prefill={"p0": size, "p1": size}, decode={"d0": size, "d1": size})
    reporters = {name: CacheReporter() for name in ("p0", "p1", "d0", "d1")}

    def tell() -> None:
        for name, reporter in reporters.items():
            for update in reporter.take_messages():
                assert router.update_cache(name, update)

    prompt = [5, 6, 7]
    hashes = hash_blocks(np.array(prompt, np.int32), 1)
    reporters["p1"].take_in(stored(*hashes[:2]))
    reporters["d1"].take_in(stored(*hashes))
    tell()
    assert router.route(AttemptKey("a", 1), prompt) == Route("p1", "d1")
    # An equal prompt follows it, because p1 will have all of it.
    assert router.loads() == {"p0": 0, "p1": 1, "d0": 0, "d1": 0}
    assert router.route(AttemptKey("b", 1), prompt) == Route("p1", "d1")
    router.finished(AttemptKey("a", 1), prompt)
    router.finished(AttemptKey("b", 1))
    # What failed is not predicted: only the node tells what it has got.
    gone = EventBatch(1, (BlockRemoved("GPU", tuple(hashes[:2])),))
    reporters["p1"].take_in(gone)
    reporters["p0"].take_in(stored(hashes[0]))
    tell()
    assert router.route(AttemptKey("c", 1), prompt) == Route("p0", "d1")
    assert [router.next_update(name) for name in ("p0", "p1", "d0")] == [2, 2, 1]
    with pytest.raises(RoutingError, match=r"^there is no node 'p9'$"):
        router.next_update("p9")


def test_what_an_attempt_that_has_ended_did_not_cache_is_expected_no_more() -> None:
    size = CacheSize(10, 1)
    router = Router(prefill={"p0": size, "p1": size}, decode={"d0": size})
    for name in ("p0", "p1"):
        for update in CacheReporter().take_messages():
            assert router.update_cache(name, update)
    for attempt in range(6):  # each goes to the node that was sent less: none has anything
        key = AttemptKey("a", attempt)
        assert router.route(key, [5, 6, 7]).prefill == f"p{attempt % 2}"
        assert router.loads()[f"p{attempt % 2}"] == 3
        router.finished(key)
