"""The adapter of our hand-off tells the rules what is in a message, and passes the rest on."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.errors import HandoffsOpenError, StepOrderError
from radixkv.scheduler.fuzz import handoff_adapter
from radixkv.scheduler.fuzz.handoff_adapter import (
    NAMESPACES,
    GatewayAdapter,
    HandoffAdapter,
    _copy_of,
    attempt_name,
    message_of,
    part_of,
)
from radixkv.scheduler.gateway.network_gateway import Connect, Disconnect, SendToNode
from radixkv.scheduler.handoff import actions, messages
from radixkv.scheduler.handoff import gateway_messages as gateway
from radixkv.scheduler.handoff.messages import AttemptKey, Header, Hits, PartId
from radixkv.scheduler.request import GREEDY, RequestStatus
from radixkv.spec.adapters import handoff as spec

from .recording import Recorder

KEY = AttemptKey("r1 #3.9", 2)
HEADER = Header(KEY, 1, 4, grant=5)
PROMPT = np.array([7, 8], "<i4").tobytes()
HITS = Hits(10, 200, 3_000)
STATUS = gateway.NodeStatus("decode", "", "simulated", 2, 9, "simulated")
RUN = gateway.RunPrefill(KEY, 1, PROMPT, 3, 0, GREEDY, (), b"", "d1", "")

SHOWN: list[tuple[Any, dict[str, Any]]] = [
    (STATUS, {"attempt": ""}),
    (gateway.CacheUpdate(1, True, b"", b"", b"", b""), {"attempt": ""}),
    (gateway.CacheAsk(1), {"attempt": ""}),
    (gateway.DeliveryAck(KEY, "Finished"), {"of": "Finished"}),
    (gateway.CancelAttempt(KEY, "why"), {"cancels": True}),
    (gateway.FollowAttempt(KEY, 0), {"follows": True}),
    (gateway.Progress((gateway.NewTokens(KEY, 0, (1,)),
                       gateway.NewTokens(AttemptKey("r2", 1), 0, ()))),
     {"reports": ("r1.3.2", "r2.0.1")}),
    (gateway.PrefillFailed(KEY, "why"), {"is_repeated": True, "is_failure": True}),
    (gateway.PrefillFailed(KEY, "why", is_final=True),
     {"is_repeated": True, "is_failure": True, "is_final": True}),
    (gateway.PrefillFailed(KEY, "why", is_busy=True), {"is_repeated": True, "has_no_room": True}),
    (gateway.PrefillFailed(KEY, "why", is_lost=True), {"is_repeated": True}),
    (gateway.Preempted(KEY, (4, 5), HITS, 1), {"tokens": (4, 5)}),
    (RUN, {"is_repeated": True, "tokens": (7, 8)}),
    (gateway.Started(KEY), {"is_repeated": True}),
    (gateway.Finished(KEY, (1,), HITS, 0), {"is_repeated": True}),
    (gateway.DecodeFailed(KEY, "why"), {"is_repeated": True, "is_failure": True}),
    (messages.Ask(HEADER, PROMPT, b"", 2, 1, 3), {}),
    (messages.Grant(HEADER, 6, 2), {"grant": 5, "first_block": 6}),
    *((messages.Refuse(HEADER, reason, 1, 0), {"has_no_room": True})
      for reason in ("out of blocks", "out of slots", "others wait")),
    *((messages.Refuse(HEADER, reason, 1, 0), {})
      for reason in ("draining", "too large", "block size", "malformed", "version")),
    (messages.Send(HEADER, 0, 1, 1, 0), {}),
    (messages.Commit(HEADER, 1, 7, 12, HITS), {"hits": 3_210, "position": 12}),
    (messages.Ack(HEADER), {}),
    (messages.Abort(HEADER, "why", True), {"grant": 5}),
    (messages.Renew(HEADER), {}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "shown"), SHOWN, ids=lambda each: type(each).__name__)
def test_a_message_is_shown_with_all_that_the_rules_need_and_nothing_else(
    body: Any, shown: dict[str, Any]
) -> None:
    expected = {"kind": type(body).__name__, "attempt": "r1.3.2", "body": body, **shown}
    assert vars(message_of(body)) == vars(spec.Message(**expected))


def test_there_is_no_other_message() -> None:
    known = {*messages.Message.__subclasses__(), *gateway.GatewayMessage.__args__}
    assert {type(body).__name__ for body, _ in SHOWN} == {each.__name__ for each in known}


def test_names_of_attempts_and_parts() -> None:
    assert attempt_name(AttemptKey("r7 #12.3", 4)) == "r7.12.4"
    assert attempt_name(AttemptKey("r7", 4)) == "r7.0.4"
    assert spec.request_of("r7.12.4") == "r7" == spec.request_of("r7")
    part_id = PartId(KEY, 1, 2, 5, 8)
    assert part_of(part_id) == spec.Part("r1.3.2", 8, part_id)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (OpKind.LOOKUP, ("lookup", [], ["0a", "0b"])),
        (OpKind.HOST_TO_STORAGE, ("store", [1, 2], ["0a", "0b"])),
        (OpKind.STORAGE_TO_HOST, ("fetch", [3, 4], ["0a", "0b"])),
        (OpKind.DEVICE_TO_HOST, (True, [1, 2], [3, 4])),
        (OpKind.HOST_TO_DEVICE, (False, [1, 2], [3, 4])),
    ],
)
def test_a_copy_has_its_blocks_and_keys(kind: OpKind, shown: tuple[Any, ...]) -> None:
    operation: Any = SimpleNamespace(
        kind=kind, sources=np.array([1, 2]), destinations=np.array([3, 4]), keys=[b"\x0a", b"\x0b"]
    )
    assert tuple(_copy_of(operation)) == (operation, *shown)


CONFIG = {
    "prefill_blocks": 12, "decode_blocks": 13, "host_blocks": 0, "block_size": 2, "num_groups": 3,
    "budget": 5, "max_running": 4, "order": "early", "reserve_tokens": 6, "max_attempts": 7,
    "request_s": 5_000, "max_overtaken": 256,
}  # fmt: skip


class Made:
    """Notes how an object of ours is made, in its place."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, **answers: Any) -> None:
        self.given: dict[str, Any] = {}
        self.recorder = Recorder(**answers)
        patch.setattr(handoff_adapter, name, self)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.given = named
        return self.recorder


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_gateway_has_its_options(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "NetworkGateway")
    HandoffAdapter({**CONFIG, **more}).gateway(8, 90)
    assert made.given == {
        "silence_s": spec.SILENCE, "max_attempts": 7, "backoff_s": spec.BACKOFF,
        "request_s": 5_000, "lost_s": 5_000, "epoch": 8, "stream": bool(more),
    }  # fmt: skip
    assert made.recorder.calls == [("tick", 90)]


