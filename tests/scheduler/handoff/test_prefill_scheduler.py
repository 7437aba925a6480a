"""The prefill scheduler, story by story: what it computes, when, and what it keeps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from radixkv.kvcache import CacheManager, HostConfig, RequestTooLargeError
from radixkv.scheduler import (
    ConfigError,
    HandoffsOpenError,
    PrefillScheduler,
    Request,
    RequestError,
    StepOrderError,
)
from radixkv.scheduler.handoff import (
    Ask,
    Commit,
    Failed,
    Grant,
    Head,
    Message,
    Offer,
    Post,
    Refuse,
    Send,
    Timing,
    Withdraw,
)
from radixkv.scheduler.handoff.drive import settle

from .theatre import Theatre

PROMPT = [5, 6, 7, 8, 9, 4, 3]


def scheduler(num_blocks: int = 8, host: int = 0, **options: Any) -> PrefillScheduler:
    manager = CacheManager(num_blocks, 2, host=HostConfig(host) if host else None)
    sizes: dict[str, Any] = {"epoch": 1, "timing": Timing(), "token_budget": 4, "max_running": 2}
    return PrefillScheduler(manager, **(sizes | options))


def request(name: str = "a", prompt: list[int] = PROMPT, max_new_tokens: int = 4) -> Request:
    return Request(name, prompt, max_new_tokens)


def actions(p: PrefillScheduler) -> list[Any]:
    return [*p.take_actions()]


def posted(p: PrefillScheduler, kind: type) -> list[Any]:
    messages = [each.message for each in actions(p) if isinstance(each, Post)]
    return [message for message in messages if isinstance(message, kind)]


def grant(p: PrefillScheduler, name: str = "a", first_block: int = 0, number: int = 1) -> None:
    p.receive("d0", Grant(Head((name, 1), 7, 1, number), first_block))


def step(p: PrefillScheduler, token: int = 1) -> list[tuple[str, int, int]]:
    plan = p.schedule()
    if plan.chunks:
        p.update(plan, [token] * len(plan.chunks))
    return [(each.request.request_id, each.start, each.length) for each in plan.chunks]


# When a prompt is computed


def test_early_it_is_computed_after_the_grant_and_sent_chunk_by_chunk() -> None:
    p = scheduler()
    p.begin(Request("a", PROMPT, 4, stop_token_ids=[8, 2]), "d0")
    assert step(p) == []
    [ask] = posted(p, Ask)
    assert (ask.max_new_tokens, ask.num_groups, ask.block_size) == (4, 1, 2)
    assert step(p) == [], "D has not granted"
    grant(p)
    assert step(p) == [("a", 0, 4)]
    [send] = posted(p, Send)
    assert (send.first_block, send.num_blocks) == (0, 2)
    assert p.manager.match(PROMPT).num_tokens == 4, "a chunk is matchable when it is computed"
    assert step(p, token=9) == [("a", 4, 3)]
    send, commit = posted(p, Message)
    assert (send.first_block, send.num_blocks) == (2, 2)
    assert (commit.first_token, commit.position, commit.num_parts) == (9, 7, 2)
    assert commit.stop_token_ids == (2, 8)
    assert p.num_open == 1 and not p.has_work


def test_in_the_other_order_d_is_asked_when_the_prompt_is_computed() -> None:
    p = scheduler(order="prefill_complete")
    p.begin(request(), "d0")
    assert step(p) == [("a", 0, 4)]
    assert actions(p) == [], "D knows nothing of it"
    step(p, token=9)
    [ask] = posted(p, Ask)
    assert ask.head.peer_epoch is None
    grant(p, first_block=1)
    offer, send, commit = actions(p)
    assert isinstance(offer, Offer) and len(offer.blocks) == 3
    assert (send.message.first_block, send.message.num_blocks) == (1, 3)
    assert commit.message.first_token == 9


def test_d_hears_nothing_of_what_ends_before_it_is_asked() -> None:
    p = scheduler(order="prefill_complete")
    p.begin(request(), "d0")
    step(p)
    p.tick(100.0)
    assert p.num_open == 1, "nobody is waited for"
    p.abort("a")
    assert actions(p) == [Failed(("a", 1), "aborted")]
    assert p.num_open == 0 and p.manager.match(PROMPT).num_tokens == 4, "it is computed"


def test_one_who_was_refused_after_computing_asks_again_and_keeps_its_blocks() -> None:
    p = scheduler(order="prefill_complete")
    p.begin(request(), "d0")
    step(p), step(p)
    refuse = Refuse(Head(("a", 1), 7, 1), "out of blocks", 9, 3)
    for now in range(1, 30):
        p.receive("d0", refuse)
        actions(p)
        p.tick(float(now))
        assert len(posted(p, Ask)) == 1
    assert p.num_open == 1
    p.tick(30.0)
    [_, failed] = actions(p)
    text = "refused, out of blocks: 9 needed, 3 available"
    assert failed == Failed(("a", 1), text, is_busy=True)
    assert p.num_open == 0 and p.manager.match(PROMPT).num_tokens == 6


def test_an_attempt_that_is_refused_is_not_admitted_and_has_no_hits() -> None:
    p = scheduler()
    lease = p.manager.admit(p.manager.match(PROMPT))
    p.manager.publish(lease, PROMPT)
    p.manager.release(lease)
    for attempt in (1, 2, 3):
        p.begin(request(), "d0", attempt)
        step(p)
        p.receive("d0", Refuse(Head(("a", attempt), 7, 1), "out of blocks", 9, 3))
        assert (p.stats().admitted, p.stats().hit_tokens) == (0, 0)
    p.begin(request(), "d0", attempt=4)
    step(p)
    p.receive("d0", Grant(Head(("a", 4), 7, 1, 1), 0))
    step(p)
    stats = p.stats()
    assert (stats.admitted, stats.hit_tokens, stats.prefill_tokens) == (1, 6, 1)


def test_requests_and_their_tokens_are_counted_once_however_often_d_refuses() -> None:
    for order in ("early", "prefill_complete"):
        theatre = Theatre(order=order, max_running=4, decode_blocks=8, reserve_tokens=None)
        for last in range(4):
            theatre.submit([*PROMPT, last], 4)
        theatre.finish()
        stats = theatre.p().stats()
        assert stats.admitted == 4 and theatre.d().stats().admitted == 4
        assert stats.hit_tokens + stats.prefill_tokens == 4 * 8
        assert order != "early" or theatre.counts["refusals"] > 0


def test_what_can_never_be_granted_fails_for_good_in_either_order() -> None:
    for order in ("early", "prefill_complete"):
        p = scheduler(order=order)
        p.begin(request(), "d0")
        step(p), step(p)
        actions(p)
        p.receive("d0", Refuse(Head(("a", 1), 7, 1), "too large", 9, 3))
        assert actions(p) == [
            Failed(("a", 1), "refused, too large: 9 needed, 3 available", is_final=True)
        ]
        assert p.num_open == 0 and not p.has_work


# What is shared


def test_who_needs_a_block_that_another_computes_waits_for_it() -> None:
    theatre = Theatre()
    for last in (1, 2):
        theatre.submit([*PROMPT, last])
    theatre.finish()
    stats = theatre.p().stats()
    assert stats.waits_for_leader > 0
    assert (stats.prefill_tokens, stats.hit_tokens) == (8 + 2, 6)


def test_who_waits_for_another_computes_it_if_that_fails() -> None:
    p = scheduler()
    for name in "ab":
        p.begin(request(name), "d0")
    step(p)
    assert [each.head.key[0] for each in posted(p, Ask)] == ["a"], "b waits for a"
    p.give_up(("a", 1), "cancelled")
    step(p)
    assert [each.head.key[0] for each in posted(p, Ask)] == ["b"]


def test_what_the_host_has_is_copied_first_and_hits_are_counted_by_tier() -> None:
    for order in ("early", "prefill_complete"):
        check_host_hits(order)


def check_host_hits(order: str) -> None:
    p = scheduler(host=8, order=order)
    tiers = p.manager.tiers
    assert tiers is not None
    lease = p.manager.admit(p.manager.match(PROMPT))
    p.manager.publish(lease, PROMPT)
    p.manager.release(lease)
    p.manager.evict(2)
    [down] = tiers.take_operations()
    tiers.complete(down.id, [True] * down.num_blocks)
    p.begin(request(), "d0")
    assert step(p) == []
    grant(p)
    assert step(p) == [], "blocks are being copied"
    [up] = tiers.take_operations()
    tiers.complete(up.id, [True] * up.num_blocks)
    assert step(p) == [("a", 6, 1)]
    grant(p)
    [commit] = posted(p, Commit)
    assert (commit.hits.device, commit.hits.host, commit.hits.storage) == (2, 4, 0)
    assert commit.num_parts == 1, "all at once, as no part was offered before the copy"


# What leaves nothing behind


@pytest.mark.parametrize("how", ["refused", "given up", "silence", "aborted by D"])
def test_what_ends_before_it_is_computed_is_not_matchable(how: str) -> None:
    p = scheduler()
    p.begin(request(), "d0")
    step(p)
    head = Head(("a", 1), 7, 1)
    match how:
        case "refused":
            p.receive("d0", Refuse(head, "others wait", 1, 0))
        case "given up":
            assert p.abort("a")
        case "silence":
            p.tick(5.0)
        case _:
            grant(p)
            p.receive("d0", Grant(Head(("a", 1), 8, 1, 1), 0))
    [failed] = [each for each in actions(p) if isinstance(each, Failed)]
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
    assert actions(p) == [Failed(("b", 1), "aborted")]
    assert p.num_open == 1


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
    assert kinds[-2:] == [Failed, Withdraw]
    assert step(p) == []
    [ask] = posted(p, Ask)
    assert ask.head.key == ("a", 2)
    p.fenced(("a", 1))
    assert p.num_open == 1


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
    assert [each.key for each in actions(p) if isinstance(each, Failed)] == [("a", 2)]


def test_a_prompt_larger_than_the_pool_is_refused_and_changes_nothing() -> None:
    p = scheduler()
    p.begin(request(), "d0")
    with pytest.raises(RequestTooLargeError, match="17 tokens need 9 blocks"):
        p.begin(request("b", [1] * 17), "d0")
    assert [each.request_id for each in p.waiting] == ["a"]
    # Its output is not P's to hold.
    p.begin(request("c", [1] * 16, max_new_tokens=100), "d0")


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
    assert [each.key for each in actions(p) if isinstance(each, Failed)] == [("a", 1)]
    with pytest.raises(HandoffsOpenError):
        p.reset_cache()
    assert step(p) == [] and posted(p, Ask) == [], "b waits for the new weights"
    p.fenced(("a", 1))
    p.reset_cache()
    assert p.manager.match(PROMPT).num_tokens == 0
    step(p)
    assert [each.head.key[0] for each in posted(p, Ask)] == ["b"]


# Several peers


def test_one_p_speaks_with_several_d() -> None:
    p = scheduler(num_blocks=16)
    for name, peer in (("a", "d0"), ("b", "d1")):
        p.begin(request(name, [ord(name)] * 3), peer)
    step(p)
    assert [each.peer for each in actions(p) if isinstance(each, Post)] == ["d0", "d1"]
    p.receive("d1", Grant(Head(("a", 1), 7, 1, 1), 0))
    [declined] = actions(p)
    assert declined.peer == "d1" and declined.message.reason == "nobody asks"
    grant(p, "a")
    p.receive("d1", Grant(Head(("b", 1), 7, 1, 1), 0))
    assert step(p) == [("a", 0, 3), ("b", 0, 1)]


@pytest.mark.parametrize("order", ["early", "prefill_complete"])
@pytest.mark.parametrize("nodes", [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_any_number_of_p_and_d(order: str, nodes: tuple[int, int]) -> None:
    theatre = Theatre(order=order, num_prefill=nodes[0], num_decode=nodes[1])
    for last in range(6):
        theatre.submit([*PROMPT, last])
    theatre.finish()
    settle(theatre)
