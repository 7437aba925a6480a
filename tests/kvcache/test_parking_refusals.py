"""Parking: refused calls change nothing."""

import pytest

from radixkv.kvcache import CacheManager, LeaseError, OutOfBlocksError, StorageConfigError

from .test_parking import TOKENS, memory_of, park, resume

ENDED = "the parked request was resumed or unparked, or is of another cache"


def test_let_go_twice():
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.tiers.unpark(parked)
    with pytest.raises(LeaseError) as caught:
        memory.tiers.unpark(parked)
    assert str(caught.value) == ENDED
    memory.settle()


def test_resumed_twice():
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.settle()
    resume(memory, parked, TOKENS)
    before = memory.manager.stats()
    with pytest.raises(LeaseError) as caught:
        memory.manager.admit(memory.manager.match(TOKENS), parked)
    assert str(caught.value) == ENDED
    assert memory.manager.stats() == before


@pytest.mark.parametrize("other", [memory_of().manager, CacheManager(4, 2)])
def test_resumed_on_another_cache(other):
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.settle()
    with pytest.raises(LeaseError) as caught:
        other.admit(other.match(TOKENS), parked)
    assert str(caught.value) == ENDED
    assert other.stats().live_leases == 0


def test_resumed_while_it_is_saved():
    memory = memory_of()
    parked = park(memory, TOKENS)
    for _ in range(2):  # queued, and dispatched
        with pytest.raises(LeaseError) as caught:
            memory.manager.admit(memory.manager.match(TOKENS), parked)
        assert (
            str(caught.value) == "the parked request is not saved yet: its copy is still in flight"
        )
        memory.take()
    memory.settle()
    assert resume(memory, parked, TOKENS) == 5


@pytest.mark.parametrize("given", [3, "r1", []])
def test_what_is_not_parked_is_refused(given):
    memory = memory_of()
    manager, tiers = memory.manager, memory.tiers
    for use in (tiers.unpark, lambda parked: manager.admit(manager.match(TOKENS), parked)):
        with pytest.raises(LeaseError) as caught:
            use(given)
        assert str(caught.value) == f"parked must be a Parked, got {type(given).__name__}"


def test_resumed_with_fewer_tokens():
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.settle()
    before = memory.manager.stats()
    with pytest.raises(LeaseError) as caught:
        memory.manager.admit(memory.manager.match(TOKENS[:4]), parked)
    assert str(caught.value) == "the request was parked with 5 tokens, but resumes with 4"
    assert memory.manager.stats() == before
    assert resume(memory, parked, TOKENS) == 5


def test_resumed_without_room_on_the_device():
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.settle()
    other = memory.start([7, 7, 8, 8, 9, 9])
    memory.settle()
    before = memory.manager.stats(), memory.residency(TOKENS), memory.drop_order()
    with pytest.raises(OutOfBlocksError) as caught:
        memory.manager.admit(memory.manager.match(TOKENS), parked)
    assert str(caught.value) == "needs 2 blocks, but only 0 are free or evictable"
    assert (memory.manager.stats(), memory.residency(TOKENS), memory.drop_order()) == before
    memory.manager.check()
    memory.manager.release(other)
    assert resume(memory, parked, TOKENS) == 5


def test_a_lease_that_is_parked_is_used():
    memory = memory_of()
    parked = park(memory, TOKENS)
    for call in (memory.manager.publish, memory.tiers.park, memory.tiers.fork):
        with pytest.raises(LeaseError) as caught:
            call(parked.lease, TOKENS)
        assert str(caught.value) == "the lease cannot be published while it is loading or parking"
    with pytest.raises(LeaseError) as caught:
        memory.manager.release(parked.lease)
    assert str(caught.value) == "the lease is being parked: it ends with its copy"
    memory.manager.check()
    memory.settle()
    with pytest.raises(LeaseError) as caught:
        memory.manager.release(parked.lease)
    assert str(caught.value) == "the lease was released or belongs to another manager"


def test_a_lease_that_loads_is_used():
    memory = memory_of()
    memory.demote(TOKENS)
    lease = memory.start(TOKENS)
    for call in (memory.manager.publish, memory.tiers.park, memory.tiers.fork):
        with pytest.raises(LeaseError) as caught:
            call(lease, TOKENS)
        assert str(caught.value) == "the lease cannot be published while it is loading or parking"
    memory.manager.check()
    memory.settle()
    memory.compute(lease, TOKENS)


def test_parked_with_more_tokens_than_there_is_room_for():
    memory = memory_of()
    lease = memory.start(TOKENS)
    with pytest.raises(LeaseError) as caught:
        memory.tiers.park(lease, [*TOKENS, 6])
    assert str(caught.value) == "6 tokens published on a lease with room for 5"
    assert memory.stats.parked == 0


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("storage", "where is 'storage', but the cache has no storage"),
        ("disk", "where must be 'host' or 'storage', got 'disk'"),
    ],
)
def test_parked_where_nothing_can_be(where, message):
    memory = memory_of()
    lease = memory.start(TOKENS)
    with pytest.raises(StorageConfigError) as caught:
        memory.tiers.park(lease, TOKENS, where)
    assert str(caught.value) == message
    memory.manager.release(lease)
