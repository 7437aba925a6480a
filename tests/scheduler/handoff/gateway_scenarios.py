"""Scenarios of the gateway and its nodes on a network that loses messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations, product
from types import ModuleType
from typing import Any, Final

from radixkv.scheduler.handoff.records import pack_records, unpack_records
from radixkv.scheduler.request import TokenLogprob
from radixkv.spec.harness.handoff.world import HandoffWorld

from .harness import ORDERS, PROMPT, D, P, lossy
from .planted import gateway_of


def is_answered(world: HandoffWorld) -> None:
    [answer] = world.model.answers.values()
    assert answer.tokens is not None, answer.reason


def either_node_may_crash_and_lose_its_messages(h: ModuleType) -> None:
    for order in ORDERS:
        for number in range(lossy(h, order=order)[1]):
            for node in (P, D):
                fault = number, [["crash", node], ["cut", node]]
                is_answered(lossy(h, fault=fault, order=order)[0])


def either_connection_may_break_at_any_message(h: ModuleType) -> None:
    for order in ORDERS:
        for number in range(lossy(h, order=order)[1]):
            for node in (P, D):
                is_answered(lossy(h, fault=(number, [["cut", node]]), order=order)[0])


def the_gateway_may_restart_at_any_message(h: ModuleType) -> None:
    for number in range(lossy(h)[1]):
        is_answered(lossy(h, fault=(number, [["new_gateway"]]))[0])
        is_answered(lossy(h, fault=(number, [["new_gateway"], ["cut", P], ["cut", D]]))[0])


class GatewayHarness:
    """A gateway and its messages."""

    def __init__(self, h: ModuleType, **options: Any) -> None:
        self.h, self.now = h, 0.0
        self.gateway = gateway_of(h).network_gateway.NetworkGateway(**options)
        for name, role in ((P, "prefill"), (D, "decode")):
            self.send_status(name, role)
        self.sent()

    def send_status(
        self, name: str, role: str, epoch: int = 5, unheard: tuple[str, ...] = ()
    ) -> None:
        kind = self.h.gateway_messages.NodeStatus
        status = kind(role, f"{name}:1", "none", 2, 40, "m", unheard)
        self.gateway.receive(name, epoch, status, self.now)

    def sent(self) -> list[Any]:
        says = [each for each in self.gateway.take_actions() if hasattr(each, "message")]
        return [(each.peer, each.message) for each in says]

    def run(
        self, request_id: str = "a", max_new_tokens: int = 2, logprobs: int | None = None
    ) -> Any:
        request = gateway_of(self.h).network_gateway.Request(
            request_id, PROMPT, max_new_tokens, logprobs=logprobs
        )
        self.gateway.add_request(request, self.now)
        self.gateway.tick(self.now)
        [(_, run)] = self.sent()
        return run


def a_node_is_lost_once_when_it_comes_back(h: ModuleType) -> None:
    harness = GatewayHarness(h, max_attempts=2)
    run = harness.run()
    harness.send_status(D, "decode", 6)
    assert harness.gateway.nodes[D].epoch == 6
    harness.send_status(D, "decode", 5)  # sent before the crash
    assert harness.gateway.nodes[D].epoch == 6, "an older epoch replaces a newer one"
    harness.send_status(D, "decode", 6)
    assert harness.gateway.failures == {}
    messages = h.gateway_messages
    harness.gateway.receive(D, 5, messages.Started(run.key), 0.0)
    assert [type(message) for _, message in harness.sent()] == [messages.CancelAttempt] * 2
    harness.gateway.tick(1.0)
    [(_, again)] = harness.sent()
    assert again.key == (run.key.request_id, 2)


def a_node_with_a_lower_epoch_joins_when_its_old_epoch_is_silent(h: ModuleType) -> None:
    harness = GatewayHarness(h, silence_s=5.0)
    for now, epoch in ((1.0, 5), (4.0, 5), (5.0, 4)):
        harness.now = now
        harness.gateway.tick(now)
        harness.send_status(D, "decode", 4)
        assert harness.gateway.nodes[D].epoch == epoch


def the_gateway_acknowledges_each_copy_of_a_report(h: ModuleType) -> None:
    harness, messages = GatewayHarness(h), h.gateway_messages
    run = harness.run()
    for _ in range(2):
        harness.gateway.receive(D, 5, messages.Finished(run.key, (1, 2), h.Hits(), 0), 0.0)
        assert harness.sent() == [(D, messages.DeliveryAck(run.key, "Finished"))]
    harness.gateway.tick(1.0)
    assert harness.sent() == []
    [request] = harness.gateway.take_ended()
    assert request.output_tokens == [1, 2] and harness.gateway.take_ended() == []


def reports_of_an_older_attempt_are_no_answer(h: ModuleType) -> None:
    harness, messages = GatewayHarness(h), h.gateway_messages
    run = harness.run()
    harness.gateway.receive(P, 5, messages.PrefillFailed(run.key, "it was cold", False, False), 0.0)
    harness.gateway.tick(1.0)
    assert (P, messages.CancelAttempt(run.key, "cancelled")) in harness.sent()
    harness.gateway.receive(D, 5, messages.Started(run.key), 1.0)
    assert (D, messages.CancelAttempt(run.key, "cancelled")) in harness.sent(), "nobody wants it"
    harness.gateway.receive(D, 5, messages.Finished(run.key, (1, 2), h.Hits(), 0), 1.0)
    assert harness.gateway.num_open == 1


def the_gateway_repeats_run_prefill_until_it_is_acknowledged(h: ModuleType) -> None:
    harness, messages = GatewayHarness(h, silence_s=5.0, lost_s=5.0), h.gateway_messages
    run = harness.run()
    for now in (1.0, 2.0):
        harness.gateway.tick(now)
        assert harness.sent() == [(P, run)]
    assert harness.gateway.abort("a")
    assert harness.sent() == [
        (peer, messages.CancelAttempt(run.key, "cancelled")) for peer in (P, D)
    ]
    harness.now = 3.0
    run = harness.run("b")
    for _ in range(2):
        for _ in range(5):
            harness.now += 1.0
            harness.send_status(P, "prefill")
            harness.send_status(D, "decode")
            harness.gateway.tick(harness.now)
        harness.gateway.tick(harness.now + 0.1)
    reason = "attempts were lost for 5 s: p0 does not acknowledge the request"
    assert harness.gateway.failures["b"] == reason


def a_silent_node_is_gone(h: ModuleType) -> None:
    harness = GatewayHarness(h, silence_s=5.0)
    harness.gateway.tick(4.9)
    assert set(harness.gateway.nodes) == {P, D}
    harness.gateway.tick(5.0)
    assert not harness.gateway.nodes and set(harness.gateway.gone) == {P, D}


def nodes_may_be_lost_together_while_requests_wait(h: ModuleType) -> None:
    """Requests that come between two ticks: the clock of the second begins the first."""
    roles = {P: "prefill", "p1": "prefill", D: "decode", "d1": "decode"}
    subsets = chain.from_iterable(combinations(roles, number) for number in range(1, 5))
    for lost, looks in product(subsets, (False, True)):
        harness = GatewayHarness(h, silence_s=5.0, backoff_s=0.0, max_attempts=1)
        statuses = {name: status_of(h, role, name) for name, role in roles.items()}
        for name in roles:
            harness.gateway.receive(name, 5, statuses[name], 0.0)
        for name in roles.keys() - lost:
            harness.gateway.receive(name, 5, statuses[name], 5.0)
        harness.sent()
        for name in "abc":
            request = gateway_of(h).network_gateway.Request(name, PROMPT, 2)
            harness.gateway.add_request(request, 5.0)
        assert not looks or harness.gateway.take_ended() == []
        harness.gateway.tick(5.0)
        assert set(harness.gateway.gone) == set(lost)
        for name in lost:
            harness.gateway.receive(name, 6, statuses[name], 5.0)
        harness.gateway.tick(5.0)
        runs = [each for _, each in harness.sent() if hasattr(each, "decode_node")]
        last = {run.key.request_id.split()[0]: run for run in runs}
        assert set(last) == {"a", "b", "c"}, lost
        for run in last.values():
            finished = h.gateway_messages.Finished(run.key, (1, 2), h.Hits(), 0)
            epoch = 6 if run.decode_node in lost else 5
            harness.gateway.receive(run.decode_node, epoch, finished, 5.0)
        assert len(harness.gateway.take_ended()) == 3 and harness.gateway.failures == {}


def only_time_limits_lost_attempts(h: ModuleType) -> None:
    harness = GatewayHarness(h, max_attempts=1, lost_s=5.0, silence_s=1e9, backoff_s=1.0)
    run, messages = harness.run(), h.gateway_messages
    for now in (2.0, 4.0, 6.0, 8.0):
        harness.gateway.tick(now)
        lost = messages.PrefillFailed(run.key, "silence", is_lost=True)
        harness.gateway.receive(P, 5, lost, now)
        harness.sent()
        harness.gateway.tick(now + 1.0)
        if now < 7.0:
            [run] = [message for _, message in harness.sent()]
    assert harness.gateway.failures == {"a": "attempts were lost for 6 s: silence"}


def the_next_attempt_avoids_the_pair_that_lost_one(h: ModuleType) -> None:
    harness = GatewayHarness(h, silence_s=1e9, backoff_s=1.0)
    harness.send_status("d1", "decode")
    harness.sent()
    run = harness.run()
    assert run.decode_node == D
    lost = h.gateway_messages.PrefillFailed(run.key, "silence", is_lost=True)
    harness.gateway.receive(P, 5, lost, 0.0)
    harness.sent()
    harness.gateway.tick(1.0)
    [(_, again)] = harness.sent()
    assert again.decode_node == "d1"


def lost_attempts_go_to_every_pair_before_one_comes_again(h: ModuleType) -> None:
    harness = GatewayHarness(h, silence_s=1e9, backoff_s=1.0)
    for name in ("d1", "d2"):
        harness.send_status(name, "decode")
    harness.sent()
    run, decode_nodes = harness.run(), []
    for now in range(6):
        decode_nodes.append(run.decode_node)
        lost = h.gateway_messages.PrefillFailed(run.key, "silence", is_lost=True)
        harness.gateway.receive(P, 5, lost, float(now))
        harness.sent()
        harness.gateway.tick(now + 1.0)
        [(_, run)] = harness.sent()
    assert {*decode_nodes[:3]} == {D, "d1", "d2"}, decode_nodes
    assert len({*decode_nodes[2:5]}) == 3, decode_nodes


def nodes_that_do_not_hear_each_other_get_no_attempt_until_they_do(h: ModuleType) -> None:
    for deaf, role, other in ((P, "prefill", D), (D, "decode", P)):
        harness = GatewayHarness(h, silence_s=1e9)
        harness.send_status("d1", "decode")
        harness.send_status(deaf, role, unheard=(other,))
        harness.sent()
        assert [harness.run(name).decode_node for name in "abc"] == ["d1"] * 3
        harness.send_status(deaf, role)
        harness.sent()
        assert harness.run("d").decode_node == D


def a_node_whose_load_changes_stays(h: ModuleType) -> None:
    harness, messages = GatewayHarness(h), h.gateway_messages
    run = harness.run()
    status = messages.NodeStatus("prefill", "p0:1", "none", 2, 40, "m")
    for number in range(3):
        load = messages.NodeLoad(num_running=number, prompt_tokens=7 * number)
        harness.gateway.receive(P, 5, replace(status, load=load), 0.0)
        assert harness.gateway.nodes[P].load == load
        harness.gateway.receive(P, 5, messages.DeliveryAck(run.key, "RunPrefill"), 0.0)
        assert harness.gateway.nodes[P].load == load
    assert harness.sent() == [] and not harness.gateway.gone


class Stream(GatewayHarness):
    """A gateway that streams the tokens of a request, which its decode node has started."""

    def __init__(self, h: ModuleType, logprobs: int | None = None, **options: Any) -> None:
        super().__init__(h, stream=True, backoff_s=0.0, silence_s=1e9, **options)
        run = self.run(max_new_tokens=9, logprobs=logprobs)
        assert run.logprobs == logprobs
        self.key = run.key
        self.started()

    def started(self) -> None:
        self.receive(self.h.gateway_messages.Started(self.key))
        follow = self.h.gateway_messages.FollowAttempt(self.key, 0)
        assert (D, follow) in self.sent(), "the gateway does not ask"

    def receive(self, message: Any, peer: str = D) -> None:
        self.gateway.receive(peer, 5, message, self.now)

    def hear(self, start: int, *tokens: int, records: bytes = b"") -> list[Any]:
        """Receive tokens of the attempt; return all that the client was told, if that changed."""
        messages = self.h.gateway_messages
        new = messages.NewTokens(self.key, start, tokens, records)
        self.receive(messages.Progress((new,)))
        return [list(each.output_tokens) for each in self.gateway.take_advanced()]

    def retry(self) -> None:
        """The decode node gives up; another attempt starts."""
        self.receive(self.h.gateway_messages.DecodeFailed(self.key, "it was cold"))
        self.sent()
        self.gateway.tick(self.now)
        [(_, run)] = self.sent()
        self.key = run.key
        self.started()


def tokens_that_are_doubled_late_or_lost_are_told_once(h: ModuleType) -> None:
    stream, follow = Stream(h), h.gateway_messages.FollowAttempt
    assert stream.hear(0, 1, 2) == [[1, 2]]
    assert stream.hear(0, 1, 2) == stream.hear(1, 2) == []
    assert stream.hear(1, 2, 3) == [[1, 2, 3]]
    assert stream.hear(4, 5) == [], "a token before it is missing"
    assert stream.sent() == [(D, follow(stream.key, 3))]
    assert stream.hear(5, 6) == [] and stream.sent() == [], "the gateway has asked"
    stream.send_status(D, "decode")
    assert stream.sent() == [(D, follow(stream.key, 3))], "the answer may be lost"
    assert stream.hear(3, 4, 5, 6) == [[1, 2, 3, 4, 5, 6]]
    stream.send_status(D, "decode")
    assert stream.sent() == []
    assert stream.hear(7, 8) == []
    assert stream.sent() == [(D, follow(stream.key, 6))]
    stream.receive(
        h.gateway_messages.Finished(stream.key, (1, 2, 3, 4, 5, 6, 7, 8, 9), h.Hits(), 0)
    )
    [request] = stream.gateway.take_ended()
    assert request.output_tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert request.finish_reason == "length"
    stream.sent()
    assert stream.hear(6, 7) == []
    assert stream.sent() == [(D, h.gateway_messages.CancelAttempt(stream.key, "cancelled"))]


def a_lost_question_for_tokens_is_repeated(h: ModuleType) -> None:
    stream = Stream(h)
    for _ in range(2):
        stream.send_status(P, "prefill")
        assert stream.sent() == []
        stream.send_status(D, "decode")
        assert stream.sent() == [(D, h.gateway_messages.FollowAttempt(stream.key, 0))]
    stream.gateway.abort("a")
    stream.sent()
    stream.send_status(D, "decode")
    assert stream.sent() == []


def another_attempt_tells_only_what_is_new(h: ModuleType) -> None:
    stream = Stream(h)
    assert stream.hear(0, 1, 2, 3) == [[1, 2, 3]]
    stream.retry()
    assert stream.hear(0, 1, 2) == []
    assert stream.hear(2, 3, 4) == [[1, 2, 3, 4]]
    stream.receive(h.gateway_messages.Finished(stream.key, (1, 2, 3, 4, 5), h.Hits(), 0))
    [request] = stream.gateway.take_ended()
    assert request.output_tokens == [1, 2, 3, 4, 5] and stream.gateway.failures == {}


def a_request_fails_if_another_attempt_contradicts_what_was_told(h: ModuleType) -> None:
    messages = h.gateway_messages
    for tokens, reason in (
        ((1, 7, 3), "attempt 2 has 7 as output token 1, and an earlier attempt, "),
        ((1,), "attempt 2 has the end as output token 1, and an earlier attempt, "),
    ):
        for is_end in (True, False):
            stream = Stream(h)
            stream.hear(0, 1, 2, 3)
            stream.retry()
            if is_end:
                stream.receive(messages.Finished(stream.key, tokens, h.Hits(), 0))
            elif len(tokens) > 1:
                stream.hear(0, *tokens)
            else:
                continue
            assert stream.gateway.failures == {"a": f"{reason}whose tokens were told, had 2"}
            [request] = stream.gateway.take_ended()
            assert request.finish_reason == "abort"
            assert (D, messages.CancelAttempt(stream.key, "cancelled")) in stream.sent()


def a_preempted_request_goes_on_where_there_is_room(h: ModuleType) -> None:
    messages = h.gateway_messages
    for last in ("finished", "refused"):
        stream = Stream(h, max_attempts=1, logprobs=None)
        stream.gateway.receive(P, 5, status_of(h, "prefill", P), 0.0)
        assert stream.hear(0, 7) == [[7]]
        preempted = messages.Preempted(stream.key, (7, 8), h.Hits(1), 1)
        for load in ({"num_used_blocks": 36}, {"num_waiting": 1}, None):
            stream.receive(preempted)
            assert stream.sent() == [], "d0 has to keep it"
            if load is not None:
                status = status_of(h, "decode", "d1", messages.NodeLoad(**load))
                stream.gateway.receive("d1", 5, status, 0.0)
                stream.sent()
        stream.gateway.receive("d1", 5, status_of(h, "decode", "d1"), 0.0)
        stream.receive(preempted)
        assert [list(each.output_tokens) for each in stream.gateway.take_advanced()] == [[7, 8]]
        cancel = messages.CancelAttempt(stream.key, "cancelled")
        assert stream.sent() == [(peer, cancel) for peer in (P, D, "d1")]
        assert stream.gateway.num_moved == 1
        stream.gateway.tick(0.0)
        [(_, run)] = stream.sent()
        assert run.request().prompt.tolist() == [*PROMPT, 7, 8]
        assert (run.max_new_tokens, run.sampling.num_continued) == (7, 2)
        assert run.decode_node == "d1"
        stream.receive(preempted)  # late
        assert stream.sent() == [(peer, cancel) for peer in (P, D, "d1")]
        stream.key = run.key
        if last == "refused":  # without what it has kept it fits
            stream.receive(messages.PrefillFailed(run.key, "too large", is_final=True), P)
            stream.sent()
            stream.gateway.tick(1.0)
            [(_, run)] = stream.sent()
            assert (run.request().prompt.tolist(), run.max_new_tokens) == (PROMPT, 9)
            assert run.sampling.num_continued == 0
            stream.key = run.key
            rest = tuple(range(7, 16))
        else:
            stream.receive(messages.Started(run.key), "d1")
            assert ("d1", messages.FollowAttempt(run.key, 0)) in stream.sent()
            assert stream.hear(0, 9) == [[7, 8, 9]]
            assert stream.hear(1, 10) == [[7, 8, 9, 10]]
            rest = tuple(range(9, 16))
        stream.receive(messages.Finished(stream.key, rest, h.Hits(3), 2))
        [request] = stream.gateway.take_ended()
        assert request.output_tokens == list(range(7, 16))
        assert (request.num_hit_tokens, request.num_preemptions) == (1, 3)


def a_moved_request_goes_on_after_what_was_reported_of_it(h: ModuleType) -> None:
    """An attempt that was lost has told more tokens, perhaps all, before the one that moves."""
    messages, output = h.gateway_messages, tuple(range(7, 16))
    for num_told, num_reported in product(range(10), range(9)):
        stream = Stream(h)
        stream.hear(0, *output[:num_told])
        stream.retry()
        stream.gateway.receive("d1", 5, status_of(h, "decode", "d1"), 0.0)
        stream.receive(messages.Preempted(stream.key, output[:num_reported], h.Hits(), 1))
        assert stream.gateway.num_moved == 1
        stream.sent()
        stream.gateway.tick(0.0)
        [(_, run)] = stream.sent()
        assert run.request().prompt.tolist() == [*PROMPT, *output[:num_reported]]
        assert run.max_new_tokens == 9 - num_reported
        stream.receive(messages.Started(run.key), "d1")
        rest = output[num_reported:]
        stream.receive(messages.Finished(run.key, rest, h.Hits(), 0), "d1")
        [request] = stream.gateway.take_ended()
        assert tuple(request.output_tokens) == output


def status_of(h: ModuleType, role: str, name: str, load: Any = None) -> Any:
    messages = h.gateway_messages
    status = messages.NodeStatus(role, f"{name}:1", "none", 2, 40, "m")
    return status if load is None else replace(status, load=load)


def a_node_repeats_that_a_request_is_preempted_until_it_resumes(h: ModuleType) -> None:
    reporter, messages = reporter_of(h), h.gateway_messages
    key, request = decoding(h, reporter, "a", 2)
    states = gateway_of(h).node_reporter.RequestStatus
    request.status, request.num_preemptions = states.PREEMPTED, 1
    reporter.report(h.Preempted(key, request), 0.0)
    preempted = messages.Preempted(key, (0, 1), h.Hits(), 1)
    assert reporter.take_messages() == [preempted]
    reporter.tick(0.5)
    assert reporter.take_messages() == []
    reporter.tick(1.0)
    started = messages.Started(key)
    assert reporter.take_messages() == [preempted, started]
    request.status = states.RUNNING
    reporter.acknowledge(messages.GATEWAY, messages.DeliveryAck.of(started))
    reporter.tick(2.0)
    assert reporter.take_messages() == []
    request.status = states.PREEMPTED
    reporter.report(h.Preempted(key, request), 3.0)
    assert reporter.take_messages() == [preempted]
    reporter.report(h.Finished(key, request), 3.0)
    reporter.take_messages()
    reporter.tick(3.9)
    reporter.tick(4.0)
    assert [type(each) for each in reporter.take_messages()] == [messages.Finished]


def record(token: int, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(token, logprob, 2, ((8, -0.25), (token, logprob)))


def log_probabilities_come_with_their_tokens(h: ModuleType) -> None:
    stream, first = Stream(h, logprobs=2), pack_records([record(1), record(2)])
    assert stream.hear(0, 1, 2, records=first) == [[1, 2]]
    assert stream.hear(0, 1, 2, records=first) == []
    assert stream.hear(1, 2, 3, records=pack_records([record(2), record(3)])) == [[1, 2, 3]]
    stream.retry()
    other = pack_records([record(each, -1.5) for each in (1, 2, 3, 4)])
    assert stream.hear(0, 1, 2, 3, 4, records=other) == [[1, 2, 3, 4]]
    last = pack_records([record(each, -2.5) for each in range(1, 10)])
    tokens = tuple(range(1, 10))
    stream.receive(h.gateway_messages.Finished(stream.key, tokens, h.Hits(), 0, last))
    [request] = stream.gateway.take_ended()
    assert tuple(request.output_tokens) == tokens and stream.gateway.failures == {}
    told = [*(record(each) for each in (1, 2, 3)), record(4, -1.5)]
    assert request.output_logprobs == [*told, *(record(each, -2.5) for each in range(5, 10))]


def an_attempt_without_the_log_probabilities_is_retried(h: ModuleType) -> None:
    messages, tokens = h.gateway_messages, tuple(range(9))
    for packed in (b"", pack_records([record(1)]), bytes(8 * 9 - 8), bytes(8 * 22 * 9)):
        for is_end in (True, False):
            stream = Stream(h, logprobs=2, max_attempts=1)
            if is_end:
                stream.receive(messages.Finished(stream.key, tokens, h.Hits(), 0, packed))
            else:
                assert stream.hear(0, *tokens, records=packed) == []
            reason = "log probabilities of 0 of 9 tokens came"
            assert stream.gateway.failures == {"a": reason}
            [request] = stream.gateway.take_ended()
            assert request.output_tokens == request.output_logprobs == []


def log_probabilities_that_nobody_asked_for_are_ignored(h: ModuleType) -> None:
    stream, packed = Stream(h), pack_records([record(1)])
    assert stream.hear(0, 1, records=packed) == [[1]]
    finished = h.gateway_messages.Finished(stream.key, (1,), h.Hits(), 0, packed)
    stream.receive(finished)
    [request] = stream.gateway.take_ended()
    assert request.output_logprobs == []


def a_node_reports_log_probabilities_within_the_limits(h: ModuleType) -> None:
    """Each counts as a token more; who has none takes the room that is left."""
    reporter, messages = reporter_of(h), h.gateway_messages
    most = messages.MAX_PROGRESS_TOKENS
    (key, request), (plain, _) = (decoding(h, reporter, name, most) for name in "ab")
    request.logprobs = 1
    request.output_logprobs += map(record, request.output_tokens)
    for each in (key, plain):
        reporter.follow(messages.FollowAttempt(each, 5))
    reporter.report_progress(0.0)
    [progress] = reporter.take_messages()
    [new, other] = progress.attempts
    room = most // 3
    assert (new.key, new.start, new.tokens) == (key, 5, tuple(range(5, 5 + room)))
    assert unpack_records(new.records, new.tokens) == [record(each) for each in new.tokens]
    assert (other.key, other.tokens, other.records) == (plain, tuple(range(5, 5 + most % 3)), b"")
    reporter.report(h.Finished(key, request), 1.0)
    [finished] = reporter.take_messages()
    assert unpack_records(finished.records, finished.tokens) == request.output_logprobs


def tokens_are_asked_for_only_by_a_gateway_that_streams(h: ModuleType) -> None:
    harness, messages = GatewayHarness(h), h.gateway_messages
    run = harness.run()
    harness.gateway.receive(D, 5, messages.Started(run.key), 0.0)
    assert harness.sent() == [(D, messages.DeliveryAck(run.key, "Started"))]


def decoding(h: ModuleType, reporter: Any, name: str, num_tokens: int) -> tuple[Any, Any]:
    """Let a node decode an attempt; return its key and its request."""
    key = h.AttemptKey(name, 1)
    request = gateway_of(h).network_gateway.Request(name, PROMPT, num_tokens + 1)
    request.output_tokens += range(num_tokens)
    started = h.Started(key, request, 0)
    reporter.report(started, 0.0)
    reporter.take_messages()
    return key, request


def a_node_reports_new_tokens_to_those_who_asked(h: ModuleType) -> None:
    reporter, messages = reporter_of(h), h.gateway_messages
    key, request = decoding(h, reporter, "a", 2)
    other, _ = decoding(h, reporter, "b", 4)
    reporter.report_progress(0.0)
    assert reporter.take_messages() == []
    reporter.follow(messages.FollowAttempt(key, 0))
    reporter.follow(messages.FollowAttempt(h.AttemptKey("c", 1), 0))  # it has ended
    reporter.report_progress(0.0)
    assert reporter.take_messages() == [
        messages.Progress((messages.NewTokens(key, 0, (0, 1)),)),
    ]
    reporter.follow(messages.FollowAttempt(other, 3))
    reporter.report_progress(0.004)
    assert reporter.take_messages() == [], "there was a message just now"
    request.append(7)
    reporter.report_progress(0.005)
    [progress] = reporter.take_messages()
    assert sorted(progress.attempts) == [
        messages.NewTokens(key, 2, (7,)),
        messages.NewTokens(other, 3, (3,)),
    ]
    reporter.report_progress(1.0)
    assert reporter.take_messages() == []
    reporter.follow(messages.FollowAttempt(key, 1))  # some were lost
    reporter.report_progress(1.0)
    [progress] = reporter.take_messages()
    assert progress.attempts == (messages.NewTokens(key, 1, (1, 7)),)
    request.append(8)
    reporter.report(messages.DecodeFailed(key, "it was cold"), 1.0)
    reporter.take_messages()
    reporter.report_progress(2.0)
    assert reporter.take_messages() == []


def a_message_has_a_limited_number_of_tokens_and_serves_all_in_turn(h: ModuleType) -> None:
    reporter, messages = reporter_of(h), h.gateway_messages
    most = messages.MAX_PROGRESS_TOKENS
    started = [decoding(h, reporter, name, most) for name in "abc"]
    heard = dict.fromkeys((key for key, _ in started), 0)
    for key in heard:
        reporter.follow(messages.FollowAttempt(key, 0))
    for now in range(3):
        reporter.report_progress(float(now))
        [progress] = reporter.take_messages()
        assert sum(len(each.tokens) for each in progress.attempts) == most
        for key, start, tokens, _ in progress.attempts:
            assert start == heard[key]
            heard[key] += len(tokens)
        for _, request in started:
            request.output_tokens += range(most)
    assert list(heard.values()) == [most] * 3


def reporter_of(h: ModuleType) -> Any:
    return gateway_of(h).node_reporter.NodeReporter(
        5, h.Timing(1.0, silence_s=2.0, transfer_s=3.0, remember_s=9.0)
    )


def a_node_begins_once_and_acknowledges_each_copy(h: ModuleType) -> None:
    run = GatewayHarness(h).run()
    reporter = reporter_of(h)
    begun: list[Any] = []
    for now in range(4):
        reporter.begin(run, lambda *what: begun.append(what), float(now))
        assert reporter.take_messages() == [h.gateway_messages.DeliveryAck.of(run)]
    [(request, peer, attempt)] = begun
    assert (request.prompt.tolist(), request.max_new_tokens, peer, attempt) == (PROMPT, 2, D, 1)
    for epoch in (4, 6):
        reporter.begin(replace(run, epoch=epoch), lambda *what: begun.append(what), 4.0)
    assert reporter.take_messages() == [] and len(begun) == 1
    reporter.tick(11.0)
    assert not reporter.is_new(run)
    reporter.tick(12.0)
    assert reporter.is_new(run)


def an_attempt_that_a_node_rejects_has_failed(h: ModuleType) -> None:
    run, messages = GatewayHarness(h).run(), h.gateway_messages
    reporter = reporter_of(h)

    def refuse(*_: object) -> None:
        raise gateway_of(h).node_reporter.RequestError("it is open")

    reporter.begin(run, refuse, 0.0)
    failed = messages.PrefillFailed(run.key, "it is open", True, False)
    assert reporter.take_messages() == [messages.DeliveryAck.of(run), failed]
    assert reporter.num_unacked == 1
    for now in (1.0, 2.0, 3.0, 4.0):
        reporter.tick(now)
        assert reporter.take_messages() == ([failed] if now < 3.0 else [])
    assert reporter.num_unacked == 0


def a_message_is_resent_until_it_is_acknowledged(h: ModuleType) -> None:
    queue, key, messages = (
        gateway_of(h).resend.ResendQueue(retry_s=1.0, patience_s=3.0),
        h.AttemptKey("a", 1),
        h.gateway_messages,
    )
    started = messages.Started(key)
    queue.add("gateway", started, 0.0)
    assert queue.take_due(0.9) == ([], [])
    assert queue.take_due(1.0) == ([("gateway", started)], [])
    assert queue.take_due(1.9) == ([], [])
    queue.acknowledge("another", messages.DeliveryAck(key, "Started"))
    queue.acknowledge("gateway", messages.DeliveryAck(h.AttemptKey("a", 2), "Started"))
    assert queue.take_due(2.0) == ([("gateway", started)], [])
    assert queue.take_due(3.0) == ([], [("gateway", started)])
    assert len(queue) == 0


def the_last_message_of_an_attempt_replaces_earlier_ones(h: ModuleType) -> None:
    queue, key, messages = (
        gateway_of(h).resend.ResendQueue(retry_s=1.0, patience_s=9.0),
        h.AttemptKey("a", 1),
        h.gateway_messages,
    )
    failed = messages.DecodeFailed(key, "why")
    queue.add("gateway", messages.Started(key), 0.0)
    queue.add("gateway", failed, 0.5)
    queue.acknowledge("gateway", messages.DeliveryAck(key, "Started"))
    assert queue.take_due(1.2) == ([], [])
    assert queue.take_due(1.5) == ([("gateway", failed)], [])
    queue.acknowledge("gateway", messages.DeliveryAck(key, "DecodeFailed"))
    assert len(queue) == 0


def no_message_is_resent_to_a_gone_node_or_about_an_ended_attempt(h: ModuleType) -> None:
    queue, messages = (
        gateway_of(h).resend.ResendQueue(retry_s=1.0, patience_s=9.0),
        h.gateway_messages,
    )
    for peer in ("p0", "p1"):
        for key in (h.AttemptKey("a", 1), h.AttemptKey("b", 1)):
            queue.add(peer, messages.Started(key), 0.0)
    queue.forget_peer("p0")
    queue.forget(h.AttemptKey("a", 1))
    assert queue.take_due(1.0) == ([("p1", messages.Started(h.AttemptKey("b", 1)))], [])


GATEWAY_SCENARIOS: Final[list[Callable[[ModuleType], None]]] = [
    a_node_is_lost_once_when_it_comes_back,
    a_node_with_a_lower_epoch_joins_when_its_old_epoch_is_silent,
    the_gateway_acknowledges_each_copy_of_a_report,
    reports_of_an_older_attempt_are_no_answer,
    the_gateway_repeats_run_prefill_until_it_is_acknowledged,
    a_silent_node_is_gone,
    nodes_may_be_lost_together_while_requests_wait,
    only_time_limits_lost_attempts,
    the_next_attempt_avoids_the_pair_that_lost_one,
    lost_attempts_go_to_every_pair_before_one_comes_again,
    nodes_that_do_not_hear_each_other_get_no_attempt_until_they_do,
    a_node_begins_once_and_acknowledges_each_copy,
    an_attempt_that_a_node_rejects_has_failed,
    a_message_is_resent_until_it_is_acknowledged,
    the_last_message_of_an_attempt_replaces_earlier_ones,
    no_message_is_resent_to_a_gone_node_or_about_an_ended_attempt,
    a_node_whose_load_changes_stays,
    tokens_that_are_doubled_late_or_lost_are_told_once,
    a_lost_question_for_tokens_is_repeated,
    another_attempt_tells_only_what_is_new,
    log_probabilities_come_with_their_tokens,
    an_attempt_without_the_log_probabilities_is_retried,
    log_probabilities_that_nobody_asked_for_are_ignored,
    a_node_reports_log_probabilities_within_the_limits,
    a_request_fails_if_another_attempt_contradicts_what_was_told,
    a_preempted_request_goes_on_where_there_is_room,
    a_moved_request_goes_on_after_what_was_reported_of_it,
    a_node_repeats_that_a_request_is_preempted_until_it_resumes,
    tokens_are_asked_for_only_by_a_gateway_that_streams,
    a_node_reports_new_tokens_to_those_who_asked,
    a_message_has_a_limited_number_of_tokens_and_serves_all_in_turn,
    either_node_may_crash_and_lose_its_messages,
    either_connection_may_break_at_any_message,
    the_gateway_may_restart_at_any_message,
]
"""Scenarios of the gateway, quick ones first."""
