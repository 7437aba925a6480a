"""No message of a peer crashes a node, whatever fields the codec lets through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.scheduler import DecodeScheduler, Request, RequestError, handoff
from radixkv.scheduler.errors import RefusalReason
from radixkv.scheduler.handoff import (
    Abort,
    Ack,
    Ask,
    AttemptKey,
    CancelPull,
    Commit,
    DecodeSide,
    Grant,
    Header,
    Hits,
    Message,
    Post,
    Pull,
    Refuse,
    Renew,
    Send,
    Start,
    Stop,
    Timing,
)
from radixkv.scheduler.handoff.messages import MAX_MISSING, MAX_REASON_CHARS
from radixkv.scheduler.nodes.channel.codec import Packet, decode, encode

from ...profiles import scaled
from .harness import KEY, PROMPT, D, P, Pair

MOST = 2**31 - 1
TOKENS = b"".join(token.to_bytes(4, "little") for token in PROMPT)
counts = st.integers(0, 5) | st.just(MOST)
sizes = st.sampled_from([1, 2, 2, 2, 4, MOST])
heads = st.builds(
    Header,
    st.sampled_from([KEY, KEY, KEY, AttemptKey("r1", 2), AttemptKey("r2", 1)]),
    st.sampled_from([1, 1, 1, 1, 2, 2**64 - 1]),
    st.sampled_from([1, 1, 1, 1, None, 0, 2**64 - 1]),
    st.sampled_from([1, 1, 1, 0, 2, 3, 2**64 - 1]),
    st.sampled_from([2, 2, 2, 2, 2, 3]),
)
hits = st.builds(Hits, counts, counts, counts)
prompts = st.just(TOKENS) | st.binary(min_size=1, max_size=5).map(lambda some: 4 * some)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Ask,
        heads,
        prompts,
        st.sampled_from([b"", b"n"]),
        sizes,
        st.integers(1, 1024),
        sizes,
        counts,
    ),
    st.builds(Ask, heads, prompts, st.just(b""), st.just(2), st.integers(1, 2), st.just(4)),
    st.builds(Grant, heads, counts),
    st.builds(Refuse, heads, st.sampled_from(get_args(RefusalReason)), counts, counts),
    st.builds(Send, heads, counts, counts, sizes, counts),
    st.builds(Commit, heads, counts, st.sampled_from([1, 1, 49, 50, -1, MOST]), counts, hits),
    st.builds(Ack, heads),
    st.builds(Abort, heads, st.just("why not"), st.booleans()),
    st.builds(Renew, heads, st.lists(counts, max_size=4).map(tuple)),
)
acts = st.lists(messages | st.just("go on") | st.floats(0.0, 4.0), max_size=30)


def go_on(pair: Pair) -> None:
    """Run one step of two honest nodes."""
    if pair.p.num_open == 0:
        for number in range(1, 9):
            if not pair.d.keys_of("r1"):
                pair.d.receive(P, pair.begin(number))
                return
    for key in pair.p.keys_of("r1"):
        if pair.p.may_compute(key):
            for group in range(pair.num_groups):
                pair.p.computed(key, len(PROMPT), group)
            pair.p.sampled(key, 1, Hits())
    for message in pair.posted(pair.p):
        pair.d.receive(P, message)
    for action in pair.d.take_actions():
        match action:
            case Post():
                pair.p.receive(D, action.message)
            case Pull() | CancelPull():
                pair.d.pulled(action.part_id)
            case Start():
                assert action.request.lease is not None
                pair.d_manager.release(action.request.lease)
                pair.d.finished(action.key)
            case Stop():
                pass


@scaled(300)
@given(acts, st.integers(1, 2))
def test_no_message_crashes_a_node(acts: list[Any], num_groups: int) -> None:
    pair = Pair(handoff, num_groups=num_groups)
    now = 0.0
    for act in acts:
        match act:
            case Message():
                pair.p.receive(D, act)
                pair.d.receive(P, act)
            case float():
                now += act
                pair.p.tick(now)
                pair.d.tick(now)
            case _:
                go_on(pair)
        pair.p_manager.check()
        pair.d_manager.check()


def test_a_renew_may_name_parts_that_were_never_sent() -> None:
    pair = Pair(handoff)
    sends, commit = pair.committed()
    header = replace(commit.header, epoch=1, peer_epoch=1)
    pair.p.receive(D, Renew(header, (7, 0, MOST, -9, 0)))
    assert pair.posted(pair.p) == sends == sends[:1]


@pytest.mark.parametrize("first_block", [5, MOST])
def test_a_grant_beyond_the_prompt_is_given_back(first_block: int) -> None:
    pair = Pair(handoff)
    pair.d.receive(P, pair.begin())
    [grant] = pair.posted(pair.d)
    pair.p.receive(D, replace(grant, first_block=first_block))
    abort, failed = pair.p.take_actions()
    reason = f"granted from block {first_block} of 2 tokens on, of a prompt of 7 in blocks of 2"
    assert abort.message.reason == failed.reason == reason
    pair.d.receive(P, abort.message)
    assert pair.are_empty()


@pytest.mark.parametrize(
    "fields",
    [
        {"part": 8},
        {"part": MOST},
        {"first_block": 4},
        {"first_block": MOST},
        {"num_blocks": MOST},
        {"group": 2},
        {"part": 1},  # its blocks are in part 0
        {"part": 1, "first_block": 3, "num_blocks": 1},
    ],
)
def test_a_part_outside_the_grant_ends_the_attempt(fields: dict[str, Any]) -> None:
    pair = Pair(handoff, num_groups=2)
    header = Header(KEY, 1, 1, pair.granted().header.grant)
    known = Send(header, 0, 0, 4, 0)
    if fields.get("part") == 1:
        pair.d.receive(P, known)
    pair.d.receive(P, replace(known, **fields))
    reason = f"part {fields.get('part', 0)} lies outside the grant"
    assert pair.posted(pair.d)[-1].reason == reason


def test_the_parts_of_two_groups_may_be_of_the_same_blocks() -> None:
    pair = Pair(handoff, num_groups=2)
    header = Header(KEY, 1, 1, pair.granted().header.grant)
    parts = [(0, 0, 4, 0), (1, 0, 3, 1), (7, 3, 1, 1)]
    for part in parts:
        pair.d.receive(P, Send(header, *part))
    assert len(pair.actions(pair.d, "Pull")) == 3


def test_a_commit_of_more_parts_than_blocks_is_rejected() -> None:
    pair = Pair(handoff)
    header = Header(KEY, 1, 1, pair.granted().header.grant)
    pair.d.receive(P, Commit(header, MOST, 1, len(PROMPT), Hits()))
    [abort] = pair.posted(pair.d)
    assert abort.reason == "the parts do not cover the prompt"
    assert pair.d_manager.stats().live_leases == 0


def test_d_names_a_limited_number_of_parts() -> None:
    manager = CacheManager(2000, 1)
    side = DecodeSide(manager, epoch=1, timing=Timing())
    tokens = b"".join(number.to_bytes(4, "little") for number in range(1500))
    side.receive(P, Ask(Header(KEY, 1), tokens, b"", 1, 1, 1))
    commit = Commit(Header(KEY, 1, 1, 1), 1500, 1, 1500, Hits())
    side.receive(P, commit)
    side.receive(P, commit)
    last = side.take_actions()[-1]
    assert isinstance(last, Post)
    assert last.message == Renew(Header(KEY, 1, 1, 1), tuple(range(MAX_MISSING)))


def test_a_huge_request_is_refused_before_it_is_allocated() -> None:
    pair = Pair(handoff)
    pair.d.receive(P, replace(pair.begin(), max_new_tokens=MOST))
    [refusal] = pair.posted(pair.d)
    assert (refusal.reason, refusal.needed, refusal.available) == ("too large", 2**30 + 3, 8)


@given(st.text(st.characters(codec="utf-8"), max_size=2000))
def test_a_refusal_by_the_model_carries_its_message(words: str) -> None:
    def refuse(request: Request) -> None:
        raise RequestError(words)

    d = DecodeScheduler(
        CacheManager(8, 2),
        epoch=1,
        timing=Timing(),
        token_budget=8,
        max_running=4,
        check_request=refuse,
    )
    d.receive(P, Ask(Header(KEY, 1), TOKENS, b"", 2, 1, 4))
    [action] = d.take_actions()
    assert isinstance(action, Post)
    answer = action.message
    assert isinstance(answer, Refuse)
    assert (answer.reason, answer.needed, answer.available) == ("malformed", 0, 0)
    assert answer.detail == words[:MAX_REASON_CHARS]
    packet = Packet("d", "p", 1, 1, answer)
    assert decode(encode(packet)) == packet
    d.manager.check()
