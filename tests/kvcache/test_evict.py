"""Eviction: exactly the requested number of least recently used leaves, never one in use."""

from typing import Any

import pytest

from radixkv.kvcache import CacheManager, CountError

from .helpers import hit, serve, start
from .observe import eviction_order, observe


def test_a_run_goes_from_its_tail():
    manager = CacheManager(8, 1)
    serve(manager, [1, 2, 3])
    assert eviction_order(manager, [(b"", [1, 2, 3])]) == [[2], [1], [0]]


def test_the_least_recently_used_goes_first():
    manager = CacheManager(8, 1)
    serve(manager, [1, 2])
    serve(manager, [3, 4])
    serve(manager, [1, 2])
    probes = [(b"", [1, 2]), (b"", [3, 4])]
    assert eviction_order(manager, probes) == [[2, 1], [2, 0], [1, 0], [0, 0]]


def test_age_counts_from_release_not_from_admission():
    manager = CacheManager(8, 1)
    early, late = start(manager, [1]), start(manager, [2])
    manager.publish(early, [1])
    manager.publish(late, [2])
    manager.release(late)
    manager.release(early)
    assert eviction_order(manager, [(b"", [1]), (b"", [2])]) == [[1, 0], [0, 0]]


def test_a_branch_is_older_than_the_prefix_it_shares():
    manager = CacheManager(8, 1)
    serve(manager, [1, 2, 3])
    serve(manager, [1, 2, 4])
    probes = [(b"", [1, 2, 3]), (b"", [1, 2, 4])]
    assert eviction_order(manager, probes) == [[2, 3], [2, 2], [1, 1], [0, 0]]


def test_order_across_namespaces():
    manager = CacheManager(8, 1)
    serve(manager, [1], b"b")
    serve(manager, [1], b"a")
    assert eviction_order(manager, [(b"a", [1]), (b"b", [1])]) == [[1, 0], [0, 0]]


def test_exactly_as_many_as_asked_over_several_runs():
    manager = CacheManager(16, 1)
    serve(manager, [1, 2, 3])
    serve(manager, [4, 5, 6])
    assert manager.evict(4) == 4
    assert (hit(manager, [1, 2, 3]), hit(manager, [4, 5, 6])) == (0, 2)
    stats = manager.stats()
    assert (stats.evicted_blocks, stats.cached_blocks, stats.free_blocks) == (4, 2, 14)
    manager.check()


def test_all_that_is_idle_and_no_more():
    manager = CacheManager(8, 1)
    serve(manager, [1, 2, 3])
    assert manager.evict(0) == 0
    assert manager.evict(100) == 3
    assert manager.evict(1) == 0
    assert manager.stats().free_blocks == 8
    manager.check()


def test_blocks_in_use_are_never_victims():
    manager = CacheManager(8, 1)
    lease = start(manager, [1, 2, 3, 4])
    manager.publish(lease, [1, 2, 3])
    serve(manager, [1, 2, 7])
    assert manager.evict(8) == 1
    assert hit(manager, [1, 2, 3]) == 3
    assert manager.stats().private_blocks == 1
    manager.check()


def test_a_hit_saves_its_blocks_until_release():
    manager = CacheManager(4, 1)
    serve(manager, [1, 2, 3, 4])
    lease = start(manager, [1, 2])
    assert manager.evict(4) == 2
    manager.release(lease)
    assert manager.evict(4) == 2
    manager.check()


def test_a_trimmed_run_is_found_and_continued():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2, 3, 4, 5, 6])
    manager.evict(1)
    lease = start(manager, [1, 2, 3, 4, 5, 6])
    assert lease.num_hit_blocks == 2
    manager.publish(lease, [1, 2, 3, 4, 5, 6])
    assert hit(manager, [1, 2, 3, 4, 5, 6]) == 3
    manager.check()


@pytest.mark.parametrize("evicted", range(1, 5))
def test_a_run_that_grew_block_by_block_is_trimmed_and_grows_again(evicted: int):
    manager, tokens = CacheManager(16, 2), list(range(12))
    lease = start(manager, tokens)
    for end in range(2, 13, 2):  # the second one begins a run that grows in place
        manager.publish(lease, tokens[:end])
    manager.release(lease)
    serve(manager, [0, 1, 99, 98])  # the next hit leaves the run as it is
    serve(manager, [0, 1, 99, 98])
    assert manager.evict(evicted) == evicted
    manager.check()
    kept = 12 - 2 * evicted
    other = [*tokens[:kept], *range(50, 50 + 2 * evicted)]
    lease = start(manager, other)
    assert lease.num_hit_blocks == kept // 2
    for end in range(kept + 2, 13, 2):
        manager.publish(lease, other[:end])
        manager.check()
    assert (hit(manager, tokens), hit(manager, other)) == (kept // 2, 6)


@pytest.mark.parametrize(
    ("num_blocks", "message"),
    [
        (-1, "num_blocks must be at least 0, got -1"),
        (1.5, "num_blocks must be an integer, got 1.5"),
    ],
)
def test_a_wrong_number_of_blocks(num_blocks: Any, message: str):
    manager = CacheManager(4, 1)
    serve(manager, [1, 2])
    with pytest.raises(CountError) as caught:
        manager.evict(num_blocks)
    assert str(caught.value) == message
    assert hit(manager, [1, 2]) == 2


def test_evicting_many_equals_evicting_one_by_one():
    managers = [CacheManager(16, 1), CacheManager(16, 1)]
    for manager in managers:
        for tokens in ([1, 2, 3], [1, 2, 4, 5], [6], [1, 7]):
            serve(manager, tokens)
    managers[0].evict(5)
    for _ in range(5):
        managers[1].evict(1)
    probes = [(b"", tokens) for tokens in ([1, 2, 3], [1, 2, 4, 5], [6], [1, 7])]
    one, other = (observe(manager, probes=probes) for manager in managers)
    for seen in (one, other):
        seen["matches"] = [match[:2] for match in seen["matches"]]  # nodes of two trees differ
        seen["allocation order"].sort()  # the same blocks are free, in whatever order
    assert one == other


@pytest.mark.parametrize("fan_out", [1, 2, 100], ids=["cousins", "pairs", "siblings"])
@pytest.mark.parametrize("num_blocks", [60, 151, 1000])
def test_evicting_very_many_equals_evicting_one_by_one(fan_out: int, num_blocks: int):
    # Enough for the phases over many leaves, whose runs are of 1 to 3 blocks.
    managers = [CacheManager(400, 1), CacheManager(400, 1)]
    prompts = [[-1 - n // fan_out, 10 + n, *([9] * (n % 3))] for n in range(100)]
    for manager in managers:
        for tokens in prompts:
            serve(manager, tokens)
    evicted = managers[0].evict(num_blocks)
    assert sum(managers[1].evict(1) for _ in range(num_blocks)) == evicted
    managers[0].check()
    left = [[hit(manager, tokens) for tokens in prompts] for manager in managers]
    assert left[0] == left[1]


def test_leaves_of_two_namespaces_with_the_same_tokens():
    manager = CacheManager(100, 1)
    for n in range(50):
        serve(manager, [n], b"a")
        serve(manager, [n], b"b")
    assert manager.evict(60) == 60
    manager.check()
    for namespace in (b"a", b"b"):
        assert [hit(manager, [n], namespace) for n in range(50)] == [0] * 30 + [1] * 20
