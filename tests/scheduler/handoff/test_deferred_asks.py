"""A request that needs a block in flight for another waits for it, and is not forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.kvcache import CacheManager
from radixkv.scheduler import DecodeScheduler, PrefillScheduler, Request
from radixkv.scheduler.handoff import (
    Abort,
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Hits,
    Message,
    Post,
    PrefillFailed,
    Pull,
    Renew,
    Send,
    Timing,
)
from radixkv.scheduler.handoff.deferred_asks import MAX_DEFERRED

from .decode_harness import actions, refusal, scheduler
from .worlds import SteppedWorld

PROMPT = [5, 6, 7, 8, 9]


def posted(d: DecodeScheduler) -> list[Any]:
    return [each.message for each in actions(d) if isinstance(each, Post)]


def ask(
    d: DecodeScheduler,
    name: str,
    prompt: list[int] = PROMPT,
    *,
    attempt: int = 1,
    namespace: bytes = b"",
) -> Any:
    """Send an ASK; return the answer."""
    tokens = np.array(prompt, "<i4").tobytes()
    d.receive("p0", Ask(Header(AttemptKey(name, attempt), 5), tokens, namespace, 2, 1, 1))
    [answer] = posted(d)
    return answer


def arrive(d: DecodeScheduler, granted: Grant) -> list[Any]:
    """Send a whole prompt; return D's messages."""
    header = Header(granted.header.key, 5, 1, granted.header.grant)
    d.receive("p0", Send(header, 0, granted.first_block, 3 - granted.first_block, 0))
    [pull] = [each for each in actions(d) if isinstance(each, Pull)]
    d.pulled(pull.part_id)
    d.receive("p0", Commit(header, 1, 9, len(PROMPT), Hits()))
    return posted(d)


def deferred(d: DecodeScheduler, *names: str) -> Grant:
    """Ask for the first, which is granted, and the others, which are deferred; return the grant."""
    first, *others = names
    granted = ask(d, first)
    assert isinstance(granted, Grant)
    for name in others:
        answer = ask(d, name)
        assert isinstance(answer, Renew) and answer.header == Header(AttemptKey(name, 1), 1, 5)
    return granted


def test_deferred_asks_are_granted_the_rest_when_the_block_has_arrived() -> None:
    d = scheduler()
    granted = deferred(d, "a", "b", "c")
    assert d.num_open == d.manager.stats().live_leases == 1, "who is held holds nothing"
    ack, *grants = arrive(d, granted)
    assert ack.header.key == ("a", 1)
    assert [(each.header.key.request_id, each.first_block) for each in grants] == [
        ("b", 2),
        ("c", 2),
    ]


def test_a_deferred_ask_is_granted_if_the_other_attempt_fails() -> None:
    d = scheduler()
    granted = deferred(d, "a", "b", "c")
    d.give_up(AttemptKey("a", 1), "cancelled")
    abort, grant, renew = posted(d)
    assert (abort.header.key, grant.header.key, grant.first_block) == (("a", 1), ("b", 1), 0)
    assert isinstance(renew, Renew) and renew.header.key == ("c", 1), "it waits for b now"
    assert grant.header.grant > granted.header.grant


def test_a_repeated_ask_keeps_its_place() -> None:
    d = scheduler()
    deferred(d, "a", "b", "c")
    assert isinstance(ask(d, "b"), Renew)
    d.give_up(AttemptKey("a", 1), "cancelled")
    assert [each.header.key.request_id for each in posted(d)] == ["a", "b", "c"]


def test_a_prompt_without_a_shared_block_is_not_deferred() -> None:
    d = scheduler()
    deferred(d, "a")
    assert isinstance(ask(d, "b", [5, 1, 7]), Grant)
    assert isinstance(ask(d, "c", [5]), Grant)
    assert isinstance(ask(d, "d", namespace=b"n"), Grant)


def test_a_prompt_that_shares_little_is_not_deferred() -> None:
    d = scheduler()
    deferred(d, "a")
    assert isinstance(ask(d, "b", [5, 6, 7, 8, 1]), Renew)
    assert isinstance(ask(d, "c", [5, 6, 7, 8, 1, 2, 3, 4]), Renew)
    assert isinstance(ask(d, "d", [5, 6, 7, 8, 1, 2, 3, 4, 5]), Grant)
    assert isinstance(ask(d, "e", [5, 6, 1, 2, 3]), Grant)


def test_an_ended_attempt_is_not_granted() -> None:
    for how in ("aborted by P", "given up", "aborted", "silence", "a newer attempt"):
        check_ended(how)


def check_ended(how: str) -> None:
    d = scheduler()
    granted = deferred(d, "a", "b")
    match how:
        case "aborted by P":
            d.receive("p0", Abort(Header(AttemptKey("b", 1), 5), "cancelled", fenced=False))
        case "given up":
            d.give_up(AttemptKey("b", 1), "cancelled")
            d.give_up(AttemptKey("b", 1), "cancelled")
        case "aborted":
            assert d.abort("b") and not d.abort("b")
        case "silence":
            for now in (4.0, 8.0):
                d.receive("p0", Renew(Header(granted.header.key, 5, 1, granted.header.grant)))
                d.tick(now)
            actions(d)
        case _:
            assert isinstance(ask(d, "b", [1], attempt=2), Grant)
            assert ask(d, "b").reason == "a newer attempt has begun"
    if how in ("given up", "aborted"):
        [abort] = posted(d)
        assert isinstance(abort, Abort) and abort.fenced
    actions(d)
    assert [each.header.key.request_id for each in arrive(d, granted)] == ["a"], how


