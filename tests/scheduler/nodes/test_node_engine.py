"""A node between its messages, its transport and its steps, without a model."""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest.mock import Mock

import numpy as np

from radixkv.kvcache import CacheManager
from radixkv.scheduler import DecodeScheduler, PrefillScheduler, Request
from radixkv.scheduler.handoff import (
    Ack,
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Hits,
    PartId,
    Post,
    Pull,
    Renew,
    Send,
    Started,
    Timing,
)
from radixkv.scheduler.handoff.gateway_messages import NodeLoad
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.kv_sender import KVSender
from radixkv.scheduler.nodes.node import PeerMessage
from radixkv.scheduler.nodes.transport import Offered, Received
from radixkv.scheduler.step_plan import StepPlan


def decode_node(scheduler: DecodeScheduler) -> Any:
    """A node whose model takes no time, and whose transport the test plays."""
    node: Any = DecodeEngine.__new__(DecodeEngine)
    node.scheduler, node._runner, node._transport = scheduler, Mock(), Mock()
    node._receiver = Mock()
    node._in_flight, node._num_started = deque(), 0
    node._outbox, node._reports, node._on_events = [], [], None
    return node


def test_a_part_that_arrived_during_a_long_step_is_not_late() -> None:
    """The transport is asked before the deadlines pass: the part has waited only for the node."""
    receives = DecodeScheduler(
        CacheManager(8, 2), epoch=1, timing=Timing(), token_budget=8, max_running=4
    )
    prompt = np.arange(4, dtype="<i4").tobytes()
    receives.receive("p0", Ask(Header(AttemptKey("a", 1), 5), prompt, b"", 2, 1, 2))
    header = Header(AttemptKey("a", 1), 5, 1, 1)
    receives.receive("p0", Send(header, 0, 0, 2, 0))
    [pull] = [each for each in receives.take_actions() if isinstance(each, Pull)]
    node = decode_node(receives)
    node._transport.poll.return_value = [Received(pull.part_id, ())]
    node.set_time(Timing().transfer_s)
    node.receive(PeerMessage("p0", Renew(header)))
    node.poll(Timing().transfer_s)
    assert node.take_reports() == [] and receives.num_receiving == 1
    node._transport.poll.return_value = []
    node.receive(PeerMessage("p0", Commit(header, 1, 9, 4, Hits(0, 0, 0))))
    assert [type(each) for each in node.take_reports()] == [Started]


class Model:
    """Steps that end when the test says so, or when the node waits for them."""

    def __init__(self) -> None:
        self.steps: list[StepPlan] = []
        self.is_ready = False

    def start(self, plan: StepPlan, wrote: Any) -> None:
        assert wrote is None
        if plan.num_chunks:
            self.steps.append(plan)

    def read(self) -> list[int]:
        self.is_ready = False
        return [7] * self.steps[-1].num_chunks

    def append_logprobs(self, plan: StepPlan) -> None:
        """Nobody has asked for any."""

    def collect(self) -> None:
        """There are no tiers."""

    dispatch = collect


def prefill_node(*prompts: str) -> Any:
    """A node that computes a prompt of two blocks per step; D has granted blocks for each."""
    node: Any = PrefillEngine.__new__(PrefillEngine)
    node.scheduler = PrefillScheduler(
        CacheManager(32, 2), epoch=1, timing=Timing(), token_budget=4, max_running=4
    )
    node._runner, node._transport, node._num_groups = Model(), Mock(), 1
    node._transport.poll.return_value = []
    kv = Mock()
    kv.describe.return_value.num_bytes = 1
    node._sender = KVSender(kv, node._transport, max_bytes=8)
    node._in_flight, node._num_started = deque(), 0
    node._outbox, node._reports, node._on_events = [], [], None
    for number, name in enumerate(prompts):
        node.scheduler.begin(Request(name, range(4 * number, 4 * number + 4), 2), "d0")
    node.step()
    for name in prompts:
        granted = Grant(Header(AttemptKey(name, 1), 5, 1, 1), 0, 2)
        node.receive(PeerMessage("d0", granted))
    node.take_messages()
    return node


def serve(node: Any) -> None:
    """Let the transport serve every part that waits for it."""
    parts = list(node._sender._waiting_sends)
    node._transport.poll.return_value = [Offered(part_id, Mock()) for part_id in parts]
    node.poll(0.0)
    node._transport.poll.return_value = []


def kinds(node: Any) -> list[str]:
    return [type(each.message).__name__ for each in node.take_messages()]


