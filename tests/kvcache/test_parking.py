"""Parking: a preempted request keeps its KV on the host and resumes on other blocks."""

from itertools import product

import pytest

from radixkv.kvcache import OpKind, Parked
from radixkv.kvcache.tiers.parked import ParkedIn

from .tier_memory import TierMemory

TOKENS = [1, 2, 3, 4, 5]  # two blocks and a tail
WHOLE = TOKENS[:4]


def park(memory: TierMemory, tokens: list[int], where: ParkedIn = "host", room: int = 0) -> Parked:
    """Run a request and preempt it; its copies are not dispatched yet."""
    lease = memory.start(tokens)
    memory.settle()
    memory.compute(lease, tokens)
    memory.manager.extend(lease, room)
    parked = memory.tiers.park(lease, tokens, where)
    assert parked is not None
    memory.manager.check()
    return parked


def resume(memory: TierMemory, parked: Parked, tokens: list[int]) -> int:
    """Go on with a request; return how many of its tokens need no computing."""
    lease = memory.manager.admit(memory.manager.match(tokens), parked)
    memory.settle()
    ready = lease.num_ready_tokens
    memory.compute(lease, tokens)
    memory.read(lease, tokens)
    memory.manager.release(lease)
    memory.settle()
    return ready


def memory_of(num_blocks: int = 4, host_blocks: int = 4, write="back", **options) -> TierMemory:
    return TierMemory(num_blocks, host_blocks, write, block_size=2, **options)


@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
@pytest.mark.parametrize("tokens", [TOKENS, WHOLE, [1]])
@pytest.mark.parametrize("evicted", [0, 1, 4])
def test_park_and_resume_without_recompute(write, tokens, evicted):
    memory = memory_of(write=write)
    before = list(tokens)
    parked = park(memory, tokens)
    assert (parked.saved, parked.failed, parked.num_tokens) == (False, False, len(tokens))
    memory.settle()
    assert (parked.saved, parked.failed) == (True, False)
    memory.manager.evict(evicted)
    memory.settle()
    assert resume(memory, parked, [*tokens, 6]) == len(tokens)
    assert tokens == before
    assert memory.stats.parked == 0
    assert memory.manager.available == 4


def test_device_blocks_are_free_exactly_when_the_copy_is_acknowledged():
    memory = memory_of()
    parked = park(memory, TOKENS, room=2)  # four blocks
    assert memory.manager.available == 0
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    assert operation.num_blocks == 3
    assert memory.manager.available == 0
    assert parked.lease.parking
    memory.finish(operation)
    assert memory.manager.available == 4
    stats = memory.manager.stats()
    assert (stats.free_blocks, stats.idle_blocks, stats.live_leases) == (2, 2, 0)
    memory.manager.check()


def test_blocks_on_the_host_are_not_copied_again():
    memory = memory_of(write="through")
    memory.serve(WHOLE)
    parked = park(memory, TOKENS)
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    assert operation.num_blocks == 1  # the tail
    memory.finish(operation)
    assert parked.saved


def test_a_request_with_nothing_to_copy_is_saved_at_once():
    memory = memory_of(write="through")
    memory.serve(WHOLE)
    parked = park(memory, WHOLE)
    assert parked.saved and not parked.failed
    assert memory.take() == []
    assert memory.manager.stats().live_leases == 0
    assert resume(memory, parked, TOKENS) == 4


def test_parked_blocks_are_not_dropped():
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.settle()
    memory.demote([7, 7, 8, 8, 9, 9])
    assert memory.residency(WHOLE) == "hh"
    assert memory.residency([7, 7, 8, 8, 9, 9]) == "h"
    assert resume(memory, parked, TOKENS) == 5


