"""The cache benchmark counts what it should; its times are only there."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from radixkv.kvcache import CacheManager
from radixkv.scheduler.bench.cache import PHASES, TOKEN_FORMS, bench_cache
from radixkv.scheduler.bench.timing import us_summary
from radixkv.scheduler.bench.workload import WorkloadError
from radixkv.scheduler.replay.trace import TraceRequest

from .conftest import Clock

pytestmark = pytest.mark.usefixtures("no_collection")

REQUESTS = [
    TraceRequest(0.0, 1000, 10, (0, 1)),
    TraceRequest(1.0, 1536, 3, (0, 2, 3)),
    TraceRequest(2.0, 1300, 20, (0, 1, 7)),
]


def test_hits_are_the_shared_whole_blocks() -> None:
    figures = bench_cache(REQUESTS, block_size=16, num_blocks=1000)
    # The second shares id 0; the third shares 1000 tokens with the first, 62 whole blocks.
    assert figures["hit_tokens"] == 512 + 62 * 16
    assert figures["prompt_tokens"] == 1000 + 1536 + 1300
    assert figures["output_tokens"] == 33
    assert figures["blocks"] == 64 + 97 + 83  # 1010, 1539 and 1320 tokens
    assert figures["evicted_blocks"] == 0
    assert figures["requests"] == 3


def test_a_cache_that_holds_one_request_evicts_the_others() -> None:
    figures = bench_cache(REQUESTS, block_size=16, num_blocks=97)
    assert figures["evicted_blocks"] > 0
    # The third finds what was left of id 0, which the second shared.
    assert 512 <= figures["hit_tokens"] <= 1024


@pytest.mark.parametrize("tokens", TOKEN_FORMS)
def test_the_manager_is_given_the_form_that_is_asked_for(tokens, monkeypatch) -> None:
    forms = set()

    def given(value: Any) -> Any:
        forms.add(str(value.dtype) if isinstance(value, np.ndarray) else type(value).__name__)
        return value

    match, publish = CacheManager.match, CacheManager.publish
    monkeypatch.setattr(CacheManager, "match", lambda self, it: match(self, given(it)))
    monkeypatch.setattr(CacheManager, "publish", lambda self, of, it: publish(self, of, given(it)))
    figures = bench_cache(REQUESTS, block_size=16, num_blocks=1000, tokens=tokens)
    assert forms == {tokens} and figures["tokens"] == tokens
    assert figures["hit_tokens"] == 512 + 62 * 16, "that of every form"


def test_every_phase_has_a_cost() -> None:
    figures = bench_cache(REQUESTS, block_size=64, num_blocks=100)
    assert tuple(figures["phases"]) == PHASES
    for cost in [figures, *figures["phases"].values()]:
        assert set(cost["us_per_request"]) == {"median", "mean", "p99_9", "max"}
        assert isinstance(cost["ns_per_block"], float)


def test_a_request_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(
        WorkloadError,
        match=r"request 1 has 1539 tokens and needs 97 blocks of 16, but the cache has 96",
    ):
        bench_cache(REQUESTS, block_size=16, num_blocks=96)


def test_no_requests_are_refused() -> None:
    with pytest.raises(WorkloadError, match="the trace has no requests"):
        bench_cache([], block_size=16, num_blocks=96)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_figures_are_those_of_their_pass(num_requests: int, clock: Clock) -> None:
    def duration(column: int, call: int) -> int:
        run, number = divmod(call, num_requests)
        return (1_000_003, 10_007, 101)[run] * (number * number + column + 1)

    for column, name in enumerate(PHASES):
        clock.takes(CacheManager, name, functools.partial(duration, column))
    requests = REQUESTS[:num_requests]
    figures = bench_cache(requests, block_size=16, num_blocks=1000)
    numbers = range(num_requests)

    def spans(run: int, columns: Iterable[int]) -> Any:
        calls = [run * num_requests + number for number in numbers]
        return np.array([sum(duration(column, call) for column in columns) for call in calls])

    def cost(spans_ns: Any) -> dict[str, Any]:
        per_block = round(float(spans_ns.sum()) / figures["blocks"], 3)
        return {"us_per_request": us_summary(spans_ns), "ns_per_block": per_block}

    every = range(len(PHASES))
    # A span of one phase has the cost of one reading; that of whole requests has no others.
    expected = cost(spans(1, every)) | {"clock_ns": Clock.cost_ns}
    expected["phases"] = {name: cost(spans(2, [index])) for index, name in enumerate(PHASES)}
    expected["first_pass_us_per_request"] = us_summary(spans(0, every))
    assert {name: figures[name] for name in expected} == expected
    hit_tokens, prompt_tokens = figures["hit_tokens"], figures["prompt_tokens"]
    assert figures["hit_rate"] == round(hit_tokens / prompt_tokens, 6)
    assert (figures["block_size"], figures["device_blocks"]) == (16, 1000)
    assert clock.managers == [(1000, 16)] * 3
