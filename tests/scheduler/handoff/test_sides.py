"""`PrefillSide`, `DecodeSide` and `RequestRetrier`: tiers, refusals and errors."""

from __future__ import annotations

import re
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest

from radixkv.kvcache import (
    CacheManager,
    CountError,
    HostConfig,
    OutOfBlocksError,
    RequestTooLargeError,
    TokenError,
)
from radixkv.scheduler import Request, RequestError, StepOrderError, handoff
from radixkv.scheduler.errors import RefusalReason, RefusedError
from radixkv.scheduler.gateway.node_reporter import NodeReporter
from radixkv.scheduler.gateway.retries import Answer, Begin, Cancel, RequestRetrier
from radixkv.scheduler.handoff import (
    PROTOCOL_VERSION,
    Abort,
    Ask,
    AttemptKey,
    DecodeSide,
    Grant,
    Header,
    Hits,
    Message,
    Order,
    Post,
    PrefillFailed,
    PrefillSide,
    Refuse,
    Renew,
    Timing,
)
from radixkv.scheduler.handoff.gateway_messages import (
    GATEWAY,
    MAX_PROGRESS_TOKENS,
    AttemptMessage,
    DeliveryAck,
    FollowAttempt,
    Progress,
)
from radixkv.scheduler.handoff.messages import MAX_REASON_CHARS
from radixkv.scheduler.request import TokenLogprob

from .harness import KEY, ORDERS, PROMPT, D, P, Pair


def with_host_copy(tokens: list[int]) -> CacheManager:
    """A manager with the whole blocks of some tokens in the host tier, and an empty device."""
    manager = CacheManager(8, 2, host=HostConfig(8))
    lease = manager.admit(manager.match(tokens))
    manager.publish(lease, tokens)
    manager.release(lease)
    manager.evict(8)
    finish_copy(manager)
    return manager


def finish_copy(manager: CacheManager, ok: bool = True) -> None:
    assert manager.tiers is not None
    [operation] = manager.tiers.take_operations()
    manager.tiers.complete(operation.id, [ok] * operation.num_blocks)


def posted(side: PrefillSide | DecodeSide) -> list[Message]:
    return [action.message for action in side.take_actions() if isinstance(action, Post)]


def ask(block_size: int = 2, version: int = PROTOCOL_VERSION, prompt: list[int] = PROMPT) -> Ask:
    tokens = np.array(prompt, "<i4").tobytes()
    return Ask(Header(KEY, 1, version=version), tokens, b"", block_size, 1, 4)


# Over tiers


@pytest.mark.parametrize(("ok", "first_block"), [(True, 2), (False, 0)])
def test_d_grants_what_it_lacks_after_the_load_from_the_host(ok: bool, first_block: int) -> None:
    side = DecodeSide(with_host_copy(PROMPT[:4]), epoch=1, timing=Timing())
    side.receive(P, ask())
    side.receive(P, ask())
    assert posted(side) == []
    side.tick(1.0)
    [sign] = posted(side)
    assert isinstance(sign, Renew), "P must not give up meanwhile"
    finish_copy(side._manager, ok)
    side.tick(1.5)
    [grant] = posted(side)
    assert isinstance(grant, Grant) and grant.first_block == first_block


@pytest.mark.parametrize("how", ["silence", "D drains", "ABORT", "restart of P", "too long"])
def test_d_gives_up_while_the_host_loads(how: str) -> None:
    side = DecodeSide(with_host_copy(PROMPT[:4]), epoch=1, timing=Timing())
    manager = side._manager
    assert manager.tiers is not None
    side.receive(P, ask())
    [operation] = manager.tiers.take_operations()
    match how:
        case "silence":
            side.tick(5.0)
        case "D drains":
            side.abort_receiving("other weights")
        case "ABORT":
            side.receive(P, Abort(Header(KEY, 1), "cancelled", fenced=False))
        case "restart of P":
            side.receive(P, Renew(Header(KEY, 2, 1)))
        case _:
            for now in range(1, 30):
                side.receive(P, ask())
                side.tick(float(now))
            assert side.num_open == 1
            side.receive(P, ask())
            side.tick(30.0)
    assert side.num_open == 0
    reasons = {
        "silence": "the prefill node is silent",
        "D drains": "other weights",
        "ABORT": "cancelled",
        "restart of P": "the prefill node restarted",
        "too long": "loading took too long",
    }
    abort = posted(side)[-1]
    assert isinstance(abort, Abort) and (abort.reason, abort.fenced) == (reasons[how], True)
    assert abort.is_lost == (how == "silence")
    assert manager.stats().private_blocks == 4, "the copy still writes"
    manager.tiers.complete(operation.id, [True] * operation.num_blocks)
    manager.check()
    assert manager.stats().private_blocks == 0


