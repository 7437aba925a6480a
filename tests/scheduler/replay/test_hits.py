"""Hit counts: published figures, oracles against each other and against planted bugs."""

from __future__ import annotations

import inspect
import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest

from radixkv.kvcache.errors import CountError
from radixkv.scheduler.replay.hits.counts import HitCounts, count_hits, run_manager
from radixkv.scheduler.replay.hits.hit_curve import measure_hit_curve
from radixkv.scheduler.replay.hits.oracles import (
    belady,
    lru_oracle,
    num_distinct_blocks,
    prefix_paths,
)
from radixkv.scheduler.replay.trace import Trace

from .conftest import make_trace


@pytest.mark.parametrize(
    ("num_blocks", "hit_blocks"), [(None, 5791), (10_000, 4723), (1_000, 1038)]
)
def test_hits_of_the_bundled_trace(
    bundled_trace: Trace, num_blocks: int | None, hit_blocks: int
) -> None:
    counts = count_hits(bundled_trace, num_blocks)
    assert (counts.requests, counts.blocks, counts.hit_blocks) == (1000, 27_305, hit_blocks)
    assert counts.hit_rate == hit_blocks / 27_305


def test_evictions_are_misses_minus_resident_blocks(bundled_trace: Trace) -> None:
    counts = count_hits(bundled_trace, 1_000)
    assert counts.evicted_blocks == counts.blocks - counts.hit_blocks - 1_000


def test_the_capacity_must_be_positive(bundled_trace: Trace) -> None:
    with pytest.raises(CountError, match="num_blocks must be at least 1, got 0"):
        count_hits(bundled_trace, 0)


def test_a_request_larger_than_the_cache_changes_nothing() -> None:
    trace = make_trace([0, 1], [0, 1, 2, 3], [0, 1])
    assert count_hits(trace, 3) == HitCounts(3, 8, 2, 0, 2 / 8, 1)
    run = run_manager(trace, 3)
    assert (run.hits, run.refused) == ([0, 0, 2], 1)
    assert lru_oracle(prefix_paths(trace), 3) == run.hits
    assert belady(prefix_paths(trace), 3) == 2


def test_the_oracle_has_twenty_lines_at_most() -> None:
    source = inspect.getsource(lru_oracle)
    code = source.split('"""')[0] + source.split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def random_trace(seed: int, requests: int = 60) -> Trace:
    """Paths over a random tree; the same local id may follow several parents."""
    rng = random.Random(seed)
    return make_trace(
        *([rng.randrange(3) for _ in range(rng.randrange(1, 7))] for _ in range(requests))
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_manager_equals_the_oracle_on_random_trees(seed: int) -> None:
    trace = random_trace(seed)
    for num_blocks in (1, 3, 6, 10, 30):
        assert run_manager(trace, num_blocks).hits == lru_oracle(prefix_paths(trace), num_blocks)


def touch_from_the_root(paths: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
    """The oracle with a bug: it touches a path from its first block and evicts from there."""
    resident: OrderedDict[int, None] = OrderedDict()
    result = []
    for path in paths:
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        result.append(hit)
        for block in path:
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > num_blocks:
            resident.popitem(last=False)
    return result


def do_not_refresh(paths: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
    """The oracle with a bug: a hit does not refresh a block."""
    resident: OrderedDict[int, None] = OrderedDict()
    result = []
    for path in paths:
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        result.append(hit)
        for block in reversed(path[hit:]):
            resident[block] = None
        while len(resident) > num_blocks:
            resident.popitem(last=False)
    return result


@pytest.mark.parametrize("bug", [touch_from_the_root, do_not_refresh])
def test_a_planted_bug_is_found(
    bundled_trace: Trace, monkeypatch: pytest.MonkeyPatch, bug: object
) -> None:
    monkeypatch.setattr("radixkv.scheduler.replay.hits.hit_curve.lru_oracle", bug)
    curve = measure_hit_curve(bundled_trace, (2_000, 10_000))
    check = curve.checks[0]
    assert check.name == "hits of every request equal the LRU oracle's"
    assert not check.ok
    assert ": request " in check.detail and "manager" in check.detail and "oracle" in check.detail


def test_a_policy_better_than_belady_is_a_failure(
    bundled_trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "radixkv.scheduler.replay.hits.hit_curve.belady", lambda paths, num_blocks: 7
    )
    check = measure_hit_curve(bundled_trace, (1_000,)).checks[1]
    assert (check.ok, check.detail) == (False, "1,000 blocks: 1,038, 7, 5,791")


def best_by_search(paths: Sequence[Sequence[int]], num_blocks: int) -> int:
    """The most hits that any leaf evictions give, by exhaustive search."""

    @cache
    def best(index: int, resident: frozenset[int]) -> int:
        if index == len(paths):
            return 0
        path = paths[index]
        if len(path) > num_blocks:
            return best(index + 1, resident)
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        others = resident - set(path)
        room = min(len(others), num_blocks - len(path))
        # Any subset may stay; a block without its parent only makes it worse.
        return hit + max(
            best(index + 1, frozenset(kept) | frozenset(path))
            for kept in combinations(sorted(others), room)
        )

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_belady_equals_an_exhaustive_search(seed: int) -> None:
    paths = prefix_paths(random_trace(seed, requests=9))
    for num_blocks in (2, 4, 6):
        assert belady(paths, num_blocks) == best_by_search(paths, num_blocks)


def test_the_curve_of_the_bundled_trace(bundled_trace: Trace) -> None:
    calls: list[tuple[str, int, int]] = []
    curve = measure_hit_curve(
        bundled_trace, progress=lambda stage, done, total: calls.append((stage, done, total))
    )
    assert [row.num_blocks for row in curve.rows] == [1000, 2000, 5000, 10_000, 20_000, None]
    manager = [row.counts.hit_blocks for row in curve.rows]
    assert manager == [1038, 1151, 2630, 4723, 5791, 5791]
    assert manager == [row.oracle_hit_blocks for row in curve.rows]
    assert [row.belady_hit_blocks for row in curve.rows] == [4017, 5403, 5791, 5791, 5791, 5791]
    assert all(check.ok for check in curve.checks)
    assert calls[0] == ("hits", 1, 6000) and calls[-1] == ("hits", 6000, 6000)


def test_equal_ids_after_different_parents_are_different_blocks() -> None:
    trace = make_trace([0, 7], [1, 7], [0, 7])
    assert num_distinct_blocks(trace) == 4
    assert run_manager(trace, 4).hits == [0, 0, 2]
