"""Admission of the decode scheduler: grants, refusals and waiting requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.fairness import AdmissionFairness
from radixkv.scheduler.handoff import Abort, AttemptKey, Finished, Grant, Header, Send

from .decode_harness import actions, ask, refusal, scheduler, start, step


def test_what_is_received_takes_a_slot() -> None:
    d = scheduler(max_running=2)
    assert isinstance(ask(d, "a"), Grant)
    start(d, "b")
    assert refusal(ask(d, "c")) == ("out of slots", 3, 2)


def test_an_attempt_whose_pulls_may_still_write_takes_no_slot() -> None:
    d = scheduler(max_running=1)
    granted = ask(d, "a")
    d.receive("p0", Send(Header(AttemptKey("a", 1), 5, 1, granted.header.grant), 0, 0, 2, 0))
    assert refusal(ask(d, "b")) == ("out of slots", 2, 1)
    d.give_up(AttemptKey("a", 1), "cancelled")
    actions(d)
    assert (d.num_receiving, d.num_open) == (1, 1)
    assert isinstance(ask(d, "b"), Grant)
    assert (d.num_receiving, d.num_open) == (2, 2)


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
    d.receive("p0", Send(Header(AttemptKey("x", 1), 5, 1, granted.header.grant), 0, 6, 1, 0))
    d.give_up(AttemptKey("x", 1), "cancelled")
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
    assert isinstance(twin, Abort) and twin.reason == "the attempt belongs to another epoch"
    d.receive(
        "p1", Abort(Header(AttemptKey("a", 1), 5, 1, granted.header.grant), "no", fenced=False)
    )
    [post] = actions(d)
    assert post.peer == "p1" and post.message.reason == "nothing is granted"
    assert d.num_open == 1


def test_a_slot_is_set_aside_with_the_room() -> None:
    for max_running, is_room in ((2, False), (3, True)):
        d = scheduler(num_blocks=64, max_running=max_running, max_overtaken=0)
        start(d, "a", 4, 3)
        held = d.manager.admit(d.manager.match([1] * 118))
        assert refusal(ask(d, "l", 10, 1))[0] == "out of blocks"
        d.manager.release(held)
        answer = ask(d, "s", 2, 1)
        assert isinstance(answer, Grant) if is_room else refusal(answer) == ("others wait", 1, 0)


@pytest.mark.parametrize(("num_free", "is_room"), [(5, False), (6, True)])
def test_others_may_use_all_but_the_room_that_is_set_aside(num_free: int, is_room: bool) -> None:
    d = scheduler(num_blocks=64, max_overtaken=0)
    held = d.manager.admit(d.manager.match([1] * 120))
    assert refusal(ask(d, "l", 10, 1)) == ("out of blocks", 5, 4)
    d.manager.release(held)
    d.manager.admit(d.manager.match([1] * (128 - 2 * num_free)))
    answer = ask(d, "s", 2, 1)
    assert isinstance(answer, Grant) if is_room else refusal(answer) == ("others wait", 1, 0)


def test_room_is_set_aside_since_the_clock_of_the_refusal() -> None:
    """Messages are received between two ticks, after `set_time` alone."""
    d = scheduler(num_blocks=12, max_overtaken=0)
    ask(d, "a", 4, 2)
    d.set_time(100.0)
    assert refusal(ask(d, "z", 20, 2))[0] == "out of blocks"
    d.tick(104.9)
    assert refusal(ask(d, "c", 4, 2)) == ("others wait", 1, 0)
    d.tick(105.0)
    assert isinstance(ask(d, "d", 4, 2), Grant)


def test_no_room_is_set_aside_for_who_was_refused_while_d_drained() -> None:
    d = scheduler(num_blocks=12, max_overtaken=0)
    d.drain("other weights")
    assert refusal(ask(d, "z", 20, 2)) == ("draining", 0, 0)
    d.resume()
    assert isinstance(ask(d, "c", 4, 2), Grant)


def test_room_is_set_aside_for_twice_the_time_between_two_asks() -> None:
    fairness = AdmissionFairness(1.0, max_overtaken=0)
    fairness.refused("large", 5, 0.0)
    fairness.refused("large", 5, 4.0)
    assert fairness.set_aside("small", 11.9) == [5]
    assert fairness.set_aside("small", 12.0) == []


@given(
    pauses=st.lists(st.integers(0, 6), max_size=6),
    patience_s=st.integers(1, 9),
    rest=st.integers(0, 20),
)
def test_the_longest_time_between_two_asks_counts(
    pauses: list[int], patience_s: int, rest: int
) -> None:
    fairness, now = AdmissionFairness(float(patience_s), max_overtaken=0), 3.0
    fairness.refused("large", 5, now)
    for pause in pauses:
        now += pause
        fairness.refused("large", 5, now)
    is_awaited = rest < max(patience_s, *(2 * pause for pause in pauses), 0)
    assert fairness.set_aside("small", now + rest) == [5] * is_awaited


@given(
    max_overtaken=st.integers(0, 3),
    before=st.integers(0, 9),
    asks=st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=30),
)
def test_only_what_comes_after_a_refusal_overtakes_it(
    max_overtaken: int, before: int, asks: list[tuple[str, bool]]
) -> None:
    """Room is for those whom others of a later first refusal, or of none, have overtaken."""
    fairness = AdmissionFairness(100.0, max_overtaken)
    overtaken: dict[str, int] = {}  # in order of the first refusal
    for number in range(before):
        fairness.admitted(f"before {number}")
    for name, is_admitted in asks:
        if is_admitted:
            fairness.admitted(name)
            for each in overtaken:
                if each == name:
                    break
                overtaken[each] += 1
            overtaken.pop(name, None)
        else:
            fairness.refused(name, ord(name), 0.0)
            overtaken.setdefault(name, 0)
        order = [*overtaken, "new"]
        for place, asking in enumerate(order):
            expected = [ord(each) for each in order[:place] if overtaken[each] >= max_overtaken]
            assert fairness.set_aside(asking, 1.0) == expected


def test_who_has_not_asked_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.scheduler.fairness.MAX_REMEMBERED", 2)
    fairness = AdmissionFairness(9.0, max_overtaken=0)
    for now, (name, num_blocks) in enumerate([("a", 1), ("b", 2), ("a", 1), ("c", 3)]):
        fairness.refused(name, num_blocks, float(now))
    assert fairness.set_aside("d", 4.0) == [1, 3]
