"""The prefill scheduler when attempts end: pins, aborts, draining and resets."""

from __future__ import annotations

import re

import pytest

from radixkv.kvcache import RequestTooLargeError
from radixkv.scheduler import ConfigError, HandoffsOpenError, RequestError, StepOrderError
from radixkv.scheduler.handoff import (
    Abort,
    Ack,
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Message,
    Offer,
    Post,
    PrefillFailed,
    Refuse,
    Withdraw,
)

from .prefill_harness import PROMPT, actions, grant, posted, request, scheduler, step
from .worlds import SteppedWorld

# What leaves nothing behind


@pytest.mark.parametrize("how", ["refused", "given up", "silence", "aborted by D"])
def test_what_ends_before_it_is_computed_is_not_matchable(how: str) -> None:
    p = scheduler()
    p.begin(request(), "d0")
    step(p)
    header = Header(AttemptKey("a", 1), 7, 1)
    match how:
        case "refused":
            p.receive("d0", Refuse(header, "others wait", 1, 0))
        case "given up":
            assert p.abort("a")
        case "silence":
            p.tick(0.0)
            p.tick(5.0)
        case _:
            grant(p)
            p.receive("d0", Grant(Header(AttemptKey("a", 1), 8, 1, 1), 0, 2))
    [failed] = [each for each in actions(p) if isinstance(each, PrefillFailed)]
    assert failed.is_busy == (how == "refused")
    assert p.num_open == 0 and not p.has_work
    assert p.manager.match(PROMPT).num_tokens == 0
    assert p.manager.stats().free_blocks == 8


def test_one_who_waits_can_be_given_up() -> None:
    p = scheduler(num_blocks=4)
    for name in "ab":
        p.begin(request(name, [ord(name)] * 7), "d0")
    step(p)
    actions(p)
    assert p.abort("b") and not p.abort("b")
    assert actions(p) == [PrefillFailed(AttemptKey("b", 1), "aborted")]
    assert p.num_open == 1


@pytest.mark.parametrize(
    "how", ["given up", "aborted by D", "silence", "refused", "restart of D", "read by D"]
)
@pytest.mark.parametrize("is_granted", [False, True])
def test_the_end_of_an_attempt_leaves_a_newer_one_that_waits(how: str, is_granted: bool) -> None:
    p = scheduler(order="prefill_complete", token_budget=8)
    p.begin(request(), "d0")
    step(p)
    if is_granted:
        grant(p)
    p.begin(request(), "d1", attempt=2)
    actions(p)
    older = AttemptKey("a", 1)
    header = Header(older, 7, 1, 1)
    match how:
        case "given up":
            p.give_up(older, "cancelled")
        case "aborted by D":
            p.receive("d0", Abort(header, "cancelled", fenced=True))
        case "silence":
            p.tick(100.0)
        case "refused":
            p.receive("d0", Refuse(header, "block size", 2, 4))
        case "restart of D":
            p.receive("d0", Grant(Header(older, 8, 1, 1), 0, 2))
        case _:
            p.receive("d0", Ack(header))
    failed = [each.key for each in actions(p) if isinstance(each, PrefillFailed)]
    assert failed in ([], [older])
    assert step(p) == [("a", 6, 1)]
    [ask] = posted(p, Ask)
    assert ask.header.key == ("a", 2)


# In the middle of a step


def test_what_it_is_told_within_a_step_counts_after_it() -> None:
    p = scheduler()
    p.begin(request(), "d0")
    step(p)
    grant(p)
    plan = p.schedule()
    actions(p)
    p.abort("a")
    p.tick(1.0)
    assert actions(p) == [] and p.num_open == 1, "the step writes into its blocks"
    p.begin(request(), "d1", attempt=2)
    with pytest.raises(RequestError, match="attempt 2 of request 'a' is open"):
        p.begin(request(), "d1", attempt=2)
    p.update(plan, [1])
    kinds = [type(each.message if isinstance(each, Post) else each) for each in actions(p)]
    assert kinds[-2:] == [PrefillFailed, Withdraw]
    assert step(p) == []
    [ask] = posted(p, Ask)
    assert ask.header.key == ("a", 2)
    p.fenced(AttemptKey("a", 1))
    assert p.num_open == 1


