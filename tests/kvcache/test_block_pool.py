"""Block pool: allocating and recycling many ids has the same result as one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import BlockPool, CountError, OutOfBlocksError, RadixKVError, RecycleError
from radixkv.kvcache.prefix.block_pool import _FEW


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def free(pool: BlockPool) -> list[int]:
    return sorted(pool.free_ids().tolist())


def test_a_new_pool_has_every_id_but_the_sink():
    pool = BlockPool(5)
    assert free(pool) == [1, 2, 3, 4, 5]
    assert pool.num_free == pool.num_blocks == 5
    pool.check()


def test_allocated_ids_are_distinct_and_no_longer_free():
    pool = BlockPool(5)
    taken = pool.allocate(3).tolist()
    assert len(set(taken)) == 3
    assert set(taken).isdisjoint(free(pool))
    assert pool.num_free == 2
    pool.check()


def test_the_lowest_ids_come_first_from_a_new_pool():
    assert BlockPool(5).allocate(3).tolist() == [1, 2, 3]


def test_the_last_of_the_free_ids_is_allocated_next():
    pool = BlockPool(4)
    last = pool.free_ids()[-1]
    assert pool.allocate(1).tolist() == [last]


def test_free_ids_is_a_copy():
    pool = BlockPool(3)
    pool.free_ids()[:] = 0
    pool.check()
    assert free(pool) == [1, 2, 3]


@pytest.mark.parametrize("num_free", [0, 2])
def test_allocating_nothing_takes_nothing(num_free):
    pool = BlockPool(2)
    pool.allocate(2 - num_free)
    assert pool.allocate(0).tolist() == []
    assert pool.num_free == num_free
    pool.check()


def test_all_or_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    before = pool.free_ids().tolist()
    with pytest.raises(OutOfBlocksError) as caught:
        pool.allocate(3)
    assert str(caught.value) == "needs 3 blocks, but only 2 are free or evictable"
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert isinstance(caught.value, RadixKVError)
    assert pool.free_ids().tolist() == before
    pool.check()


def test_a_negative_number_of_blocks():
    pool = BlockPool(4)
    with pytest.raises(CountError, match=r"^num_blocks must be at least 0, got -1$"):
        pool.allocate(-1)
    assert pool.num_free == 4


def test_recycled_ids_are_free_again_the_last_one_first():
    pool = BlockPool(4)
    pool.allocate(4)
    pool.recycle(ids(3, 1))
    assert free(pool) == [1, 3]
    assert pool.allocate(2).tolist() == [1, 3]
    pool.check()


def test_recycling_nothing():
    pool = BlockPool(2)
    pool.recycle(ids())
    pool.check()
    assert pool.num_free == 2


@pytest.mark.parametrize(
    ("recycled", "refused", "kept"),
    [
        ((2, 2), (2,), (2,)),
        ((1, 2, 1, 3, 1), (1, 1), (1, 2, 3)),
        ((5,), (5,), ()),
        ((1, 5, 2), (5,), (1, 2)),
        ((0, 1), (0,), (1,)),
        ((-1, 1), (-1,), (1,)),
        ((7, 3, 99), (7, 99), (3,)),
        ((7, 3, 5), (7, 5), (3,)),
        ((1, 7, 1), (7, 1), (1,)),
    ],
)
def test_wrong_ids_are_refused_and_the_others_kept(recycled, refused, kept):
    pool = BlockPool(6)
    pool.allocate(4)  # 1 .. 4; 5 and 6 stay free
    with pytest.raises(RecycleError) as caught:
        pool.recycle(ids(*recycled))
    assert str(caught.value) == (
        f"refused block ids {list(refused)}: not allocated, out of range or repeated; "
        f"the other {len(kept)} were recycled"
    )
    assert (caught.value.refused, caught.value.recycled) == (refused, len(kept))
    assert isinstance(caught.value, RadixKVError)
    assert free(pool) == sorted({5, 6, *kept})
    pool.check()


def test_reset_frees_all():
    pool = BlockPool(4)
    pool.allocate(3)
    pool.reset()
    pool.check()
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("number", range(_FEW - 1, _FEW + 3))
@pytest.mark.parametrize("wrong", [0, 1, 14, 99])  # 0 and 99: out of range; 14: free; 1: repeated
def test_large_and_small_batches_with_a_wrong_id(number, wrong):
    pool = BlockPool(14)
    recycled = pool.allocate(number - 1).tolist()
    with pytest.raises(RecycleError) as caught:
        pool.recycle(ids(*recycled, wrong))
    assert (caught.value.refused, caught.value.recycled) == ((wrong,), number - 1)
    assert free(pool) == list(range(1, 15))
    pool.check()


@given(st.data(), st.integers(1, 2 * _FEW))
def test_recycling_a_batch_equals_recycling_its_ids_one_by_one(data, num_blocks):
    batch, singles = BlockPool(num_blocks), BlockPool(num_blocks)
    taken = data.draw(st.integers(0, num_blocks))
    held = batch.allocate(taken).tolist()
    singles.allocate(taken)
    wrong = st.lists(st.integers(-1, num_blocks + 1), max_size=3)
    recycled = data.draw(
        st.permutations(held[: data.draw(st.integers(0, taken))] + data.draw(wrong))
    )
    refused: list[int] = []
    for block in recycled:
        try:
            singles.recycle(ids(block))
        except RecycleError as error:
            refused += error.refused
    try:
        batch.recycle(ids(*recycled))
    except RecycleError as error:
        assert list(error.refused) == refused
        assert error.recycled == len(recycled) - len(refused)
    else:
        assert not refused
    batch.check()
    singles.check()
    assert batch.free_ids().tolist() == singles.free_ids().tolist()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30), st.integers(1, 10))
def test_free_and_allocated_are_all_blocks_at_all_times(steps, num_blocks):
    pool, held = BlockPool(num_blocks), []
    for allocates, number in steps:
        if allocates:
            try:
                held += pool.allocate(number).tolist()
            except OutOfBlocksError:
                assert number > pool.num_free
        else:
            pool.recycle(ids(*held[:number]))
            held = held[number:]
        pool.check()
        assert sorted(free(pool) + held) == list(range(1, num_blocks + 1))
