"""The prefill scheduler: chunks, offers and both orders."""

from __future__ import annotations

from radixkv.scheduler import Request
from radixkv.scheduler.handoff import (
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Hits,
    Message,
    Offer,
    PrefillFailed,
    Refuse,
    Send,
)
from radixkv.scheduler.handoff.records import unpack_records
from radixkv.scheduler.request import TokenLogprob

from .prefill_harness import PROMPT, actions, grant, posted, request, scheduler, step
from .worlds import SteppedWorld

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


def test_commit_has_the_log_probabilities_of_the_first_token() -> None:
    p, record = scheduler(token_budget=8), TokenLogprob(9, -0.5, 2, ((3, -0.25),))
    p.begin(Request("a", PROMPT, 4, logprobs=1), "d0")
    step(p)
    grant(p)
    plan = p.schedule()
    [computed] = plan.requests
    assert computed.logprobs == 1
    p.update(plan, [9], lambda: computed.output_logprobs.append(record))
    [commit] = posted(p, Commit)
    assert unpack_records(commit.first_record, [commit.first_token]) == [record]


def test_in_the_other_order_d_is_asked_when_the_prompt_is_computed() -> None:
    p = scheduler(order="prefill_complete")
    p.begin(request(), "d0")
    assert step(p) == [("a", 0, 4)]
    assert actions(p) == [], "D knows nothing of it"
    step(p, token=9)
    [ask] = posted(p, Ask)
    assert ask.header.peer_epoch is None
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
    assert actions(p) == [PrefillFailed(AttemptKey("a", 1), "aborted")]
    assert p.num_open == 0 and p.manager.match(PROMPT).num_tokens == 4, "it is computed"


def test_one_who_was_refused_after_computing_asks_again_and_keeps_its_blocks() -> None:
    p = scheduler(order="prefill_complete")
    p.begin(request(), "d0")
    step(p), step(p)
    p.tick(0.0)
    refuse = Refuse(Header(AttemptKey("a", 1), 7, 1), "out of blocks", 9, 3)
    for now in range(1, 30):
        p.receive("d0", refuse)
        actions(p)
        p.tick(float(now))
        assert len(posted(p, Ask)) == 1
    assert p.num_open == 1
    p.tick(30.0)
    [_, failed] = actions(p)
    text = "refused, out of blocks: 9 needed, 3 available"
    assert failed == PrefillFailed(AttemptKey("a", 1), text, is_busy=True)
    assert p.num_open == 0 and p.manager.match(PROMPT).num_tokens == 6


def test_an_attempt_that_is_refused_is_not_admitted_and_has_no_hits() -> None:
    p = scheduler()
    lease = p.manager.admit(p.manager.match(PROMPT))
    p.manager.publish(lease, PROMPT)
    p.manager.release(lease)
    for attempt in (1, 2, 3):
        p.begin(request(), "d0", attempt)
        step(p)
        p.receive("d0", Refuse(Header(AttemptKey("a", attempt), 7, 1), "out of blocks", 9, 3))
        assert (p.stats().admitted, p.stats().hit_tokens) == (0, 0)
        assert (p.manager.stats().admitted, p.manager.stats().hit_blocks) == (1 + attempt, 0)
    p.begin(request(), "d0", attempt=4)
    step(p)
    p.receive("d0", Grant(Header(AttemptKey("a", 4), 7, 1, 1), 0, 2))
    step(p)
    stats = p.stats()
    assert (stats.admitted, stats.hit_tokens, stats.prefill_tokens) == (1, 6, 1)
    assert p.manager.stats().hit_blocks == 3


def test_an_attempt_that_asks_after_computing_counts_its_hits_once() -> None:
    p = scheduler(order="prefill_complete")
    lease = p.manager.admit(p.manager.match(PROMPT))
    p.manager.publish(lease, PROMPT)
    p.manager.release(lease)
    p.begin(request(), "d0")
    assert step(p) == [("a", 6, 1)]
    for _ in range(2):
        p.receive("d0", Refuse(Header(AttemptKey("a", 1), 7, 1), "out of blocks", 9, 3))
    grant(p)
    assert (p.stats().hit_tokens, p.manager.stats().hit_blocks) == (6, 3)