def test_a_gateway_gets_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "NetworkGateway")
    adapter, recorder = GatewayAdapter(CONFIG, 1, 20), made.recorder
    adapter.tick(30)
    adapter.cancel("r4")
    message = message_of(STATUS)
    adapter.receive("d1", 6, message)
    assert recorder.calls[1:] == [
        ("tick", 30), ("abort", "r4"), ("receive", "d1", 6, STATUS, 30)
    ]  # fmt: skip
    adapter.submit("r5", (4, 5, 6), 3, 17, 1, (8, 9))
    called, request, now = recorder.calls[-1]
    assert (called, now) == ("add_request", 30) and request.prompt.tolist() == [4, 5, 6]
    assert (request.request_id, request.max_new_tokens) == ("r5", 3)
    assert (request.sampling.seed, request.namespace) == (17, NAMESPACES[1] or None)
    assert set(request.stop_token_ids) == {8, 9}


def test_a_gateway_sends_to_connected_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "NetworkGateway")
    adapter, ack = GatewayAdapter(CONFIG, 1, 20), gateway.DeliveryAck(KEY, "Started")
    made.recorder.answers["take_actions"] = [Connect("d1", ""), SendToNode("d1", ack)]
    [sent] = adapter.take_messages()
    assert (sent.to, sent.message.body) == ("d1", ack)
    made.recorder.answers["take_actions"] = [Disconnect("d1"), SendToNode("d1", ack)]
    with pytest.raises(AssertionError, match="the gateway has no address of d1"):
        adapter.take_messages()


