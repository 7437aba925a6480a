"""Scenarios of the gateway and its nodes on a network that loses messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

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
        self.gateway = gateway_of(h).network_gateway.NetworkGateway(2, **options)
        for name, role in ((P, "prefill"), (D, "decode")):
            self.send_status(name, role)
        self.sent()

    def send_status(self, name: str, role: str, epoch: int = 5) -> None:
        status = self.h.gateway_messages.NodeStatus(role, f"{name}:1", "none", 2, 40, "m")
        self.gateway.receive(name, epoch, status, self.now)

    def sent(self) -> list[Any]:
        says = [each for each in self.gateway.take_actions() if hasattr(each, "message")]
        return [(each.peer, each.message) for each in says]

    def run(self, request_id: str = "a") -> Any:
        self.gateway.add_request(
            gateway_of(self.h).network_gateway.Request(request_id, PROMPT, 2), self.now
        )
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
    harness, messages = GatewayHarness(h, silence_s=5.0, max_attempts=2), h.gateway_messages
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
    assert harness.gateway.failures["b"] == "p0 does not acknowledge the request"


def a_silent_node_is_gone(h: ModuleType) -> None:
    harness = GatewayHarness(h, silence_s=5.0)
    harness.gateway.tick(4.9)
    assert set(harness.gateway.nodes) == {P, D}
    harness.gateway.tick(5.0)
    assert not harness.gateway.nodes and set(harness.gateway.gone) == {P, D}


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
    a_node_begins_once_and_acknowledges_each_copy,
    an_attempt_that_a_node_rejects_has_failed,
    a_message_is_resent_until_it_is_acknowledged,
    the_last_message_of_an_attempt_replaces_earlier_ones,
    no_message_is_resent_to_a_gone_node_or_about_an_ended_attempt,
    either_node_may_crash_and_lose_its_messages,
    either_connection_may_break_at_any_message,
    the_gateway_may_restart_at_any_message,
]
"""Scenarios of the gateway, quick ones first."""