def test_p_sends_loaded_and_computed_blocks_together() -> None:
    pair = Pair(handoff)
    pair.p_manager = with_host_copy(PROMPT[:4])
    pair.p = PrefillSide(pair.p_manager, epoch=1, timing=Timing())
    pair.granted()
    assert posted(pair.p) == []
    with pytest.raises(StepOrderError):
        pair.p.computed(KEY, 7)
    finish_copy(pair.p_manager)
    pair.p.computed(KEY, 7)
    [send] = posted(pair.p)
    assert isinstance(send, handoff.Send) and (send.first_block, send.num_blocks) == (0, 4)


# Refusals


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (ask(block_size=65), "refused, block size: 65 here, 2 there"),
        (ask(prompt=[]), "refused, malformed: request 'r1' has an empty prompt"),
        (
            ask(version=PROTOCOL_VERSION + 1),
            f"refused, version: {PROTOCOL_VERSION + 1} here, {PROTOCOL_VERSION} there",
        ),
        (ask(prompt=[1] * 17), "refused, too large: 10 needed, 8 available"),
    ],
)
def test_an_impossible_ask_is_refused_for_good(message: Ask, reason: str) -> None:
    pair = Pair(handoff)
    pair.begin()
    pair.d.receive(P, message)
    [refusal] = pair.posted(pair.d)
    assert isinstance(refusal, Refuse)
    pair.p.receive(D, refusal)
    [failed] = pair.actions(pair.p, "PrefillFailed")
    assert (failed.reason, failed.is_final) == (reason, True)
    assert pair.are_empty()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("no" * 600), ("malformed", 0, 0, "no" * (MAX_REASON_CHARS // 2))),
        (TokenError("token 7"), ("malformed", 0, 0, "token 7")),
        (OutOfBlocksError(5, 3), ("out of blocks", 5, 3, "")),
        (RequestTooLargeError(17, 9, 8), ("too large", 9, 8, "")),
        (RefusedError("others wait", 2, 1), ("others wait", 2, 1, "")),
    ],
)
def test_p_hears_why_admission_fails(
    error: Exception, expected: tuple[RefusalReason, int, int, str]
) -> None:
    side = DecodeSide(CacheManager(8, 2), epoch=3, timing=Timing(), admit=Mock(side_effect=error))
    for _ in range(2):
        side.receive(P, ask())
        assert posted(side) == [Refuse(Header(KEY, 3, 1), *expected)]
    assert side.num_known == 0 and side.keys_of("r1") == []


def test_messages_of_another_version_change_nothing() -> None:
    pair = Pair(handoff)
    pair.d.receive(P, pair.begin())
    [grant] = pair.posted(pair.d)
    header = Header(KEY, 1, 1, 1, version=PROTOCOL_VERSION + 1)
    pair.p.receive(D, Grant(header, 0, 2))
    pair.d.receive(P, Abort(header, "no", fenced=False))
    assert pair.p.take_actions() == pair.d.take_actions() == []
    pair.p.receive(D, grant)
    assert pair.actions(pair.p, "Compute")