@pytest.mark.parametrize(
    ("ok", "ready"),
    [
        ([False, False, False], 0),
        ([True, False, True], 2),
        ([True, True, False], 4),
        ([False, True, True], 0),
    ],
)
@pytest.mark.parametrize("fenced", [True, False])
def test_blocks_that_were_not_saved_are_computed(ok, ready, fenced):
    memory = memory_of()
    parked = park(memory, TOKENS)
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    memory.finish(operation, ok, fenced=fenced)
    assert (parked.saved, parked.failed) == (True, True)
    assert memory.manager.available == 4
    memory.manager.evict(4)
    for demotion in memory.take():
        memory.finish(demotion, False)
    assert resume(memory, parked, [*TOKENS, 6]) == ready
    memory.settle()
    assert memory.stats.host_free_blocks == 4 - memory.tiers.state.host.num_cached


@pytest.mark.parametrize("ok", [*product([True, False], repeat=3)], ids=str)
def test_blocks_after_one_that_was_not_loaded_are_computed(ok):
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.settle()
    memory.manager.evict(4)
    tokens = [*TOKENS, 6]
    lease = memory.manager.admit(memory.manager.match(tokens), parked)
    memory.finish(memory.one(OpKind.HOST_TO_DEVICE), ok)
    whole = [*ok[:2], False].index(False)
    assert lease.num_shared_blocks == memory.stats.promoted_blocks == whole
    assert lease.num_ready_tokens == (5 if all(ok) else 2 * whole)
    memory.manager.check()
    memory.compute(lease, tokens)
    memory.read(lease, tokens)
    memory.manager.check()


def test_blocks_that_were_not_saved_take_no_room():
    memory = memory_of()
    parked = park(memory, TOKENS)
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    memory.finish(operation, [True, False, False], fenced=False)
    assert memory.stats.host_free_blocks == 1
    memory.fence(operation)
    assert memory.stats.host_free_blocks == 3
    memory.manager.check()
    assert resume(memory, parked, TOKENS) == 4


def test_a_failed_copy_costs_nothing_while_the_device_has_the_blocks():
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST), False)
    assert resume(memory, parked, TOKENS) == 4


def test_park_without_room_on_the_host_changes_nothing():
    memory = memory_of(host_blocks=2)
    lease = memory.start(TOKENS)
    memory.compute(lease, TOKENS)
    before = memory.manager.stats(), memory.residency(WHOLE), memory.drop_order()
    assert memory.tiers.park(lease, TOKENS) is None
    assert (memory.manager.stats(), memory.residency(WHOLE), memory.drop_order()) == before
    assert memory.take() == []
    memory.manager.check()
    memory.manager.release(lease)
    memory.manager.check()


def test_park_does_not_make_room_of_the_request_itself():
    memory = memory_of(host_blocks=2, write="through")
    lease = memory.start(TOKENS)
    memory.compute(lease, TOKENS)
    memory.settle()
    order = memory.drop_order()
    assert memory.tiers.park(lease, TOKENS) is None  # its own copies make no room for its tail
    assert memory.residency(WHOLE) == "bb"
    assert memory.drop_order() == order
    memory.manager.check()


# Let go


def test_unpark_before_the_copy_is_dispatched():
    memory = memory_of()
    parked = park(memory, TOKENS)
    memory.tiers.unpark(parked)
    assert memory.take() == []
    assert memory.manager.available == 4
    assert memory.stats.host_free_blocks == 4
    memory.manager.check()


def test_unpark_while_the_copy_is_in_flight():
    memory = memory_of()
    parked = park(memory, TOKENS)
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    memory.tiers.unpark(parked)
    assert memory.tiers.take_cancelled() == [operation.id]
    assert memory.manager.available == 4  # read at its dispatch
    assert memory.stats.host_free_blocks == 1  # still written
    memory.manager.check()
    assert not memory.finish(operation)
    assert memory.stats.host_free_blocks == 4
    memory.manager.check()


@pytest.mark.parametrize(("write", "left"), [("back", "bb"), ("exclusive", "dd")])
def test_unpark_after_it_is_saved(write, left):
    memory = memory_of(write=write)
    parked = park(memory, TOKENS)
    memory.settle()
    assert memory.residency(WHOLE) == "bb"
    memory.tiers.unpark(parked)
    assert memory.residency(WHOLE) == left
    memory.manager.check()