@pytest.mark.parametrize("token_budget", [4, 8])
def test_an_attempt_that_begins_within_the_last_steps_of_an_older_one_can_be_aborted(
    token_budget: int,
) -> None:
    """The step computes a chunk of the older attempt, or all of it."""
    p = scheduler(token_budget=token_budget)
    p.begin(request(), "d0")
    step(p)
    grant(p)
    plan = p.schedule()
    p.begin(request(), "d1", attempt=2)
    p.update(plan, [1])
    actions(p)
    assert p.abort("a"), "the newer attempt waits"
    [failed] = [each for each in actions(p) if isinstance(each, PrefillFailed)]
    assert failed.key == ("a", 2)
    assert not p.has_work


def test_groups_of_layers_are_offered_while_the_step_runs() -> None:
    p = scheduler(num_groups=2, token_budget=8)
    p.begin(request(), "d0")
    step(p)
    grant(p)
    plan = p.schedule()
    actions(p)
    with pytest.raises(StepOrderError, match="group 1 was written, expected 0"):
        p.wrote(plan, 1)
    p.wrote(plan, 0)
    [offer] = [each for each in actions(p) if isinstance(each, Offer)]
    assert offer.group == 0 and p.manager.match(PROMPT).num_tokens == 0
    with pytest.raises(StepOrderError, match="update got 2 tokens for 1 chunks"):
        p.update(plan, [1, 1])
    p.update(plan, [1])
    [offer] = [each for each in actions(p) if isinstance(each, Offer)]
    assert offer.group == 1 and p.manager.match(PROMPT).num_tokens == 6


@pytest.mark.parametrize("state", ["asking", "asking when computed", "committed"])
@pytest.mark.parametrize("step_s", [0.0, 5.0, 60.0])
def test_a_long_step_leaves_d_all_of_its_time_to_answer(state: str, step_s: float) -> None:
    """What P sends at the end of a step is answered after it, as its node polls once a step."""
    is_late = state == "asking when computed"
    p = scheduler(order="prefill_complete" if is_late else "early", token_budget=8)
    p.tick(1.0)
    p.begin(request(), "d0")
    plan = p.schedule()
    if state == "committed":
        p.tick(1.0)
        grant(p)
        plan = p.schedule()
    if plan.chunks:
        p.update(plan, [1])
    sent = posted(p, Message)[-1]
    assert isinstance(sent, Commit if state == "committed" else Ask)
    end = 1.0 + step_s
    p.set_time(end)
    p.tick(end)
    assert p.num_open == 1 and posted(p, Message) == []
    p.tick(end + 0.9)
    assert posted(p, Message) == [], "it is sent again after retry_s"
    p.tick(end + 1.0)
    assert posted(p, Message) == [sent]
    p.tick(end + 4.9)
    assert p.num_open == 1
    p.tick(end + 5.0)
    assert any(isinstance(each, PrefillFailed) for each in actions(p))


def test_a_clock_that_advances_during_a_step_ends_nothing_within_it() -> None:
    """The deadlines of the hand-offs that are not computed pass at the first time after it."""
    p = scheduler(num_groups=2, token_budget=8)
    p.begin(request(), "d0")
    step(p)
    grant(p)
    p.begin(request("b", [1, 2, 3]), "d1")
    plan = p.schedule()
    actions(p)
    for now in (1.0, 6.0, 11.0):
        p.set_time(now)
        p.tick(now)
    assert actions(p) == [] and p.num_open == 2
    p.update(plan, [1])
    assert not any(isinstance(each, PrefillFailed) for each in actions(p))
    p.tick(16.0)
    [failed] = [each for each in actions(p) if isinstance(each, PrefillFailed)]
    assert failed.key.request_id == "b", "D does not answer since 1.0; the commit is new"
    assert p.num_open == 1
    p.tick(21.0)
    assert p.num_open == 1, "its blocks wait for the fence"
    assert [type(each) for each in actions(p)][-2:] == [PrefillFailed, Withdraw]


# Errors


def test_an_attempt_is_begun_once_and_a_newer_one_ends_it() -> None:
    p = scheduler()
    p.begin(request(), "d0", attempt=2)
    for attempt in (1, 2):
        with pytest.raises(RequestError, match="attempt 2 of request 'a' is open"):
            p.begin(request(), "d0", attempt)
    step(p)
    with pytest.raises(RequestError, match="attempt 2 of request 'a' is open"):
        p.begin(request(), "d0", attempt=1)
    actions(p)
    p.begin(request(), "d1", attempt=3)
    assert [each.key for each in actions(p) if isinstance(each, PrefillFailed)] == [("a", 2)]


