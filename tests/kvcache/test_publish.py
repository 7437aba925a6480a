"""Publish: the first publisher wins, duplicates are recycled, runs grow or fork."""

import pytest

from radixkv.kvcache import CacheManager, LeaseError

from .helpers import hit, serve, start
from .observe import observe


def test_whole_blocks_become_shared():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3, 4, 5])
    table = lease.block_table.tolist()
    assert hit(manager, [1, 2, 3, 4, 5]) == 0  # reserved is not computed
    manager.publish(lease, [1, 2, 3])
    assert (hit(manager, [1, 2, 3, 4]), lease.num_shared_blocks) == (1, 1)
    manager.publish(lease, [1, 2, 3, 4, 5])
    assert (hit(manager, [1, 2, 3, 4]), lease.num_shared_blocks) == (2, 2)
    assert lease.block_table.tolist() == table
    assert lease.num_hit_blocks == 0
    manager.check()


@pytest.mark.parametrize("computed", [[], [1], [1, 2, 3]])
def test_publishing_no_new_whole_block_changes_nothing(computed):
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3, 4])
    manager.publish(lease, [1, 2])
    before = observe(manager, [lease], [(b"", [1, 2, 3, 4])])
    manager.publish(lease, computed)
    assert observe(manager, [lease], [(b"", [1, 2, 3, 4])]) == before


def test_publishing_more_than_the_lease_has_room_for_is_refused():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3])
    before = observe(manager, [lease], [(b"", [1, 2, 3, 4])])
    with pytest.raises(LeaseError) as caught:
        manager.publish(lease, [1, 2, 3, 4])
    assert str(caught.value) == "4 tokens published on a lease with room for 3"
    assert observe(manager, [lease], [(b"", [1, 2, 3, 4])]) == before
    manager.check()


def test_the_first_publisher_wins():
    manager = CacheManager(8, 2)
    first, second = start(manager, [1, 2, 3, 4]), start(manager, [1, 2, 3, 4])
    table = second.block_table.tolist()
    manager.publish(second, [1, 2, 3, 4])
    manager.publish(first, [1, 2, 3, 4])
    assert first.block_table.tolist() == second.block_table.tolist() == table
    stats = manager.stats()
    assert (stats.duplicate_blocks, stats.free_blocks, stats.cached_blocks) == (2, 6, 2)
    assert first.num_shared_blocks == 2
    manager.check()


def test_duplicate_blocks_are_recycled_and_the_others_stay():
    manager = CacheManager(8, 2)
    first, second = start(manager, [1, 2, 3, 4]), start(manager, [1, 2, 5, 6])
    kept = second.block_table.tolist()[1]
    manager.publish(first, [1, 2, 3, 4])
    manager.publish(second, [1, 2, 5, 6])
    assert second.block_table.tolist() == [first.block_table.tolist()[0], kept]
    assert manager.stats().duplicate_blocks == 1
    assert hit(manager, [1, 2, 3, 4]) == hit(manager, [1, 2, 5, 6]) == 2
    manager.check()


def test_a_duplicate_of_an_idle_run():
    manager = CacheManager(8, 2)
    slow = start(manager, [1, 2, 3, 4])
    table = serve(manager, [1, 2, 3, 4])
    assert manager.stats().idle_blocks == 2
    manager.publish(slow, [1, 2, 3, 4])
    assert slow.block_table.tolist() == table
    assert (manager.stats().idle_blocks, manager.stats().free_blocks) == (0, 6)
    assert manager.evict(8) == 0
    manager.check()
    manager.release(slow)
    assert manager.stats().idle_blocks == 2
    manager.check()


def test_a_duplicate_of_a_part_of_an_idle_run():
    manager = CacheManager(12, 1)
    slow = start(manager, [1, 2, 9, 9])
    table = serve(manager, [1, 2, 3, 4])
    manager.publish(slow, [1, 2, 9])
    assert slow.block_table.tolist()[:2] == table[:2]
    assert manager.stats().idle_blocks == 2  # the suffix, not refreshed
    manager.check()
    manager.publish(slow, [1, 2, 9, 9])
    assert hit(manager, [1, 2, 9, 9]) == hit(manager, [1, 2, 3, 4]) == 4
    manager.check()


def test_a_duplicate_of_a_part_of_a_run_in_use():
    manager = CacheManager(12, 1)
    fast, slow = start(manager, [1, 2, 3, 4]), start(manager, [1, 2, 9])
    manager.publish(fast, [1, 2, 3, 4])
    manager.publish(slow, [1])
    manager.check()
    manager.publish(slow, [1, 2])
    manager.check()
    manager.publish(slow, [1, 2, 9])
    manager.check()
    manager.release(fast)
    assert manager.stats().idle_blocks == 2
    manager.check()


def test_publishing_block_by_block_equals_publishing_at_once():
    tokens = [1, 2, 3, 4, 5, 6, 7]
    managers = [CacheManager(8, 2), CacheManager(8, 2)]
    leases = [start(manager, tokens) for manager in managers]
    managers[0].publish(leases[0], tokens)
    for end in range(len(tokens) + 1):
        managers[1].publish(leases[1], tokens[:end])
        managers[1].check()
    seen = [observe(manager, [lease]) for manager, lease in zip(managers, leases, strict=True)]
    assert seen[0] == seen[1]
    assert hit(managers[0], tokens) == hit(managers[1], tokens) == 3


def test_a_run_in_use_by_two_forks_instead_of_growing():
    manager = CacheManager(12, 1)
    serve(manager, [1, 2])
    one, two = start(manager, [1, 2, 3, 4]), start(manager, [1, 2, 5])
    manager.publish(one, [1, 2, 3])
    manager.publish(two, [1, 2, 5])
    manager.publish(one, [1, 2, 3, 4])
    manager.check()
    manager.release(one)
    manager.check()
    # Only what the second does not use may go.
    assert manager.evict(12) == 2
    assert (hit(manager, [1, 2, 5]), hit(manager, [1, 2, 3])) == (3, 2)
    manager.release(two)
    assert manager.evict(12) == 3
    manager.check()


def test_a_run_that_others_have_continued_is_not_grown():
    manager = CacheManager(12, 1)
    serve(manager, [1, 2, 3])
    lease = start(manager, [1, 2, 7])
    manager.publish(lease, [1, 2, 7])
    assert hit(manager, [1, 2, 3]) == hit(manager, [1, 2, 7]) == 3
    manager.check()


def test_a_run_grows_while_it_is_matched_and_pinned_by_others():
    manager = CacheManager(12, 1)
    leader = start(manager, [1, 2, 3, 4])
    manager.publish(leader, [1, 2])
    follower = start(manager, [1, 2, 3, 4])
    manager.publish(leader, [1, 2, 3, 4])
    assert follower.num_shared_blocks == 2
    manager.check()
    manager.publish(follower, [1, 2, 3, 4])
    assert follower.block_table.tolist() == leader.block_table.tolist()
    assert manager.stats().duplicate_blocks == 2
    manager.check()


def test_a_generated_answer_is_a_hit_of_the_next_turn():
    manager = CacheManager(16, 2)
    lease = start(manager, [1, 2, 3])
    tokens = [1, 2, 3]
    for token in (4, 5, 6, 7):
        manager.publish(lease, tokens)
        manager.extend(lease, 1)
        tokens.append(token)
    manager.publish(lease, tokens[:-1])  # the last one's KV is not computed
    manager.release(lease)
    assert manager.match([*tokens, 8, 9]).num_tokens == 6
    manager.check()
