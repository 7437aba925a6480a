"""`DecodeSide`: quarantine, stale messages, and memory of ended attempts."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest

from radixkv.scheduler import handoff
from radixkv.scheduler.handoff import (
    Abort,
    Ack,
    AttemptKey,
    CancelPull,
    Commit,
    Header,
    Hits,
    PartId,
    Post,
    Pull,
    Renew,
    Send,
    Start,
    Stop,
)

from .harness import KEY, PROMPT, VOCABULARY, P, Pair


def pulling() -> tuple[Pair, list[Pull]]:
    """A pair with a pull in flight for each of two layer groups."""
    pair = Pair(handoff, num_groups=2)
    pair.granted()
    for group in (0, 1):
        pair.p.computed(KEY, len(PROMPT), group)
    for send in pair.posted(pair.p):
        pair.d.receive(P, send)
    pulls = [action for action in pair.d.take_actions() if isinstance(action, Pull)]
    assert len(pulls) == 2
    return pair, pulls


def leases(pair: Pair) -> int:
    return pair.d_manager.stats().live_leases


def test_quarantine_ends_with_the_last_fence() -> None:
    pair, (first, second) = pulling()
    pair.d.abort(KEY, "cancelled")
    pair.d.pull_fenced(first.part_id)
    assert leases(pair) == 1, "the other pull may still write"
    pair.d.pull_fenced(first.part_id)
    assert leases(pair) == 1
    pair.d.pulled(second.part_id)  # it ends well, too late
    assert leases(pair) == 0 and pair.d_manager.match(PROMPT).num_tokens == 0


@pytest.mark.parametrize("how", ["failed", "ABORT", "silence", "restart of P", "newer attempt"])
@pytest.mark.parametrize("last", ["pulled", "failed", "failed late", "fenced"])
def test_blocks_are_held_until_nothing_writes_into_them(how: str, last: str) -> None:
    """D cancels each pull, and tells P at once, and again when its blocks are read no more."""
    pair, pulls = pulling()
    part_ids = [pull.part_id for pull in pulls]
    header = Header(KEY, 1, 1, part_ids[0].grant)
    reason = "the prefill node restarted"
    match how:
        case "failed":
            pair.d.pull_failed(part_ids[1], fenced=False, reason="it was lost")
            reason = "part 1 could not be pulled: it was lost"
        case "ABORT":
            pair.d.receive(P, Abort(header, "cancelled", fenced=False))
            reason = "cancelled"
        case "silence":
            pair.d.tick(5.0)
            reason = "the prefill node is silent"
        case "restart of P":
            pair.d.receive(P, Renew(replace(header, epoch=2)))
        case _:
            ask = replace(pair.begin(2), num_groups=1)
            pair.d.receive(P, ask)
            reason = "a newer attempt has begun"
    first, second, posted, *others = pair.d.take_actions()
    assert [first, second] == [CancelPull(each) for each in part_ids]
    reply, is_lost = Header(KEY, 1, 1, header.grant), how == "silence"
    assert posted == Post(P, Abort(reply, reason, False, is_lost))
    assert len(others) == (how == "newer attempt")
    assert pair.d.keys_of("r1")[0] == KEY
    assert [each.request_id for each in pair.d.quarantined] == ["r1"]
    before, request = leases(pair), pair.d.quarantined[0]
    for number, part_id in enumerate(part_ids):
        assert (leases(pair), pair.d.take_actions()) == (before, []), "a pull may still write"
        match last:
            case "pulled":
                pair.d.pulled(part_id)
            case "failed":
                pair.d.pull_failed(part_id, fenced=True, reason="cancelled")
            case "failed late":
                pair.d.pull_failed(part_id, fenced=False, reason="again")
                assert (leases(pair), pair.d.take_actions()) == (before, []), number
                pair.d.pull_fenced(part_id)
            case _:
                pair.d.pull_fenced(part_id)
    assert leases(pair) == before - 1 and pair.d.quarantined == []
    assert request.lease is None
    assert pair.d.take_actions() == [Post(P, Abort(reply, reason, True, is_lost))]
    assert pair.d_manager.match(PROMPT).num_tokens == 0


def test_the_end_of_a_pull_that_is_not_open_changes_nothing() -> None:
    pair, (first, second) = pulling()
    pair.d.pulled(first.part_id)
    pair.d.pulled(first.part_id)
    pair.d.pull_failed(first.part_id, fenced=True, reason="it was lost")
    assert pair.d.take_actions() == []
    pair.d.abort(KEY, "cancelled")
    assert leases(pair) == 1, "the second pull is open"
    pair.d.pull_fenced(second.part_id)
    assert leases(pair) == 0


@pytest.mark.parametrize("other", [{"grant": 9}, {"part": 9}, {"key": AttemptKey("r1", 2)}])
@pytest.mark.parametrize("is_given_up", [False, True])
def test_the_end_of_a_pull_of_another_grant_or_attempt_changes_nothing(
    other: dict, is_given_up: bool
) -> None:
    pair, pulls = pulling()
    if is_given_up:
        pair.d.abort(KEY, "cancelled")
        pair.d.take_actions()
    for pull in pulls:
        unknown = pull.part_id._replace(**other)
        pair.d.pulled(unknown)
        for fenced in (False, True):
            pair.d.pull_failed(unknown, fenced=fenced, reason="it was lost")
        pair.d.pull_fenced(unknown)
    assert pair.d.take_actions() == [] and leases(pair) == 1
    pair.d.abort(KEY, "cancelled")
    pair.d.pull_fenced(pulls[0].part_id)
    assert leases(pair) == 1, "the other pull may still write"
    pair.d.pull_fenced(pulls[1].part_id)
    assert leases(pair) == 0


def test_a_message_about_another_grant_is_declined() -> None:
    pair = Pair(handoff)
    grant = pair.granted()
    stale = Header(KEY, 1, 1, grant.header.grant + 1)
    pair.d.receive(P, Send(stale, 0, 0, 4, 0))
    [abort] = pair.posted(pair.d)
    assert isinstance(abort, Abort) and abort.fenced and abort.header.grant == stale.grant
    assert leases(pair) == 1


def test_d_gives_up_attempts_of_a_restarted_p() -> None:
    pair = Pair(handoff)
    grant = pair.granted().header.grant
    pair.d.receive(P, Renew(Header(KEY, 0, 1, grant)))
    assert pair.d.take_actions() == [] and leases(pair) == 1, "an older life says nothing"
    pair.d.receive(P, Renew(Header(KEY, 2, 1, grant)))
    [abort] = pair.posted(pair.d)
    assert abort.reason == "the prefill node restarted" and leases(pair) == 0


def test_a_started_attempt_continues_without_p() -> None:
    pair = Pair(handoff)
    start = pair.start()
    header = Header(KEY, 1, 1, start.commit.header.grant)
    pair.d.receive(P, Abort(Header(KEY, 2, 1, header.grant), "restarted", fenced=False))
    pair.d.tick(59.0)
    assert pair.d.take_actions() == []
    pair.d.receive(P, Abort(header, "no answer", fenced=False))
    [ack] = pair.posted(pair.d)
    assert isinstance(ack, Ack)
    pair.d.abort(KEY, "cancelled")
    assert pair.d.take_actions() == [Stop(KEY, "cancelled")]


def test_an_attempt_that_has_finished_is_remembered_without_its_prompt() -> None:
    pair = Pair(handoff)
    prompt = weakref.ref(pair.start().request.prompt)
    assert prompt() is not None
    pair.d.finished(KEY)
    assert prompt() is None and pair.d.num_known == 1


def test_an_attempt_that_was_given_up_is_remembered_without_its_prompt() -> None:
    pair, pulls = pulling()
    prompt = weakref.ref(pair.d.receiving[0].prompt)
    pair.d.abort(KEY, "cancelled")
    assert prompt() is not None
    for pull in pulls:
        pair.d.pull_fenced(pull.part_id)
    assert prompt() is None and pair.d.num_known == 1


def test_ack_is_sent_when_decoding_starts_and_repeated_while_remembered() -> None:
    pair = Pair(handoff)
    sends, commit = pair.committed()
    for message in (*sends, commit):
        pair.d.receive(P, message)
    [pull] = pair.actions(pair.d, "Pull")
    pair.d.pulled(pull.part_id)
    [ack] = pair.posted(pair.d)
    assert isinstance(ack, Ack)
    pair.d.finished(KEY)
    pair.d.receive(P, commit)
    assert pair.posted(pair.d) == [ack]
    pair.d.tick(59.9)
    assert pair.d.num_known == 1
    pair.d.tick(60.0)
    assert pair.d.num_known == 0
    pair.d.receive(P, commit)
    [abort] = pair.posted(pair.d)
    assert abort == Abort(ack.header, "nothing is granted", fenced=True)


def test_nothing_is_kept_of_attempts_that_are_forgotten() -> None:
    pair = Pair(handoff)
    for attempt in (1, 2):
        pair.d.receive(P, pair.begin(attempt))
    pair.d.abort(AttemptKey("r1", 2), "cancelled")
    pair.d.tick(59.9)
    attempts = pair.d._attempts
    assert [each.header.key.attempt for each in attempts.of("r1")] == [1, 2]
    pair.d.tick(60.0)
    assert (attempts._by_request, attempts._open, attempts._ended) == ({}, {}, {})


def test_commit_bounds_how_long_parts_may_take() -> None:
    pair = Pair(handoff)
    header = Header(KEY, 1, 1, pair.granted().header.grant)
    for now in range(1, 41):
        pair.d.tick(float(now))
        pair.d.receive(P, Renew(header))
    assert leases(pair) == 1, "P computes as long as it likes"
    assert pair.posted(pair.d)[-1] == Renew(header, ()), "COMMIT tells how many parts there are"
    commit = Commit(header, 1, 5, len(PROMPT), Hits())
    for now in range(41, 71):
        pair.d.tick(float(now - 1))
        pair.d.receive(P, commit)
    assert leases(pair) == 1
    assert pair.posted(pair.d)[-1] == Renew(header, (0,)), "part 0 is missing"
    pair.d.tick(70.0)
    assert leases(pair) == 0


@pytest.mark.parametrize("arrives", [None, 0, 1])
def test_each_pull_has_its_own_time(arrives: int | None) -> None:
    pair = Pair(handoff, num_groups=2)
    header = Header(KEY, 1, 1, pair.granted().header.grant)
    for group, now in enumerate((1.0, 4.0)):
        pair.p.computed(KEY, len(PROMPT), group)
        pair.d.tick(now)
        for message in pair.posted(pair.p):
            pair.d.receive(P, message)
    pulls = pair.actions(pair.d, "Pull")
    if arrives is not None:
        pair.d.pulled(pulls[arrives].part_id)
    late = 34.0 if arrives == 0 else 31.0
    for now in [*range(5, int(late)), late - 0.1]:
        pair.d.receive(P, Renew(header))
        pair.d.tick(float(now))
        assert len(pair.d.receiving) == 1, now
    pair.d.receive(P, Renew(header))
    pair.posted(pair.d)
    pair.d.tick(late)
    [abort] = pair.posted(pair.d)
    assert abort == Abort(header, "receiving took too long", fenced=False)


def test_a_heartbeat_follows_the_last_one_by_retry_s() -> None:
    pair = Pair(handoff)
    header = Header(KEY, 1, 1, pair.granted().header.grant)
    sent = []
    for tenth in range(1, 35):
        pair.d.tick(tenth / 10)
        sent += [(tenth, message) for message in pair.posted(pair.d)]
    assert sent == [(tenth, Renew(header)) for tenth in (10, 20, 30)]


def test_asking_again_is_a_sign_of_life() -> None:
    pair = Pair(handoff)
    ask = pair.begin()
    pair.d.receive(P, ask)
    pair.d.tick(4.0)
    pair.d.receive(P, ask)
    pair.d.tick(8.9)
    assert leases(pair) == 1
    pair.d.tick(9.0)
    assert leases(pair) == 0


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(
    ("num_more", "token", "reason"),
    [
        (1, 1, "the parts do not cover the prompt"),
        (0, -1, "first token -1 is outside the vocabulary of 50"),
        (0, VOCABULARY, "first token 50 is outside the vocabulary of 50"),
        (0, 0, ""),
        (0, VOCABULARY - 1, ""),
    ],
)
def test_a_commit_that_cannot_be_true_ends_the_attempt(
    num_groups: int, num_more: int, token: int, reason: str
) -> None:
    pair = Pair(handoff, num_groups=num_groups)
    grant = pair.granted().header.grant
    most = num_groups * -(-len(PROMPT) // 2)
    header = Header(KEY, 1, 1, grant)
    pair.d.receive(P, Commit(header, most + num_more, token, len(PROMPT), Hits()))
    assert [abort.reason for abort in pair.posted(pair.d)] == ([reason] if reason else [])
    assert leases(pair) == (reason == "")


@pytest.mark.parametrize("position", [0, len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 1])
@pytest.mark.parametrize("num_sent", [0, 1, 2])
@pytest.mark.parametrize("is_commit_first", [False, True])
def test_d_starts_only_with_the_whole_prompt(
    is_commit_first: bool, num_sent: int, position: int
) -> None:
    """A COMMIT may count fewer parts than the prompt needs, or have another position."""
    pair = Pair(handoff)
    header = Header(KEY, 1, 1, pair.granted().header.grant)
    sends = [Send(header, part, 2 * part, 2, 0) for part in range(num_sent)]
    commit = Commit(header, num_sent, 1, position, Hits())
    for message in [commit, *sends] if is_commit_first else [*sends, commit]:
        pair.d.receive(P, message)
    taken = pair.d.take_actions()
    for part in range(num_sent):
        assert not any(isinstance(each, Start | Post) for each in taken)
        pair.d.pulled(PartId(KEY, 1, 1, header.grant, part))
        taken = pair.d.take_actions()
    is_whole = num_sent == 2 and position == len(PROMPT)
    reason = "the parts do not cover the prompt"
    end = Ack(header) if is_whole else Abort(header, reason, fenced=True)
    assert taken[0] == Post(P, end)
    assert [type(each) for each in taken[1:]] == [Start] * is_whole
    assert pair.d_manager.match(PROMPT).num_tokens == (6 if is_whole else 0)
    assert leases(pair) == is_whole