def test_a_gateway_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "NetworkGateway")
    adapter, recorder = GatewayAdapter(CONFIG, 1, 20), made.recorder
    hits = {"num_hit_tokens": 10, "num_host_hit_tokens": 200, "num_storage_hit_tokens": 3_000}
    ended = [
        SimpleNamespace(request_id=name, status=status, output_tokens=[4, 5], **hits)
        for name, status in (("r1", RequestStatus.FINISHED), ("r2", RequestStatus.ABORTED))
    ]
    recorder.answers.update(take_ended=ended, take_advanced=ended[::-1])
    vars(recorder).update(
        failures={"r2": "why"}, nodes={"d1": SimpleNamespace(epoch=6)}, num_open=3, num_unacked=4,
        loads={"d1": 5},
    )  # fmt: skip
    assert adapter.take_answers() == [("r1", (4, 5), "", 3_210), ("r2", None, "why", 3_210)]
    assert adapter.take_told() == [("r2", (4, 5)), ("r1", (4, 5))]
    assert (adapter.epoch_of("d1"), adapter.epoch_of("d2")) == (6, None)
    assert adapter.state_of("d1") == (recorder.nodes["d1"], 3, 4)  # type: ignore[index]
    assert (adapter.num_open(), adapter.num_unacked(), adapter.loads()) == (3, 4, {"d1": 5})


@pytest.mark.parametrize(
    ("role", "name", "more", "options", "sizes"),
    [
        ("prefill", "p0", {}, {"max_running": 4, "order": "early", "num_groups": 3}, (12, 2)),
        ("prefill", "p0", {"max_running": 6, "decode_block_size": 4},
         {"max_running": 5, "order": "early", "num_groups": 3}, (12, 2)),
        ("decode", "d0", {"more_blocks": 5},
         {"max_running": 4, "reserve_tokens": 6, "preempt": "recompute", "depth": 1,
          "vocab_size": spec.VOCABULARY, "max_overtaken": 256}, (13, 2)),
        ("decode", "d1",
         {"more_blocks": 5, "depth": 2, "host_blocks": 8, "max_running": 6,
          "decode_block_size": 4},
         {"max_running": 5, "reserve_tokens": 6, "preempt": "host", "depth": 2,
          "vocab_size": spec.VOCABULARY, "max_overtaken": 256}, (18, 4)),
        ("decode", "d1", {},
         {"max_running": 4, "reserve_tokens": 6, "preempt": "recompute", "depth": 1,
          "vocab_size": spec.VOCABULARY, "max_overtaken": 256}, (13, 2)),
    ],
)  # fmt: skip
def test_a_node_has_its_options(
    role: spec.Role, name: str, more: dict[str, Any], options: dict[str, Any],
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = Made(monkeypatch, "PrefillScheduler" if role == "prefill" else "DecodeScheduler")
    config = {**CONFIG, **more}
    adapter = HandoffAdapter(config)
    for _ in range(2):  # a node that begins anew has what it had
        node = adapter.node(name, role, 8, 90)
    assert config == {**CONFIG, **more}, "the configuration is the world's"
    common = {"epoch": 8, "timing": handoff_adapter.TIMING, "token_budget": 5}
    assert made.given == {**common, **options}
    assert made.recorder.calls == [("tick", 90)] * 2
    assert (node.manager.num_blocks, node.manager.block_size) == sizes
    assert (adapter.max_overtaken, adapter.depth) == (256, more.get("depth", 1))
    tiers = node.manager.tiers
    assert (tiers is not None) == bool(more.get("host_blocks"))


@pytest.mark.parametrize("storage", [0, 1])
def test_the_blocks_of_storage_have_keys(storage: int) -> None:
    config = {**CONFIG, "host_blocks": 4, "storage": storage}
    node = HandoffAdapter(config).node("p0", "prefill", 1, 0)
    keys = node.storage_keys((1, 2, 3, 4, 5), 1)
    assert len(keys) == 2 * storage and keys[:1] == node.storage_keys((1, 2, 3), 1)
    assert not storage or keys != node.storage_keys((1, 2, 3, 4, 5), 0)


def test_a_decode_node_passes_on_what_happens_to_a_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "DecodeScheduler")
    node = handoff_adapter.DecodeNode(CONFIG, 1, 0)
    part_id = PartId(KEY, 1, 2, 5, 8)
    part = part_of(part_id)
    node.pulled(part)
    node.pull_fenced(part)
    for fenced in (True, False):
        node.pull_failed(part, fenced)
    assert made.recorder.calls[1:] == [
        ("pulled", part_id), ("pull_fenced", part_id),
        *(("pull_failed", part_id, {"fenced": fenced, "reason": "it was lost"})
          for fenced in (True, False)),
    ]  # fmt: skip


