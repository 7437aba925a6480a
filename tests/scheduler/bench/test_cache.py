"""The cache benchmark counts what it should; its times are only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.kvcache import CacheManager
from radixkv.scheduler.bench.cache import PHASES, TOKEN_FORMS, bench_cache
from radixkv.scheduler.bench.workload import WorkloadError
from radixkv.scheduler.replay.trace import TraceRequest

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