def test_requests_and_their_tokens_are_counted_once_however_often_d_refuses() -> None:
    for order in ("early", "prefill_complete"):
        world = SteppedWorld(order=order, max_running=4, decode_blocks=8, reserve_tokens=None)
        for last in range(4):
            world.ask([*PROMPT, last], 4)
        world.finish()
        stats = world.p().stats()
        assert stats.admitted == 4 and world.d().stats().admitted == 4
        assert stats.hit_tokens + stats.prefill_tokens == 4 * 8
        assert order != "early" or world.situations["busy"] > 0


def test_what_can_never_be_granted_fails_for_good_in_either_order() -> None:
    for order in ("early", "prefill_complete"):
        p = scheduler(order=order)
        p.begin(request(), "d0")
        step(p), step(p)
        actions(p)
        p.receive("d0", Refuse(Header(AttemptKey("a", 1), 7, 1), "too large", 9, 3))
        assert actions(p) == [
            PrefillFailed(
                AttemptKey("a", 1), "refused, too large: 9 needed, 3 available", is_final=True
            )
        ]
        assert p.num_open == 0 and not p.has_work


# What is shared


def test_who_needs_a_block_that_another_computes_waits_for_it() -> None:
    world = SteppedWorld()
    for last in (1, 2):
        world.ask([*PROMPT, last])
    world.finish()
    stats = world.p().stats()
    assert stats.waits_for_leader > 0
    assert (stats.prefill_tokens, stats.hit_tokens) == (8 + 2, 6)


def test_who_waits_for_another_computes_it_if_that_fails() -> None:
    p = scheduler()
    for name in "ab":
        p.begin(request(name), "d0")
    step(p)
    assert [each.header.key.request_id for each in posted(p, Ask)] == ["a"], "b waits for a"
    p.give_up(AttemptKey("a", 1), "cancelled")
    step(p)
    assert [each.header.key.request_id for each in posted(p, Ask)] == ["b"]


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
    assert p.manager.stats().hit_blocks == 1, "on the device"
    assert commit.num_parts == 1, "all at once, as no part was offered before the copy"


def test_the_hit_that_commit_reports_leaves_the_token_that_is_computed() -> None:
    p, prompt = scheduler(), PROMPT[:6]
    lease = p.manager.admit(p.manager.match(prompt))
    p.manager.publish(lease, prompt)
    p.manager.release(lease)
    p.begin(request(prompt=prompt), "d0")
    step(p)
    grant(p)
    assert step(p) == [("a", 5, 1)]
    [commit] = posted(p, Commit)
    assert commit.hits == Hits(5, 0, 0)


def test_who_gives_up_an_older_attempt_leaves_the_newer() -> None:
    p = scheduler()
    p.begin(request(), "d0")
    p.begin(request(), "d0", attempt=2)
    failed = PrefillFailed(AttemptKey("a", 1), "a newer attempt has begun")
    assert actions(p) == [failed]
    for older in (AttemptKey("a", 1), AttemptKey("a", 3), AttemptKey("b", 2)):
        p.give_up(older, "late")
        assert actions(p) == [] and len(p.waiting) == 1
    p.give_up(AttemptKey("a", 2), "now")
    assert actions(p) == [PrefillFailed(AttemptKey("a", 2), "now")] and not p.has_work


def test_nothing_is_kept_of_prompts_that_are_computed_or_have_failed() -> None:
    p = scheduler(num_blocks=16)
    for name in "abc":
        p.begin(request(name), "d0")
        step(p)
        grant(p, name)
        step(p), step(p)
        p.begin(request(f"{name} fails"), "d0")
        p.abort(f"{name} fails")
    assert p.num_open == 3 and p._newest == {}
