"""The checks for leaked blocks, and a failure of each."""

from __future__ import annotations

import dataclasses

import pytest

from radixkv.kvcache import CacheManager
from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler.replay.checks import (
    check_all_blocks_returned,
    check_all_host_blocks_returned,
    check_violations,
)


def test_a_lease_that_is_not_released_is_found() -> None:
    manager = CacheManager(num_blocks=4, block_size=2)
    assert check_all_blocks_returned(manager).ok
    manager.admit(manager.match([1, 2, 3]))
    check = check_all_blocks_returned(manager)
    assert (check.ok, check.detail) == (False, "2 free + 0 idle of 4 blocks, 1 leases")


def test_a_broken_invariant_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CacheManager(num_blocks=4, block_size=2)

    def broken() -> None:
        raise AssertionError("a block is owned twice")

    monkeypatch.setattr(manager, "check", broken)
    check = check_all_blocks_returned(manager)
    assert (check.ok, check.detail) == (False, "broken invariant: a block is owned twice")


def test_a_parked_request_that_is_forgotten_is_found() -> None:
    manager = CacheManager(num_blocks=4, block_size=2, host=HostConfig(4))
    assert manager.tiers is not None
    assert check_all_host_blocks_returned(manager.tiers.stats()).ok
    manager.tiers.park(manager.admit(manager.match([1, 2, 3])), [1, 2, 3])
    check = check_all_host_blocks_returned(manager.tiers.stats())
    assert (check.name, check.ok) == ("no host block is leaked", False)
    assert check.detail == "2 of 4 free or cached, 1 parked, 1 copies"
    [operation] = manager.tiers.take_operations()
    manager.tiers.complete(operation.id, [False, False], fenced=False)
    check = check_all_host_blocks_returned(manager.tiers.stats())
    assert check.detail.endswith(", 1 parked, 1 copies")


@pytest.mark.parametrize(
    ("counts", "detail"),
    [
        ({"host_free_blocks": 3}, "3 of 4 free or cached, 0 parked, 0 copies"),
        ({"host_free_blocks": 3, "host_cached_blocks": 1}, ""),
        ({"host_cached_blocks": 1}, "5 of 4 free or cached, 0 parked, 0 copies"),
        ({"parked": 1}, "4 of 4 free or cached, 1 parked, 0 copies"),
        ({"open_operations": 1}, "4 of 4 free or cached, 0 parked, 1 copies"),
        ({"quarantined_operations": 1}, "4 of 4 free or cached, 0 parked, 1 copies"),
    ],
)
def test_each_count_of_an_idle_host_tier_must_be_right(counts: dict[str, int], detail: str) -> None:
    manager = CacheManager(num_blocks=4, block_size=2, host=HostConfig(4))
    assert manager.tiers is not None
    check = check_all_host_blocks_returned(dataclasses.replace(manager.tiers.stats(), **counts))
    assert check.ok is not bool(detail)
    assert check.ok or check.detail == detail


def test_the_first_violation_is_told() -> None:
    check = check_violations("a law", ["one", "two", "three"], "")
    assert (check.ok, check.detail) == (False, "3 violations, the first: one")
    assert check_violations("a law", [], "all hold").detail == "all hold"
