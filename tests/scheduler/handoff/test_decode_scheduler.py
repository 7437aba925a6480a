"""The decode scheduler, story by story: whom it lets in, and how it goes on alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.scheduler import DecodeScheduler, HandoffsOpenError, RequestStatus, SamplingParams
from radixkv.scheduler.handoff import (
    Abort,
    Ask,
    Commit,
    Finished,
    Grant,
    Head,
    Hits,
    Post,
    Pull,
    Refuse,
    Send,
    Started,
    Stopped,
    Timing,
)

from .theatre import Theatre


def scheduler(num_blocks: int = 16, host: int = 0, **options: Any) -> DecodeScheduler:
    manager = CacheManager(num_blocks, 2, host=HostConfig(host) if host else None)
    sizes: dict[str, Any] = {
        "epoch": 1,
        "timing": Timing(),
        "token_budget": 8,
        "max_running": 4,
        "reserve_tokens": 0,
    }
    return DecodeScheduler(manager, **(sizes | options))


def actions(d: DecodeScheduler) -> list[Any]:
    return [*d.take_actions()]


def ask(
    d: DecodeScheduler,
    name: str = "a",
    num_tokens: int = 4,
    max_new_tokens: int = 1,
    *,
    peer: str = "p0",
    attempt: int = 1,
    tokens: bytes | None = None,
) -> Any:
    """Ask for a prompt of the name's letter; return the answer."""
    prompt = np.full(num_tokens, ord(name), "<i4").tobytes() if tokens is None else tokens
    d.receive(peer, Ask(Head((name, attempt), 5), prompt, b"", 2, 1, max_new_tokens))
    messages = [each.message for each in actions(d) if isinstance(each, Post)]
    return messages[-1]


def send(d: DecodeScheduler, granted: Grant, num_blocks: int, commit: Commit) -> None:
    """Send all of a prompt that D lacks."""
    head = Head(granted.head.key, 5, 1, granted.head.grant)
    if num_blocks:
        d.receive("p0", Send(head, 0, granted.first_block, num_blocks, 0))
        [pull] = [each for each in actions(d) if isinstance(each, Pull)]
        d.pulled(pull.ticket)
    d.receive("p0", commit)


def start(
    d: DecodeScheduler, name: str = "a", num_tokens: int = 4, max_new_tokens: int = 3, **more: Any
) -> list[Any]:
    """Hand a request over; return what D reports."""
    granted = ask(d, name, num_tokens, max_new_tokens)
    assert isinstance(granted, Grant), granted
    return hand_over(d, granted, num_tokens, **more)


