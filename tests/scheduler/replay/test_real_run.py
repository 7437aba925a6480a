"""The real run: exact sharing after scaling, and a failure of each check."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import numpy as np
import pytest

from radixkv.scheduler.engine import Engine, programs
from radixkv.scheduler.models import Model
from radixkv.scheduler.replay.checks import Check
from radixkv.scheduler.replay.engine_run import real_run
from radixkv.scheduler.replay.engine_run.checks import (
    EnginePass,
    PassResult,
    check_compilations,
    check_exercised,
    check_hits_save_prefill,
    check_no_leak,
    check_parked,
    check_tokens,
)
from radixkv.scheduler.replay.engine_run.real_run import RealRunConfig, run_real
from radixkv.scheduler.replay.engine_run.scaling import (
    BLOCK_SIZE,
    ScaledRequest,
    scale_request,
    select_requests,
)
from radixkv.scheduler.replay.trace import Trace, TraceRequest
from radixkv.scheduler.request import Request

from .conftest import SMALL_REAL_RUN, make_trace


def test_prompts_are_scaled_by_32_and_outputs_by_8_rounded_up() -> None:
    scaled = scale_request(TraceRequest(0.0, 1100, 33, (4, 9, 2)), vocab_size=1024)
    assert len(scaled.prompt) == 35 and scaled.max_new_tokens == 5
    assert scaled.prompt.dtype == np.int32
    assert scaled.prompt.min() >= 0 and scaled.prompt.max() < 1024


def test_tokens_are_hashed_with_splitmix64() -> None:
    """The first output of SplitMix64 with the seed 0; figures of a run hold for its tokens."""
    prompt = scale_request(TraceRequest(0.0, 512, 8, (0,)), 10**6).prompt
    assert prompt[0] == 0xE220A8397B1DCDAF % 10**6


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


def test_single_turns_come_last() -> None:
    trace = make_trace([0], [0, 1], [0], [0, 1, 2], [0, 3])
    chosen = select_requests(trace, 3, 512)
    assert [request.hash_ids for request in chosen] == [(0,), (0, 1), (0, 1, 2)]
    assert select_requests(trace, 3, 16) == []


@pytest.mark.slow
def test_a_wrong_token_is_found(bundled_trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def corrupt(self: Engine) -> list[Request]:
        finished = step(self)
        for request in finished:
            if request.num_hit_tokens:
                request.output_tokens[-1] += 1
        return finished

    monkeypatch.setattr(Engine, "step", corrupt)
    config = dataclasses.replace(SMALL_REAL_RUN, max_running=1)  # two programs to compile
    check = run_real(bundled_trace, config).checks[0]
    assert (check.name, check.verdict) == ("identical tokens", "FAIL")
    assert re.fullmatch(r"cache on: request \d+ differs at output token \d+", check.detail)


FREE = Check("no block is leaked", True, "all free")


@pytest.mark.parametrize(
    ("outputs", "detail"),
    [
        ([[[1, 2], [3]], [[1, 2], [3]], [[1, 2], [3]]], ""),
        ([[[1, 2], [3]], [[1, 9], [3]], [[1, 2], [3]]], "b: request 0 differs at output token 1"),
        ([[[1, 2], [3]], [[1, 2], [3]], [[1, 2], [9]]], "c: request 1 differs at output token 0"),
        ([[[1, 2], [3]], [[1], [3]], [[1, 2], [3]]], "b: request 0 differs at output token 1"),
        ([[[1, 2], [3]], [[1, 2, 4], [3]], []], "b: request 0 differs at output token 2"),
        ([[[1, 2], []], [[1, 2], []], [[1, 2], []]], "a: request 1 has 0 tokens of 1"),
        ([[[1, 2, 5], [3]]] * 3, "a: request 0 has 3 tokens of 2"),
    ],
)
def test_every_pass_has_the_tokens_of_the_first(
    outputs: list[list[list[int]]], detail: str
) -> None:
    requests = [ScaledRequest(np.zeros(4, np.int32), 2), ScaledRequest(np.zeros(4, np.int32), 1)]
    passes = [
        EnginePass(pass_result(name, 0, 0), tokens, [FREE])
        for name, tokens in zip("abc", outputs, strict=True)
    ]
    check = check_tokens(passes, requests)
    assert (check.ok, check.detail) == (not detail, detail or "3 output tokens, 3 times")


def test_hits_save_prefill_and_no_pass_compiles() -> None:
    def passes(prefill: int, hits: int, compilations: int) -> list[PassResult]:
        off = dataclasses.replace(pass_result("cache off", 3, 0), prefill_tokens=1_000)
        on = dataclasses.replace(
            off, name="cache on", prefill_tokens=prefill, hit_tokens=hits,
            compilations=compilations,
        )  # fmt: skip
        return [pass_result("reference", 0, 0), off, on]

    saved = [
        check_hits_save_prefill(passes(*case, 0)) for case in [(999, 1), (1_000, 1), (1_000, 0)]
    ]
    assert [check.ok for check in saved] == [True, False, True]
    assert saved[0].detail == "1,000 - 999 = 1 tokens"
    compiled = check_compilations(passes(0, 0, 1))
    assert (compiled.ok, compiled.detail) == (False, "reference 0, cache off 0, cache on 1")
    assert check_compilations(passes(0, 0, 0)).ok


def pass_result(name: str, preemptions: int, evicted_blocks: int) -> PassResult:
    return PassResult(name, 60, 100, 1000, 0, preemptions, evicted_blocks, 0, 1.0)


@pytest.mark.parametrize(
    ("off", "on", "evicted"), [(0, 3, 20), (3, 0, 20), (3, 3, 0)], ids=["off", "on", "evicted"]
)
def test_a_pool_that_never_runs_short_is_not_exercised(off: int, on: int, evicted: int) -> None:
    runs = [
        pass_result("reference", 0, 0),
        pass_result("cache off", off, 0),
        pass_result("cache on", on, evicted),
    ]
    detail = f"not exercised: {off} and {on} preemptions, {evicted} blocks evicted"
    skipped = check_exercised(runs)
    assert (skipped.ok, skipped.verdict, skipped.detail) == (True, "SKIP", detail)
    least = [pass_result("", min(number, 1), 1) for number in (0, 1, 1)]
    assert check_exercised(least).verdict == "PASS"


@pytest.mark.parametrize(
    ("parked", "resumed", "recomputed", "verdict"),
    [
        (5, 5, 0, "PASS"),
        (5, 4, 0, "FAIL"),
        (5, 5, 16, "FAIL"),
        (0, 0, 0, "SKIP"),
        (0, 0, 16, "FAIL"),
    ],
)
def test_parked_requests_must_resume_and_compute_nothing_again(
    parked: int, resumed: int, recomputed: int, verdict: str
) -> None:
    tiered = dataclasses.replace(
        pass_result("host tier", 5, 9),
        host_hit_tokens=1_024,
        parked=parked,
        resumed=resumed,
        recomputed_tokens=recomputed,
    )
    check = check_parked([pass_result("", 0, 0)] * 3 + [tiered])
    assert (check.name, check.verdict) == ("preempted requests keep their KV on the host", verdict)
    detail = f"{parked} parked, {resumed} resumed, 1,024 host hits; {recomputed} tokens recomputed"
    assert check.detail == (detail if parked else f"not exercised: {detail}")


def test_a_leak_of_any_pass_on_any_tier_is_found() -> None:
    good, bad = FREE, Check("no host block is", False, "1")
    run = EnginePass(pass_result("host tier", 0, 0), [], [good])
    first = dataclasses.replace(run, result=pass_result("reference", 0, 0))
    both = dataclasses.replace(run, leaks=[good, Check("no host block is", True, "2")])
    assert check_no_leak([first, first, both]) == Check(good.name, True, "host tier: all free")
    broken = dataclasses.replace(run, leaks=[good, bad])
    assert check_no_leak([broken, run]) == Check(bad.name, False, "host tier: 1")


def test_requests_of_one_token_run_in_the_smallest_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[int] = []

    def note(model: Model, requests: Any, config: Any, variant: Any, progress: Any) -> EnginePass:
        pools.append(variant.num_blocks)
        return EnginePass(pass_result(variant.name, 0, 0), [[] for _ in requests], [FREE])

    monkeypatch.setattr(real_run, "_run_engine", note)
    run_real(make_trace([0, 1], [2]), SMALL_REAL_RUN)
    assert pools == [12, 3, 3, 3], "the longest request alone; nothing in between is compiled"


def test_no_request_is_short_enough() -> None:
    run = run_real(make_trace([0, 1]), RealRunConfig(max_model_len=16))
    assert (run.requests, run.runs) == (0, ())
    assert [(check.verdict, check.detail) for check in run.checks] == [
        ("SKIP", "no request is shorter than 16 tokens when scaled down")
    ]


def test_each_compiled_program_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    log = logging.getLogger(programs.__name__)

    def make_engine(*args: object, **options: object) -> str:
        for number in (1, 2, 3):
            log.info("compiling %d of %d programs", number, 3)
        return "an engine"

    monkeypatch.setattr(real_run, "Engine", make_engine)
    variant = real_run._Variant("cache on", 48)
    start: Any = real_run._start_engine
    engine = start(None, RealRunConfig(), variant, lambda *call: calls.append(call))
    log.info("compiling %d of %d programs", 1, 1)
    stage = "real run, cache on: compiling"
    assert engine == "an engine"
    assert calls == [(stage, 0, 1), (stage, 1, 3), (stage, 2, 3), (stage, 3, 3), (stage, 1, 1)]
