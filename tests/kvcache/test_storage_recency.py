"""Recency reports to storage: whole paths, last block first, at most once per interval."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from radixkv.kvcache.tiers import storage_recency as storage_uses

from .tier_memory import TierMemory


@pytest.fixture
def told_at_once(monkeypatch):
    """Of a path that is used again, storage is told again."""
    monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 0)


def backwards(memory: TierMemory, tokens: Sequence[int], namespace: bytes = b"") -> list[bytes]:
    return memory.namespace.block_keys(tokens, namespace)[::-1]


@pytest.mark.usefixtures("told_at_once")
class TestWhat:
    def test_a_hit_on_the_device_and_on_the_host_is_a_use_of_the_whole_path(self):
        memory = TierMemory(4, 4, storage=True)
        memory.demote([1, 2, 3])
        memory.serve([1])  # on the device, too
        memory.tiers.take_used()
        memory.start([1, 2, 4])
        assert memory.tiers.take_used() == backwards(memory, [1, 2])
        assert memory.tiers.take_used() == []

    def test_what_was_stored_is_used_after_what_follows_it(self):
        memory = TierMemory(4, 4, "through", storage=True)
        memory.serve([1, 2, 3])
        assert memory.tiers.take_used() == backwards(memory, [1, 2, 3])
        memory.serve([1, 5, 6])
        assert memory.tiers.take_used() == backwards(memory, [1, 5, 6])

    def test_what_was_read_is_used_with_what_it_follows(self):
        memory = TierMemory(4, 4, storage=True)
        memory.demote([1, 2, 3])
        memory.manager.reset()
        assert memory.tiers.take_used() == []  # a reset forgets it
        memory.serve([1])
        memory.tiers.take_used()
        memory.tiers.prefetch([1, 2, 3])
        memory.settle()
        assert memory.tiers.take_used() == backwards(memory, [1, 2, 3])

    def test_two_paths_share_what_is_used_last(self):
        memory = TierMemory(6, 6, "through", storage=True)
        memory.serve([1, 2, 3], b"lora")
        memory.serve([1, 2, 4], b"lora")
        memory.tiers.take_used()
        memory.start([1, 2, 4], b"lora")
        memory.start([1, 2, 3], b"lora")
        path = backwards(memory, [1, 2, 3], b"lora")
        other = backwards(memory, [1, 2, 4], b"lora")
        assert memory.tiers.take_used() == [other[0], *path]

    def test_what_storage_never_had_is_not_told(self):
        memory = TierMemory(4, 4, storage=True)
        memory.serve([1, 2, 3])
        memory.start([1, 2, 3])
        assert memory.tiers.take_used() == []

    def test_with_new_weights_old_keys_are_not_told(self):
        memory = TierMemory(4, 4, "through", storage=True)
        memory.serve([1, 2], b"kept")
        memory.reset([b"kept"])
        memory.start([1, 2], b"kept")
        assert memory.tiers.take_used() == []

    def test_without_storage_there_is_nothing_to_tell(self):
        memory = TierMemory(4, 4, "through")
        memory.serve([1, 2])
        memory.start([1, 2])
        assert memory.tiers.take_used() == []


class TestHowOften:
    def serve_and_count(self, memory: TierMemory, tokens: Sequence[int]) -> int:
        memory.serve(tokens)
        return len(memory.tiers.take_used())

    def test_a_use_that_was_told_stands_for_the_next_ones(self, monkeypatch):
        monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 5)
        memory = TierMemory(8, 8, "through", storage=True)
        assert self.serve_and_count(memory, [1, 2]) == 2  # told when two blocks were stored
        assert [self.serve_and_count(memory, [1, 2]) for _ in range(6)] == [0, 0, 0, 0, 2, 0]
        # A block that is stored is told at once, what it follows when that is due.
        assert [self.serve_and_count(memory, [1, 2, last]) for last in (3, 4)] == [1, 3]

    def test_what_was_split_was_told(self, monkeypatch):
        monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 100)
        memory = TierMemory(8, 8, "through", storage=True)
        memory.serve([1, 2, 3])
        memory.tiers.take_used()
        assert self.serve_and_count(memory, [1, 4]) == 1

    def test_what_nobody_takes_is_bounded(self, monkeypatch):
        monkeypatch.setattr(storage_uses, "_MOST_KEYS", 4)
        monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 1)
        memory = TierMemory(8, 8, "through", storage=True)
        for first in range(20):
            memory.serve([first, first])
        assert len(memory.tiers.take_used()) == 4
        memory.serve([19, 19])
        assert memory.tiers.take_used() == backwards(memory, [19, 19])
