"""The decode scheduler after the hand-off: decoding, preemption and resumption."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CountError
from radixkv.scheduler import (
    DecodeScheduler,
    HandoffsOpenError,
    RequestStatus,
    SamplingParams,
    StepOrderError,
    StepPlan,
)
from radixkv.scheduler.handoff import (
    Abort,
    AttemptKey,
    Commit,
    DecodeFailed,
    Finished,
    Grant,
    Header,
    Hits,
    Post,
    Pull,
    Send,
    Started,
)
from radixkv.scheduler.handoff.records import pack_records
from radixkv.scheduler.request import TokenLogprob

from .decode_harness import actions, ask, hand_over, refusal, scheduler, send, start, step
from .worlds import SteppedWorld

# What it does with what has arrived


def test_it_decodes_with_what_commit_said() -> None:
    d = scheduler()
    sampling = SamplingParams(temperature=1.0, seed=7)
    [started] = start(d, max_new_tokens=3, sampling=sampling, stop_token_ids=(2,))
    assert isinstance(started, Started) and started.num_cached_tokens == 0
    request = started.request
    assert request.output_tokens == [9] and request.sampling == sampling
    assert request.stop_token_ids == request.late_token_ids == {2}
    hits = request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens
    assert hits == (1, 2, 0), "as P counted them"
    assert step(d) == [("a", 4, 1)]
    assert step(d, token=2) == [("a", 5, 1)]
    [finished] = actions(d)
    assert isinstance(finished, Finished) and finished.request is request
    assert (request.output_tokens, request.finish_reason) == ([9, 1, 2], "stop")
    assert d.num_open == 0 and d.manager.stats().live_leases == 0
    assert d.manager.match([97] * 4 + [9, 1]).num_tokens == 6, "outputs are cached"


def test_it_records_log_probabilities_as_commit_did() -> None:
    first, last = TokenLogprob(9, -0.5, 2, ((3, -0.25),)), TokenLogprob(1, -2.0, 1, ((1, -2.0),))
    d = scheduler()
    [started] = start(d, max_new_tokens=2, first_record=pack_records([first]))
    request = started.request
    assert (request.logprobs, request.output_logprobs) == (1, [first])
    plan = d.schedule()

    def append_logprobs() -> None:
        assert request.output_tokens == [9, 1], "a record follows its token"
        assert actions(d) == [], "the request is reported with its last record"
        request.output_logprobs.append(last)

    d.update(plan, [1], append_logprobs)
    [finished] = actions(d)
    assert finished.request.output_logprobs == [first, last]


@pytest.mark.parametrize(
    ("more", "reason"), [({"max_new_tokens": 1}, "length"), ({"stop_token_ids": (9,)}, "stop")]
)
def test_the_first_token_may_be_the_last(more: dict, reason: str) -> None:
    d = scheduler()
    started, finished = start(d, **more)
    assert isinstance(started, Started) and isinstance(finished, Finished)
    assert finished.request.finish_reason == reason
    assert finished.request.output_tokens == [9]
    assert not d.has_work and d.manager.stats().live_leases == 0


# Preempted and resumed, without P


def pressed(**options: Any) -> DecodeScheduler:
    """Three decoding requests, without room for all of them."""
    d = scheduler(num_blocks=12, **options)
    for name in "abc":
        start(d, name, 4, 9)
    return d


def test_one_is_preempted_and_computed_again_here() -> None:
    d = pressed()
    chunks = []
    while d.has_work:
        chunks += step(d)
    stats = d.stats()
    assert stats.preemptions == stats.resumed > 0 and stats.prefill_tokens > 0
    assert (stats.hit_tokens, stats.received_tokens) == (0, 12), "counted once, when it arrived"
    assert [each[0] for each in chunks if each[2] > 1], "computed in chunks"
    ended = [each.key.request_id for each in actions(d) if isinstance(each, Finished)]
    assert sorted(ended) == ["a", "b", "c"] and ended[0] == "a", "the first is never preempted"
    assert d.num_open == 0


def test_nobody_is_let_in_while_one_waits_to_be_resumed() -> None:
    d = pressed()
    while not d.waiting:
        step(d)
    assert refusal(ask(d, "x", 1, 1)) == ("others wait", 1, 0)
    while d.waiting:
        step(d)
    assert isinstance(ask(d, "x", 1, 1), Grant)


def test_one_is_parked_on_the_host_and_goes_on_from_there() -> None:
    d = pressed(host=12, preempt="host")
    tiers = d.manager.tiers
    assert tiers is not None
    while d.has_work:
        step(d)
        for operation in tiers.take_operations():
            tiers.complete(operation.id, [True] * operation.num_blocks)
    stats = d.stats()
    assert stats.resumed_parked > 0 and stats.recomputed_tokens == 0
    assert stats.hit_tokens == stats.host_hit_tokens == 0


# Ended from outside


@pytest.mark.parametrize("state", ["receiving", "running", "in a step", "preempted"])
def test_an_abort_in_any_state(state: str) -> None:
    d = pressed()
    name = "a"
    if state == "receiving":
        d = scheduler()
        ask(d)
    if state == "preempted":
        while not d.waiting:
            step(d)
        name = d.waiting[0].request_id
    actions(d)
    plan = d.schedule() if state == "in a step" else None
    assert d.abort(name)
    if plan is not None:
        assert d.num_open == 3, "the step uses its blocks"
        d.update(plan, [1] * len(plan.chunks))
    ended = [each for each in actions(d) if not isinstance(each, Post)]
    assert ended == ([] if state == "receiving" else [DecodeFailed(AttemptKey(name, 1), "aborted")])
    assert not d.abort(name)
    while d.has_work:
        step(d)
    assert d.num_open == 0 and d.manager.stats().live_leases == 0
    d.manager.check()


def test_a_newer_attempt_may_start_while_the_step_of_an_older_one_runs() -> None:
    d = scheduler()
    start(d, "a", 4, 5)
    plan = d.schedule()
    granted = ask(d, "a", 4, 5, attempt=2)
    assert isinstance(granted, Grant) and granted.first_block == 2
    header = Header(AttemptKey("a", 2), 5, 1, granted.header.grant)
    send(d, granted, 0, Commit(header, 0, 9, 4, Hits()))
    d.give_up(AttemptKey("a", 1), "again")
    d.update(plan, [1])
    reports = [each for each in actions(d) if not isinstance(each, Post)]
    assert [(type(each), each.key.attempt) for each in reports] == [(Started, 2), (DecodeFailed, 1)]
    while d.has_work:
        step(d)
    assert [each.key.attempt for each in actions(d) if isinstance(each, Finished)] == [2]
    assert d.num_open == 0


@pytest.mark.parametrize("older", ["in a step", "in quarantine"])
@pytest.mark.parametrize("newer", ["receiving", "running"])
def test_an_abort_ends_every_attempt(older: str, newer: str) -> None:
    d = scheduler()
    plan = pull = None
    if older == "in a step":
        start(d, "a", 4, 5)
        plan = d.schedule()
    else:
        granted = ask(d, "a", 4, 5)
        first = Header(granted.header.key, 5, 1, granted.header.grant)
        d.receive("p0", Send(first, 0, granted.first_block, 1, 0))
        [pull] = [each for each in actions(d) if isinstance(each, Pull)]
    granted = ask(d, "a", 4, 5, attempt=2)
    if newer == "running":
        hand_over(d, granted, 4)
    assert d.abort("a")
    if plan is not None:
        d.update(plan, [1])
    if pull is not None:
        d.pull_fenced(pull.part_id)
    assert d.num_open == 0 and not d.has_work and not d.abort("a")
    d.receive("p0", Commit(Header(granted.header.key, 5, 1, granted.header.grant), 0, 9, 4, Hits()))
    assert d.num_open == 0 and d.manager.stats().live_leases == 0
    d.manager.check()


# Several steps in flight


def plans(d: DecodeScheduler, count: int) -> list[StepPlan]:
    """Plan so many steps, and update none."""
    planned = [d.schedule() for _ in range(count)]
    assert all(each.chunks for each in planned)
    return planned


def reports(d: DecodeScheduler) -> list[tuple[str, str]]:
    return [
        (type(each).__name__, each.key.request_id)
        for each in actions(d)
        if not isinstance(each, Post)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_are_in_flight_as_the_depth(depth: int) -> None:
    d = scheduler(depth=depth)
    assert d.depth == depth
    start(d, max_new_tokens=9)
    planned = plans(d, depth)
    assert [each.chunks[0].start for each in planned] == [4 + index for index in range(depth)]
    with pytest.raises(StepOrderError, match=f"with {depth} steps in flight of {depth}$"):
        d.schedule()
    for plan in planned:
        d.update(plan, [1])
    assert reports(d) == []


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_below_1_is_refused(depth: int) -> None:
    with pytest.raises(CountError, match=f"depth must be at least 1, got {depth}"):
        scheduler(depth=depth)


@pytest.mark.parametrize("end", ["stop", "abort", "length"])
def test_an_end_is_reported_once_by_the_last_step_in_flight(end: str) -> None:
    d = scheduler(depth=3)
    limit = 4 if end == "length" else 9
    start(d, "a", 4, limit, stop_token_ids=(7,) if end == "stop" else ())
    start(d, "b", 4, 9)
    planned = plans(d, 3)
    assert [len(each.chunks) for each in planned] == [2, 2, 2]
    before = d.manager.available
    if end == "abort":
        d.abort("a")
        assert d.abort("a"), "it has not ended before its last step has"
    for plan in planned[:2]:
        d.update(plan, [7, 1])
        assert reports(d) == [] and d.num_open == 2
        assert d.manager.available == before, "the next step uses its blocks"
    d.update(planned[2], [7, 1])
    assert reports(d) == [("DecodeFailed" if end == "abort" else "Finished", "a")]
    assert d.num_open == 1 and before < d.manager.available
    while d.has_work:
        step(d)
    assert reports(d) == [("Finished", "b")]
    assert d.manager.stats().live_leases == 0
    d.manager.check()


def test_blocks_of_a_step_in_flight_are_not_granted() -> None:
    d = scheduler(num_blocks=8, depth=2)
    start(d, "a", 8, 8)
    planned = plans(d, 2)
    [table] = [each.lease.block_table.tolist() for each in d.running if each.lease is not None]
    d.abort("a")
    assert refusal(ask(d, "b", 8, 1))[0] == "out of blocks"
    d.update(planned[0], [1])
    assert refusal(ask(d, "b", 8, 1))[0] == "out of blocks"
    d.update(planned[1], [1])
    granted = ask(d, "b", 8, 1)
    assert isinstance(granted, Grant)
    header = Header(AttemptKey("b", 1), 5, 1, granted.header.grant)
    d.receive("p0", Send(header, 0, 0, 4, 0))
    [pull] = [each for each in actions(d) if isinstance(each, Pull)]
    assert set(pull.blocks) & set(table), "there are no others"


def test_a_cancel_after_a_stop_token_changes_nothing() -> None:
    d = scheduler(depth=2)
    start(d, "a", 4, 9, stop_token_ids=(7,))
    first, second = plans(d, 2)
    [request] = d.update(first, [7])
    d.give_up(AttemptKey("a", 1), "cancelled")
    assert reports(d) == []
    assert d.update(second, [8]) == []
    assert reports(d) == [("Finished", "a")]
    assert (request.output_tokens, request.finish_reason) == ([9, 7], "stop")


def test_a_newer_attempt_ends_before_the_last_step_of_an_older_one() -> None:
    d = scheduler(depth=2)
    start(d, "a", 4, 5)
    planned = plans(d, 2)
    d.give_up(AttemptKey("a", 1), "again")
    granted = ask(d, "a", 4, 1, attempt=2)
    header = Header(AttemptKey("a", 2), 5, 1, granted.header.grant)
    send(d, granted, 0, Commit(header, 0, 9, 4, Hits()))
    ended = [(type(each), each.key.attempt) for each in actions(d) if not isinstance(each, Post)]
    assert ended == [(Started, 2), (Finished, 2)]
    for plan in planned:
        d.update(plan, [1])
    ended = [(type(each), each.key.attempt) for each in actions(d)]
    assert ended == [(DecodeFailed, 1)] and d.num_open == 0


def test_none_is_preempted_while_steps_are_in_flight() -> None:
    d = pressed(depth=2)
    while True:
        plan = d.schedule()
        if not plan.chunks:
            break
        if len(planned := d._batch.in_flight) == 2:
            d.update(planned[0], [1] * len(planned[0].chunks))
    [last] = d._batch.in_flight
    assert d.stats().preemptions == 0, "it waits for the step in flight"
    d.update(last, [1] * len(last.chunks))
    assert d.schedule().preempted


def test_a_reset_waits_for_the_steps_in_flight() -> None:
    d = scheduler(depth=2)
    start(d, "a", 4, 5)
    planned = plans(d, 2)
    d.drain("other weights")
    for plan in planned:
        with pytest.raises(StepOrderError, match="reset_cache was called before update"):
            d.reset_cache()
        d.update(plan, [1])
    d.reset_cache()
    assert step(d) == [("a", 0, 7)], "computed again, with the new weights"


# Other weights


def test_the_cache_is_reset_when_nothing_is_received() -> None:
    d = scheduler()
    start(d, "a", 4, 5)
    granted = ask(d, "b")
    d.receive("p0", Send(Header(AttemptKey("b", 1), 5, 1, granted.header.grant), 0, 0, 2, 0))
    [pull] = [each for each in actions(d) if isinstance(each, Pull)]
    with pytest.raises(HandoffsOpenError, match="1 hand-offs hold blocks"):
        d.reset_cache()
    d.drain("other weights")
    [abort] = [each.message for each in actions(d) if isinstance(each, Post)]
    assert isinstance(abort, Abort) and abort.reason == "other weights"
    assert refusal(ask(d, "c")) == ("draining", 0, 0)
    with pytest.raises(HandoffsOpenError):
        d.reset_cache()
    d.pull_fenced(pull.part_id)
    step(d)
    d.reset_cache()
    [running] = d.waiting
    assert running.status is RequestStatus.PREEMPTED
    assert step(d) == [("a", 0, 6)], "computed again, with the new weights"
    assert isinstance(ask(d, "c"), Grant)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_keeps_a_request_that_has_ended(is_reset: bool, is_stopped: bool) -> None:
    d = scheduler()
    [started] = start(d, max_new_tokens=3)
    assert isinstance(started, Started)
    request = weakref.ref(started.request)
    if is_reset:
        d.reset_cache()
    if is_stopped:
        d.give_up(started.key, "not wanted")
    while d.has_work:
        step(d)
    [ended] = actions(d)
    assert isinstance(ended, DecodeFailed if is_stopped else Finished)
    del started, ended
    gc.collect()
    assert request() is None


# No preemption where all is reserved


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=10),
    num_blocks=st.integers(10, 24),
    block_size=st.integers(1, 3),
    max_running=st.integers(1, 5),
    is_early=st.booleans(),
    shared=st.integers(0, 9),
    host_blocks=st.sampled_from([0, 6]),
)
def test_without_overcommitment_none_is_preempted(
    sizes: list[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    max_running: int,
    is_early: bool,
    shared: int,
    host_blocks: int,
) -> None:
    world = SteppedWorld(
        decode_blocks=num_blocks,
        block_size=block_size,
        max_running=max_running,
        order="early" if is_early else "prefill_complete",
        reserve_tokens=None,
        host_blocks=host_blocks,
    )
    for number, (num_tokens, max_new_tokens) in enumerate(sizes):
        own = max(num_tokens - shared, 0)
        world.ask([1] * (num_tokens - own) + [number] * own, max_new_tokens)
    world.until(lambda: len(world.model.answers) == len(world.requests))
    assert world.situations["preempted"] == world.d().stats().preemptions == 0


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    d = scheduler()
    for name in "abc":
        start(d, name, 4, 3)
        step(d)
        d.give_up(AttemptKey(name, 1), "late")
        failed = [each for each in actions(d) if isinstance(each, DecodeFailed)]
        assert failed == [DecodeFailed(AttemptKey(name, 1), "late")]
    assert (d._reasons, d._keys) == ({}, {})