def hand_over(d: DecodeScheduler, granted: Grant, num_tokens: int, **more: Any) -> list[Any]:
    """Send and commit what was granted; return what D reports."""
    num_blocks = -(-num_tokens // 2) - granted.first_block
    head = Head(granted.head.key, 5, 1, granted.head.grant)
    commit = Commit(head, bool(num_blocks), 9, num_tokens, Hits(1, 2, 0), **more)
    send(d, granted, num_blocks, commit)
    return [each for each in actions(d) if not isinstance(each, Post)]


def step(d: DecodeScheduler, token: int = 1) -> list[tuple[str, int, int]]:
    plan = d.schedule()
    if plan.chunks:
        d.update(plan, [token] * len(plan.chunks))
    return [(each.request.request_id, each.start, each.length) for each in plan.chunks]


# Whom it lets in


def refusal(answer: Any) -> tuple[str, int, int]:
    assert isinstance(answer, Refuse), answer
    return answer.reason, answer.needed, answer.available


def test_what_is_received_takes_a_slot() -> None:
    d = scheduler(max_running=2)
    assert isinstance(ask(d, "a"), Grant)
    start(d, "b")
    assert refusal(ask(d, "c")) == ("out of slots", 3, 2)


def test_blocks_are_kept_for_what_is_received_and_runs() -> None:
    for reserve, kept in ((0, 1), (4, 3), (None, 6)):
        check_reservation(reserve, kept)


def check_reservation(reserve: int | None, kept: int) -> None:
    # Each may come to 4 + 12 tokens: 8 blocks, of which its prompt has 2. A token is handed over,
    # which needs a third; within 4 more tokens it needs 5.
    for is_running in (False, True):
        d = scheduler(num_blocks=64, reserve_tokens=reserve)
        if is_running:
            start(d, "a", 4, 13)
        else:
            ask(d, "a", 4, 13)
        held = d.manager.admit(d.manager.match([1] * (128 - 4 - 2 * (2 + kept + 6))))
        # The guard wants 6 blocks for the neediest, whatever the horizon is.
        needed = 2 + max(2 * kept, 6)
        free = d.manager.available
        assert free == 2 + kept + 6
        if free < needed:
            assert refusal(ask(d, "b", 4, 13)) == ("out of blocks", needed, free)
        else:
            spare = free - needed
            assert spare == 0 or d.manager.admit(d.manager.match([2] * 2 * spare))
            assert isinstance(ask(d, "b", 4, 13), Grant)
            assert refusal(ask(d, "c", 4, 13))[0] == "out of blocks"
        d.manager.release(held)


def test_the_token_that_is_handed_over_needs_a_slot() -> None:
    d = scheduler(num_blocks=5)
    ask(d, "a", 4, 2)  # 2 blocks, and a third for the first token
    assert refusal(ask(d, "b", 4, 2)) == ("out of blocks", 4, 3)


def test_the_guard_counts_on_no_block_that_is_received() -> None:
    d = scheduler(num_blocks=10)
    start(d, "a", 4, 13)  # 2 blocks, and up to 6 more
    assert refusal(ask(d, "b", 6, 1)) == ("out of blocks", 9, 8)
    assert isinstance(ask(d, "b", 4, 1), Grant)


def test_the_guard_counts_on_what_others_have_published() -> None:
    d = scheduler(num_blocks=13)
    start(d, "a", 12, 13)  # 6 blocks, all published, and up to 6 more
    assert start(d, "b", 2, 17), "it lacks 8: 6 are left, and 6 come free if a is preempted"
    while d.has_work:
        step(d)
    assert d.stats().preemptions > 0
    assert len([each for each in actions(d) if isinstance(each, Finished)]) == 2


def test_the_guard_counts_on_no_block_of_an_attempt_whose_pulls_may_still_write() -> None:
    d = scheduler(num_blocks=14)
    start(d, "a", 12, 3)
    prompt = np.array([ord("a")] * 12 + [1, 2], "<i4").tobytes()
    granted = ask(d, "x", tokens=prompt)
    d.receive("p0", Send(Head(("x", 1), 5, 1, granted.head.grant), 0, 6, 1, 0))
    d.give_up(("x", 1), "cancelled")
    actions(d)
    assert refusal(ask(d, "b", 2, 17)) == ("out of blocks", 9, 7)


def test_the_guard_leaves_room_for_what_is_received() -> None:
    d = scheduler(num_blocks=9)
    ask(d, "a", 4, 13)  # 2 blocks, and up to 6 more
    assert refusal(ask(d, "b", 4, 1)) == ("out of blocks", 8, 7)


def test_what_it_has_is_not_granted_again() -> None:
    d = scheduler()
    start(d, "a", 5, 1)
    again = ask(d, "a", 5, 1, attempt=2)
    assert isinstance(again, Grant) and again.first_block == 2


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"num_tokens": 4, "max_new_tokens": 30}, ("too large", 17, 16)),
        ({"tokens": b""}, ("malformed", 0, 0)),
        ({"tokens": b"12345"}, ("malformed", 0, 0)),
        ({"max_new_tokens": 0}, ("malformed", 0, 0)),
    ],
)
def test_what_can_never_run_is_refused(how: dict, expected: tuple[str, int, int]) -> None:
    d = scheduler()
    assert refusal(ask(d, "a", **how)) == expected
    assert d.num_open == 0


def test_what_fits_alone_is_not_too_large() -> None:
    assert isinstance(ask(scheduler(), "a", 4, 29), Grant)
    assert refusal(ask(scheduler(), "a", 4, 30)) == ("too large", 17, 16)


