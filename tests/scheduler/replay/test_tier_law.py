"""The law of two exclusive tiers: on the bundled trace, on random traces, and broken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.kvcache.stats import TierStats
from radixkv.kvcache.tiers.host_tier import HostConfig, HostTier
from radixkv.scheduler.replay.hits.counts import (
    ManagerRun,
    TieredHitCounts,
    count_hits,
    run_manager,
)
from radixkv.scheduler.replay.hits.oracles import prefix_paths
from radixkv.scheduler.replay.hits.tier_law import (
    TwoTierCounts,
    check_two_tier_law,
    find_difference,
    two_tier_law,
)
from radixkv.scheduler.replay.trace import Trace

from .conftest import make_trace

SIZES = [(1_000, 1_000), (2_000, 500), (1_000, 9_000), (5_000, 5_000), (500, 1)]


def run_two_tiers(trace: Trace, device: int, host: int) -> ManagerRun:
    return run_manager(trace, device, host=HostConfig(host, "exclusive"))


@pytest.mark.parametrize(("device", "host"), SIZES)
def test_the_bundled_trace_obeys_the_law(bundled_trace: Trace, device: int, host: int) -> None:
    law = two_tier_law(prefix_paths(bundled_trace), device, host)
    run = run_two_tiers(bundled_trace, device, host)
    assert (find_difference(run, law), run.refused) == (None, 0)
    # The right side again, from managers with one tier: the law does not depend on its oracle.
    upper, both = count_hits(bundled_trace, device), count_hits(bundled_trace, device + host)
    assert sum(law.device_hits) == upper.hit_blocks
    assert sum(law.device_hits) + sum(law.host_hits) == both.hit_blocks
    assert (law.demoted_blocks, law.dropped_blocks) == (upper.evicted_blocks, both.evicted_blocks)


def test_the_counts_of_the_bundled_trace(bundled_trace: Trace) -> None:
    counts = count_hits(bundled_trace, 1_000, HostConfig(9_000, "exclusive"))
    assert counts == TieredHitCounts(
        requests=1000,
        blocks=27_305,
        hit_blocks=1038,
        evicted_blocks=25_267,
        hit_rate=1038 / 27_305,
        refused=0,
        host_hit_blocks=4723 - 1038,
        demoted_blocks=27_305 - 1038 - 1_000,
        dropped_blocks=27_305 - 4723 - 10_000,
    )


def test_written_through_copies_of_both_tiers_hit_less_than_exclusive_ones(
    bundled_trace: Trace,
) -> None:
    counts = count_hits(bundled_trace, 1_000, HostConfig(9_000, "through"))
    assert isinstance(counts, TieredHitCounts)
    assert counts.hit_blocks == 1038
    assert 0 < counts.host_hit_blocks < 4723 - 1038


def test_written_back_copies_make_room_before_anything_is_lost(bundled_trace: Trace) -> None:
    counts = count_hits(bundled_trace, 1_000, HostConfig(9_000, "back"))
    assert isinstance(counts, TieredHitCounts)
    assert (counts.hit_blocks, counts.host_hit_blocks) == (1038, 4723 - 1038)


# Requests share first blocks: the tree stays small and is reused.
requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=24)


@given(requests, st.integers(1, 6), st.integers(1, 8))
@example([[0, 1, 2], [0], [0, 1, 2]], 2, 1)
def test_any_small_trace_obeys_the_law(paths: list[list[int]], device: int, host: int) -> None:
    trace = make_trace(*paths)
    run = run_two_tiers(trace, device, host)
    assert run.refused == sum(len(path) > device for path in paths)
    assert find_difference(run, two_tier_law(prefix_paths(trace), device, host)) is None


def test_a_request_that_the_device_cannot_hold_is_refused_though_both_tiers_could() -> None:
    trace = make_trace([0, 1], [0, 1, 2], [3, 4], [0, 1])
    run = run_two_tiers(trace, 2, 8)
    assert run == ManagerRun([0, 0, 0, 0], 4, 1, [0, 0, 0, 2], demoted_blocks=4, dropped_blocks=0)
    assert two_tier_law(prefix_paths(trace), 2, 8) == TwoTierCounts([0] * 4, [0, 0, 0, 2], 4, 0)


# ---------------------------------------------------------------------- differences it finds


def test_each_kind_of_difference_has_its_message() -> None:
    run = ManagerRun([0, 1], 5, 0, [0, 2], demoted_blocks=5, dropped_blocks=1_003)

    def difference(hits: Sequence[int], host: Sequence[int], demoted: int, dropped: int) -> str:
        law = TwoTierCounts(list(hits), list(host), demoted, dropped)
        return str(find_difference(run, law))

    assert difference([0, 3], [0, 2], 5, 1_003) == (
        "request 1: manager 1 blocks on the device, law 3"
    )
    assert difference([0, 1], [4, 2], 5, 1_003) == "request 0: manager 0 blocks on the host, law 4"
    assert difference([0, 1], [0, 2], 4, 1_003) == "manager demoted 5 blocks, law 4"
    assert difference([0, 1], [0, 2], 5, 1_002) == "manager dropped 1,003 blocks, law 1,002"
    assert difference([0, 1], [0, 2], 5, 1_003) == "None"


def test_the_check_passes_with_its_number_of_comparisons(bundled_trace: Trace) -> None:
    calls: list[tuple[str, int, int]] = []
    check = check_two_tier_law(
        bundled_trace,
        ((1_000, 1_000), (500, 20)),
        lambda stage, done, total: calls.append((stage, done, total)),
    )
    assert (check.verdict, check.detail) == ("PASS", "1,000 requests at 2 pairs of sizes")
    assert check.name == "two tiers hit, demote and drop as LRU caches of their sizes do"
    assert calls == [("two tiers", done, 2_000) for done in (0, 1_000, 2_000)]


def test_a_host_tier_in_the_wrong_order_is_found(
    bundled_trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostTier, "next_to_drop", lambda self: list(self.idle_runs())[-1])
    check = check_two_tier_law(Trace(bundled_trace.requests[:300]), ((500, 500),))
    assert not check.ok
    assert check.detail.startswith("500 + 500 blocks: request ")


def test_a_miscounted_demotion_is_found(
    bundled_trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixkv.kvcache.tiers.api import Tiers

    def stats(self: Tiers) -> TierStats:
        return TierStats(0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0)

    monkeypatch.setattr(Tiers, "stats", stats)
    check = check_two_tier_law(Trace(bundled_trace.requests[:300]), ((500, 500),))
    assert check.detail.startswith("500 + 500 blocks: manager demoted 7 blocks, law ")
