"""Steps in flight: what `publish` replaces stays quarantined until they have ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, Lease, StepError

TOKENS = [1, 2, 3, 4]
LONG = list(range(10))


def duplicates(manager: CacheManager) -> tuple[Lease, list[int]]:
    """Publish the same two blocks twice; return the second lease, and its former blocks."""
    first, second = (manager.admit(manager.match(TOKENS)) for _ in range(2))
    blocks: list[int] = second.block_table.tolist()
    manager.publish(first, TOKENS)
    manager.publish(second, TOKENS)
    assert second.block_table.tolist() == first.block_table.tolist()
    return second, blocks


@given(ahead=st.integers(0, 4), more=st.integers(0, 2))
def test_duplicates_wait_for_the_steps_that_had_begun(ahead: int, more: int) -> None:
    manager = CacheManager(8, 2)
    for _ in range(ahead):
        manager.begin_step()
    _, blocks = duplicates(manager)
    for _ in range(more):  # these read the new table
        manager.begin_step()
    for number in range(ahead + more):
        assert manager.available == 6 - 2 * (number < ahead)
        manager.check()
        manager.end_step()
    assert manager.available == 6
    manager.check()
    taken = manager.admit(manager.match([7] * 12)).block_table.tolist()
    assert set(blocks) <= set(taken)


@given(
    calls=st.lists(
        st.one_of(
            st.sampled_from(["begin", "end", "end"]),
            st.tuples(st.integers(0, 3), st.integers(1, 5)),
        ),
        max_size=24,
    ),
    keep=st.sampled_from([(), (b"",)]),
)
def test_each_duplicate_is_free_once_the_steps_that_had_begun_have_ended(
    calls: list[str | tuple[int, int]], keep: tuple[bytes, ...]
) -> None:
    """Any number of them may wait for one step; a call is a step, or a lease and its blocks."""
    manager = CacheManager(20, 2)
    leases = [manager.admit(manager.match(LONG)) for _ in range(4)]
    running: list[int] = []
    waits_for: dict[int, set[int]] = {}  # the steps that may read a block that was replaced
    for number, call in enumerate(calls):
        if call == "begin":
            manager.begin_step()
            running.append(number)
        elif call == "end":
            if running:
                manager.end_step()
                running.pop(0)
        else:
            assert isinstance(call, tuple)
            lease, num_blocks = leases[call[0]], call[1]
            before = lease.block_table.tolist()
            manager.publish(lease, LONG[: 2 * num_blocks])
            replaced = {*before} - {*lease.block_table.tolist()}
            waits_for |= {block: {*running} for block in replaced}
        manager.check()
        expected = {block for block, steps in waits_for.items() if not steps & {*running}}
        assert {*manager._pool.free_ids().tolist()} == expected
    manager.reset(keep)
    manager.check()
    assert manager.available == 20


def test_a_quarantined_duplicate_is_given_to_nobody() -> None:
    manager = CacheManager(8, 2)
    manager.begin_step()
    _, blocks = duplicates(manager)
    taken = manager.admit(manager.match([7] * 8)).block_table.tolist()
    assert not set(blocks) & set(taken)


@pytest.mark.parametrize("keep", [(), (b"",)])
def test_a_reset_ends_all_steps(keep: tuple[bytes, ...]) -> None:
    manager = CacheManager(8, 2)
    manager.begin_step()
    duplicates(manager)
    manager.reset(keep)
    assert manager.available == 8
    manager.check()
    with pytest.raises(StepError, match=r"^a step ends, and all 1 that began have ended$"):
        manager.end_step()
    duplicates(manager)
    assert manager.available == 6, "no step of the old epoch reads the duplicates"
    manager.check()


def test_the_end_of_no_step_is_refused() -> None:
    manager = CacheManager(8, 2)
    manager.begin_step()
    manager.end_step()
    with pytest.raises(StepError, match=r"^a step ends, and all 1 that began have ended$"):
        manager.end_step()