def test_a_node_cannot_abort_the_ask_of_another() -> None:
    d = scheduler()
    granted = deferred(d, "a", "b")
    d.receive("p1", Abort(Header(AttemptKey("b", 1), 5), "no", fenced=False))
    actions(d)
    assert [each.header.key.request_id for each in arrive(d, granted)] == ["a", "b"]


def test_an_older_attempt_is_not_deferred_beside_a_newer_one() -> None:
    d = scheduler()
    deferred(d, "a")
    assert isinstance(ask(d, "b", attempt=2), Renew)
    assert ask(d, "b").reason == "a newer attempt has begun"


def quarantined_beside_deferred() -> tuple[DecodeScheduler, Grant, Pull]:
    """Attempt 1 of b, whose pull may still write, and attempt 2, which waits for a."""
    d = scheduler()
    older = ask(d, "b")
    d.receive("p0", Send(Header(AttemptKey("b", 1), 5, 1, older.header.grant), 0, 0, 3, 0))
    [pull] = [each for each in actions(d) if isinstance(each, Pull)]
    d.give_up(AttemptKey("b", 1), "cancelled")
    actions(d)
    granted = ask(d, "a")
    assert isinstance(granted, Grant) and isinstance(ask(d, "b", attempt=2), Renew)
    return d, granted, pull


@pytest.mark.parametrize("how", ["given up", "aborted by P", "ABORT of a later one"])
def test_the_end_of_another_attempt_leaves_the_deferred_one(how: str) -> None:
    d, granted, _ = quarantined_beside_deferred()
    attempt = 3 if how == "ABORT of a later one" else 1
    if how == "given up":
        d.give_up(AttemptKey("b", attempt), "late")
    else:
        d.receive("p0", Abort(Header(AttemptKey("b", attempt), 5), "late", fenced=False))
    assert all(each.header.key.attempt == attempt for each in posted(d))
    answers = arrive(d, granted)
    assert [each.header.key for each in answers] == [("a", 1), ("b", 2)]
    assert isinstance(answers[-1], Grant)


def test_an_abort_of_a_request_ends_what_is_deferred_and_what_is_in_quarantine() -> None:
    d, granted, pull = quarantined_beside_deferred()
    assert d.abort("b")
    [abort] = posted(d)
    assert abort == Abort(Header(AttemptKey("b", 2), 1, 5), "aborted", fenced=True)
    d.pull_fenced(pull.part_id)
    [abort] = posted(d)
    assert abort.header.key == ("b", 1) and abort.fenced
    assert not d.abort("b")
    assert [each.header.key.request_id for each in arrive(d, granted)] == ["a"]


def test_a_deferred_ask_is_refused_when_d_drains() -> None:
    d = scheduler()
    deferred(d, "a", "b")
    d.drain("other weights")
    _, refused = posted(d)
    assert refusal(refused) == ("draining", 0, 0)


def test_the_number_of_deferred_asks_is_limited() -> None:
    d = scheduler(max_running=200, token_budget=200, num_blocks=16)
    deferred(d, *[f"r{number}" for number in range(1 + MAX_DEFERRED)])
    assert isinstance(ask(d, "r1"), Renew), "it is deferred already"
    assert isinstance(ask(d, "one more"), Grant)


# What P makes of it


def asking() -> PrefillScheduler:
    manager, timing = CacheManager(8, 2), Timing()
    p = PrefillScheduler(manager, epoch=5, timing=timing, token_budget=8, max_running=2)
    p.begin(Request("a", PROMPT, 1), "d0")
    p.schedule()
    p.take_actions()
    return p


def test_an_ask_deferred_for_too_long_counts_as_busy() -> None:
    p = asking()
    p.tick(0.0)
    for now in range(1, 30):
        p.receive("d0", Renew(Header(AttemptKey("a", 1), 1, 5)))
        p.tick(float(now))
        [again] = p.take_actions()
        assert isinstance(again, Post) and isinstance(again.message, Ask)
    p.tick(30.0)
    [_, failed] = p.take_actions()
    text = "the decode node receives the same blocks for another request"
    assert failed == PrefillFailed(AttemptKey("a", 1), text, is_busy=True)


def test_a_renew_from_before_the_grant_may_arrive_after_it() -> None:
    p = asking()
    p.receive("d0", Grant(Header(AttemptKey("a", 1), 1, 5, 1), 0, 2))
    p.take_actions()
    p.receive("d0", Renew(Header(AttemptKey("a", 1), 1, 5)))
    assert p.take_actions() == [], "an ABORT would end what was granted"
    plan = p.schedule()
    p.update(plan, [1])
    messages: list[Message] = [each.message for each in p.take_actions() if isinstance(each, Post)]
    assert isinstance(messages[-1], Commit)


def test_equal_prompts_at_the_same_time_are_sent_once() -> None:
    for order in ("early", "prefill_complete"):
        world = SteppedWorld(order=order, num_prefill=2)
        for _ in range(4):
            world.ask([*PROMPT, 1, 2], 2)
        world.finish()
        # Of 7 tokens in blocks of 2, all but one lack only the last, half a block.
        assert world.situations["block sent"] == 4 + 3
        assert world.situations["attempt"] == 4
