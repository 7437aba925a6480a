"""Ways to wait for each other, or for ever: each of the ten patterns that schedulers fall into.

Source of the patterns: deadlocks and starvation seen in vLLM, SGLang, FastDeploy and TensorRT-LLM.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import RequestTooLargeError
from radixkv.scheduler import Request
from radixkv.scheduler.fairness import MAX_OVERTAKEN
from radixkv.scheduler.handoff import AttemptKey, Grant
from radixkv.scheduler.handoff_simulation import drain_and_check

from .decode_stage import ask, hand_over, refusal, scheduler, start, step
from .theatre import Theatre


@given(
    running=st.lists(st.tuples(st.integers(1, 6), st.integers(2, 12)), min_size=1, max_size=4),
    received=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), max_size=4),
    num_blocks=st.integers(6, 16),
    reserve_tokens=st.sampled_from([0, 2, None]),
)
def test_d1_what_is_received_for_ever_stops_nobody_from_finishing(
    running: list[tuple[int, int]],
    received: list[tuple[int, int]],
    num_blocks: int,
    reserve_tokens: int | None,
) -> None:
    d = scheduler(num_blocks=num_blocks, max_running=8, reserve_tokens=reserve_tokens)
    for number, (num_tokens, max_new_tokens) in enumerate(running):
        answer = ask(d, chr(97 + number), num_tokens, max_new_tokens)
        if isinstance(answer, Grant):
            hand_over(d, answer, num_tokens)
    granted = 0
    for number, (num_tokens, max_new_tokens) in enumerate(received):
        answer = ask(d, chr(65 + number), num_tokens, max_new_tokens)
        granted += isinstance(answer, Grant)
    for _ in range(200):
        step(d)
    assert not d.has_work and d.num_open == granted
    d.manager.check()


def test_d2_prompts_that_the_host_has_do_not_hold_half_of_what_they_need() -> None:
    theatre = Theatre(prefill_blocks=8, host_blocks=40, num_decode=1)
    prompts = [[number] * 9 for number in range(6)]
    for prompt in prompts:
        theatre.submit(prompt, 1)
    theatre.finish()
    theatre.p().manager.evict(8)
    theatre.copy()
    for prompt in prompts:
        theatre.submit([*prompt, 7], 1)
    theatre.finish()
    assert theatre.p().stats().host_hit_tokens > 0


def test_d3_a_prompt_has_all_of_its_blocks_before_its_first_chunk() -> None:
    theatre = Theatre(prefill_blocks=7, budget=2, max_running=2)
    for number in (1, 2):
        theatre.submit([number] * 8, 1)
    while not theatre.answers:
        held = [each.lease.num_blocks for each in theatre.p().running if each.lease]
        assert all(blocks == 4 for blocks in held)
        theatre.round()
        theatre.tick()
    theatre.finish()


def test_d4_what_d_has_started_needs_no_p() -> None:
    theatre = Theatre(decode_blocks=12, max_running=3)
    for number in (1, 2, 3):
        theatre.submit([number] * 4, 9)
    theatre.until(lambda: theatre.counts["starts"] == 3)
    theatre.apply(["crash", 0])
    while theatre.d().has_work:
        theatre.step_d()
    theatre.report()
    assert theatre.counts["preemptions"] > 0
    assert theatre.counts["answers"] == 3


def test_d5_what_can_never_fit_is_refused_at_once() -> None:
    theatre = Theatre(prefill_blocks=4, decode_blocks=4)
    with pytest.raises(RequestTooLargeError):
        theatre.p().begin(Request("x", [1] * 9, 1), "d0")
    theatre.submit([1] * 7, 3)
    theatre.until(lambda: bool(theatre.answers))
    [answer] = theatre.answers.values()
    assert answer.reason == "refused, too large: 5 needed, 4 available"
    assert theatre.counts["attempts"] == 1


def test_d6_who_finds_no_room_on_the_host_is_computed_again() -> None:
    theatre = Theatre(decode_blocks=12, max_running=3, host_blocks=2)
    for number in (1, 2, 3):
        theatre.submit([number] * 4, 9)
    theatre.finish()
    stats = theatre.d().stats()
    assert stats.preemptions > stats.parked
    drain_and_check(theatre)


def test_d7_new_ones_do_not_starve_who_was_preempted() -> None:
    d = scheduler(num_blocks=12)
    for name in "abc":
        start(d, name, 4, 9)
    seen = set()
    for attempt in range(1, 200):
        answer = ask(d, "x", 1, 1, attempt=attempt)
        seen.add((bool(d.waiting), isinstance(answer, Grant)))
        if not isinstance(answer, Grant):
            assert refusal(answer)[0] in ("others wait", "out of blocks")
        d.give_up(AttemptKey("x", attempt), "there will be others")
        step(d)
        if not d.has_work:
            break
    assert not d.has_work
    assert (True, False) in seen and (False, True) in seen and (True, True) not in seen


def test_d8_small_requests_do_not_starve_a_large_one_on_d() -> None:
    d = scheduler(num_blocks=12, max_running=8)
    ask(d, "a", 4, 2)
    passed = 0
    for attempt in range(1, 2 * MAX_OVERTAKEN):
        d.tick(attempt / 2)
        if isinstance(ask(d, "z", 20, 2, attempt=attempt), Grant):
            break
        # There is always a small one, so that the large one finds no room.
        small = ask(d, "bc"[attempt % 2], 4, 2, attempt=attempt)
        if isinstance(small, Grant):
            passed += 1
        else:
            assert refusal(small) == ("others wait", 1, 0)
        d.abort("abc"[attempt - 1] if attempt == 1 else "cb"[attempt % 2])
    else:
        raise AssertionError("it starves")
    assert passed == MAX_OVERTAKEN


def test_d8_who_was_let_in_holds_nobody_up() -> None:
    d = scheduler(num_blocks=12, max_running=8)
    ask(d, "a", 4, 2)
    assert refusal(ask(d, "z", 20, 2))[0] == "out of blocks"
    d.abort("a")
    assert isinstance(ask(d, "z", 20, 2), Grant)
    d.abort("z")
    for attempt in range(1, 3 + MAX_OVERTAKEN):
        assert isinstance(ask(d, "b", 4, 2, attempt=attempt), Grant)


def test_d8_who_asks_no_more_holds_nobody_up() -> None:
    d = scheduler(num_blocks=12, max_running=8)
    ask(d, "a", 4, 2)
    assert refusal(ask(d, "z", 20, 2))[0] == "out of blocks"
    for attempt in range(1, MAX_OVERTAKEN + 1):
        assert isinstance(ask(d, "b", 4, 2, attempt=attempt), Grant)
    assert refusal(ask(d, "c", 4, 2)) == ("others wait", 1, 0)
    d.tick(4.9)
    assert refusal(ask(d, "c", 4, 2))[0] == "others wait"
    d.tick(5.0)
    assert isinstance(ask(d, "d", 4, 2), Grant), "z has gone"


def test_d9_prompts_that_wait_for_d_do_not_stop_p() -> None:
    theatre = Theatre(
        order="prefill_complete", prefill_blocks=9, max_running=1, num_prefill=2, budget=4
    )
    for number in range(8):
        theatre.submit([number] * 8, 6)
    theatre.finish()
    assert theatre.counts["Refuse"] > 0
    drain_and_check(theatre)


def test_d10_blocks_that_may_be_written_are_not_given_away() -> None:
    theatre = Theatre(decode_blocks=5)
    theatre.submit([1] * 8, 1)
    while not theatre.pulls:
        theatre.deliver()
        theatre.step_p()
    theatre.apply(["cancel", 0])
    theatre.submit([2] * 8, 1)
    for _ in range(6):
        theatre.deliver()
        theatre.step_p()
        theatre.report()
        theatre.tick()
        theatre.apply(["pull_write", 0])
        assert theatre.counts["starts"] == 0
        theatre.d().manager.check()
    assert theatre.counts["Refuse"] > 0
    theatre.apply(["pull_fence", 0])
    theatre.until(lambda: len(theatre.answers) == 2)
    assert theatre.answers["r2"].tokens is not None
    drain_and_check(theatre)