def decode_node(patch: pytest.MonkeyPatch) -> tuple[handoff_adapter.DecodeNode, Recorder, Recorder]:
    """Return a node whose scheduler and reporter note the calls."""
    made = Made(patch, "DecodeScheduler")
    node = handoff_adapter.DecodeNode(CONFIG, 1, 20)
    reporter: Any = Recorder()
    node.reporter = reporter
    made.recorder.calls.clear()
    return node, made.recorder, reporter


def test_a_node_gets_each_message_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    node, scheduler, reporter = decode_node(monkeypatch)
    ack, follow = gateway.DeliveryAck(KEY, "Started"), gateway.FollowAttempt(KEY, 3)
    commit = messages.Commit(HEADER, 1, 7, 12, HITS)
    for body in (ack, follow, gateway.CancelAttempt(KEY, "why"), commit):
        node.receive("p1", message_of(body))
    node.tick(30)
    assert scheduler.calls == [("give_up", KEY, "why"), ("receive", "p1", commit), ("tick", 30)]
    assert reporter.calls == [("acknowledge", "p1", ack), ("follow", follow), ("tick", 30)]
    assert node.now == 30


def test_a_prefill_node_begins_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "PrefillScheduler", take_actions=[])
    node = handoff_adapter.PrefillNode(CONFIG, 1, 20)
    reporter: Any = Recorder(take_messages=[])
    node.reporter = reporter
    node.receive("gateway", message_of(RUN))
    assert reporter.calls == [("begin", RUN, node._begin, 20)]
    request = RUN.request()
    node._begin(request, "d1", 2)
    assert node.take_actions() == [spec.Begun("r1.3.2")] and node.take_actions() == []
    plans: Any = ["a plan", "the next one"]
    node.plans.extend(plans)
    node.wrote(2)
    assert made.recorder.calls == [
        ("tick", 20), ("begin", request, "d1", 2), *[("take_actions",)] * 2, ("wrote", "a plan", 2)
    ]  # fmt: skip


def test_actions_of_a_prefill_node_are_shown_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    part_id = PartId(KEY, 1, 2, 5, 8)
    commit, failed = messages.Commit(HEADER, 1, 7, 12, HITS), gateway.PrefillFailed(KEY, "why")
    made = Made(monkeypatch, "PrefillScheduler", take_actions=[
        actions.Post("d1", commit), actions.Offer("d1", part_id, (3, 4), 1),
        actions.Withdraw(KEY), failed, actions.Compute(KEY),
    ])  # fmt: skip
    node = handoff_adapter.PrefillNode(CONFIG, 1, 20)
    reporter: Any = Recorder(take_messages=[gateway.Started(KEY)])
    node.reporter = reporter
    shown: list[Any] = list(node.take_actions())
    sent, offer, withdraw, told = shown
    assert (sent.to, sent.message.body) == ("d1", commit)
    assert offer == spec.Offer(part_of(part_id), (3, 4), 1)
    assert withdraw == spec.Withdraw("r1.3.2")
    assert (told.to, told.message.body) == (spec.GATEWAY, gateway.Started(KEY))
    assert reporter.calls == [("report", failed, 20), ("report_progress", 20), ("take_messages",)]
    node.fenced("r1.3.2")
    assert made.recorder.calls[-1] == ("fenced", KEY)


def test_actions_of_a_decode_node_are_shown_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    node, scheduler, reporter = decode_node(monkeypatch)
    part_id = PartId(KEY, 1, 2, 5, 8)
    held = SimpleNamespace(block_table=np.array([5, 6]))
    has, lacks = RUN.request(), RUN.request()
    has.lease, has.num_hit_tokens, lacks.lease = held, 4, None  # type: ignore[assignment]
    ack = messages.Ack(HEADER)
    done = [
        actions.Started(KEY, has, 9), actions.Started(KEY, lacks, 8),
        actions.Preempted(KEY, has), actions.Finished(KEY, has), gateway.DecodeFailed(KEY, "why"),
    ]  # fmt: skip
    scheduler.answers["take_actions"] = [
        actions.Post("p1", ack), actions.Pull("p1", part_id, (3, 4), 1, 3, actions.Sent(2, 2, 7)),
        actions.CancelPull(part_id), *done,
    ]  # fmt: skip
    reporter.answers["take_messages"] = []
    shown: list[Any] = list(node.take_actions())
    sent, *others = shown
    assert (sent.to, sent.message.body) == ("p1", ack)
    assert list(map(repr, others)) == list(map(repr, [
        spec.Pull("p1", part_of(part_id), (3, 4), 1, 7), spec.CancelPull(part_of(part_id)),
        spec.Started("r1.3.2", [5, 6], 9, 4), spec.Started("r1.3.2", [], 8, 0),
        spec.Ended("r1.3.2"), spec.Ended("r1.3.2"),
    ]))  # fmt: skip
    assert reporter.calls[:-2] == [("report", each, 20) for each in done]


