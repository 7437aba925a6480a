"""Log probabilities in messages: they come back as they were, and lies give none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.handoff.records import (
    MAX_RECORDS_BYTES,
    max_tokens,
    pack_records,
    unpack_records,
)
from radixkv.scheduler.request import MAX_LOGPROBS, TokenLogprob

INTS, FLOATS = st.integers(0, 2**31 - 1), st.floats(max_value=0, allow_nan=False, width=32)
PAIRS = st.tuples(INTS, FLOATS)


@st.composite
def some_records(draw: st.DrawFn) -> list[TokenLogprob]:
    num_top = draw(st.integers(0, 3))
    top = st.lists(PAIRS, min_size=num_top, max_size=num_top).map(tuple)
    return draw(st.lists(st.builds(TokenLogprob, INTS, FLOATS, INTS, top), max_size=4))


@given(some_records())
def test_records_come_back_as_they_were(records: list[TokenLogprob]) -> None:
    assert unpack_records(pack_records(records), [each.token_id for each in records]) == records


def test_records_may_have_as_many_tokens_as_a_request_may_ask_for() -> None:
    for num_top in range(MAX_LOGPROBS + 2):
        record = TokenLogprob(7, -1.5, 3, tuple((token, -2.0) for token in range(num_top)))
        expected = [record] if num_top <= MAX_LOGPROBS else []
        assert unpack_records(pack_records([record]), [7]) == expected


@given(st.binary(max_size=900), st.lists(INTS, max_size=5))
def test_any_bytes_give_a_record_of_each_token_or_none(packed: bytes, tokens: list[int]) -> None:
    records = unpack_records(packed, tokens)
    if records:
        assert [each.token_id for each in records] == tokens
        assert len(pack_records(records)) == len(packed)
    assert bool(records) == (
        bool(tokens and packed)
        and len(packed) % (8 * len(tokens)) == 0
        and len(packed) <= 8 * 21 * len(tokens)
    )


def test_the_records_of_a_request_fit_a_message() -> None:
    for num_top in range(MAX_LOGPROBS + 1):
        most = max_tokens(num_top)
        assert most * 8 * (1 + num_top) <= MAX_RECORDS_BYTES < (most + 1) * 8 * (1 + num_top)
