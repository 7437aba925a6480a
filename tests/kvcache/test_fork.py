"""Fork: a request continues another one, and neither writes the blocks that both read."""

import pytest

from radixkv.kvcache import LeaseError, OpKind, OutOfBlocksError

from .tier_memory import TierMemory

TOKENS = [1, 2, 3, 4, 5]


def running(tokens: list[int], num_blocks: int = 6):
    """A request whose tokens have been computed, two to a block, with room for one more."""
    memory = TierMemory(num_blocks, 4, block_size=2)
    lease = memory.start(tokens)
    memory.compute(lease, tokens)
    return memory, lease


def test_whole_blocks_are_shared_and_the_tail_is_copied():
    memory, lease = running(TOKENS)
    tokens = list(TOKENS)
    other = memory.tiers.fork(lease, tokens)
    assert tokens == TOKENS
    operation = memory.one(OpKind.DEVICE_TO_DEVICE)
    assert operation.sources.tolist() == lease.block_table.tolist()[2:]
    assert operation.destinations.tolist() == other.block_table.tolist()[2:]
    assert (other.loading, other.num_ready_tokens) == (operation.id, 4)
    memory.finish(operation)
    assert (other.loading, other.num_ready_tokens, other.num_promoted_blocks) == (None, 5, 0)
    assert other.block_table.tolist()[:2] == lease.block_table.tolist()[:2]
    for each, token in ((lease, 7), (other, 8)):
        memory.manager.extend(each, 1)
        memory.compute(each, [*TOKENS, token], publish=False)
    memory.read(lease, [*TOKENS, 7])
    memory.read(other, [*TOKENS, 8])
    memory.manager.check()


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], []])
def test_without_a_tail_there_is_nothing_to_copy(tokens):
    memory, lease = running(tokens)
    other = memory.tiers.fork(lease, tokens)
    assert memory.take() == []
    assert (other.loading, other.num_ready_tokens) == (None, len(tokens))
    assert other.block_table.tolist() == lease.block_table.tolist()
    memory.manager.check()


def test_in_the_namespace_of_the_first():
    memory = TierMemory(6, 4, block_size=2)
    lease = memory.start(TOKENS, b"lora")
    memory.compute(lease, TOKENS, b"lora")
    other = memory.tiers.fork(lease, TOKENS)
    memory.settle()
    memory.read(other, TOKENS, b"lora")
    assert memory.hit(TOKENS) == (0, 0)


def test_what_was_not_published_is():
    memory = TierMemory(6, 4, block_size=2)
    lease = memory.start(TOKENS)
    memory.compute(lease, TOKENS, publish=False)
    other = memory.tiers.fork(lease, TOKENS)
    assert lease.num_shared_blocks == other.num_shared_blocks == 2
    memory.settle()
    memory.read(other, TOKENS)


def test_a_tail_that_was_not_copied_is_computed():
    memory, lease = running(TOKENS)
    other = memory.tiers.fork(lease, TOKENS)
    memory.finish(memory.one(OpKind.DEVICE_TO_DEVICE), False)
    assert (other.loading, other.num_ready_tokens) == (None, 4)
    memory.compute(other, TOKENS)
    memory.read(other, TOKENS)
    memory.read(lease, TOKENS)
    memory.manager.check()


def test_the_fork_is_released_while_its_tail_is_copied():
    memory, lease = running(TOKENS)
    other = memory.tiers.fork(lease, TOKENS)
    operation = memory.one(OpKind.DEVICE_TO_DEVICE)
    memory.manager.release(other)
    assert memory.tiers.take_cancelled() == [operation.id]
    assert memory.manager.stats().private_blocks == 2  # one may still be written
    memory.manager.check()
    assert not memory.finish(operation)
    assert memory.manager.stats().private_blocks == 1
    memory.read(lease, TOKENS)
    memory.manager.check()


def test_the_first_is_released_before_the_copy_was_dispatched():
    memory, lease = running(TOKENS)
    other = memory.tiers.fork(lease, TOKENS)
    memory.manager.release(lease)
    memory.settle()
    assert other.num_ready_tokens == 5
    memory.read(other, TOKENS)


def test_the_first_is_parked_at_once():
    memory, lease = running(TOKENS)
    other = memory.tiers.fork(lease, TOKENS)
    parked = memory.tiers.park(lease, TOKENS)
    memory.settle()
    memory.read(other, TOKENS)
    assert parked is not None
    again = memory.manager.admit(memory.manager.match(TOKENS), parked)
    memory.settle()
    memory.read(again, TOKENS)


def test_many_forks_of_one():
    memory, lease = running(TOKENS)
    forks = [memory.tiers.fork(lease, TOKENS) for _ in range(3)]
    memory.settle()
    tails = {each.block_table.tolist()[2] for each in (lease, *forks)}
    assert len(tails) == 4
    for each in forks:
        memory.read(each, TOKENS)


def test_no_room_for_the_tail():
    memory, lease = running(TOKENS, num_blocks=3)
    before = memory.manager.stats()
    with pytest.raises(OutOfBlocksError) as caught:
        memory.tiers.fork(lease, TOKENS)
    assert str(caught.value) == "needs 1 blocks, but only 0 are free or evictable"
    assert memory.manager.stats() == before
    assert memory.take() == []
    memory.manager.check()


def test_refused():
    memory, lease = running(TOKENS)
    with pytest.raises(LeaseError) as caught:
        memory.tiers.fork(lease, [*TOKENS, 6])
    assert str(caught.value) == "6 tokens published on a lease with room for 5"
    memory.manager.release(lease)
    with pytest.raises(LeaseError) as released:
        memory.tiers.fork(lease, TOKENS)
    assert str(released.value) == "the lease was released or belongs to another manager"
    assert memory.take() == []