def test_one_node_does_not_speak_for_another() -> None:
    d = scheduler()
    granted = ask(d, "a")
    twin = ask(d, "a", peer="p1")
    assert isinstance(twin, Abort) and twin.reason == "the attempt is known of another epoch"
    d.receive("p1", Abort(Head(("a", 1), 5, 1, granted.head.grant), "no", fenced=False))
    [post] = actions(d)
    assert post.peer == "p1" and post.message.reason == "nothing is granted"
    assert d.num_open == 1


# What it does with what has arrived


def test_it_decodes_with_what_commit_said() -> None:
    d = scheduler()
    sampling = SamplingParams(temperature=1.0, seed=7)
    [started] = start(d, max_new_tokens=3, sampling=sampling, stop_token_ids=(2,))
    assert isinstance(started, Started) and started.num_own_tokens == 0
    request = started.request
    assert request.output_tokens == [9] and request.sampling == sampling
    hits = request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens
    assert hits == (1, 2, 0), "as P counted them"
    assert step(d) == [("a", 4, 1)]
    assert step(d, token=2) == [("a", 5, 1)]
    [finished] = actions(d)
    assert isinstance(finished, Finished) and finished.request is request
    assert (request.output_tokens, request.finish_reason) == ([9, 1, 2], "stop")
    assert d.num_open == 0 and d.manager.stats().live_leases == 0
    assert d.manager.match([97] * 4 + [9, 1]).num_tokens == 6, "outputs are cached"


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
    """Three that decode, and no room for all of them."""
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
    assert stats.hit_tokens == 0, "hits are counted by P, once"
    assert [each[0] for each in chunks if each[2] > 1], "computed in chunks"
    ended = [each.key[0] for each in actions(d) if isinstance(each, Finished)]
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
    assert ended == ([] if state == "receiving" else [Stopped((name, 1), "aborted")])
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
    head = Head(("a", 2), 5, 1, granted.head.grant)
    send(d, granted, 0, Commit(head, 0, 9, 4, Hits()))
    d.give_up(("a", 1), "again")
    d.update(plan, [1])
    reports = [each for each in actions(d) if not isinstance(each, Post)]
    assert [(type(each), each.key[1]) for each in reports] == [(Started, 2), (Stopped, 1)]
    while d.has_work:
        step(d)
    assert [each.key[1] for each in actions(d) if isinstance(each, Finished)] == [2]
    assert d.num_open == 0


# Other weights


def test_the_cache_is_reset_when_nothing_is_received() -> None:
    d = scheduler()
    start(d, "a", 4, 5)
    granted = ask(d, "b")
    d.receive("p0", Send(Head(("b", 1), 5, 1, granted.head.grant), 0, 0, 2, 0))
    [pull] = [each for each in actions(d) if isinstance(each, Pull)]
    with pytest.raises(HandoffsOpenError, match="1 hand-offs hold blocks"):
        d.reset_cache()
    d.drain("other weights")
    [abort] = [each.message for each in actions(d) if isinstance(each, Post)]
    assert isinstance(abort, Abort) and abort.reason == "other weights"
    assert refusal(ask(d, "c")) == ("draining", 0, 0)
    with pytest.raises(HandoffsOpenError):
        d.reset_cache()
    d.pull_fenced(pull.ticket)
    step(d)
    d.reset_cache()
    [running] = d.waiting
    assert running.status is RequestStatus.PREEMPTED
    assert step(d) == [("a", 0, 6)], "computed again, with the new weights"
    assert isinstance(ask(d, "c"), Grant)


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
    theatre = Theatre(
        decode_blocks=num_blocks,
        block_size=block_size,
        max_running=max_running,
        order="early" if is_early else "prefill_complete",
        reserve_tokens=None,
        host_blocks=host_blocks,
    )
    for number, (num_tokens, max_new_tokens) in enumerate(sizes):
        own = max(num_tokens - shared, 0)
        theatre.submit([1] * (num_tokens - own) + [number] * own, max_new_tokens)
    theatre.until(lambda: len(theatre.answers) == len(theatre.jobs))
    assert theatre.counts["preemptions"] == theatre.d().stats().preemptions == 0
