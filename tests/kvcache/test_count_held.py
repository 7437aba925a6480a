"""count_held: leases hold as many blocks as their block tables name."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, Lease
from radixkv.kvcache.prefix.lease import count_held

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=8)


def blocks_of(leases: Iterable[Lease]) -> set[int]:
    return {block for lease in leases for block in lease.block_table.tolist()}


@given(
    st.lists(st.tuples(prompts, st.integers(0, 8), st.booleans()), max_size=5),
    prompts,
    st.integers(1, 2),
)
def test_each_block_counts_once(held, prompt, block_size) -> None:
    manager = CacheManager(100, block_size)
    counted = []
    for tokens, num_published, is_counted in held:
        lease = manager.admit(manager.match(tokens))
        manager.publish(lease, tokens[:num_published])
        counted += [lease] * is_counted
    assert count_held(counted) == len(blocks_of(counted))
    match = manager.match(prompt)
    with_match = count_held(counted, match)
    hit = manager.admit(match).block_table[: match.num_blocks].tolist()
    assert with_match == len(blocks_of(counted).union(hit))
