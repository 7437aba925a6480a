"""`GenerationParams` makes the requests of a prompt."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.scheduler import GenerationParams, SamplingParams

TOP = 2**32 - 1


@example(TOP, 3)
@example(TOP - 1, 2)
@given(st.integers(0, TOP), st.integers(1, 5))
def test_each_sample_has_the_next_seed_of_32_bits(seed: int, n: int) -> None:
    params = GenerationParams(
        n=n, max_tokens=7, sampling=SamplingParams(temperature=1.0, seed=seed)
    )
    requests = params.make_requests("a", [1, 2, 3], None, [5])
    seeds = [request.sampling.seed for request in requests]
    assert seeds == [(seed + index) % 2**32 for index in range(n)]
    assert len(set(seeds)) == n
    names = ["a"] if n == 1 else [f"a#{index}" for index in range(n)]
    assert [request.request_id for request in requests] == names
    assert [request.sample_of for request in requests] == [None, *[requests[0]] * (n - 1)]
