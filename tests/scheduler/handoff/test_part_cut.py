"""Where a prompt is cut into parts: every size of blocks on both sides."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixkv.scheduler.handoff.messages import MAX_PART_BLOCKS
from radixkv.scheduler.handoff.part_cut import Destination, PartCut
from radixkv.scheduler.nodes.kv_parts import cut_and_join

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 33, 64])


@st.composite
def cuts(draw: st.DrawFn) -> PartCut:
    sent, own = draw(SIZES), draw(SIZES)
    cut = PartCut(sent, own, draw(st.integers(1, 300)), 0)
    assume(cut.is_possible)
    num_cached = own * draw(st.integers(0, cut.num_tokens // own))
    return PartCut(sent, own, cut.num_tokens, num_cached)


def parts_of(cut: PartCut, computed: list[int]) -> list[tuple[int, int]]:
    """Cut as P does while it computes."""
    parts, first = [], cut.first_block
    for num_tokens in (*sorted(each for each in computed if each < cut.num_tokens), cut.num_tokens):
        while (stop := cut.part_end(first, num_tokens)) > first:
            parts.append((first, stop))
            first = stop
    assert first == cut.num_blocks
    return parts


@given(cuts(), st.lists(st.integers(0, 299), max_size=6))
def test_parts_fill_what_the_decode_node_lacks(cut: PartCut, computed: list[int]) -> None:
    """Each token that D lacks arrives once, in its place, and no other block is touched."""
    sent, own, length = cut.sent_block_size, cut.block_size, cut.num_tokens
    prefill = np.full((cut.num_blocks, 1, sent, 1), -1)
    prefill.reshape(-1)[:length] = np.arange(length)
    num_blocks = -(-length // own)
    decode = np.full((num_blocks, 1, own, 1), -1)
    written = np.zeros(num_blocks, int)
    for first, stop in parts_of(cut, computed):
        assert cut.is_part(first, stop)
        assert stop - first <= MAX_PART_BLOCKS
        to = cut.destination(first, stop)
        assert to.stop - to.first <= MAX_PART_BLOCKS
        written[to.first : to.stop] += 1
        decode[to.first : to.stop] = cut_and_join(
            prefill[first:stop], to.num_skipped_tokens, to.stop - to.first, own
        )
    first = min(cut.num_cached_tokens // own, num_blocks)
    assert written.tolist() == [0] * first + [1] * (num_blocks - first)
    tokens = decode.reshape(-1)
    lacking = np.arange(cut.num_cached_tokens, length)
    assert tokens[cut.num_cached_tokens : length].tolist() == lacking.tolist()
    assert (tokens[: cut.num_cached_tokens] == -1).all()


@pytest.mark.parametrize("sent", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("own", [1, 2, 3, 4, 6])
def test_both_sides_cut_prompts_of_every_length_by_the_same_rule(sent: int, own: int) -> None:
    """Beyond two parts of the largest size, whose last block may be full or not."""
    for length in range(1, 2 * sent * MAX_PART_BLOCKS + 2 * lcm(sent, own) + 2):
        cut = PartCut(sent, own, length, 0)
        assert all(cut.is_part(*part) for part in parts_of(cut, [])), cut


@given(cuts())
def test_no_part_ends_or_begins_within_a_block(cut: PartCut) -> None:
    common = lcm(cut.sent_block_size, cut.block_size)
    for first in range(-1, min(cut.num_blocks, 40) + 1):
        for stop in range(first, min(cut.num_blocks, 40) + 2):
            if cut.is_part(first, stop):
                assert cut.first_block <= first < stop <= cut.num_blocks
                assert first == cut.first_block or first * cut.sent_block_size % common == 0
                assert stop == cut.num_blocks or stop * cut.sent_block_size % common == 0
                assert stop - first <= MAX_PART_BLOCKS


def test_the_example_of_the_docs() -> None:
    cut = PartCut(4, 6, 18, 6)
    assert parts_of(cut, [11, 12]) == [(1, 3), (3, 5)]
    assert cut.destination(1, 3) == Destination(1, 2, 2)
    assert cut.destination(3, 5) == Destination(2, 3, 0)


@pytest.mark.parametrize(
    ("sent", "own", "is_possible"),
    [
        (16, 16, True),
        (2, 64, True),
        (2, 65, False),
        (1, 32, True),
        (1, 33, False),
        (32, 1, True),
        (33, 1, False),
        (32, 31, True),
        (33, 32, False),
    ],
)
def test_sizes_that_are_too_different(sent: int, own: int, is_possible: bool) -> None:
    assert PartCut(sent, own, 1, 0).is_possible is is_possible


@pytest.mark.parametrize(("sent", "own"), [(4, 4), (4, 6), (6, 4), (5, 2)])
def test_nothing_is_sent_of_a_prompt_that_the_decode_node_has(sent: int, own: int) -> None:
    cut = PartCut(sent, own, 2 * own, 2 * own)
    assert cut.first_block == cut.num_blocks == cut.part_end(cut.num_blocks, 2 * own)
