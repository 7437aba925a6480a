"""Evicting many blocks at once has the same result as one by one, in every tier."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache.tiers.host_tier import WritePolicy

from ..profiles import scaled
from .tier_memory import TierMemory, as_list

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8)


def content(memory: TierMemory) -> dict[str, object]:
    """What both tiers hold, where, and in which order it would go."""
    stats = memory.manager.stats()
    assert stats.tiers is not None
    tree = memory.tiers.state.tree
    return {
        "device": {
            tokens: memory.residency(tokens)
            for _, tokens in filter(None, (*memory.device.values(), *memory.host.values()))
        },
        "idle": [
            memory.device[int(block)]
            for node in tree.idle_nodes()
            for block in np.frombuffer(node.device_blocks, np.int32)[::-1]
        ],
        "drop order": memory.drop_order(),
        "free": (stats.free_blocks, stats.tiers.host_free_blocks),
        "moved": (stats.tiers.demoted_blocks, stats.tiers.dropped_blocks),
    }


@given(
    st.sampled_from(["exclusive", "back", "through"]),
    st.integers(1, 8),
    SEQUENCES,
    st.integers(0, 8),
)
@scaled(300)
def test_a_batch_is_its_singles(write, host_blocks, sequences, num_blocks):
    compare(write, host_blocks, sequences, num_blocks)


def compare(
    write: WritePolicy, host_blocks: int, sequences: list[list[int]], num_blocks: int
) -> None:
    batch, singles = (TierMemory(8, host_blocks, write) for _ in range(2))
    for memory in (batch, singles):
        for tokens in sequences:
            memory.serve(tokens)
    num_evicted = batch.manager.evict(num_blocks)
    batch.settle()
    assert num_evicted == sum(singles_of(singles, num_blocks))
    assert content(batch) == content(singles)
    # The same blocks are free, too.
    num_free = batch.manager.stats().free_blocks
    tables = [as_list(m.start([9] * num_free).block_table) for m in (batch, singles)]
    assert sorted(tables[0]) == sorted(tables[1])


def singles_of(memory: TierMemory, num_blocks: int) -> list[int]:
    """Evict one block, and deliver what follows from that, some times."""
    evicted = []
    for _ in range(num_blocks):
        evicted.append(memory.manager.evict(1))
        memory.settle()
    return evicted


def test_more_than_the_host_holds_is_dropped_from_its_cold_end():
    memory = TierMemory(6, 2)
    memory.demote([7, 8])
    memory.serve([1, 2, 3, 4, 5])
    memory.manager.evict(5)
    memory.settle()
    assert memory.residency([1, 2, 3, 4, 5]) == "hh"
    assert memory.residency([7, 8]) == ""
    assert memory.stats.dropped_blocks == 5


def test_what_is_evicted_together_is_dropped_in_one_order_copied_or_not():
    memory = TierMemory(4, 6)
    memory.demote([1, 2])
    memory.serve([3, 4])
    memory.serve([1, 2])  # the host has it already, the device evicts it last
    memory.manager.evict(4)
    memory.settle()
    tokens = [tag[1] for tag in memory.drop_order() if tag is not None]
    assert tokens == [(3, 4), (3,), (1, 2), (1,)]