@pytest.mark.parametrize("error", [None, HandoffsOpenError(1), StepOrderError("in flight")])
def test_a_node_resets_unless_it_is_refused(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, scheduler, _ = decode_node(monkeypatch)
    scheduler.answers["reset_cache"] = error
    assert node.reset() == (error is None)
    node.drain()
    assert scheduler.calls == [("reset_cache",), ("drain", "the weights change")]


def test_a_node_tells_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    node, scheduler, _ = decode_node(monkeypatch)
    vars(scheduler)["waiting"] = [1, 2, 3]
    node.manager.admit(node.manager.match([1, 2, 3]))
    assert node.status().body == gateway.NodeStatus(
        "decode", "", "simulated", 2, 13, "simulated",
        load=gateway.NodeLoad(num_waiting=3, num_used_blocks=2),
    )  # fmt: skip
    assert (node.num_free(), node.num_evicted()) == (11, 0)


def test_an_update_ends_the_first_step_and_tells_who_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    node, scheduler, _ = decode_node(monkeypatch)
    statuses = (RequestStatus.RUNNING, RequestStatus.ABORTED)
    plan: Any = SimpleNamespace(
        chunks=[SimpleNamespace(request=SimpleNamespace(status=each)) for each in statuses]
    )
    node.plans.extend((plan, plan))
    assert node.update([4, 5]) == [True, False] and len(node.plans) == 1
    assert scheduler.calls == [("update", plan, [4, 5])]


# Steps, copies and the cache


def asked(name: str, seed: int, *table: int) -> Any:
    """Return a request in the namespace of a tenant, with a lease if it has a table."""
    request = replace(RUN, namespace=NAMESPACES[1], sampling=replace(GREEDY, seed=seed)).request()
    request.request_id = name
    request.append(9)
    request.lease = (
        SimpleNamespace(  # type: ignore[assignment]
            block_table=np.array(table, np.int32), num_shared_blocks=1, num_hit_blocks=2
        )
        if table
        else None
    )
    return request


def test_a_plan_is_shown_with_all_of_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    node, scheduler, _ = decode_node(monkeypatch)
    one, two, waits, lost = (
        asked("r1", 17, 5, 6), asked("r2", 18, 7), asked("r3", 19), asked("r4", 20)
    )  # fmt: skip
    node._names.update({one: "one", two: "two", waits: "waits", lost: "lost"})
    chunks = [SimpleNamespace(request=two, start=2, length=1),
              SimpleNamespace(request=one, start=0, length=3)]  # fmt: skip
    plan = SimpleNamespace(chunks=chunks, admitted=[one, waits, two], preempted=[lost, waits])
    scheduler.answers["schedule"] = plan
    assert node.schedule() == spec.Plan(
        [spec.Chunk("two", 2, 3, (7, 8, 9), [7], 1, 18, 1),
         spec.Chunk("one", 0, 3, (7, 8, 9), [5, 6], 1, 17, 1)],
        [spec.Admitted("one", (7, 8, 9), 2 * 2, 1), spec.Admitted("two", (7, 8, 9), 2 * 2, 1)],
        ["lost", "waits"],
    )  # fmt: skip
    assert list(node.plans) == [plan]
    scheduler.answers["schedule"] = SimpleNamespace(chunks=[], admitted=[], preempted=[lost])
    assert node.schedule() == spec.Plan([], [], ["lost"]) and list(node.plans) == [plan]
    for other in (waits, lost):
        scheduler.answers["schedule"] = SimpleNamespace(
            chunks=[SimpleNamespace(request=other, start=0, length=1)], admitted=[], preempted=[]
        )
        with pytest.raises(AssertionError, match="is computed without blocks"):
            node.schedule()


def test_a_request_that_an_update_ends_ran_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    node, scheduler, _ = decode_node(monkeypatch)
    request = SimpleNamespace(status=RequestStatus.RUNNING)
    plan: Any = SimpleNamespace(chunks=[SimpleNamespace(request=request)])
    node.plans.append(plan)

    def end(*_: Any) -> None:
        assert not node.plans
        request.status = RequestStatus.FINISHED

    vars(scheduler)["update"] = end
    assert node.update([4]) == [True]


def test_names_of_requests_that_are_gone_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    node, scheduler, reporter = decode_node(monkeypatch)
    reporter.answers["take_messages"] = []
    scheduler.answers["take_actions"] = [actions.Started(KEY, RUN.request(), 9)]
    node.take_actions()
    scheduler.answers.clear()
    reporter.calls.clear()
    gc.collect()
    assert not node._names


def test_an_attempt_is_withdrawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "PrefillScheduler", take_actions=[actions.Withdraw(KEY)])
    node = handoff_adapter.PrefillNode(CONFIG, 1, 20)
    begun = RUN.request()
    node._begin(begun, "d1", 2)
    shown = list(map(repr, node.take_actions()))  # equal tuples may be of other kinds
    assert shown == list(map(repr, [spec.Begun("r1.3.2"), spec.Withdraw("r1.3.2")]))
    node.fenced("r1.3.2")
    assert made.recorder.calls[-1] == ("fenced", KEY) and not node._withdrawn


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_reporter_has_its_options_and_the_time(
    role: spec.Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    Made(monkeypatch, "PrefillScheduler" if role == "prefill" else "DecodeScheduler")
    given: list[Any] = []
    reporter = Recorder()

    def make(*some: Any, **named: Any) -> Recorder:
        given.append((some, named))
        return reporter

    monkeypatch.setattr(handoff_adapter, "NodeReporter", make)
    node = HandoffAdapter(CONFIG).node("d0", role, 8, 90)
    assert given == [((8, handoff_adapter.TIMING), {"progress_s": 0})]
    assert reporter.calls == [("tick", 90)] and node.now == 90


def test_the_timing_is_that_of_the_world() -> None:
    assert (
        actions.Timing(spec.RETRY, spec.SILENCE, spec.TRANSFER, spec.REMEMBER)
        == handoff_adapter.TIMING
    )


def used_node(**more: Any) -> Any:
    """Return a node whose manager has three published blocks, two of them of a tenant."""
    node = HandoffAdapter({**CONFIG, **more}).node("d0", "decode", 1, 0)
    for tokens, namespace in (([1, 2, 3, 4], NAMESPACES[1]), ([1, 2], NAMESPACES[0])):
        lease = node.manager.admit(node.manager.match(tokens, namespace))
        node.manager.publish(lease, tokens)
        node.manager.release(lease)
    return node


def test_the_cache_of_a_node_is_shown_as_it_is_and_stays_so() -> None:
    node = used_node()
    manager = node.manager
    before = manager.stats()
    assert (node.num_free(), manager.available) == (10, 13)
    prompt = (1, 2, 3, 4, 5)
    assert [node.num_cached(prompt, each) for each in (0, 1)] == [2, 4]
    tables = [node.cached_blocks(prompt[:size], each) for size, each in ((2, 0), (4, 1), (2, 1))]
    assert [len(each) for each in tables] == [1, 2, 1]
    assert tables[1][:1] == tables[2] and not {*tables[0]} & {*tables[1]}
    after = manager.stats()
    assert (after.live_leases, after.hit_blocks, after.free_blocks) == (
        0, before.hit_blocks, before.free_blocks
    )  # fmt: skip
    node.evict(2)
    assert (node.num_evicted(), node.num_free(), node.counts()) == (
        2, 12, spec.NodeCounts(13, 13, 0, 0, 0, 0, 0)
    )  # fmt: skip


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_node_has_work_if_its_scheduler_has(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, scheduler, _ = decode_node(monkeypatch)
    vars(scheduler)["has_work"] = is_busy
    assert node.has_work() is is_busy


def test_copies_of_a_node_end_with_their_results_also_when_they_are_cancelled() -> None:
    assert used_node().take_copies() == []
    node = used_node(host_blocks=4)
    tiers = node.manager.tiers
    node.evict(3)
    [copy] = node.take_copies()
    assert copy.is_down and len(copy.sources) == len(copy.destinations) == 3
    node.copied(copy.id, [True, True, False])
    assert tiers.stats().host_cached_blocks == 2 and tiers.num_open_operations == 0
    match = node.manager.match([1, 2, 3, 4, 5], NAMESPACES[1])
    lease = node.manager.admit(match)
    [copy] = node.take_copies()
    assert not copy.is_down
    node.manager.release(lease)
    assert node.take_copies() == [] and tiers.take_cancelled() == []
    node.copied(copy.id, [True, True])
    assert tiers.num_open_operations == 0