def test_an_unwanted_grant_is_declined() -> None:
    pair = Pair(handoff)
    grant = pair.granted()
    other = Grant(Header(KEY, 1, 1, grant.header.grant + 1), 0, 2)
    pair.p.receive(D, other)
    pair.p.receive(D, Grant(Header(AttemptKey("r9", 1), 1, 1, 7), 0, 2))
    assert [(each.header.key, each.header.grant, each.reason) for each in pair.posted(pair.p)] == [
        (KEY, 2, "granted twice"),
        (("r9", 1), 7, "no such attempt is open"),
    ]


def test_an_attempt_of_another_epoch_of_p_is_declined() -> None:
    pair = Pair(handoff)
    pair.granted()
    later = Ask(Header(KEY, 2), ask().prompt, b"", 2, 1, 4)
    pair.d.receive(P, later)
    [answer] = pair.posted(pair.d)
    assert isinstance(answer, Abort)
    assert answer.reason == "the attempt belongs to another epoch"


@pytest.mark.parametrize("how", ["a newer attempt has begun", "cancelled", "other weights"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_d_that_was_asked_hears_that_p_gives_up(order: Order, how: str) -> None:
    p = PrefillSide(CacheManager(8, 2), epoch=1, timing=Timing(), order=order)
    p.begin(KEY, D, Request("r1", PROMPT, 4))
    p.take_actions()
    match how:
        case "a newer attempt has begun":
            p.begin(AttemptKey("r1", 2), "d1", Request("r1", PROMPT, 4))
        case "cancelled":
            p.abort(KEY, how)
        case _:
            p.abort_all(how)
    first, *others = taken = p.take_actions()
    abort = Post(D, Abort(Header(KEY, 1), how, fenced=False))
    failed = PrefillFailed(KEY, how)
    if order == "early":
        assert [first, others[0]] == [abort, failed]
    else:
        assert first == failed and abort not in taken, "D was not asked"
    asked = [each.peer for each in taken if isinstance(each, Post) and each != abort]
    assert asked == ["d1"] * (order == "early" and how.startswith("a newer"))


# Errors


def test_p_has_no_room() -> None:
    pair = Pair(handoff)
    pair.p_manager.admit(pair.p_manager.match([1] * 10))
    text = "needs 4 blocks, but only 3 are free or evictable"
    with pytest.raises(OutOfBlocksError, match=text):
        pair.begin()
    assert pair.p.num_open == 0 and pair.p.take_actions() == []


def test_an_attempt_that_finds_no_room_leaves_the_older_one() -> None:
    pair = Pair(handoff)
    pair.begin()
    pair.p_manager.admit(pair.p_manager.match([1] * 4))
    with pytest.raises(OutOfBlocksError, match="needs 4 blocks, but only 2 are free or evictable"):
        pair.begin(2)
    assert pair.p.num_open == 1 and pair.p.take_actions() == []


def test_an_open_attempt_is_not_begun_again() -> None:
    pair = Pair(handoff)
    pair.begin()
    with pytest.raises(RequestError, match="attempt 1 of request 'r1' is open"):
        pair.begin()


def test_chunks_and_groups_come_in_order() -> None:
    pair = Pair(handoff, num_groups=2)
    pair.granted()

    def refused(num_tokens: int, group: int, expected: str) -> None:
        text = f"request 'r1' computed group {group} up to token {num_tokens}, expected {expected}"
        with pytest.raises(StepOrderError, match=text):
            pair.p.computed(KEY, num_tokens, group)

    refused(4, 1, "group 0 after token 0")
    refused(0, 0, "group 0 after token 0")
    refused(8, 0, "group 0 after token 0")
    pair.p.computed(KEY, 4, 0)
    refused(4, 0, "group 1 after token 0")
    refused(5, 1, "group 1 after token 0")
    with pytest.raises(StepOrderError, match="request 'r1' sampled after 0 of 7 tokens"):
        pair.p.sampled(KEY, 1, Hits())
    assert pair.p_manager.match(PROMPT).num_tokens == 0, "half of the layers are written"
    pair.p.computed(KEY, 4, 1)
    assert pair.p_manager.match(PROMPT).num_tokens == 4


def test_calls_about_ended_attempts_are_ignored() -> None:
    pair = Pair(handoff)
    pair.start()
    for _ in range(2):
        pair.d.finished(KEY)
    pair.d.pull_fenced(handoff.PartId(KEY, 1, 1, 1, 0))
    pair.d.abort(handoff.AttemptKey("r9", 1), "unknown")
    pair.p.abort(KEY, "cancelled")
    pair.p.take_actions()
    pair.p.abort(KEY, "cancelled")
    pair.p.computed(KEY, 99)
    pair.p.sampled(KEY, 1, Hits())
    pair.p.fenced(KEY)
    pair.p.fenced(KEY)
    assert pair.p.take_actions() == pair.d.take_actions() == []


def test_impossible_timing_is_rejected() -> None:
    text = (
        "needs 0 < retry_s < silence_s <= transfer_s and remember_s >= 0, got 5, 5.0, 30.0 and 60.0"
    )
    with pytest.raises(CountError, match=re.escape(text)):
        Timing(retry_s=5)


# The gateway


def test_remember_s_must_exceed_silence_s() -> None:
    text = (
        "remember_s must be more than silence_s 5, as an attempt that is forgotten sooner may "
        "begin twice; got 5"
    )
    with pytest.raises(CountError, match=f"^{re.escape(text)}$"):
        NodeReporter(1, Timing(remember_s=5.0))


def test_nothing_is_kept_of_attempts_that_were_reported() -> None:
    reporter = NodeReporter(1, Timing())
    for number in range(3):
        key, request = AttemptKey(str(number), 1), Request("r1", PROMPT, 4)
        reporter.report(handoff.Started(key, request, 0), 0.0)
        reporter.follow(FollowAttempt(key, 0))
        reporter.report(handoff.Finished(key, request), 0.0)
        for message in reporter.take_messages():
            if isinstance(message, AttemptMessage):
                reporter.acknowledge(GATEWAY, DeliveryAck.of(message))
    assert (reporter._decoding, reporter._followed, reporter.num_unacked) == ({}, {}, 0)


@pytest.mark.parametrize("logprobs", [None, 0, 5, 20])
@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_a_report_of_progress_has_a_bound_whatever_it_tells(
    logprobs: int | None, surplus: int
) -> None:
    """Two attempts have new tokens; a record of a token counts as the pairs that it has."""
    pairs = 1 if logprobs is None else 2 + logprobs
    reporter, most = NodeReporter(1, Timing()), MAX_PROGRESS_TOKENS // pairs
    num_tokens = {"first": most - 3, "second": 3 + surplus}
    for name, number in num_tokens.items():
        request = Request(name, PROMPT, MAX_PROGRESS_TOKENS, logprobs=logprobs)
        request.output_tokens += range(number)
        if logprobs is not None:
            record = TokenLogprob(1, -0.5, 1, tuple((each, -0.5) for each in range(logprobs)))
            request.output_logprobs += [record] * number
        reporter.report(handoff.Started(AttemptKey(name, 1), request, 0), 0.0)
        reporter.follow(FollowAttempt(AttemptKey(name, 1), 0))
    reporter.take_messages()
    told: Counter[str] = Counter()
    for now in (1.0, 2.0):
        reporter.report_progress(now)
        for message in reporter.take_messages():
            assert isinstance(message, Progress)
            assert sum(len(each.tokens) for each in message.attempts) <= most
            told.update({each.key.request_id: len(each.tokens) for each in message.attempts})
    assert told == num_tokens


def test_a_request_is_retried_and_answered_once() -> None:
    gateway = RequestRetrier(max_attempts=2, backoff_s=1, request_s=100)
    gateway.submit("a")
    with pytest.raises(RequestError, match="request 'a' is open"):
        gateway.submit("a")
    gateway.tick(0)
    assert gateway.take_actions() == [Begin(AttemptKey("a", 1))]
    gateway.prefill_failed(AttemptKey("a", 1), "no room")
    gateway.prefill_failed(AttemptKey("a", 1), "no room")
    gateway.tick(0.5)
    assert gateway.take_actions() == [Cancel(AttemptKey("a", 1))]
    gateway.tick(1)
    assert gateway.take_actions() == [Begin(AttemptKey("a", 2))]
    gateway.started(AttemptKey("a", 1))
    gateway.finished(AttemptKey("a", 1), (1, 2))
    assert gateway.take_actions() == [Cancel(AttemptKey("a", 1))], (
        "the older attempt is of no use any more"
    )
    gateway.started(AttemptKey("a", 2))
    gateway.prefill_failed(AttemptKey("a", 2), "ACK was lost")
    gateway.prefill_lost(AttemptKey("a", 2))
    assert gateway.take_actions() == []
    gateway.finished(AttemptKey("a", 2), (3,))
    gateway.finished(AttemptKey("a", 2), (3,))
    assert gateway.take_actions() == [Answer("a", (3,))]


def test_a_request_has_a_last_attempt_and_a_deadline() -> None:
    gateway = RequestRetrier(max_attempts=1, backoff_s=1, request_s=10)
    for name in "abc":
        gateway.submit(name)
    gateway.tick(0)
    gateway.take_actions()
    gateway.started(AttemptKey("a", 1))
    gateway.decode_failed(AttemptKey("a", 1), "it was cold")
    assert gateway.take_actions() == [
        Cancel(AttemptKey("a", 1)),
        Answer("a", None, "it was cold"),
    ]
    gateway.prefill_failed(AttemptKey("b", 1), "too large", is_final=True)
    assert gateway.take_actions()[-1] == Answer("b", None, "too large")
    gateway.tick(10)
    last = Answer("c", None, "not done in time: attempt 1 has not ended")
    assert gateway.take_actions() == [Cancel(AttemptKey("c", 1)), last]
    assert gateway.num_open == 0


@pytest.mark.parametrize("how", ["prefill", "decode", "pair"])
def test_an_attempt_that_is_lost_does_not_count(how: str) -> None:
    gateway = RequestRetrier(max_attempts=1, backoff_s=1, request_s=1e9, lost_s=50)
    gateway.submit("a")

    def lose(key: AttemptKey) -> None:
        if how == "prefill":
            gateway.prefill_lost(key)
        elif how == "decode":
            gateway.started(key)
            gateway.decode_lost(key)
        else:
            gateway.prefill_failed(key, "silence", is_lost=True)

    gateway.tick(100)
    for attempt in range(1, 27):
        key = AttemptKey("a", attempt)
        assert gateway.take_actions() == [Begin(key)]
        gateway.tick(98 + 2 * attempt)
        lose(key)
        if attempt < 26:
            assert gateway.take_actions() == [Cancel(key)]
        gateway.tick(100 + 2 * attempt)
    cancelled, answer = gateway.take_actions()
    assert cancelled == Cancel(key)
    assert isinstance(answer, Answer) and answer.tokens is None
    assert answer.reason.startswith("attempts were lost for 50 s: ")


def test_a_failed_attempt_counts_beside_lost_ones() -> None:
    gateway = RequestRetrier(max_attempts=2, backoff_s=1, request_s=1e9)
    gateway.submit("a")
    for attempt, is_lost in enumerate([True, False, True, False], 1):
        gateway.tick(2.0 * attempt)
        gateway.prefill_failed(AttemptKey("a", attempt), "no", is_lost=is_lost)
    assert gateway.take_actions()[-1] == Answer("a", None, "no")


def test_p_says_that_it_has_lost_d() -> None:
    for lose in ("silence", "restart", "abort"):
        pair = Pair(handoff)
        pair.d.receive(P, pair.begin())
        [grant] = pair.posted(pair.d)
        if lose == "silence":
            pair.p.tick(0.0)
            pair.p.tick(Timing().silence_s)
        elif lose == "restart":
            pair.p.receive(D, grant)
            pair.p.receive(D, Grant(Header(KEY, 2, 1, 1), 0, 2))
        else:
            pair.d.tick(Timing().silence_s)
            [abort] = [each for each in pair.posted(pair.d) if isinstance(each, Abort)]
            assert (abort.reason, abort.is_lost) == ("the prefill node is silent", True)
            pair.p.receive(D, abort)
        [failed] = pair.actions(pair.p, "PrefillFailed")
        assert failed.is_lost and not (failed.is_busy or failed.is_final), lose


@pytest.mark.parametrize("order", ORDERS)
def test_the_silence_of_d_begins_when_it_is_to_answer(order: Order) -> None:
    """However long P has computed without a word of D: COMMIT or ASK may not have reached it."""
    p = PrefillSide(CacheManager(8, 2), epoch=1, timing=Timing(), order=order)
    p.begin(KEY, D, Request("r1", PROMPT, 4))
    if order == "early":
        p.receive(D, Grant(Header(KEY, 1, 1, 1), 0, 2))
    p.tick(50.0)
    p.computed(KEY, len(PROMPT))
    p.sampled(KEY, 1, Hits())
    for later_s, failures in ((0.0, []), (0.99, []), (1.0, [True])):
        p.tick(60.0 + later_s * Timing().silence_s)
        ended = [each for each in p.take_actions() if isinstance(each, PrefillFailed)]
        assert [each.is_lost for each in ended] == failures


@pytest.mark.parametrize("kind", ["Grant", "Renew", "Refuse", "Abort", "Ack"])
@pytest.mark.parametrize("epoch", [4, 5, 6])
def test_what_another_life_or_grant_of_d_says(epoch: int, kind: str) -> None:
    """P declines what it would hold for nothing, and notes that D has restarted."""
    pair = Pair(handoff, decode_epoch=5)
    known = pair.granted().header
    pair.p.take_actions()
    header = Header(KEY, epoch, 1, known.grant + 1)
    messages: dict[str, Message] = {
        "Grant": Grant(header, 0, 2),
        "Renew": Renew(header),
        "Refuse": Refuse(header, "draining", 0, 0),
        "Abort": Abort(header, "no", fenced=True),
        "Ack": handoff.Ack(header),
    }
    pair.p.receive(D, messages[kind])
    reason = {4: "", 5: "granted twice", 6: "the decode node restarted"}[epoch]
    reply = Header(KEY, 1, epoch, header.grant)
    declined = [Post(D, Abort(reply, reason, fenced=False))]
    failed = [PrefillFailed(KEY, reason, is_lost=True)]
    is_declined = reason and kind in ("Grant", "Renew")
    assert pair.p.take_actions() == declined * bool(is_declined) + failed * (epoch == 6)
    assert pair.p.num_open == (epoch < 6)


def test_a_d_that_was_busy_and_has_granted_is_lost_if_it_is_silent() -> None:
    p = PrefillSide(CacheManager(8, 2), epoch=1, timing=Timing(), order="prefill_complete")
    p.begin(KEY, D, Request("r1", PROMPT, 4))
    p.computed(KEY, len(PROMPT))
    p.sampled(KEY, 1, Hits())
    p.receive(D, Refuse(Header(KEY, 1, 1), "out of blocks", 9, 3))
    p.receive(D, Grant(Header(KEY, 1, 1, 1), 0, 2))
    p.tick(0.0)
    p.take_actions()
    p.tick(Timing().silence_s)
    [failed] = [each for each in p.take_actions() if isinstance(each, PrefillFailed)]
    reason = "no answer from the decode node while committed"
    assert failed == PrefillFailed(KEY, reason, is_lost=True)


@pytest.mark.parametrize("state", ["computing", "committed", "given up", "given up after COMMIT"])
@pytest.mark.parametrize(
    "how", ["ABORT", "fenced ABORT", "ACK", "RENEW", "withdrawn", "given up", "silence"]
)
def test_p_holds_its_blocks_until_nobody_reads_them(state: str, how: str) -> None:
    pair = Pair(handoff)
    header = pair.granted().header
    pair.p.computed(KEY, len(PROMPT))
    has_commit = state in ("committed", "given up after COMMIT")
    if has_commit:
        pair.p.sampled(KEY, 1, Hits())
    is_withdrawn = state.startswith("given up")
    if is_withdrawn:
        pair.p.abort(KEY, "cancelled")
    pair.p.take_actions()
    match how:
        case "ABORT" | "fenced ABORT":
            pair.p.receive(D, Abort(header, "no", fenced=how == "fenced ABORT"))
        case "ACK":
            pair.p.receive(D, handoff.Ack(header))
        case "RENEW":
            pair.p.receive(D, Renew(header))
        case "withdrawn":
            pair.p.fenced(KEY)
        case "given up":
            pair.p.abort(KEY, "late")
        case _:
            pair.p.tick(1.0)
            pair.p.tick(1e9)
    ends = how == "fenced ABORT" or (how, has_commit) == ("ACK", True)
    ends = ends or (how == "withdrawn" and is_withdrawn)
    assert (pair.p.num_open, pair.p_manager.stats().live_leases) == (not ends, not ends)
    taken = pair.p.take_actions()
    has_failed = how in ("ABORT", "fenced ABORT", "given up") or (how == "silence" and has_commit)
    has_failed = has_failed and not is_withdrawn
    assert sum(isinstance(each, PrefillFailed) for each in taken) == has_failed
    withdrawn = [each for each in taken if isinstance(each, handoff.Withdraw)]
    is_read = how == "ACK" and state == "committed"
    assert withdrawn == [handoff.Withdraw(KEY, was_read=is_read)] * (has_failed or is_read)
    pair.p_manager.check()


@pytest.mark.parametrize(
    ("missing", "sent"),
    [((), []), ((1,), [1]), ((1, 0, 1), [0, 1]), ((-1, 2, 7, 0), [0]), ((-2, -1), [])],
)
def test_p_sends_each_part_that_d_misses_once(missing: tuple[int, ...], sent: list[int]) -> None:
    pair = Pair(handoff)
    header = pair.granted().header
    for num_tokens in (4, len(PROMPT)):
        pair.p.computed(KEY, num_tokens)
    sends = [each for each in posted(pair.p) if isinstance(each, handoff.Send)]
    assert len(sends) == 2
    pair.p.receive(D, Renew(header, missing))
    assert posted(pair.p) == [], "COMMIT tells D how many there are"
    pair.p.sampled(KEY, 1, Hits())
    posted(pair.p)
    pair.p.receive(D, Renew(header, missing))
    assert posted(pair.p) == [sends[part] for part in sent]


@pytest.mark.parametrize("first_block", [-1, 0, 1, 3, 4, 5])
def test_p_sends_the_blocks_that_d_lacks_and_declines_what_is_impossible(first_block: int) -> None:
    p = PrefillSide(CacheManager(8, 2), epoch=1, timing=Timing(), order="prefill_complete")
    p.begin(KEY, D, Request("r1", PROMPT, 4))
    p.computed(KEY, len(PROMPT))
    p.sampled(KEY, 1, Hits())
    p.take_actions()
    header = Header(KEY, 1, 1, 3)
    p.receive(D, Grant(header, first_block, 2))
    sent = posted(p)
    if 0 <= first_block <= 4:
        num_parts = int(first_block < 4)
        parts = [handoff.Send(header, 0, first_block, 4 - first_block, 0)] * num_parts
        commit = handoff.Commit(header, num_parts, 1, len(PROMPT), Hits())
        assert sent == [*parts, commit]
    else:
        [abort] = sent
        text = f"granted from block {first_block} of 2 tokens on, of a prompt of 7 in blocks of 2"
        assert abort == Abort(header, text, fenced=False) and p.num_open == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_blocks_that_another_has_published_are_freed_unless_d_reads_them(
    num_groups: int, order: Order
) -> None:
    manager = CacheManager(8, 2)
    p = PrefillSide(manager, epoch=1, timing=Timing(), num_groups=num_groups, order=order)
    keys = [KEY, AttemptKey("r2", 1)]
    for key in keys:
        p.begin(key, D, Request(key.request_id, PROMPT, 4))
        if order == "early":
            p.receive(D, Grant(Header(key, 1, 1, 1), 0, 2))
    for key in keys:
        for group in range(num_groups):
            p.computed(key, 6, group)
    offered = [each for each in p.take_actions() if isinstance(each, handoff.Offer)]
    assert len(offered) == (2 * num_groups if order == "early" else 0)
    is_read = order == "early" and num_groups > 1  # the first group was offered before
    assert manager.stats().free_blocks == (0 if is_read else 3)


@pytest.mark.parametrize("how", ["ACK", "fenced ABORT", "withdrawn"])
def test_what_was_not_published_while_d_read_it_is_published_at_the_end(how: str) -> None:
    """Another has published the first two blocks; the third one is new."""
    manager = CacheManager(8, 2)
    p = PrefillSide(manager, epoch=1, timing=Timing(), num_groups=2)
    keys = [KEY, AttemptKey("r2", 1)]
    for key in keys:
        p.begin(key, D, Request(key.request_id, PROMPT, 4))
        p.receive(D, Grant(Header(key, 1, 1, 1), 0, 2))
    for key, num_tokens in ((keys[0], 4), (keys[1], 4), (keys[1], len(PROMPT))):
        for group in (0, 1):
            p.computed(key, num_tokens, group)
    assert manager.match(PROMPT).num_tokens == 4
    header = Header(keys[1], 1, 1, 1)
    match how:
        case "ACK":
            p.sampled(keys[1], 1, Hits())
            p.receive(D, handoff.Ack(header))
        case "fenced ABORT":
            p.receive(D, Abort(header, "no", fenced=True))
        case _:
            p.abort(keys[1], "cancelled")
            assert manager.match(PROMPT).num_tokens == 4
            p.fenced(keys[1])
    assert p.num_open == 1 and manager.match(PROMPT).num_tokens == 6
    manager.check()


def test_p_has_not_lost_a_busy_d_nor_one_that_gives_up() -> None:
    pair = Pair(handoff)
    pair.d.receive(P, pair.begin())
    pair.posted(pair.d)
    pair.d.abort(KEY, "no")
    [abort] = pair.posted(pair.d)
    assert isinstance(abort, Abort) and not abort.is_lost
    pair.p.receive(D, abort)
    [failed] = pair.actions(pair.p, "PrefillFailed")
    assert not failed.is_lost


def test_p_has_lost_no_d_that_answers_too_late() -> None:
    pair = Pair(handoff)
    header = pair.granted().header
    pair.p.computed(KEY, len(PROMPT))
    pair.p.sampled(KEY, 1, Hits())
    for now in range(int(Timing().transfer_s) + 1):
        pair.p.receive(D, Renew(header))
        pair.p.tick(float(now))
    [failed] = pair.actions(pair.p, "PrefillFailed")
    assert failed.reason == "no answer from the decode node while committed"
    assert not (failed.is_lost or failed.is_busy or failed.is_final)


def test_p_gives_up_as_busy_a_d_that_receives_the_same_blocks_for_too_long() -> None:
    pair = Pair(handoff)
    header = Header(KEY, 1, pair.begin().header.epoch)
    for now in range(int(Timing().transfer_s) + 1):
        pair.p.receive(D, Renew(header))
        pair.p.tick(float(now))
    [failed] = pair.actions(pair.p, "PrefillFailed")
    assert failed.reason == "the decode node receives the same blocks for another request"
    assert failed.is_busy and not (failed.is_lost or failed.is_final)


def test_p_asks_again_when_the_time_has_passed_since_it_asked() -> None:
    p = PrefillSide(CacheManager(8, 2), epoch=1, timing=Timing(), order="prefill_complete")
    p.begin(KEY, D, Request("r1", PROMPT, 4))
    p.tick(50.0)
    p.computed(KEY, len(PROMPT))
    p.sampled(KEY, 1, Hits())
    [asked] = posted(p)
    for later_s, expected in ((0.0, []), (0.99, []), (1.0, [asked])):
        p.tick(60.0 + later_s * Timing().retry_s)
        assert posted(p) == expected
