"""The work list of ragged attention covers each token by one tile, and the KV of each tile."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels.paged_extend.config import ALIGNMENT
from radixkv.kernels.paged_extend.work_list import WorkItem, max_items

from ..profiles import scaled
from .work_list_checks import MAX_KV, TOKENS, build, check_rows


@st.composite
def four_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Draw the KV length, query length and gap of four rows, which have room in the batch."""
    room = TOKENS
    rows = []
    for _ in range(4):
        length = draw(st.integers(0, min(30, room)))
        gap = draw(st.integers(0, min(9, room - length)))
        rows.append((draw(st.integers(0, 50)), length, gap))
        room -= length + gap
    return draw(st.permutations(rows))


@pytest.mark.slow
@scaled(60)
@given(
    rows=four_rows(),
    order=st.randoms(use_true_random=False),
    cut=st.sampled_from([(16, None), (8, None), (40, 1), (16, 20), (16, 2**31 - 1)]),
)
def test_any_rows(rows, order, cut):
    """Rows of (KV length, queries, padding before it), which lie in any order."""
    tile_tokens, window = cut
    ends = np.cumsum([n + gap for _, n, gap in rows])
    placed = [(kv, n, int(end) - n) for (kv, n, _), end in zip(rows, ends, strict=True)]
    order.shuffle(placed)
    check_rows(placed, tile_tokens, window)


@pytest.mark.parametrize("tile_tokens", [8, 16, 24, 40, 128])
def test_the_list_has_room_for_all_tiles(tile_tokens):
    """Of 40 rows, each of which may begin and end just so that it has a tile more."""
    some = {1, 2, *range(max(3, tile_tokens - 7), tile_tokens + 3)}
    for length, first, gap in product(some, range(ALIGNMENT), range(ALIGNMENT)):
        tiles = 0
        for row in range(40):
            start = first + row * (length + gap)
            tiles += -(-(start % ALIGNMENT + length) // tile_tokens)
            assert tiles <= max_items(start + length, row + 1, tile_tokens)


@pytest.mark.parametrize("window", [1, 7, 8, 9, 20])
def test_windows_begin_at_each_place_of_a_step(window):
    """And end there: steps have eight tokens."""
    for kv_length in range(1, MAX_KV + 1):
        for q_length in {1, 3, 8, 16, 17} & {*range(kv_length + 1)}:
            check_rows([(kv_length, q_length, 8)], 16, window)


def test_most_steps_of_a_long_row_need_no_mask():
    work = build([MAX_KV], [24], [0], tile_tokens=8)
    items = [WorkItem(*(int(x) for x in item)) for item in work.items[:3]]
    steps = [(i.step_begin, i.full_begin, i.full_end, i.step_end) for i in items]
    assert np.array_equal(steps, [(0, 0, 4, 5), (0, 0, 3, 4), (0, 0, 2, 3)])


def test_inactive_rows_may_start_anywhere():
    work = build([9, 9, 9], [0, 5, 0], [-100, 3, 2**31 - 1])
    assert int(work.num_items[0]) == 1
    assert np.flatnonzero(work.item_of_token == 0).tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("q_length", "q_start"), [(70, 0), (5, 62), (5, -3), (5, 1000), (2**31 - 1, 1)]
)
def test_a_row_outside_of_the_queries_reads_and_writes_within(q_length, q_start):
    """Its outputs are unspecified, but memory is safe."""
    work = build([40], [q_length], [q_start])
    assert work.num_items[0] <= len(work.items)
    for item in work.items[: int(work.num_items[0])]:
        item = WorkItem(*(int(x) for x in item))
        assert 0 <= item.first_token <= TOKENS - 16
        assert item.valid_begin >= 0 and item.valid_end <= 16