def test_unpark_after_an_unfenced_failure():
    memory = memory_of()
    parked = park(memory, TOKENS)
    operation = memory.one(OpKind.DEVICE_TO_HOST)
    memory.finish(operation, False, fenced=False)
    memory.tiers.unpark(parked)
    assert memory.stats.host_free_blocks == 1
    memory.manager.check()
    memory.fence(operation)
    assert memory.stats.host_free_blocks == 4
    memory.manager.check()


# Two that share


@pytest.mark.parametrize("write", ["exclusive", "back"])
def test_two_parked_requests_share_their_prefix(write):
    memory = memory_of(num_blocks=6, host_blocks=6, write=write)
    one, other = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]
    first, second = park(memory, one), park(memory, other)
    memory.settle()
    assert memory.stats.host_free_blocks == 2  # two shared, two tails
    memory.manager.evict(6)
    assert resume(memory, first, one) == 5
    assert memory.residency(WHOLE) == "bb"  # the second still needs it there
    memory.manager.evict(6)
    memory.settle()
    assert resume(memory, second, other) == 5
    assert memory.residency(WHOLE) == ("bb" if write == "back" else "dd")
    assert memory.stats.host_free_blocks == (4 if write == "back" else 6)


def test_exclusive_tiers_have_one_copy_after_a_resume():
    memory = memory_of(write="exclusive")
    parked = park(memory, WHOLE)
    memory.settle()
    assert memory.residency(WHOLE) == "bb"
    assert resume(memory, parked, WHOLE) == 4
    assert memory.residency(WHOLE) == "dd"
    parked = park(memory, WHOLE)
    memory.settle()
    memory.manager.evict(4)
    assert memory.residency(WHOLE) == "hh"
    assert resume(memory, parked, WHOLE) == 4
    assert memory.residency(WHOLE) == "dd"


def test_a_tail_is_loaded_only_behind_exactly_its_blocks():
    memory = memory_of(num_blocks=5, host_blocks=5)
    longer = [*TOKENS, 6]
    parked = park(memory, TOKENS)
    memory.settle()
    memory.serve(longer)
    assert resume(memory, parked, longer) == 6
    assert memory.stats.host_free_blocks == 3


# In storage


def test_the_host_may_drop_blocks_parked_in_storage():
    memory = memory_of(storage=True)
    parked = park(memory, TOKENS, "storage")
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    assert parked.saved
    assert memory.drop_order() == []
    memory.finish(memory.one(OpKind.HOST_TO_STORAGE))
    assert len(memory.drop_order()) == 2
    memory.demote([7, 7, 8, 8, 9, 9])
    assert memory.residency(WHOLE) == ""
    fetch = memory.tiers.prefetch(TOKENS)
    assert fetch is not None
    memory.settle()
    assert memory.residency(WHOLE) == "hh"
    assert resume(memory, parked, TOKENS) == 5


def test_blocks_that_storage_did_not_take_stay_on_the_host():
    memory = memory_of(storage=True)
    parked = park(memory, WHOLE, "storage")
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    memory.finish(memory.one(OpKind.HOST_TO_STORAGE), [True, False])
    assert memory.drop_order() == []
    assert memory.stats.stored_blocks == 1
    memory.manager.evict(4)
    assert resume(memory, parked, WHOLE) == 4


@pytest.mark.parametrize("stored", [*product([False, True], repeat=2)])
def test_the_host_may_drop_parked_blocks_when_storage_has_all_of_them(stored):
    """The two blocks have separate copies, as a request that ended left the first."""
    memory = memory_of(storage=True)
    memory.serve(WHOLE[:2])
    memory.manager.evict(4)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    memory.finish(memory.one(OpKind.HOST_TO_STORAGE), stored[0])
    parked = park(memory, WHOLE, "storage")
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    memory.finish(memory.one(OpKind.HOST_TO_STORAGE), stored[1])
    assert parked.saved and len(parked.runs) == (0 if all(stored) else 2)
    assert len(memory.drop_order()) == (2 if all(stored) else 0)
    memory.manager.evict(4)
    assert resume(memory, parked, WHOLE) == 4