def test_a_prefill_node_waits_for_a_step_unless_a_part_waits_for_the_transport() -> None:
    node = prefill_node("a", "b", "c")
    model = node._runner
    assert node.step() and (len(model.steps), len(node._in_flight)) == (1, 0)
    assert kinds(node) == ["Commit"] and node._sender.num_waiting == 1
    assert node.step() and (len(model.steps), len(node._in_flight)) == (2, 1)
    assert not node.step() and not node.poll(0.0) and node.take_messages() == []
    serve(node)
    assert kinds(node) == ["Send"], "while the step runs"
    assert node.step() and (len(model.steps), len(node._in_flight)) == (2, 0), "waits again"
    assert kinds(node) == ["Commit"] and node._sender.num_waiting == 1
    assert node.step() and not node.step() and len(node._in_flight) == 1
    model.is_ready = True
    assert node.step() and (len(model.steps), len(node._in_flight)) == (3, 0)
    assert kinds(node) == ["Commit"] and node._sender.num_waiting == 2
    serve(node)
    assert kinds(node) == ["Send", "Send"] and not node.step()


def scripted_node(*num_chunks: int) -> Any:
    """A decode node whose scheduler plans steps of some numbers of chunks, and then no more."""
    node = decode_node(Mock(depth=2, has_work=bool(num_chunks)))
    node.scheduler.schedule.side_effect = [Mock(num_chunks=number) for number in num_chunks]
    node.scheduler.take_actions.return_value = []
    node._transport.poll.return_value = []
    return node


def test_staging_memory_waits_for_the_steps_that_have_ended() -> None:
    """Those in flight have not ended, and a plan without chunks is no step."""
    node, ended = scripted_node(1, 1, 0, 0, 1), list[int]()
    node._receiver.release_written = ended.append
    part = Received(PartId(AttemptKey("a", 1), 1, 1, 1, 0), ())
    assert node.step()
    node._process(part)
    node._receiver.received.assert_called_once_with(part, 1)
    assert [node.step() for _ in range(4)] == [True, True, False, True]
    assert ended == [0, 1, 2, 2, 2]


def test_a_node_that_has_something_to_send_is_not_idle() -> None:
    """And one without a step goes on with the copies between its tiers."""
    node, ack = scripted_node(), Ack(Header(AttemptKey("a", 1), 1))
    for turn in (lambda: node.poll(0.0), node.step):
        assert not turn()
        node.scheduler.take_actions.return_value = [Post("p0", ack)]
        assert turn()
        assert node.take_messages() == [PeerMessage("p0", ack)]
        node.scheduler.take_actions.return_value = []
    assert (node._runner.collect.call_count, node._runner.dispatch.call_count) == (2, 2)
    node.scheduler.schedule.assert_not_called()


def test_kv_events_are_reported_after_each_step_and_after_the_last_copies() -> None:
    node, made, told = scripted_node(1), list[str](), list[str]()
    node.manager, node._on_events = Mock(), told.append
    node.manager.take_events = lambda: made.pop(0) if made else None

    def make(what: str, result: Any) -> Any:
        made.append(what)
        return result

    node.scheduler.take_actions.side_effect = lambda: make("of the step", [])
    node._runner.close = lambda timeout_s: make(f"within {timeout_s:g} s", "closed")
    node.step()
    assert told == ["of the step"]
    assert node.close(timeout_s=3.0) == "closed"
    assert told == ["of the step", "within 3 s"]
    node._transport.close.assert_called_once_with()


def test_each_count_of_a_load_has_its_place() -> None:
    node = scripted_node()
    node.scheduler.running, node.scheduler.waiting = range(1), range(2)
    names = ("prompt_tokens", "hit_tokens", "host_hit_tokens", "storage_hit_tokens", "preemptions")
    counts = dict(zip(names, range(4, 9), strict=True))
    node.scheduler.stats.return_value = Mock(**counts)
    node.manager = Mock(num_blocks=10, available=7)
    expected = NodeLoad(num_running=1, num_waiting=2, num_used_blocks=3, **counts)
    assert node.load() == expected


def test_a_step_in_groups_is_in_flight_while_its_first_groups_are_sent() -> None:
    node = prefill_node("a")
    node._num_groups, node._start = 2, lambda plan: node._runner.start(plan, None)
    assert node.step() and len(node._in_flight) == 1
    assert not node.step() and len(node._in_flight) == 1
    node._runner.is_ready = True
    assert node.step() and len(node._in_flight) == 0
