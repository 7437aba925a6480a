"""The mixed scheduler: one behaviour per test."""

import re

import pytest

from radixkv.kvcache import CacheManager, CountError, RadixKVError
from radixkv.scheduler.errors import ConfigError, RequestError, SchedulerError, StepOrderError
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.policy import Fcfs
from radixkv.scheduler.request import Request, RequestStatus
from radixkv.scheduler.step_plan import StepPlan

from .harness import VOCABULARY, Harness, alone, chunks, names


def refused(error: type[RadixKVError], text: str):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


# Chunks and the budget


def test_one_request_is_prefilled_in_chunks_that_fill_the_budget_and_then_decoded():
    harness = Harness(token_budget=8)
    request = harness.submit(range(100, 119), 3, name="a")
    assert [chunks(harness.step()) for _ in range(5)] == [
        [("a", 0, 8)],
        [("a", 8, 8)],
        [("a", 16, 3)],
        [("a", 19, 1)],
        [("a", 20, 1)],
    ]
    assert request.output_tokens == alone(request)[0]
    harness.drain()


def test_decode_rows_come_first_and_a_chunk_fills_the_rest():
    harness = Harness(token_budget=8)
    harness.submit([1, 2, 3], 9, name="a")
    harness.submit([4, 5], 9, name="b")
    harness.step()
    harness.submit(range(10, 30), name="c")
    plan = harness.step()
    assert chunks(plan) == [("a", 3, 1), ("b", 2, 1), ("c", 0, 6)]
    assert plan.num_decode == 2 and plan.num_tokens == 8
    harness.drain()


def test_a_prompt_in_progress_goes_before_a_new_one():
    harness = Harness(token_budget=8)
    harness.submit(range(10), 1, name="a")
    harness.submit(range(20, 30), 1, name="b")
    assert chunks(harness.step()) == [("a", 0, 8)]
    assert chunks(harness.step()) == [("a", 8, 2), ("b", 0, 6)]
    harness.drain()


def test_no_more_than_max_running_hold_blocks():
    harness = Harness(max_running=2, token_budget=8)
    for name in "abc":
        harness.submit([ord(name)], 2, name=name)
    assert chunks(harness.step()) == [("a", 0, 1), ("b", 0, 1)]
    assert names(harness.scheduler.running) == ["a", "b"]
    assert names(harness.scheduler.waiting) == ["c"]
    harness.drain()


def test_a_scheduler_without_work_plans_an_empty_step_that_counts_as_none():
    harness = Harness()
    assert harness.scheduler.schedule() == StepPlan() == harness.scheduler.schedule()
    assert not harness.scheduler.has_work
    assert harness.scheduler.stats().steps == 0


def test_the_whole_prompt_has_blocks_from_its_first_chunk():
    harness = Harness(num_blocks=8, block_size=4, token_budget=8)
    request = harness.submit(range(30))
    harness.step()
    assert request.lease is not None
    assert request.lease.num_blocks == 8 and request.num_computed == 8
    harness.drain()


@pytest.mark.parametrize("stop", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_a_stop_token_ends_a_request_and_is_kept(stop):
    harness = Harness()
    request = harness.add(Request("a", [7, 8], 6, stop_token_ids=stop))
    harness.run()
    assert (request.output_tokens, request.finish_reason) == alone(request)
    assert (request.finish_reason == "stop") == (request.output_tokens[-1] in stop)
    assert request.status is RequestStatus.FINISHED
    harness.drain()


def test_update_returns_the_requests_that_ended_in_the_step():
    harness = Harness()
    short, long = harness.submit([1], 1), harness.submit([2], 3)
    ended = []
    for _ in range(3):
        before = len(harness.finished)
        harness.step()
        ended.append(harness.finished[before:])
    assert ended == [[short], [], [long]]


# Refusals


def test_a_live_id_is_refused():
    harness = Harness()
    harness.submit([1], name="a")
    with refused(RequestError, "request 'a' is already active"):
        harness.submit([2], name="a")
    harness.drain()
    assert harness.submit([2], name="a").status is RequestStatus.WAITING


def test_a_request_that_was_added_before_is_refused():
    harness = Harness()
    ended, aborted = harness.submit([1], name="a"), harness.submit([1], name="b")
    harness.abort(aborted)
    harness.run()
    for request in (ended, aborted):
        text = f"request {request.request_id!r} was added before"
        with refused(RequestError, text):
            harness.scheduler.add(request)
    assert not harness.scheduler.has_work


@pytest.mark.parametrize(
    ("budget", "running", "reserve", "error", "text"),
    [
        (4, 0, 0, CountError, "max_running must be at least 1, got 0"),
        (4, 5, 0, ConfigError, "max_running must be at most token_budget 4, got 5"),
        (0, 1, 0, CountError, "token_budget must be at least 1, got 0"),
        (4, 1, -1, CountError, "reserve_tokens must be at least 0, got -1"),
        ("4", 1, 0, CountError, "token_budget must be an integer, got '4'"),
        (4.0, 1, 0, CountError, "token_budget must be an integer, got 4.0"),
        (4, True, 0, CountError, "max_running must be an integer, got True"),
        (4, 1, 8.0, CountError, "reserve_tokens must be an integer, got 8.0"),
    ],
)
def test_sizes_that_cannot_work_are_refused(budget, running, reserve, error, text):
    with refused(error, text):
        MixedScheduler(
            CacheManager(4, 4), token_budget=budget, max_running=running, reserve_tokens=reserve
        )


def test_calls_out_of_turn_are_refused_and_change_nothing():
    harness = Harness()
    scheduler = harness.scheduler
    with refused(StepOrderError, "update was called with a plan that is not in flight"):
        scheduler.update(StepPlan(), [])
    request = harness.submit([1, 2], 2)
    plan = scheduler.schedule()
    with refused(StepOrderError, "schedule was called with 1 steps in flight of 1"):
        scheduler.schedule()
    with refused(StepOrderError, "update was called with a plan that is not in flight"):
        scheduler.update(StepPlan(), [])
    for tokens in ([], [1, 2]):
        text = f"update got {len(tokens)} tokens for 1 chunks"
        with refused(StepOrderError, text):
            scheduler.update(plan, tokens)
    assert request.num_computed == 0
    assert scheduler.update(plan, [1]) == []
    with refused(StepOrderError, "update was called with a plan that is not in flight"):
        scheduler.update(plan, [1])
    assert request.output_tokens == [1]
    harness.manager.check()


def test_the_errors_are_of_one_family():
    for error in (RequestError, ConfigError, StepOrderError):
        assert issubclass(error, SchedulerError) and issubclass(error, RadixKVError)
    assert issubclass(RequestError, ValueError) and issubclass(ConfigError, ValueError)


def test_stats_are_a_copy_and_the_default_policy_is_first_come_first_served():
    scheduler = MixedScheduler(CacheManager(4, 4), token_budget=4, max_running=2)
    scheduler.stats().steps = 7
    assert scheduler.stats().steps == 0
    assert isinstance(scheduler.policy, Fcfs)
    assert scheduler.reserve_tokens == 512


def test_the_fake_model_generates_every_token():
    outputs = alone(Request("a", [0, 1], 60))[0]
    assert set(outputs) == set(range(VOCABULARY))
