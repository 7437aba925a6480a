"""Recency reports to storage: whole paths, last block first, at most once per interval."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import OpKind
from radixkv.kvcache.tiers import storage_recency as storage_uses

from .tier_memory import TierMemory


@pytest.fixture
def told_at_once(monkeypatch):
    """Of a path that is used again, storage is told again."""
    monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 0)


@pytest.fixture
def told_after_long(monkeypatch):
    monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 1024)


def backwards(memory: TierMemory, tokens: Sequence[int], namespace: bytes = b"") -> list[bytes]:
    return memory.namespace.block_keys(tokens, namespace)[::-1]


@pytest.mark.usefixtures("told_at_once")
class TestWhat:
    def test_hits_on_device_and_host_report_the_whole_path(self):
        memory = TierMemory(4, 4, storage=True)
        memory.demote([1, 2, 3])
        memory.serve([1])  # on the device, too
        memory.tiers.take_used()
        memory.start([1, 2, 4])
        assert memory.tiers.take_used() == backwards(memory, [1, 2])
        assert memory.tiers.take_used() == []

    def test_stored_blocks_are_reported_last_block_first(self):
        memory = TierMemory(4, 4, "through", storage=True)
        memory.serve([1, 2, 3])
        assert memory.tiers.take_used() == backwards(memory, [1, 2, 3])
        memory.serve([1, 5, 6])
        assert memory.tiers.take_used() == backwards(memory, [1, 5, 6])

    def test_the_blocks_before_those_to_store_are_reported_before_they_are_stored(self):
        """Else storage could evict them to make room for those, which are useless without."""
        memory = TierMemory(6, 6, "through", storage=True)
        memory.serve([1, 2])
        lease = memory.start([1, 2, 3])
        memory.tiers.take_used()
        memory.compute(lease, [1, 2, 3])
        copy = memory.one(OpKind.DEVICE_TO_HOST)
        assert memory.tiers.take_used() == []
        memory.finish(copy)
        assert memory.tiers.take_used() == backwards(memory, [1, 2])
        memory.finish(memory.one(OpKind.HOST_TO_STORAGE))
        assert memory.tiers.take_used() == backwards(memory, [1, 2, 3])

    def test_blocks_read_from_storage_are_reported_with_their_path(self):
        memory = TierMemory(4, 4, storage=True)
        memory.demote([1, 2, 3])
        memory.manager.reset()
        assert memory.tiers.take_used() == []  # a reset forgets it
        memory.serve([1])
        memory.tiers.take_used()
        memory.tiers.prefetch([1, 2, 3])
        memory.settle()
        assert memory.tiers.take_used() == backwards(memory, [1, 2, 3])

    def test_the_shared_part_of_two_paths_is_reported_last(self):
        memory = TierMemory(6, 6, "through", storage=True)
        memory.serve([1, 2, 3], b"lora")
        memory.serve([1, 2, 4], b"lora")
        memory.tiers.take_used()
        memory.start([1, 2, 4], b"lora")
        memory.start([1, 2, 3], b"lora")
        path = backwards(memory, [1, 2, 3], b"lora")
        other = backwards(memory, [1, 2, 4], b"lora")
        assert memory.tiers.take_used() == [other[0], *path]

    def test_blocks_that_storage_never_had_are_not_reported(self):
        memory = TierMemory(4, 4, storage=True)
        memory.serve([1, 2, 3])
        memory.start([1, 2, 3])
        assert memory.tiers.take_used() == []

    def test_keys_of_old_weights_are_not_reported(self):
        memory = TierMemory(4, 4, "through", storage=True)
        memory.serve([1, 2], b"kept")
        memory.reset([b"kept"])
        memory.start([1, 2], b"kept")
        assert memory.tiers.storage is not None
        new = memory.tiers.storage.block_keys([1, 2], b"kept")
        assert memory.tiers.take_used() == new[::-1]  # they are about to be stored

    def test_nothing_is_reported_without_storage(self):
        memory = TierMemory(4, 4, "through")
        memory.serve([1, 2])
        memory.start([1, 2])
        assert memory.tiers.take_used() == []


PATHS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1, max_size=5)


@pytest.mark.usefixtures("told_after_long")
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_block_whose_successor_is_in_the_next_report_is_not_repeated_with_it(is_taken):
    """Runs of one path that were reported one after the other are joined only after that report."""
    memory = TierMemory(6, 6, "through", storage=True)
    memory.serve([1])
    assert memory.tiers.take_used() == backwards(memory, [1])
    memory.serve([1, 2])
    second = backwards(memory, [1, 2])[:1]
    if is_taken:
        assert memory.tiers.take_used() == second
    memory.start([1, 2])  # would join its runs
    memory.start([1, 3])  # uses a part of them
    assert memory.tiers.take_used() == ([] if is_taken else second)


@pytest.mark.usefixtures("told_after_long")
def test_a_block_in_the_next_report_comes_after_those_that_follow_it_also_if_it_could_be_joined():
    memory = TierMemory(6, 6, "through", storage=True)
    memory.serve([1])
    memory.tiers.take_used()
    memory.serve([1, 2])
    memory.start([1, 2])
    memory.serve([1, 2, 3])
    assert memory.tiers.take_used() == backwards(memory, [1, 2, 3])[:2]


def test_joined_runs_are_reported_again_when_the_first_of_them_is_due(monkeypatch):
    monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 4)
    memory = TierMemory(6, 6, "through", storage=True)
    memory.serve([1])
    assert memory.tiers.take_used() == backwards(memory, [1])  # at 2: an admission and a block
    memory.serve([1, 2])
    assert memory.tiers.take_used() == backwards(memory, [1, 2])[:1]  # at 4
    memory.start([1, 2])  # joins them
    assert memory.tiers.take_used() == []
    memory.start([1, 2])
    assert memory.tiers.take_used() == backwards(memory, [1, 2])  # at 6


@given(PATHS)
def test_of_paths_that_are_stored_at_once_each_is_reported_last_block_first(paths):
    """Storage finds the rest of a path through the part that it shares with others."""
    memory = TierMemory(32, 32, storage=True)
    for tokens in paths:
        memory.serve(tokens)
    memory.manager.evict(32)
    memory.settle()
    used = memory.tiers.take_used()
    for tokens in paths:
        path = backwards(memory, tokens)
        assert [key for key in used if key in path] == path


class TestHowOften:
    def serve_and_count(self, memory: TierMemory, tokens: Sequence[int]) -> int:
        memory.serve(tokens)
        return len(memory.tiers.take_used())

    def test_a_path_is_reported_once_per_interval(self, monkeypatch):
        monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 5)
        memory = TierMemory(8, 8, "through", storage=True)
        assert self.serve_and_count(memory, [1, 2]) == 2  # told when two blocks were stored
        assert [self.serve_and_count(memory, [1, 2]) for _ in range(6)] == [0, 0, 0, 0, 2, 0]
        # A block that is stored is told at once, what it follows when that is due.
        assert [self.serve_and_count(memory, [1, 2, last]) for last in (3, 4)] == [1, 3]

    @pytest.mark.parametrize("more", [2, 3, 4])
    def test_the_interval_counts_admissions_and_stored_blocks(self, monkeypatch, more):
        monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 5)
        memory = TierMemory(8, 8, "through", storage=True)
        assert self.serve_and_count(memory, [1, 2]) == 2
        memory.serve(range(11, 11 + more))
        # The admission of the other path and its blocks, and the one that hits.
        assert self.serve_and_count(memory, [1, 2]) == (more + 2 if more >= 3 else 2)

    def test_a_split_node_counts_as_reported(self, monkeypatch):
        monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 100)
        memory = TierMemory(8, 8, "through", storage=True)
        memory.serve([1, 2, 3])
        memory.tiers.take_used()
        assert self.serve_and_count(memory, [1, 4]) == 1
        assert self.serve_and_count(memory, [1, 2, 3]) == 0

    def test_the_number_of_waiting_keys_is_bounded(self, monkeypatch):
        monkeypatch.setattr(storage_uses, "_MOST_KEYS", 4)
        monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 1)
        memory = TierMemory(8, 8, "through", storage=True)
        for first in range(20):
            memory.serve([first, first])
        assert len(memory.tiers.take_used()) == 4
        memory.serve([19, 19])
        assert memory.tiers.take_used() == backwards(memory, [19, 19])
