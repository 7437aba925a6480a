"""A parked request also waits for an earlier operation that copies the same blocks."""

import pytest

from radixkv.kvcache import LeaseError, Operation, OpKind, Parked
from radixkv.kvcache.tiers.parked import ParkedIn

from .test_parking import TOKENS, WHOLE, memory_of, park, resume
from .tier_memory import TierMemory


def park_behind(
    memory: TierMemory, tokens: list[int], where: ParkedIn = "host"
) -> tuple[Parked, Operation]:
    """Park a request whose whole blocks are being written through; return that copy as well."""
    lease = memory.start(tokens)
    memory.compute(lease, tokens)
    through = memory.one(OpKind.DEVICE_TO_HOST)
    assert through.num_blocks == 2
    parked = memory.tiers.park(lease, tokens, where)
    assert parked is not None
    assert not parked.saved
    memory.manager.check()
    return parked, through


def is_freed(memory: TierMemory) -> bool:
    """Whether nobody keeps blocks of the device; if so, also that all is in order."""
    memory.manager.check()
    return memory.manager.available == 4 and memory.manager.stats().live_leases == 0


def test_it_is_saved_when_the_other_copy_is():
    memory = memory_of(write="through")
    parked, through = park_behind(memory, WHOLE)
    assert memory.take() == []  # it needs none of its own
    assert memory.manager.evict(4) == 0
    with pytest.raises(LeaseError, match="still in flight"):
        memory.manager.admit(memory.manager.match(WHOLE), parked)
    assert memory.residency(WHOLE) == "dd"
    memory.finish(through)
    assert (parked.saved, parked.failed) == (True, False)
    assert is_freed(memory)
    assert memory.manager.evict(4) == 2
    assert resume(memory, parked, TOKENS) == 4


@pytest.mark.parametrize(("ok", "ready"), [([True, False], 2), ([False, True], 0), (False, 0)])
@pytest.mark.parametrize("fenced", [True, False])
def test_a_failure_of_the_other_copy_is_reported(ok, ready, fenced):
    memory = memory_of(write="through")
    parked, through = park_behind(memory, WHOLE)
    memory.finish(through, ok, fenced=fenced)
    assert (parked.saved, parked.failed) == (True, True)
    assert is_freed(memory)
    memory.manager.evict(4)
    assert resume(memory, parked, TOKENS) == ready
    memory.settle()
    assert memory.stats.host_free_blocks == 4 - memory.tiers.state.host.num_cached


def test_what_the_other_copy_lost_is_not_lost_while_the_device_has_it():
    memory = memory_of(write="through")
    parked, through = park_behind(memory, WHOLE)
    memory.finish(through, False)
    assert parked.failed
    assert resume(memory, parked, TOKENS) == 4


@pytest.mark.parametrize("through_ok", [True, False])
@pytest.mark.parametrize("tail_ok", [True, False])
@pytest.mark.parametrize("own_is_first", [True, False])
def test_the_last_of_two_copies_frees_it(own_is_first, tail_ok, through_ok):
    memory = memory_of(write="through")
    parked, through = park_behind(memory, TOKENS)
    own = memory.one(OpKind.DEVICE_TO_HOST)
    assert own.num_blocks == 1  # the tail
    ends = [(own, tail_ok), (through, through_ok)]
    (first, first_ok), (last, last_ok) = ends if own_is_first else reversed(ends)
    memory.finish(first, first_ok)
    assert not parked.saved
    assert memory.manager.available == 1
    memory.manager.check()
    memory.finish(last, last_ok)
    assert (parked.saved, parked.failed) == (True, not (tail_ok and through_ok))
    assert is_freed(memory)
    memory.manager.evict(4)
    assert resume(memory, parked, TOKENS) == (4 + tail_ok if through_ok else 0)


def test_a_longer_copy_that_failed_beyond_it_did_not_fail():
    memory = memory_of(write="through")
    longer = memory.start([*WHOLE, 7, 7])
    memory.compute(longer, [*WHOLE, 7, 7])
    through = memory.one(OpKind.DEVICE_TO_HOST)
    lease = memory.start(WHOLE)
    parked = memory.tiers.park(lease, WHOLE)
    assert parked is not None and not parked.saved
    memory.finish(through, [True, True, False])
    assert (parked.saved, parked.failed) == (True, False)
    memory.manager.release(longer)
    assert is_freed(memory)


# Something else happens meanwhile


@pytest.mark.parametrize("keep", [[], [b""]])
@pytest.mark.parametrize("tokens", [WHOLE, TOKENS])
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_reset_ends_both_copies(tokens, keep, is_taken):
    memory = memory_of(write="through")
    parked, through = park_behind(memory, tokens)
    taken = memory.take() if is_taken else []
    memory.reset(keep)
    assert (parked.saved, parked.failed) == (True, True)
    assert is_freed(memory)
    assert memory.residency(WHOLE) == "dd" * len(keep)
    for operation in (through, *taken):
        assert not memory.finish(operation)
    assert memory.stats.host_free_blocks == 4
    assert resume(memory, parked, tokens) == 4 * len(keep)


@pytest.mark.parametrize("tokens", [WHOLE, TOKENS])
@pytest.mark.parametrize("through_ok", [True, False])
def test_let_go_while_another_copies_it(tokens, through_ok):
    memory = memory_of(write="through")
    parked, through = park_behind(memory, tokens)
    memory.tiers.unpark(parked)
    assert is_freed(memory)
    assert memory.take() == []
    memory.finish(through, through_ok)
    assert memory.residency(WHOLE) == ("bb" if through_ok else "dd")
    assert memory.stats.host_free_blocks == (2 if through_ok else 4)
    memory.manager.check()


def test_it_waits_for_the_copy_of_another_parked_request():
    memory = memory_of(num_blocks=6, host_blocks=6)
    first, second = park(memory, TOKENS), park_second(memory)
    own, other = memory.take()
    assert (own.num_blocks, other.num_blocks) == (3, 1)
    memory.finish(other)
    assert (first.saved, second.saved) == (False, False)
    memory.finish(own, [True, True, False])
    assert (first.saved, first.failed) == (True, True)
    assert (second.saved, second.failed) == (True, False)
    memory.manager.evict(6)
    assert resume(memory, second, [*WHOLE, 6]) == 5


def test_the_other_parked_request_is_let_go():
    memory = memory_of(num_blocks=6, host_blocks=6)
    first, second = park(memory, TOKENS), park_second(memory)
    _, other = memory.take()
    memory.finish(other)
    memory.tiers.unpark(first)
    assert (second.saved, second.failed) == (True, True)
    assert memory.manager.available == 6
    memory.manager.check()
    assert resume(memory, second, [*WHOLE, 6]) == 5  # the device has the rest


def park_second(memory: TierMemory) -> Parked:
    """Park a request that shares the whole blocks of one whose copy is not dispatched yet."""
    tokens = [*WHOLE, 6]
    lease = memory.start(tokens)
    memory.compute(lease, tokens)
    parked = memory.tiers.park(lease, tokens)
    assert parked is not None
    return parked


def test_in_storage_it_keeps_its_copies_until_they_are_stored():
    memory = memory_of(write="through", storage=True)
    parked, through = park_behind(memory, WHOLE, "storage")
    memory.finish(through)
    assert parked.saved
    assert memory.drop_order() == []
    memory.finish(memory.one(OpKind.HOST_TO_STORAGE))
    assert len(memory.drop_order()) == 2
    memory.manager.check()
