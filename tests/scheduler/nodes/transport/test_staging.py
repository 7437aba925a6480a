"""StagingPool: slots do not overlap, and all memory is recycled."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.nodes.transport.descriptors import ArraySpec
from radixkv.scheduler.nodes.transport.staging import (
    Segment,
    Slot,
    StagingPool,
    slot_bytes,
    split_slot,
)
from radixkv.scheduler.nodes.transport.transfer_engine import TooLargeError

from .conformance import arrays, equal

POOL_BYTES = 1000


@given(st.lists(st.integers(1, 400) | st.just(0), max_size=60), st.randoms())
def test_slots_do_not_overlap_and_come_back_whole(sizes: list[int], random) -> None:
    pool = StagingPool(POOL_BYTES)
    held: list[Slot] = []
    for size in sizes:
        if size == 0 and held:
            freed = held.pop(random.randrange(len(held)))
            pool.free(freed)
            with pytest.raises(AssertionError, match="is free already"):
                pool.free(freed)
        elif size and (slot := pool.allocate(size)) is not None:
            assert slot.num_bytes >= size
            assert slot.start % 64 == 0
            held.append(slot)
        taken = sorted(held)
        assert all(sum(one) <= other.start for one, other in pairwise(taken))
        assert sum(slot.num_bytes for slot in held) + pool.num_free_bytes == POOL_BYTES
    for slot in held:
        pool.free(slot)
    assert pool.allocate(POOL_BYTES) == Slot(0, POOL_BYTES)


def test_a_part_larger_than_the_pool_is_refused() -> None:
    pool = StagingPool(POOL_BYTES)
    with pytest.raises(
        TooLargeError, match=r"^it has 1001 bytes, and staging memory has 1000 \(staging_bytes\)$"
    ):
        pool.allocate(POOL_BYTES + 1)
    slot = pool.allocate(POOL_BYTES)
    assert slot is not None
    assert pool.allocate(1) is None
    pool.free(slot)
    with pytest.raises(AssertionError, match=r"(?m)is free already$"):
        pool.free(slot)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_arrays_come_out_as_they_went_in_and_cannot_be_changed(sizes: list[int]) -> None:
    """Each lies at its aligned place in the slot, and nothing else is written."""
    written = [np.full(size, number, np.uint8) for number, size in enumerate(sizes, 1)]
    specs = [ArraySpec(array.shape, str(array.dtype)) for array in written]
    pool = StagingPool(128 + slot_bytes(specs))
    before, slot = pool.allocate(64), pool.allocate(slot_bytes(specs))
    assert before is not None and slot is not None
    pool.write(slot, written)
    views = pool.views(slot, specs)
    assert equal(views, written)
    assert all(np.shares_memory(view, pool.memory) and not view.flags.writeable for view in views)
    expected, start = np.zeros_like(pool.memory), slot.start
    for array in written:
        expected[start : start + len(array)] = array
        start += -(-len(array) // 64) * 64
    assert np.array_equal(pool.memory, expected)


def test_arrays_of_a_model_come_out_as_they_went_in() -> None:
    written = arrays()
    specs = [ArraySpec(tuple(array.shape), str(array.dtype)) for array in written]
    pool = StagingPool(slot_bytes(specs))
    slot = pool.allocate(slot_bytes(specs))
    assert slot is not None
    pool.write(slot, written)
    assert equal(pool.views(slot, specs), written)


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 1 << 16, 1 << 20])
def test_the_memory_begins_with_a_page(num_bytes: int) -> None:
    memory = StagingPool(num_bytes).memory
    assert (memory.ctypes.data % 4096, memory.nbytes) == (0, num_bytes)
    assert not memory.any()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 500))
def test_segments_have_every_array_once_and_as_many_bytes_as_they_should(
    sizes: list[int], least: int
) -> None:
    specs = [ArraySpec((size,), "int8") for size in sizes]
    segments = split_slot(specs, least)
    assert all(segment.num_bytes >= least for segment in segments[:-1])
    assert segments[-1].start + segments[-1].num_bytes == slot_bytes(specs)
    firsts = [0, *[segment.stop_array for segment in segments]]
    assert firsts[-1] == len(specs)
    for (first, stop), segment in zip(pairwise(firsts), segments, strict=True):
        assert stop > first
        assert segment.start == slot_bytes([*specs[:first], ArraySpec((64,), "int8")]) - 64
        assert segment.num_bytes == slot_bytes(specs[first:stop])


@pytest.mark.parametrize("least", [63, 64, 65])
def test_a_segment_ends_as_soon_as_it_is_large_enough(least: int) -> None:
    num_segments = 2 if least <= 64 else 1
    assert len(split_slot([ArraySpec((64,), "int8")] * 2, least)) == num_segments


def test_a_small_part_is_one_segment() -> None:
    assert split_slot([ArraySpec((5,), "int8"), ArraySpec((2,), "int8")], 1000) == [
        Segment(0, 66, 2)
    ]
