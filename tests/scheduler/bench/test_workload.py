"""Tokens of the benchmarks are the ones the trace says, and new ones are new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.bench.workload import TokenSupply, WorkloadError, expand
from radixkv.scheduler.replay.trace import MAX_HASH_ID, TraceRequest


def test_prompts_follow_the_ids_and_outputs_are_unique() -> None:
    first, second = expand([TraceRequest(0.0, 600, 3, (4, 2)), TraceRequest(1.0, 512, 2, (4,))])
    assert first.tokens.dtype == np.int32
    np.testing.assert_array_equal(first.prompt[:512], np.arange(4 * 512, 5 * 512))
    np.testing.assert_array_equal(first.prompt[512:], np.arange(2 * 512, 2 * 512 + 88))
    np.testing.assert_array_equal(second.prompt, first.prompt[:512])
    assert first.tokens[600:].tolist() == [5 * 512, 5 * 512 + 1, 5 * 512 + 2]
    assert second.tokens[512:].tolist() == [5 * 512 + 3, 5 * 512 + 4]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_outputs_share_no_token_with_any_prompt(ids: list[list[int]]) -> None:
    """Wherever in its request the largest id is."""
    requests = [TraceRequest(0, 512 * len(each), 600, tuple(each)) for each in ids]
    works = list(expand(requests))
    outputs = np.concatenate([work.tokens[len(work.prompt) :] for work in works])
    assert len({*outputs.tolist()}) == 600 * len(requests)
    assert outputs.min() > max(work.prompt.max() for work in works)


def test_a_supply_that_runs_out_says_so_and_takes_nothing() -> None:
    supply = TokenSupply(first=2**31 - 2)
    with pytest.raises(
        WorkloadError, match="2147483649 different token ids are needed, int32 has 2147483648"
    ):
        supply.take(3)
    assert supply.take(2).tolist() == [2**31 - 2, 2**31 - 1]


def test_the_largest_ids_leave_no_room_for_outputs() -> None:
    with pytest.raises(WorkloadError, match="different token ids are needed"):
        list(expand([TraceRequest(0.0, 1, 1, (MAX_HASH_ID,))]))
