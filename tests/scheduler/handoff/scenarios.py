"""Scenarios of the protocol, for the package or for a copy of it with a planted bug."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from types import ModuleType
from typing import Final

import numpy as np

from radixkv.kvcache import CacheManager
from radixkv.spec.harness.handoff.drain import run_rounds
from radixkv.spec.harness.handoff.world import HandoffWorld

from .harness import KEY, ORDERS, PROMPT, VOCABULARY, D, P, Pair, lossy
from .planted import gateway_of
from .worlds import world_of


def succeeds_at_once(h: ModuleType, world: HandoffWorld) -> None:
    [answer] = world.model.answers.values()
    assert answer.tokens is not None, answer.reason
    assert world.gateway.num_open() == 0
    assert world.situations["started"] == world.situations["attempt"] == 1


def one_request(h: ModuleType) -> None:
    succeeds_at_once(h, lossy(h)[0])


def any_message_is_lost(h: ModuleType) -> None:
    for order in ORDERS:
        for number in range(lossy(h, order=order)[1] + 2):
            succeeds_at_once(h, lossy(h, [number], order=order)[0])


def any_message_is_duplicated(h: ModuleType) -> None:
    for order in ORDERS:
        for number in range(lossy(h, order=order)[1]):
            succeeds_at_once(h, lossy(h, doubled=[number], order=order)[0])


def any_message_is_late(h: ModuleType) -> None:
    for order in ORDERS:
        for number in range(lossy(h, order=order)[1]):
            succeeds_at_once(h, lossy(h, postponed=[number], order=order)[0])


def either_node_may_crash_at_any_message(h: ModuleType) -> None:
    for order in ORDERS:
        for number in range(lossy(h, order=order)[1]):
            for node in (P, D):
                world, _ = lossy(h, fault=(number, [["crash", node]]), order=order)
                [answer] = world.model.answers.values()
                assert answer.tokens is not None, answer.reason


def any_two_messages_are_lost(h: ModuleType, order: str) -> None:
    total = max(lossy(h, [number], order=order)[1] for number in range(lossy(h, order=order)[1]))
    for pair in combinations(range(total + 1), 2):
        succeeds_at_once(h, lossy(h, pair, order=order)[0])


def an_older_attempt_does_not_end_a_newer_one(h: ModuleType) -> None:
    pair = Pair(h)
    old = pair.begin()
    new = pair.begin(2)
    pair.d.receive(P, new)
    pair.posted(pair.d)
    pair.d.receive(P, old)
    [answer] = pair.posted(pair.d)
    assert isinstance(answer, h.Abort) and answer.header.key == KEY and answer.fenced
    assert pair.d_manager.stats().live_leases == 1


def a_newer_attempt_ends_an_older_one(h: ModuleType) -> None:
    pair = Pair(h)
    start = pair.start()
    newer = h.Ask(
        h.Header(h.AttemptKey("r1", 2), 1), np.array(PROMPT, np.int32).tobytes(), b"", 2, 1, 4
    )
    pair.d.receive(P, newer)
    [stop] = pair.actions(pair.d, "Stop")
    assert stop.key == start.key


def a_message_to_an_older_epoch_of_d_is_declined(h: ModuleType) -> None:
    pair = Pair(h)
    ask = pair.begin()
    pair.d.receive(P, ask)
    pair.p.receive(D, pair.posted(pair.d)[0])
    pair.p.computed(KEY, len(PROMPT))
    [send] = pair.posted(pair.p)
    pair.d = h.DecodeSide(CacheManager(8, 2), epoch=2, timing=h.Timing())
    pair.d.receive(P, ask)  # a late copy
    pair.d.take_actions()
    pair.d.receive(P, send)
    [post] = pair.d.take_actions()
    assert isinstance(post.message, h.Abort), "it is taken for one of the new epoch"
    pair.p.receive(D, post.message)
    failed, withdraw = pair.p.take_actions()
    assert failed.reason == "the decode node restarted"
    assert withdraw == h.Withdraw(KEY)
    # That the new life of D reads nothing does not say so of what the old one began.
    assert pair.p_manager.stats().live_leases == 1
    pair.p.fenced(KEY)
    assert pair.p_manager.stats().live_leases == 0


def d_gives_up_a_silent_p(h: ModuleType) -> None:
    pair = Pair(h)
    pair.granted()
    pair.d.tick(4.9)
    assert pair.d.num_open == 1
    pair.d.tick(5.0)
    assert pair.posted(pair.d)[-1].reason == "the prefill node is silent"
    assert pair.d.num_open == 0 and pair.d_manager.stats().live_leases == 0


def p_gives_up_a_silent_d(h: ModuleType) -> None:
    pair = Pair(h)
    pair.begin()
    pair.p.tick(0.0)
    pair.p.tick(5.0)
    [failed] = pair.actions(pair.p, "PrefillFailed")
    assert failed.reason == "no answer from the decode node while asking"
    assert pair.are_empty()
    pair.committed()
    pair.p.tick(5.0)
    pair.p.tick(10.0)
    [failed] = pair.actions(pair.p, "PrefillFailed")
    assert failed.reason == "no answer from the decode node while committed"
    pair.p.fenced(KEY)
    assert pair.p_manager.stats().live_leases == 0


def a_pull_times_out(h: ModuleType) -> None:
    pair = Pair(h)
    sends, _ = pair.committed()
    pair.d.receive(P, sends[0])
    [pull] = pair.actions(pair.d, "Pull")
    for now in range(1, 30):
        pair.d.tick(float(now))
        pair.d.receive(P, h.Renew(sends[0].header))
    assert pair.actions(pair.d, "CancelPull") == []
    pair.d.tick(30.0)
    cancel, post = pair.d.take_actions()
    assert isinstance(cancel, h.CancelPull)
    assert post.message.reason == "receiving took too long" and not post.message.fenced
    assert cancel.part_id == pull.part_id and pair.d_manager.stats().live_leases == 1
    pair.d.pull_fenced(pull.part_id)
    assert pair.d_manager.stats().live_leases == 0


def a_part_outside_the_grant_is_not_pulled(h: ModuleType) -> None:
    pair = Pair(h)
    lease = pair.d_manager.admit(pair.d_manager.match(PROMPT))
    pair.d_manager.publish(lease, PROMPT[:4])
    grant = pair.granted()
    assert grant.first_block == 2
    header = h.Header(KEY, 1, 1, grant.header.grant)
    pair.d.receive(P, h.Send(header, 0, 1, 3, 0))
    [post] = pair.d.take_actions()
    assert isinstance(post, h.Post), "a shared block would be written"
    assert post.message.reason == "part 0 lies outside the grant"
    assert pair.d.num_open == 0


def an_incomplete_prompt_does_not_start(h: ModuleType) -> None:
    pair = Pair(h)
    grant = pair.granted()
    header = h.Header(KEY, 1, 1, grant.header.grant)
    pair.d.receive(P, h.Commit(header, 0, 1, len(PROMPT), h.Hits()))
    [abort] = pair.posted(pair.d)
    assert abort.reason == "the parts do not cover the prompt" and pair.d.num_open == 0


def a_first_token_outside_the_vocabulary_does_not_start(h: ModuleType) -> None:
    for token in (-(2**31), -1, VOCABULARY, 2**31 - 1):
        pair = Pair(h)
        sends, commit = pair.committed()
        pair.d.receive(P, sends[0])
        [pull] = pair.actions(pair.d, "Pull")
        pair.d.receive(P, replace(commit, first_token=token))
        assert leases(pair) == 1, "its pull may still write"
        pair.d.pull_fenced(pull.part_id)
        abort = pair.posted(pair.d)[-1]
        assert abort.reason == f"first token {token} is outside the vocabulary of 50"
        assert abort.fenced and pair.d_manager.match(PROMPT).num_tokens == 0
        pair.p.receive(D, abort)
        assert pair.are_empty()


def leases(pair: Pair) -> int:
    return int(pair.d_manager.stats().live_leases)


def two_equal_prompts_are_sent_once(h: ModuleType) -> None:
    for order in ORDERS:
        for num_groups in (1, 2):
            world = world_of(h, num_groups=num_groups, order=order)
            sent = []
            for name in ("r1", "r2"):
                world.apply(["submit", name, PROMPT, 1, 1])
                run_rounds(world)
                sent.append(world.situations["block sent"])
            assert all(answer.tokens is not None for answer in world.model.answers.values())
            # Of 7 tokens in blocks of 2, the second request lacks the last, half a block.
            assert sent == [4 * num_groups, 5 * num_groups]
            assert world.situations["token cached on D"] == world.situations["token hit on P"] == 6


def a_prompt_is_matchable_when_decoding_starts(h: ModuleType) -> None:
    pair = Pair(h)
    pair.granted()
    assert pair.d_manager.match(PROMPT).num_tokens == 0, "it is promised, not there"
    pair = Pair(h)
    start = pair.start()
    assert pair.d_manager.match(PROMPT).num_tokens == 6
    commit = start.commit
    assert (commit.first_token, commit.position, commit.sampling.seed) == (1, 7, 3)


def a_failed_pull_holds_its_blocks_until_it_is_fenced(h: ModuleType) -> None:
    pair = Pair(h)
    sends, commit = pair.committed()
    for message in (*sends, commit):
        pair.d.receive(P, message)
    [pull] = pair.actions(pair.d, "Pull")
    pair.d.pull_failed(pull.part_id, fenced=False, reason="it was lost")
    [abort] = pair.posted(pair.d)
    assert isinstance(abort, h.Abort) and not abort.fenced
    assert abort.reason == "part 0 could not be pulled: it was lost"
    assert pair.d_manager.stats().live_leases == 1
    # P may be read as long, whatever D says.
    pair.p.receive(D, abort)
    assert pair.p_manager.stats().live_leases == 1
    pair.d.pull_fenced(pull.part_id)
    [abort] = pair.posted(pair.d)
    assert abort.fenced and pair.d_manager.match(PROMPT).num_tokens == 0
    pair.p.receive(D, abort)
    assert pair.are_empty()


def offered_blocks_stay_when_another_request_publishes_the_same(h: ModuleType) -> None:
    pair = Pair(h, num_groups=2)
    pair.granted()
    pair.p.computed(KEY, len(PROMPT), 0)
    [offer] = pair.actions(pair.p, "Offer")
    other = pair.p_manager.admit(pair.p_manager.match(PROMPT))
    pair.p_manager.publish(other, PROMPT)
    pair.p.computed(KEY, len(PROMPT), 1)
    [later] = pair.actions(pair.p, "Offer")
    assert later.blocks == offer.blocks, "the first group was offered in other blocks"
    pair.p.sampled(KEY, 1, h.Hits())
    [commit] = pair.posted(pair.p)
    pair.p.receive(D, h.Ack(h.Header(KEY, 1, 1, commit.header.grant)))
    pair.p_manager.release(other)
    assert pair.p_manager.stats().private_blocks == 0


def a_chunk_is_published_with_its_last_group(h: ModuleType) -> None:
    pair = Pair(h, num_groups=2)
    pair.granted()
    pair.p.computed(KEY, len(PROMPT), 0)
    assert pair.p_manager.match(PROMPT).num_tokens == 0, "group 1 of the KV is not written yet"
    pair.p.computed(KEY, len(PROMPT), 1)
    whole = len(PROMPT) - len(PROMPT) % pair.p_manager.block_size
    assert pair.p_manager.match(PROMPT).num_tokens == whole


def a_refused_prompt_is_not_matchable(h: ModuleType) -> None:
    pair = Pair(h)
    held = pair.d_manager.admit(pair.d_manager.match([1] * 10))
    pair.d.receive(P, pair.begin())
    [refusal] = pair.posted(pair.d)
    assert isinstance(refusal, h.Refuse)
    assert (refusal.reason, refusal.needed, refusal.available) == ("out of blocks", 4, 3)
    pair.p.receive(D, refusal)
    [failed] = pair.actions(pair.p, "PrefillFailed")
    assert failed.reason == "refused, out of blocks: 4 needed, 3 available"
    assert not failed.is_final
    pair.d_manager.release(held)
    for manager in (pair.p_manager, pair.d_manager):
        assert manager.match(PROMPT).num_tokens == 0
        assert manager.stats().free_blocks == 8


def temporary_refusals_are_no_failures(h: ModuleType) -> None:
    retries = gateway_of(h).retries
    gateway = retries.RequestRetrier(max_attempts=1, backoff_s=1, request_s=100)
    gateway.submit("a")
    for attempt in range(1, 5):
        gateway.tick(2.0 * attempt)
        assert gateway.take_actions()[-1] == retries.Begin(h.AttemptKey("a", attempt))
        gateway.prefill_failed(h.AttemptKey("a", attempt), "refused", is_busy=True)
    gateway.tick(10.0)
    gateway.take_actions()
    gateway.prefill_failed(h.AttemptKey("a", 5), "broken")
    expected = [retries.Cancel(h.AttemptKey("a", 5)), retries.Answer("a", None, "broken")]
    assert gateway.take_actions() == expected


SCENARIOS: Final[list[Callable[[ModuleType], None]]] = [
    one_request,
    an_older_attempt_does_not_end_a_newer_one,
    a_newer_attempt_ends_an_older_one,
    a_message_to_an_older_epoch_of_d_is_declined,
    d_gives_up_a_silent_p,
    p_gives_up_a_silent_d,
    a_pull_times_out,
    a_part_outside_the_grant_is_not_pulled,
    an_incomplete_prompt_does_not_start,
    a_first_token_outside_the_vocabulary_does_not_start,
    two_equal_prompts_are_sent_once,
    a_prompt_is_matchable_when_decoding_starts,
    a_failed_pull_holds_its_blocks_until_it_is_fenced,
    offered_blocks_stay_when_another_request_publishes_the_same,
    a_chunk_is_published_with_its_last_group,
    a_refused_prompt_is_not_matchable,
    temporary_refusals_are_no_failures,
    # They take most of the time, so that a hunt for a bug comes to them last.
    any_message_is_lost,
    any_message_is_duplicated,
    any_message_is_late,
    either_node_may_crash_at_any_message,
]