def test_a_prompt_larger_than_the_pool_is_refused_and_changes_nothing() -> None:
    p = scheduler()
    p.begin(request(), "d0")
    for name, attempt in (("b", 1), ("b", 1), ("a", 2), ("a", 2)):  # the last is a newer attempt
        with pytest.raises(RequestTooLargeError, match="17 tokens need 9 blocks"):
            p.begin(request(name, [1] * 17), "d0", attempt)
    assert [each.request_id for each in p.waiting] == ["a"]
    assert actions(p) == []
    assert not p.abort("b")
    p.begin(request("b"), "d0")  # the same attempt, as it never began
    # Its output is not P's to hold.
    p.begin(request("c", [1] * 16, max_new_tokens=100), "d0")
    assert p.abort("a")
    assert [each.key for each in actions(p)] == [("a", 1)]


def test_an_order_that_is_none() -> None:
    text = "order must be one of ('early', 'prefill_complete'), got 'late'"
    with pytest.raises(ConfigError, match=re.escape(text)):
        scheduler(order="late")


# Other weights


def test_the_cache_is_reset_when_nobody_reads_it() -> None:
    p = scheduler()
    p.begin(request(), "d0")
    step(p)
    grant(p)
    step(p)
    with pytest.raises(HandoffsOpenError, match="1 hand-offs hold blocks: drain, and wait until"):
        p.reset_cache()
    p.begin(request("b"), "d0")
    p.drain("other weights")
    assert [each.key for each in actions(p) if isinstance(each, PrefillFailed)] == [("a", 1)]
    with pytest.raises(HandoffsOpenError):
        p.reset_cache()
    assert step(p) == [] and posted(p, Ask) == [], "b waits for the new weights"
    p.fenced(AttemptKey("a", 1))
    p.reset_cache()
    assert p.manager.match(PROMPT).num_tokens == 0
    step(p)
    assert [each.header.key.request_id for each in posted(p, Ask)] == ["b"]


@pytest.mark.parametrize("how", ["resume", "reset_cache"])
def test_what_waits_is_admitted_after_a_drain_and_not_before(how: str) -> None:
    """A drain during a step gives up what the step computes, at its end."""
    p = scheduler()
    p.begin(request(), "d0")
    step(p)
    grant(p)
    plan = p.schedule()
    p.drain("other weights")
    p.begin(request("b", [1, 2, 3]), "d0")
    actions(p)
    p.update(plan, [1])
    assert [each for each in actions(p) if isinstance(each, PrefillFailed)] == [
        PrefillFailed(AttemptKey("a", 1), "other weights")
    ]
    p.fenced(AttemptKey("a", 1))
    for _ in range(2):
        assert step(p) == [] and posted(p, Ask) == []
    assert p.num_open == 0 and [each.request_id for each in p.waiting] == ["b"]
    p.resume() if how == "resume" else p.reset_cache()
    assert p.manager.match(PROMPT).num_tokens == (4 if how == "resume" else 0)
    step(p)
    assert [each.header.key for each in posted(p, Ask)] == [("b", 1)]


# Several peers


def test_one_p_speaks_with_several_d() -> None:
    p = scheduler(num_blocks=16)
    for name, peer in (("a", "d0"), ("b", "d1")):
        p.begin(request(name, [ord(name)] * 3), peer)
    step(p)
    assert [each.peer for each in actions(p) if isinstance(each, Post)] == ["d0", "d1"]
    p.receive("d1", Grant(Header(AttemptKey("a", 1), 7, 1, 1), 0, 2))
    [declined] = actions(p)
    assert declined.peer == "d1" and declined.message.reason == "no such attempt is open"
    grant(p, "a")
    p.receive("d1", Grant(Header(AttemptKey("b", 1), 7, 1, 1), 0, 2))
    assert step(p) == [("a", 0, 3), ("b", 0, 1)]


@pytest.mark.parametrize("order", ["early", "prefill_complete"])
@pytest.mark.parametrize("nodes", [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_any_number_of_p_and_d(order: str, nodes: tuple[int, int]) -> None:
    world = SteppedWorld(order=order, num_prefill=nodes[0], num_decode=nodes[1])
    for last in range(6):
        world.ask([*PROMPT, last])
    world.finish()
    world.apply(["drain"])
