"""Steps in flight: the tokens are those of an engine that waits for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import HostConfig
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.errors import StepOrderError
from radixkv.scheduler.request import GREEDY, Request, SamplingParams

from .conftest import assert_nothing_leaked, complete, fresh, let_copies_end
from .test_engine import ENGINES, PROMPTS

NEW_TOKENS = 24
SAMPLED = SamplingParams(temperature=0.9, seed=1)


@pytest.fixture(scope="module", params=ENGINES, ids=lambda param: param[0])
def served(engine: Callable[[str, int], Engine], request: Any) -> tuple[Engine, list[list[int]]]:
    """An engine to take programs from, and what each prompt generates alone, step by step."""
    compiled = engine(*request.param)
    alone = [
        complete(fresh(compiled, depth=1), [prompt], NEW_TOKENS, [sampling_of(index)])[0]
        for index, prompt in enumerate(PROMPTS)
    ]
    return compiled, alone


def sampling_of(index: int) -> SamplingParams:
    return SAMPLED if index % 3 == 1 else GREEDY


def requests_of(alone: list[list[int]], stops: list[int]) -> list[Request]:
    """Return a request per prompt; half of them end with the token of a place, where it is first.

    Args:
        alone: what each prompt generates alone.
        stops: the place in it, for each prompt.
    """
    return [
        Request(
            str(index),
            prompt,
            NEW_TOKENS,
            sampling=sampling_of(index),
            stop_token_ids=[alone[index][stop]] if index % 2 else [],
        )
        for index, (prompt, stop) in enumerate(zip(PROMPTS, stops, strict=True))
    ]


@settings(max_examples=12)
@given(
    depth=st.integers(1, 3),
    num_tokens=st.sampled_from([112, 160, 640]),
    tiers=st.sampled_from([None, "recompute", "host"]),
    stops=st.lists(st.integers(0, NEW_TOKENS - 1), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    events=st.dictionaries(st.integers(1, 40), st.sampled_from(["abort", "reset"]), max_size=4),
    data=st.data(),
)
def test_tokens_do_not_depend_on_the_depth(served, depth, num_tokens, tiers, stops, events, data):
    compiled, alone = served
    options: dict[str, Any] = {} if tiers is None else {"host": HostConfig(64), "preempt": tiers}
    engine = fresh(compiled, num_blocks=num_tokens // 4, depth=depth, reserve_tokens=0, **options)
    requests = requests_of(alone, stops)
    for request in requests:
        engine.add_request(request)
    number, finished = 0, []
    while engine.has_work:
        finished += engine.step()
        number += 1
        match events.get(number):
            case "abort":
                engine.abort(data.draw(st.sampled_from(requests)).request_id)
            case "reset":
                engine.reset_cache()
    let_copies_end(engine._runner)
    assert_nothing_leaked(engine)
    for made, outputs in zip(requests, alone, strict=True):
        expected = outputs
        if made.stop_token_ids:
            [stop] = made.stop_token_ids
            expected = outputs[: outputs.index(stop) + 1]
        if made.finish_reason == "abort":
            expected = expected[: len(made.output_tokens)]
        assert made.output_tokens == expected
        assert (made in finished) == (made.finish_reason != "abort")


def test_a_step_is_dispatched_before_the_one_before_is_read(served):
    engine = fresh(served[0], depth=2)
    engine.add_request(Request("a", PROMPTS[0], 4))
    calls = []
    start, read = engine._runner.start, engine._runner.read
    engine._runner.start = lambda plan: (calls.append("start"), start(plan))[1]  # type: ignore
    engine._runner.read = lambda: (calls.append("read"), read())[1]  # type: ignore
    for _ in range(4):
        engine.step()
    assert calls == ["start", "start", "read", "start", "read", "start", "read"]


def test_a_request_is_returned_once_by_the_step_that_reads_its_end(served):
    engine = fresh(served[0], depth=3)
    request = Request("a", PROMPTS[4], 1)
    engine.add_request(request)
    assert engine.step() == [] and engine.has_work  # the prompt is in flight
    assert engine.step() == [request] and not engine.has_work
    assert engine.step() == []


def test_the_end_of_a_request_during_a_reset_is_returned_later(served):
    engine = fresh(served[0], depth=2)
    request = Request("a", PROMPTS[4], 1)
    engine.add_request(request)
    assert engine.step() == []
    engine.reset_cache()
    assert request.finish_reason == "length" and engine.has_work
    assert engine.step() == [request] and not engine.has_work


def test_more_steps_than_the_depth_are_refused(served):
    engine = fresh(served[0], depth=2)
    engine.add_request(Request("a", PROMPTS[0], 8))
    assert engine.scheduler.schedule().chunks and engine.scheduler.schedule().chunks
    with pytest.raises(StepOrderError, match=r"^schedule was called with 2 steps in flight of 2$"):
        engine.scheduler.schedule()


def test_repr_shows_the_numbers(served):
    compiled, _ = served
    engine = fresh(compiled, num_blocks=100, depth=2)
    for name in (1, 2, 3):
        engine.add_request(Request(str(name), [name], 8))
    cache = "CacheManager(100 blocks of 4 tokens: 100 free, 0 idle, 0 in use; live leases: 0)"
    assert repr(engine) == f"Engine(0 running, 3 waiting, 0 steps in flight; {cache})"
    engine.step()
    assert repr(engine).startswith("Engine(3 running, 0 waiting, 1 steps in flight; CacheManager")
    engine.run()
    assert repr(engine).startswith("Engine(0 running, 0 waiting, 0 steps in flight; CacheManager(")
