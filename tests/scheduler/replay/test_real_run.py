"""The real run: exact sharing after scaling, and each check able to fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from radixkv.scheduler.engine import Engine
from radixkv.scheduler.replay import real_run
from radixkv.scheduler.replay.real_run import (
    BLOCK_SIZE,
    RealRun,
    RealRunConfig,
    run_real,
    scale_request,
    select_requests,
)
from radixkv.scheduler.replay.trace import Trace, TraceRequest
from radixkv.scheduler.request import Request

from .conftest import make_trace

SMALL = RealRunConfig(
    max_requests=12, max_model_len=192, tight_num_blocks=20, token_budget=64, max_running=4
)


def test_scaled_lengths_are_a_32nd_rounded_up() -> None:
    scaled = scale_request(TraceRequest(0.0, 1100, 33, (4, 9, 2)), vocab_size=1024)
    assert len(scaled.prompt) == 35 and scaled.max_new_tokens == 2
    assert scaled.prompt.dtype == np.int32
    assert scaled.prompt.min() >= 0 and scaled.prompt.max() < 1024


def test_scaled_requests_share_exactly_the_blocks_of_the_trace(bundled_trace: Trace) -> None:
    by_id: dict[int, bytes] = {}
    for request in bundled_trace.requests:
        prompt = scale_request(request, 1024).prompt
        assert len(prompt) == -(-request.input_length // 32)
        for index, hash_id in enumerate(request.hash_ids):
            block = prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            if len(block) == BLOCK_SIZE:
                assert by_id.setdefault(hash_id, block.tobytes()) == block.tobytes()
    assert len(set(by_id.values())) == len(by_id)


def test_conversations_of_several_turns_come_first(bundled_trace: Trace) -> None:
    chosen = select_requests(bundled_trace, 40, 512)
    assert len(chosen) == 40
    assert all(
        -(-request.input_length // 32) - (-request.output_length // 32) <= 512 for request in chosen
    )
    times = [request.timestamp_ms for request in chosen]
    assert times == sorted(times)
    heads = [request.hash_ids[:2] for request in chosen]
    assert sum(heads.count(head) > 1 for head in heads) >= 39  # the last one may be cut off


def test_single_turns_fill_up() -> None:
    trace = make_trace([0], [0, 1], [0], [0, 1, 2], [0, 3])
    chosen = select_requests(trace, 3, 512)
    assert [request.hash_ids for request in chosen] == [(0,), (0, 1), (0, 1, 2)]
    assert select_requests(trace, 3, 16) == []


@pytest.fixture(scope="module")
def small_run(bundled_trace: Trace) -> RealRun:
    return run_real(bundled_trace, SMALL)


def test_a_small_run_passes_under_pressure(small_run: RealRun) -> None:
    assert [(check.verdict, check.name) for check in small_run.checks] == [
        ("PASS", "identical tokens"),
        ("PASS", "the tight pool preempts and evicts"),
        ("PASS", "hits are prefill that is not computed"),
        ("PASS", "no compilation after warm-up"),
        ("PASS", "no block is leaked"),
    ], small_run
    reference, off, on = small_run.runs
    assert [run.name for run in small_run.runs] == ["reference", "cache off", "cache on"]
    assert reference.prefill_tokens == small_run.prompt_tokens
    assert reference.preemptions == reference.hit_tokens == off.hit_tokens == 0
    assert on.hit_tokens > 0 and on.num_blocks == off.num_blocks == 20


def planted(bundled_trace: Trace, config: RealRunConfig, name: str) -> tuple[str, str]:
    checks = {check.name: check for check in run_real(bundled_trace, config).checks}
    return checks[name].verdict, checks[name].detail


def test_a_wrong_token_is_found(bundled_trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def corrupt(self: Engine) -> list[Request]:
        finished = step(self)
        for request in finished:
            if request.request_id == "1" and request.num_hit_tokens:
                request.output_tokens[-1] += 1
        return finished

    monkeypatch.setattr(Engine, "step", corrupt)
    config = dataclasses.replace(SMALL, max_requests=4)
    verdict, detail = planted(bundled_trace, config, "identical tokens")
    assert verdict == "FAIL"
    assert detail.startswith("cache on: request 1 differs at output token ")


def test_a_pool_that_never_runs_short_is_not_exercised(bundled_trace: Trace) -> None:
    config = dataclasses.replace(SMALL, max_requests=4, tight_num_blocks=60)
    name = "the tight pool preempts and evicts"
    verdict, detail = planted(bundled_trace, config, name)
    assert verdict == "SKIP"
    assert detail == "not exercised: 0 and 0 preemptions, 0 blocks evicted"
    demanding = dataclasses.replace(config, min_pressure=0.0)
    assert planted(bundled_trace, demanding, name) == ("FAIL", detail)


def test_no_request_is_short_enough() -> None:
    run = run_real(make_trace([0, 1]), RealRunConfig(max_model_len=16))
    assert (run.requests, run.runs) == (0, ())
    assert [(check.verdict, check.detail) for check in run.checks] == [
        ("SKIP", "no request has 512 tokens or fewer")
    ]


def test_the_scaled_block_is_the_engine_block() -> None:
    assert real_run.SCALE * BLOCK_SIZE == 512
