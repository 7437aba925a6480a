"""Match: the longest published prefix in whole blocks, within one namespace."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, CountError, make_namespace

from .helpers import hit, serve, start
from .observe import observe


@pytest.mark.parametrize(
    ("tokens", "num_tokens"),
    [
        ([], 0),
        ([1], 0),
        ([1, 2], 2),
        ([1, 2, 3], 2),
        ([1, 2, 3, 4], 4),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4, 5, 6], 6),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 6),
        ([1, 2, 3, 9, 5, 6], 2),
        ([9, 2, 3, 4], 0),
        ([3, 4], 0),
    ],
)
def test_the_longest_prefix_in_whole_blocks(tokens, num_tokens):
    manager = CacheManager(8, 2)
    serve(manager, [1, 2, 3, 4, 5, 6, 7])
    match = manager.match(tokens)
    assert (match.num_tokens, match.num_blocks) == (num_tokens, num_tokens // 2)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_lengths_beside_a_block_boundary(block_size, delta):
    manager = CacheManager(64, block_size)
    tokens = list(range(3 * block_size + delta))
    serve(manager, tokens)
    assert hit(manager, tokens) == len(tokens) // block_size
    assert manager.stats().cached_blocks == len(tokens) // block_size


@pytest.mark.parametrize(
    ("limit", "num_tokens"), [(None, 6), (0, 0), (1, 0), (2, 2), (3, 2), (5, 4), (6, 6), (9, 6)]
)
def test_a_hit_may_be_limited(limit, num_tokens):
    """Also at the admission after another one, when the tree is walked again."""
    manager = CacheManager(12, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    serve(manager, tokens)
    match = manager.match(tokens, max_hit_tokens=limit)
    assert (match.num_tokens, match.num_blocks) == (num_tokens, num_tokens // 2)
    serve(manager, [1, 2, 3, 9])
    lease = manager.admit(match)
    assert lease.num_hit_blocks == num_tokens // 2 and len(lease.block_table) == 4
    manager.publish(lease, tokens[:6])
    manager.release(lease)
    assert manager.stats().cached_blocks == 4
    manager.check()


@pytest.mark.parametrize("limit", range(12))
@pytest.mark.parametrize("length", range(9))
def test_a_limited_hit_is_that_of_the_tokens_before_the_limit(length, limit):
    """Also the block that comes next, with a limit before, at and after the end of the tokens."""
    manager = CacheManager(12, 2)
    serve(manager, [1, 2, 3, 4])
    tokens = np.arange(1, length + 1, dtype=np.int32)
    match, cut = manager.match(tokens, max_hit_tokens=limit), manager.match(tokens[:limit])
    assert (match.num_tokens, match.num_blocks) == (cut.num_tokens, cut.num_blocks)
    assert match.next_block == cut.next_block
    assert manager.admit(match).num_tokens == length


@given(st.integers(max_value=-1))
def test_a_negative_limit_of_a_hit_is_rejected(limit):
    manager = CacheManager(12, 2)
    serve(manager, [1, 2, 3, 4])
    with pytest.raises(CountError, match=f"^max_hit_tokens must be at least 0, got {limit}$"):
        manager.match([1, 2, 3, 4], max_hit_tokens=limit)


def test_match_changes_nothing():
    manager = CacheManager(12, 2)
    serve(manager, [1, 2, 3, 4, 5, 6])
    serve(manager, [1, 2, 7, 8])
    lease = start(manager, [9, 9, 9])
    probes = [(b"", tokens) for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8], [9, 9])]
    before = observe(manager, [lease], probes)
    for tokens in ([1, 2, 3, 4, 0, 0], [1, 2], [], [9, 9], [5] * 100):
        manager.match(tokens)
        manager.match(tokens, b"a new namespace")
    assert observe(manager, [lease], probes) == before
    manager.check()


def test_the_callers_arrays_stay_his():
    manager = CacheManager(8, 2)
    tokens = np.array([1, 2, 3, 4], np.int32)
    match = manager.match(tokens)
    tokens[:] = 0
    lease = manager.admit(match)
    computed = np.array([1, 2, 3, 4], np.int32)
    manager.publish(lease, computed)
    assert computed.tolist() == [1, 2, 3, 4]  # and the cache does not write to them
    follower = manager.match(computed)
    computed[:] = 0
    assert hit(manager, [1, 2, 3, 4]) == 2
    assert hit(manager, [0, 0, 0, 0]) == 0
    assert manager.admit(follower).num_hit_blocks == 2
    manager.check()


def test_growth_in_place_keeps_no_reference_to_the_callers_array():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3, 4, 5, 6])
    tokens = np.array([1, 2, 3, 4, 5, 6], np.int32)
    for end in (2, 4, 6):
        manager.publish(lease, tokens[:end])
    tokens[:] = 0
    assert hit(manager, [1, 2, 3, 4, 5, 6]) == 3


# Namespaces


def test_namespaces_share_nothing():
    manager = CacheManager(12, 2)
    tables = [serve(manager, [1, 2, 3, 4], namespace) for namespace in (b"", b"a", b"b")]
    assert len({block for table in tables for block in table}) == 6
    assert hit(manager, [1, 2, 3, 4], b"c") == 0
    lease = start(manager, [1, 2, 3, 4], b"b")
    assert lease.block_table.tolist() == tables[2]
    manager.check()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from(["x", b"x", 1]),
            st.lists(st.integers(0, 1), max_size=4),
        ),
        max_size=6,
    )
)
def test_a_hit_is_always_of_the_same_namespace(requests):
    manager = CacheManager(64, 1)
    published: set[tuple[bytes, tuple[int, ...]]] = set()
    for name, value, tokens in requests:
        namespace = make_namespace(**{name: value})
        expected = max(
            (
                n
                for n in range(len(tokens) + 1)
                if n == 0 or (namespace, tuple(tokens[:n])) in published
            ),
        )
        assert hit(manager, tokens, namespace) == expected
        serve(manager, tokens, namespace)
        published |= {(namespace, tuple(tokens[:n])) for n in range(1, len(tokens) + 1)}


def test_a_namespace_is_gone_with_its_last_block():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2], b"a")
    assert manager.match([1, 2, 3, 4], b"a").next_block is not None
    manager.evict(1)
    # What is not there any more names no node to follow.
    assert manager.match([1, 2, 3, 4], b"a").next_block is None
    manager.check()


def test_a_namespace_is_gone_with_a_request_that_published_nothing():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2], b"a")
    assert manager.match([1, 2], b"a").next_block is not None
    manager.release(lease)
    assert manager.match([1, 2], b"a").next_block is None
    manager.check()


def test_a_namespace_in_use_outlives_its_last_block():
    manager = CacheManager(8, 2)
    serve(manager, [1, 2], b"a")
    lease = start(manager, [3, 4], b"a")
    manager.evict(1)
    manager.publish(lease, [3, 4])
    assert hit(manager, [3, 4], b"a") == 1
    manager.check()


def test_many_short_lived_namespaces_leave_nothing():
    manager = CacheManager(4, 1)
    for tenant in range(100):
        serve(manager, [1, 2], make_namespace(tenant=tenant))
    assert manager.evict(4) == 4
    assert manager.stats().free_blocks == 4
    manager.check()


# The next block: who waits for whom


def test_leader_and_follower_name_the_same_next_block():
    manager = CacheManager(16, 2)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    leader = start(manager, prompt)
    for computed in (0, 2, 4):
        manager.publish(leader, prompt[:computed])
        follower = manager.match(prompt)
        assert follower.num_tokens == computed
        assert follower.next_block is not None
        assert follower.next_block == manager.next_block(leader, prompt)
        assert manager.match([*prompt[:computed], 8, 8]).next_block != follower.next_block
        assert manager.match(prompt, b"a").next_block != follower.next_block
    manager.publish(leader, prompt)
    assert manager.next_block(leader, prompt) is None  # one token does not fill a block
    assert manager.match(prompt).next_block is None


def test_two_leaders_of_the_same_block_name_it_alike():
    manager = CacheManager(16, 2)
    one, two = start(manager, [1, 2, 3, 4]), start(manager, [1, 2, 3, 4])
    assert manager.next_block(one, [1, 2, 3, 4]) == manager.next_block(two, [1, 2, 3, 4])
    manager.publish(one, [1, 2])
    assert manager.next_block(one, [1, 2, 3, 4]) != manager.next_block(two, [1, 2, 3, 4])
    manager.publish(two, [1, 2])
    assert manager.next_block(one, [1, 2, 3, 4]) == manager.next_block(two, [1, 2, 3, 4])


@pytest.mark.parametrize("leader", [(1, 2, 2), (1, 1, 1), (2, 3, 1), (3, 3, 3)])
def test_a_request_waits_only_for_the_block_that_it_needs(leader):
    """Of all prompts of three blocks, also of those that leave a run in its middle."""
    manager = CacheManager(20, 1)
    serve(manager, [1, 2, 3])
    serve(manager, [2, 2])
    lease = start(manager, leader)
    computes = leader[: lease.num_hit_blocks + 1]
    for prompt in product([1, 2, 3], repeat=3):
        needs = prompt[: hit(manager, prompt) + 1]
        follows = manager.match(prompt).next_block == manager.next_block(lease, leader)
        assert follows == (needs == computes), prompt


def test_next_block_after_a_split():
    manager = CacheManager(16, 2)
    serve(manager, [1, 2, 3, 4, 5, 6])
    leader = start(manager, [1, 2, 7, 7])  # splits the run after its first block
    assert manager.match([1, 2, 7, 7]).next_block == manager.next_block(leader, [1, 2, 7, 7])
    assert manager.match([1, 2, 8, 8]).next_block != manager.next_block(leader, [1, 2, 7, 7])


def test_no_next_block_of_a_full_hit_or_of_half_a_block():
    manager = CacheManager(16, 2)
    serve(manager, [1, 2])
    assert manager.match([1, 2]).next_block is None
    assert manager.match([1, 2, 3]).next_block is None


def test_a_match_of_another_manager_is_done_again():
    ours, other = CacheManager(8, 2), CacheManager(8, 2)
    lease = other.admit(other.match([1, 2, 3, 4]))
    other.publish(lease, [1, 2, 3, 4])
    theirs = other.match([1, 2, 3, 4])
    assert theirs.num_blocks == 2
    assert ours.available_after(theirs) == 8
    mine = ours.admit(theirs)
    assert mine.num_hit_blocks == 0
    ours.check()
    other.check()
