"""Growing leases: all or nothing, with the same result one by one and in a batch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, CountError, Lease, LeaseError, OutOfBlocksError

from .helpers import hit, serve, start
from .observe import observe


def rows(*leases: Lease) -> np.ndarray:
    return np.array([lease.row for lease in leases], np.int32)


def test_a_block_is_taken_where_the_tokens_cross_a_boundary():
    manager = CacheManager(8, 3)
    lease = start(manager, [1, 2])
    sizes = []
    for _ in range(5):
        manager.extend(lease, 1)
        sizes.append(lease.num_blocks)
    assert sizes == [1, 2, 2, 2, 3]
    assert lease.num_tokens == 7
    manager.check()


def test_extending_keeps_the_blocks_that_are_there():
    manager = CacheManager(200, 1)
    lease = start(manager, [1, 2])
    table = lease.block_table.tolist()
    manager.extend(lease, 100)
    assert lease.block_table.tolist()[:2] == table
    assert lease.num_blocks == 102
    manager.extend(lease, 0)
    assert lease.num_tokens == 102
    manager.check()


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [
        (-1, "num_tokens must be at least 0, got -1"),
        (1.0, "num_tokens must be an integer, got 1.0"),
        (False, "num_tokens must be an integer, got False"),
    ],
)
def test_a_wrong_number_of_tokens(num_tokens: Any, message: str):
    manager = CacheManager(4, 2)
    lease = start(manager, [1])
    with pytest.raises(CountError) as caught:
        manager.extend(lease, num_tokens)
    assert str(caught.value) == message
    assert lease.num_tokens == 1


def test_extending_is_all_or_nothing():
    manager = CacheManager(6, 1)
    serve(manager, [1, 2])
    lease = start(manager, [5, 6])
    before = observe(manager, [lease], [(b"", [1, 2])])
    with pytest.raises(OutOfBlocksError) as caught:
        manager.extend(lease, 5)
    assert str(caught.value) == "needs 5 blocks, but only 4 are free or evictable"
    with pytest.raises(OutOfBlocksError, match=r"^needs 1000000000000 blocks, but only 4 are"):
        manager.extend(lease, 10**12)
    assert observe(manager, [lease], [(b"", [1, 2])]) == before
    manager.extend(lease, 4)
    assert manager.available == 0
    manager.check()


# Many at once


def test_a_batch_extends_each_by_one_token():
    manager = CacheManager(16, 2)
    leases = [start(manager, [i] * n) for i, n in enumerate((1, 2, 3, 4, 0))]
    manager.extend_batch(rows(*leases[::-1]))
    assert [lease.num_tokens for lease in leases] == [2, 3, 4, 5, 1]
    assert [lease.num_blocks for lease in leases] == [1, 2, 2, 3, 1]
    manager.check()


def test_an_empty_batch():
    manager = CacheManager(4, 2)
    lease = start(manager, [1])
    before = observe(manager, [lease])
    manager.extend_batch(rows())
    assert observe(manager, [lease]) == before


def test_a_batch_outgrows_the_room_of_its_rows():
    manager = CacheManager(1000, 1)
    leases = [start(manager, [length] * length) for length in (1, 15, 16, 17, 31, 32, 33)]
    before = [lease.block_table.tolist() for lease in leases]
    for step in range(1, 40):
        manager.extend_batch(rows(*leases))
        for lease, table in zip(leases, before, strict=True):
            assert lease.num_blocks == lease.num_tokens == len(table) + step
            assert lease.block_table[: len(table)].tolist() == table
        manager.check()


def test_a_batch_is_all_or_nothing():
    manager = CacheManager(6, 1)
    serve(manager, [8])
    leases = [start(manager, [i, i]) for i in range(2)]
    leases.append(start(manager, []))
    before = observe(manager, leases, [(b"", [8])])
    with pytest.raises(OutOfBlocksError) as caught:
        manager.extend_batch(rows(*leases))
    assert str(caught.value) == "needs 3 blocks, but only 2 are free or evictable"
    assert observe(manager, leases, [(b"", [8])]) == before
    manager.extend_batch(rows(*leases[:2]))
    assert hit(manager, [8]) == 0
    manager.check()


@pytest.mark.parametrize("wrong", [-1, 1, 63, 64, 2**31 - 1, -(2**31)])
def test_a_dead_row_is_refused(wrong):
    manager = CacheManager(8, 1)
    lease = start(manager, [1])
    before = observe(manager, [lease])
    with pytest.raises(LeaseError) as caught:
        manager.extend_batch(np.array([lease.row, wrong], np.int32))
    assert str(caught.value) == f"rows [{lease.row}, {wrong}] are not all rows of live leases"
    assert observe(manager, [lease]) == before


@pytest.mark.parametrize("num_tokens", [1, 2])  # the next token crosses a boundary, or does not
def test_a_row_that_comes_twice_is_refused(num_tokens):
    manager = CacheManager(8, 2)
    leases = [start(manager, [i] * num_tokens) for i in range(2)]
    before = observe(manager, leases)
    one, two = (lease.row for lease in leases)
    with pytest.raises(LeaseError) as caught:
        manager.extend_batch(np.array([one, two, one], np.int32))
    assert str(caught.value) == f"rows [{one}, {two}, {one}] name a lease twice"
    assert observe(manager, leases) == before


def test_the_callers_rows_are_not_changed():
    manager = CacheManager(8, 1)
    batch = rows(start(manager, [1]), start(manager, [2]))
    copy = batch.copy()
    manager.extend_batch(batch)
    assert batch.tolist() == copy.tolist()


@given(
    block_size=st.integers(1, 3),
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=5),
    cached=st.lists(st.lists(st.integers(2, 3), max_size=5), max_size=3),
    num_free=st.integers(0, 4),
    batches=st.lists(st.integers(1, 31), min_size=1, max_size=4),
)
def test_a_batch_equals_its_leases_one_by_one(block_size, prompts, cached, num_free, batches):
    num_blocks = sum(-(-len(tokens) // block_size) for tokens in prompts) + num_free
    managers = [CacheManager(max(num_blocks, 5), block_size) for _ in range(2)]
    runs: list[list[Lease]] = []
    for manager in managers:
        for tokens in cached:
            serve(manager, tokens)
        runs.append([start(manager, tokens) for tokens in prompts])
    for batch in batches:
        chosen = [i for i in range(len(prompts)) if batch >> i & 1]
        before = observe(managers[0], runs[0])
        try:
            managers[0].extend_batch(rows(*(runs[0][i] for i in chosen)))
        except OutOfBlocksError:
            # All or nothing: so one by one must not succeed for all of them either.
            assert observe(managers[0], runs[0]) == before
            with pytest.raises(OutOfBlocksError):
                for i in chosen:
                    managers[1].extend(runs[1][i], 1)
            break
        for i in chosen:
            managers[1].extend(runs[1][i], 1)
        for one, other in zip(*runs, strict=True):
            assert (one.num_tokens, one.num_blocks) == (other.num_tokens, other.num_blocks)
        assert managers[0].stats() == managers[1].stats()
        for tokens in cached:
            assert hit(managers[0], tokens) == hit(managers[1], tokens)
    for manager in managers:
        manager.check()
