"""`Gateway`: routes, retries, answers and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.errors import RequestError, RoutingError
from radixkv.scheduler.gateway.gateway import Gateway, RunAttempt
from radixkv.scheduler.gateway.retries import Answer, Begin, Cancel, RequestRetrier
from radixkv.scheduler.gateway.router import CacheSize
from radixkv.scheduler.handoff import AttemptKey, Hits
from radixkv.scheduler.handoff.gateway_messages import MAX_NEW_TOKENS
from radixkv.scheduler.handoff.records import max_tokens
from radixkv.scheduler.request import (
    MAX_STOP_TOKEN_IDS,
    Request,
    RequestStatus,
    SamplingParams,
    TokenLogprob,
)


def make(*decode: str, now: float = 0.0) -> Gateway:
    gateway = Gateway(backoff_s=1.0, request_s=100.0)
    gateway.add_prefill("p0", CacheSize(20, 4))
    for name in decode:
        gateway.add_decode(name, CacheSize(20, 4))
    gateway.tick(now)
    return gateway


def begin(gateway: Gateway, now: float = 0.0) -> RunAttempt:
    """Return the only attempt that the gateway runs."""
    gateway.tick(now)
    runs = [action for action in gateway.take_actions() if isinstance(action, RunAttempt)]
    assert len(runs) == 1
    return runs[0]


def test_a_request_ends_with_its_tokens_and_counts() -> None:
    gateway, request = make("d0"), Request("a", [1, 2, 3, 4, 5], 2)
    gateway.add_request(request, 0.0)
    run = begin(gateway)
    assert (run.key, run.route) == (("a #0.0", 1), ("p0", "d0"))
    gateway.started(run.key)
    gateway.finished(run.key, (7, 8), Hits(4, 1, 0), 3)
    assert gateway.take_ended() == [request]
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "length")
    assert request.output_tokens == [7, 8]
    assert (request.num_hit_tokens, request.num_host_hit_tokens) == (4, 1)
    assert request.num_preemptions == 3
    assert gateway.num_open == 0


def test_a_busy_decode_node_is_avoided_in_the_next_attempt() -> None:
    gateway = make("d0", "d1")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    run = begin(gateway)
    assert run.route.decode == "d0"
    gateway.prefill_failed(run.key, "out of blocks", is_busy=True)
    assert begin(gateway, now=1.0).route.decode == "d1"


def test_a_request_that_moves_counts_the_tokens_that_its_prompt_continued() -> None:
    gateway = make("d0", "d1")
    request = Request("a", [1, 2, 3, 4, 5], 6, sampling=SamplingParams(num_continued=2))
    gateway.add_request(request, 0.0)
    run = begin(gateway)
    assert (run.route.decode, run.request.sampling.num_continued) == ("d0", 2)
    gateway.started(run.key)
    gateway.set_free("d1", 20)
    gateway.preempted(run.key, (7, 8, 9), Hits(), 1)
    run = begin(gateway)
    assert (run.route.decode, run.request.sampling.num_continued) == ("d1", 5)
    assert run.request.prompt.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert run.request.max_new_tokens == 3


FATES = st.tuples(st.sampled_from(["is lost", "moves"]), st.integers(0, 6), st.integers(0, 5))


@given(st.lists(FATES, max_size=5), st.sampled_from(["stop", "length"]))
def test_a_request_ends_where_its_tokens_do_whatever_its_attempts_told(
    fates: list[tuple[str, int, int]], reason: str
) -> None:
    """Tokens may be told before their attempt is lost, also the last one of the request."""
    gateway, prompt, output = make("d0", "d1"), [1, 2, 3], [4, 5, 6, 7, 8, 9]
    request = Request("a", prompt, 8, stop_token_ids=[9])
    if reason == "length":
        request = Request("a", prompt, len(output))
    gateway.add_request(request, 0.0)
    now, num_reported = 0.0, 0
    for how, num_told, num_tokens in fates:
        run, now = begin(gateway, now), now + 1.0
        assert run.request.prompt.tolist() == [*prompt, *output[:num_reported]]
        rest = output[num_reported:]
        gateway.started(run.key)
        gateway.progressed(run.key, rest[:num_told])
        if how == "is lost":
            gateway.remove_node(run.route.decode)
            gateway.add_decode(run.route.decode, CacheSize(20, 4))
            continue
        gateway.set_free("d1" if run.route.decode == "d0" else "d0", 20)
        tokens = rest[: min(num_tokens, len(rest) - 1)]
        gateway.preempted(run.key, tokens, Hits(), 1)
        num_reported += len(tokens)
    run = begin(gateway, now)
    gateway.started(run.key)
    gateway.finished(run.key, output[num_reported:], Hits(), 0)
    assert gateway.take_ended() == [request] and gateway.failures == {}
    assert (request.output_tokens, request.finish_reason) == (output, reason)


def test_a_late_failure_of_an_attempt_that_moved_keeps_the_tokens_of_the_next() -> None:
    gateway = make("d0", "d1")
    gateway.add_request(Request("a", [1, 2, 3], 6), 0.0)
    first = begin(gateway)
    gateway.started(first.key)
    gateway.set_free("d1", 20)
    gateway.preempted(first.key, (7, 8), Hits(), 1)
    second = begin(gateway)
    gateway.prefill_failed(first.key, "too large", is_final=True)
    gateway.prefill_failed(second.key, "no")
    assert begin(gateway, now=1.0).request.prompt.tolist() == [1, 2, 3, 7, 8]


def record(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.25 * token, 1, ())


def test_a_request_that_moves_keeps_the_log_probabilities_of_all_its_tokens() -> None:
    gateway, request = make("d0", "d1"), Request("a", [1, 2, 3], 6, logprobs=0)
    gateway.add_request(request, 0.0)
    run = begin(gateway)
    gateway.started(run.key)
    gateway.progressed(run.key, [4], [record(4)])
    gateway.set_free("d1", 20)
    gateway.preempted(run.key, (4, 5), Hits(), 1, [record(4), record(5)])
    run = begin(gateway)
    gateway.started(run.key)
    gateway.progressed(run.key, [6], [record(6)])
    rest = [6, 7, 8, 9]
    gateway.finished(run.key, rest, Hits(), 0, list(map(record, rest)))
    assert gateway.take_ended() == [request] and gateway.num_moved == 1
    assert request.output_tokens == [4, 5, *rest]
    assert request.output_logprobs == list(map(record, [4, 5, *rest]))


@pytest.mark.parametrize(("num_free", "has_room"), [(2, False), (3, True)])
def test_a_request_moves_where_all_of_its_tokens_fit(num_free: int, has_room: bool) -> None:
    """Nine tokens fill two blocks of four, and begin a third."""
    gateway = make("d0", "d1")
    gateway.add_request(Request("a", [1, 2, 3, 4, 5], 4), 0.0)
    run = begin(gateway)
    gateway.started(run.key)
    gateway.set_free("d1", num_free)
    gateway.preempted(run.key, (7,), Hits(), 1)
    assert gateway.num_moved == has_room


def test_when_all_pairs_lost_an_attempt_the_last_one_is_avoided_though_it_is_idle() -> None:
    gateway = make("d0", "d1")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    run = begin(gateway)
    assert run.route.decode == "d0"
    gateway.prefill_failed(run.key, "silence", is_lost=True)
    run = begin(gateway, now=1.0)
    assert run.route.decode == "d1"
    gateway.add_request(Request("b", [7] * 9, 2), 1.0)
    assert begin(gateway, now=1.0).route.decode == "d0"
    gateway.prefill_failed(run.key, "silence", is_lost=True)
    assert begin(gateway, now=2.0).route.decode == "d0"


def test_the_decode_node_that_was_busy_last_is_avoided_though_it_is_idle() -> None:
    gateway = make("d0", "d1")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    for now, busy in enumerate(("d0", "d1")):
        run = begin(gateway, now=float(now))
        assert run.route.decode == busy
        if busy == "d1":
            gateway.add_request(Request("other", [7] * 9, 2), float(now))
            assert begin(gateway, now=float(now)).route.decode == "d0"
        gateway.prefill_failed(run.key, "out of blocks", is_busy=True)
    assert begin(gateway, now=2.0).route.decode == "d0"


LIMITS: Final[dict[str, dict[str, Any]]] = {
    f"at most {MAX_NEW_TOKENS} new tokens": {"max_new_tokens": MAX_NEW_TOKENS},
    f"at most {MAX_STOP_TOKEN_IDS} stop tokens": {"stop_token_ids": range(MAX_STOP_TOKEN_IDS)},
    f"at most {max_tokens(20)} tokens with": {"max_new_tokens": max_tokens(20), "logprobs": 20},
}


@pytest.mark.parametrize(("text", "most"), LIMITS.items(), ids=LIMITS)
def test_a_request_may_ask_for_as_much_as_a_message_has_room_for(
    text: str, most: dict[str, Any]
) -> None:
    gateway = make("d0")
    for name, value in most.items():
        if name == "logprobs":
            continue
        more = range(len(value) + 1) if isinstance(value, range) else value + 1
        with pytest.raises(RequestError, match=text):
            gateway.add_request(
                Request("a", [1], **({"max_new_tokens": 1} | most | {name: more})), 0.0
            )
    assert gateway.num_open == 0
    gateway.add_request(Request("a", [1], **({"max_new_tokens": 1} | most)), 0.0)
    assert gateway.num_open == 1


def test_attempts_of_a_lost_node_are_retried() -> None:
    gateway = make("d0", "d1")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    run = begin(gateway)
    gateway.started(run.key)
    gateway.remove_node("d0")
    assert gateway.take_actions() == [Cancel(run.key)]
    again = begin(gateway, now=1.0)
    assert (again.key, again.route.decode) == (("a #0.0", 2), "d1")
    with pytest.raises(RoutingError, match=r"^there is no node 'd0'$"):
        gateway.remove_node("d0")


def test_requests_wait_for_nodes_to_join() -> None:
    gateway = make()
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    for now in (0.0, 0.999):
        gateway.tick(now)
        assert gateway.take_actions() == []
        if not now:
            gateway.add_decode("d0", CacheSize(20, 4))
    assert begin(gateway, now=1.0).key == AttemptKey("a #0.0", 1)


def test_waiting_for_nodes_counts_as_no_attempt() -> None:
    gateway = make()
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    for now in range(9):
        gateway.tick(float(now))
        assert gateway.take_actions() == [] and gateway.failures == {}
    gateway.add_decode("d0", CacheSize(20, 4))
    for attempt in (1, 2, 3):
        run = begin(gateway, now=8.0 + attempt)
        assert run.key == ("a #0.0", attempt) and gateway.failures == {}
        gateway.prefill_failed(run.key, "no")
    assert len(gateway.take_ended()) == 1 and gateway.failures == {"a": "no"}


@given(st.lists(st.sampled_from(["p0", "d0", "d1", "is added", "is aborted", "fails"])))
def test_only_an_attempt_that_a_node_got_is_cancelled(steps: list[str]) -> None:
    """A node joins, or is gone if it is there; without any, a request waits, and is tried again."""
    gateway = Gateway(backoff_s=1.0)
    nodes, run, names = set[str](), dict[AttemptKey, None](), list[str]()
    for number, step in enumerate(steps):
        match step:
            case "is added":
                names.append(str(number))
                gateway.add_request(Request(names[-1], [1, 2, 3], 2), float(number))
            case "is aborted" if names:
                gateway.abort(names.pop(0))
            case "fails" if run:
                gateway.decode_failed(list(run)[-1], "no")
            case "p0" | "d0" | "d1" if step in nodes:
                nodes.remove(step)
                gateway.remove_node(step)
            case "p0" | "d0" | "d1":
                nodes.add(step)
                add = gateway.add_prefill if step == "p0" else gateway.add_decode
                add(step, CacheSize(20, 4))
        gateway.tick(float(number))
        for action in gateway.take_actions():
            if isinstance(action, RunAttempt):
                assert action.key not in run and set(action.route) <= nodes
                run[action.key] = None
            else:
                assert action.key in run


@pytest.mark.parametrize("state", ["waiting", "begun", "started"])
def test_an_aborted_request_leaves_no_reason(state: str) -> None:
    """A server with a new id for each request would keep one of each."""
    gateway = Gateway() if state == "waiting" else make("d0")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    if state != "waiting":
        key = begin(gateway).key
        if state == "started":
            gateway.started(key)
    assert gateway.abort("a")
    assert gateway.failures == {} and gateway.take_ended() == []


def test_failures_have_their_reasons() -> None:
    gateway = make("d0")
    large, late = Request("large", range(100), 1), Request("late", [1], 1)
    gateway.add_request(large, 0.0)
    gateway.tick(0.0)
    assert gateway.take_ended() == [large]
    assert "25 blocks" in gateway.failures["large"]
    gateway.add_request(late, 0.0)
    begin(gateway)
    gateway.tick(100.0)
    assert gateway.take_ended() == [late]
    assert gateway.failures["late"] == "not done in time: attempt 1 has not ended"
    assert (late.status, late.finish_reason) == (RequestStatus.ABORTED, "abort")


def test_a_new_request_of_a_failed_one_s_name_has_not_failed() -> None:
    gateway = make("d0")
    for name in ("a", "b"):
        gateway.add_request(Request(name, range(100), 1), 0.0)
    gateway.tick(0.0)
    assert len(gateway.take_ended()) == 2
    gateway.add_request(Request("a", [1, 2, 3], 1), 0.0)
    assert gateway.failures.keys() == {"b"}
    gateway.finished(begin(gateway).key, [7], Hits(), 0)
    assert gateway.take_ended()[0].output_tokens == [7] and gateway.failures.keys() == {"b"}


def test_a_failure_names_the_request_as_the_client_does() -> None:
    gateway = make("d0")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    key = begin(gateway).key
    assert key.request_id != "a"
    reason = "3 prompt tokens and 2 new ones are more than max_model_len 4"
    gateway.prefill_failed(key, f"request {key.request_id!r}: {reason}", is_final=True)
    gateway.take_ended()
    assert gateway.failures == {"a": f"request 'a': {reason}"}


def test_a_request_that_is_cancelled_before_it_begins_never_begins() -> None:
    retrier = RequestRetrier(max_attempts=2, backoff_s=1.0, request_s=100.0)
    retrier.submit("r")
    retrier.cancel("r")
    assert retrier.take_actions() == [Answer("r", None, "cancelled by the client")]
    retrier.tick(1.0)
    assert retrier.take_actions() == []


def test_a_request_whose_attempts_are_lost_for_too_long_fails() -> None:
    retrier = RequestRetrier(max_attempts=2, backoff_s=1.0, request_s=100.0, lost_s=5.0)
    retrier.submit("r")
    for attempt, now in enumerate((0.0, 3.0, 6.0), 1):
        retrier.tick(now)
        assert retrier.take_actions()[-1] == Begin(AttemptKey("r", attempt))
        retrier.decode_lost(AttemptKey("r", attempt))
    last = Answer("r", None, "attempts were lost for 6 s: the decode node was lost")
    assert retrier.take_actions()[-1] == last


ENDS: Final[dict[str, Callable[[RequestRetrier, AttemptKey], None]]] = {
    "P fails": lambda retrier, key: retrier.prefill_failed(key, "no"),
    "P is busy": lambda retrier, key: retrier.prefill_failed(key, "no", is_busy=True),
    "P is lost": lambda retrier, key: retrier.prefill_lost(key),
    "D fails": lambda retrier, key: retrier.decode_failed(key, "no"),
    "D is lost": lambda retrier, key: retrier.decode_lost(key),
    "moves": lambda retrier, key: retrier.moved(key),
}
OF_PREFILL = ("P fails", "P is busy", "P is lost")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(list(ENDS))), max_size=5))
def test_each_attempt_begins_anew_whatever_became_of_those_before(
    fates: list[tuple[bool, str]],
) -> None:
    """P's reports end an attempt until D has started it, and D's always."""
    retrier = RequestRetrier(max_attempts=9, backoff_s=1.0, request_s=100.0)
    retrier.submit("r")
    for number, (is_started, end) in enumerate(fates, 1):
        key = AttemptKey("r", number)
        retrier.tick(float(number))
        assert retrier.take_actions() == [Begin(key)]
        if is_started:
            retrier.started(key)
        if is_started and end in OF_PREFILL:
            ENDS[end](retrier, key)
            assert retrier.take_actions() == []
            end = "D fails"
        ENDS[end](retrier, key)
        assert retrier.take_actions() == [Cancel(key)]
        for late in OF_PREFILL:
            ENDS[late](retrier, key)
        assert (retrier.take_actions(), retrier.num_open) == ([], 1)
    last = AttemptKey("r", len(fates) + 1)
    retrier.tick(10.0)
    assert retrier.take_actions() == [Begin(last)]
    retrier.finished(last, (7,))
    assert retrier.take_actions() == [Answer("r", (7,))]


def test_a_request_is_added_once() -> None:
    gateway, request = make("d0"), Request("a", [1], 1)
    gateway.add_request(request, 0.0)
    with pytest.raises(RequestError, match=r"^request 'a' is already active$"):
        gateway.add_request(Request("a", [2], 1), 0.0)
    assert gateway.abort("a")
    assert not gateway.abort("a")
    with pytest.raises(RequestError, match=r"^request 'a' was added before$"):
        gateway.add_request(request, 0.0)


def test_a_request_has_no_deadline_by_default() -> None:
    gateway = Gateway()
    gateway.add_request(Request("a", [1], 1), 0.0)
    gateway.tick(1e9)
    gateway.add_prefill("p", CacheSize(8, 4))
    gateway.add_decode("d", CacheSize(8, 4))
    gateway.tick(2e9)
    [run] = [action for action in gateway.take_actions() if isinstance(action, RunAttempt)]
    gateway.started(run.key)
    gateway.finished(run.key, [7], Hits(), 0)
    [ended] = gateway.take_ended()
    assert (ended.output_tokens, gateway.failures) == ([7], {})


def test_a_pair_that_lost_an_attempt_is_avoided_in_the_next() -> None:
    gateway = make("d0", "d1")
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    run = begin(gateway)
    gateway.prefill_failed(run.key, "silence", is_lost=True)
    assert begin(gateway, now=1.0).route == ("p0", "d1")


def test_a_pair_that_does_not_hear_each_other_is_the_last_choice() -> None:
    gateway = make("d0", "d1")
    for peer, others in (("p0", ["d0", "d9"]), ("d1", ["p0"])):
        gateway.set_unheard(peer, others)
        gateway.add_request(Request(f"{peer} is deaf", [1, 2, 3], 2), 0.0)
        route = begin(gateway).route
        assert route == ("p0", "d1" if peer == "p0" else "d0"), "any pair is better than none"
    gateway.set_unheard("p0", [])
    gateway.add_request(Request("last", [1, 2, 3], 2), 0.0)
    assert begin(gateway).route == ("p0", "d0")
    gateway.remove_node("d1")
    gateway.add_decode("d1", CacheSize(20, 4))  # it hears p0 now, as far as anybody knows
    assert gateway._unheard == {}


def test_what_nodes_say_of_a_pair_is_forgotten_when_they_hear_each_other_again() -> None:
    gateway = make("d0", "d1", "d2")
    gateway.set_unheard("p0", ["d0", "d2"])
    gateway.add_request(Request("other", [4] * 9, 2), 0.0)
    assert begin(gateway).route.decode == "d1"
    gateway.set_unheard("p0", ["d1"])
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    first = begin(gateway)
    gateway.prefill_failed(first.key, "silence", is_lost=True)
    second = begin(gateway, now=1.0)
    assert {first.route.decode, second.route.decode} == {"d0", "d2"}
    gateway.set_unheard("p0", [])
    gateway.prefill_failed(second.key, "silence", is_lost=True)
    assert begin(gateway, now=2.0).route.decode == "d1", "the only pair that has lost nothing"
    assert gateway.num_lost == 2, "each attempt counts"


def test_what_a_request_has_met_counts_more_than_what_nodes_say_of_every_pair() -> None:
    gateway = make("d0", "d1")
    gateway.set_unheard("p0", ["d0", "d1"])
    gateway.add_request(Request("a", [1, 2, 3], 2), 0.0)
    first = begin(gateway)
    gateway.add_request(Request("other", [4] * 9, 2), 0.0)
    assert (first.route.decode, begin(gateway).route.decode) == ("d0", "d1")
    gateway.prefill_failed(first.key, "silence", is_lost=True)
    assert begin(gateway, now=1.0).route.decode == "d1", "d0 is idle, and has lost it"


def test_counts_are_those_of_the_attempt_that_is_answered() -> None:
    gateway, request = make("d0"), Request("a", [1, 2, 3, 4, 5], 2)
    gateway.add_request(request, 0.0)
    first = begin(gateway).key
    gateway.prefill_failed(first, "no")
    second = begin(gateway, now=1.0).key
    gateway.finished(first, (7, 8), Hits(4, 3, 2), 5)  # late: it was cancelled
    gateway.prefill_failed(first, "no", is_final=True)
    assert (gateway.take_ended(), gateway.num_attempts("d0")) == ([], 1)
    gateway.finished(second, (7, 8), Hits(1, 2, 3), 4)
    assert gateway.take_ended() == [request]
    hits = request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens
    assert (hits, request.num_preemptions) == ((1, 2, 3), 4)


def test_what_a_request_has_computed_attracts_only_its_namespace() -> None:
    gateway = make("d0", "d1")
    prompt = list(range(12))
    gateway.add_request(Request("a", prompt, 5, namespace=b"tenant"), 0.0)
    key = begin(gateway).key
    gateway.started(key)
    gateway.finished(key, [1, 2, 3, 4, 5], Hits(), 0)
    longer = [*prompt, 1, 2, 3, 4, 5]
    for name, namespace, num_lacking in (("other", b"", 5), ("same", b"tenant", 1)):
        gateway.add_request(Request(name, longer, 1, namespace=namespace), 0.0)
        begin(gateway)
        assert gateway.loads["d0" if name == "same" else "d1"] == num_lacking


@pytest.mark.parametrize("num_output", range(2, 8))
@pytest.mark.parametrize("moves", [False, True])
def test_a_decode_node_is_expected_to_have_all_tokens_but_the_last(
    moves: bool, num_output: int
) -> None:
    """Also those that an attempt before the move has generated."""
    gateway, prompt = make("d0", "d1"), list(range(10))
    output = list(range(20, 20 + num_output))
    gateway.add_request(Request("a", prompt, num_output), 0.0)
    run = begin(gateway)
    if moves:
        gateway.set_free("d1", 20)
        gateway.preempted(run.key, output[:1], Hits(), 1)
        run = begin(gateway)
    gateway.finished(run.key, output[moves:], Hits(), 0)
    gateway.remove_node("d0" if moves else "d1")
    longer = [*prompt, *output, 99]
    gateway.add_request(Request("b", longer, 1), 0.0)
    assert begin(gateway).route.decode == run.route.decode
    num_lacking = -(-len(longer) // 4) - (len(prompt) + num_output - 1) // 4
    assert gateway.loads[run.route.decode] == num_lacking


def test_attempts_are_lost_for_too_long_at_the_limit() -> None:
    for late_s, is_over in ((4.999, False), (5.0, True)):
        retrier = RequestRetrier(max_attempts=9, backoff_s=0.0, request_s=100.0, lost_s=5.0)
        retrier.submit("r")
        retrier.tick(0.0)
        retrier.decode_lost(AttemptKey("r", 1))
        retrier.tick(1.0)
        retrier.prefill_failed(AttemptKey("r", 2), "it failed")  # the time runs on
        retrier.tick(late_s)
        retrier.decode_lost(AttemptKey("r", 3))
        assert isinstance(retrier.take_actions()[-1], Answer) == is_over


def test_nothing_is_left_of_requests_and_nodes_that_are_gone() -> None:
    gateway = make("d0", "d1")
    sizes = []
    for number in range(3):
        for how in ("is_busy", "is_lost", "moves"):
            gateway.add_request(Request(f"{how} {number}", [1, 2, 3], 2), 0.0)
            first = begin(gateway, now=2.0 * number)
            if how == "moves":
                gateway.set_free("d0", 20)
                gateway.set_free("d1", 20)
                gateway.preempted(first.key, (1,), Hits(), 1)
            else:
                gateway.prefill_failed(first.key, "no", **{how: True})
            last = begin(gateway, now=2.0 * number + 1)
            assert last.request.num_prompt_tokens == 3 + (how == "moves")
            gateway.finished(last.key, (1, 2)[how == "moves" :], Hits(), 0)
        gateway.add_decode("d2", CacheSize(20, 4))
        gateway.set_unheard("d2", ["p0"])
        gateway.remove_node("d2")
        gateway.take_ended(), gateway.take_advanced(), gateway.take_actions()
        state = [getattr(each, "__dict__", {}) for each in (gateway, gateway._retrier)]
        sizes.append([len(value) for each in state for value in each.values()
                      if isinstance(value, dict | set | list)])  # fmt: skip
    assert sizes[0] == sizes[1] == sizes[2]
    assert sum(sizes[0]) == 0
