"""A node between its messages, its transport and its steps, without a model."""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest.mock import Mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.scheduler import DecodeScheduler, PrefillScheduler, Request
from radixkv.scheduler.handoff import (
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Hits,
    PartId,
    Pull,
    Renew,
    Send,
    Started,
    Timing,
)
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.node import PeerMessage
from radixkv.scheduler.nodes.transport import Offered, Received


def node_of(kind: Any, scheduler: DecodeScheduler | PrefillScheduler) -> Any:
    """A node whose model takes no time, and whose transport the test plays."""
    node: Any = kind.__new__(kind)
    node.scheduler, node._runner, node._transport = scheduler, Mock(), Mock()
    node._runner.read.return_value = [1]
    node._sender = node._receiver = Mock()
    node._sender.send.return_value = []
    node._in_flight, node._num_started, node._waits, node._has_yielded = deque(), 0, True, False
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
    node = node_of(DecodeEngine, receives)
    node._transport.poll.return_value = [Received(pull.part_id, ())]
    node.set_time(Timing().transfer_s)
    node.receive(PeerMessage("p0", Renew(header)))
    node.poll(Timing().transfer_s)
    assert node.take_reports() == [] and receives.num_receiving == 1
    node._transport.poll.return_value = []
    node.receive(PeerMessage("p0", Commit(header, 1, 9, 4, Hits(0, 0, 0))))
    assert [type(each) for each in node.take_reports()] == [Started]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20))
def test_messages_do_not_wait_for_a_step_and_delay_it_once(polls: list[tuple[bool, bool]]) -> None:
    """Of a part that is offered, D is told before the next step; then a step comes, however."""
    sends = PrefillScheduler(
        CacheManager(32, 2), epoch=1, timing=Timing(), token_budget=2, max_running=2
    )
    node, key = node_of(PrefillEngine, sends), AttemptKey("a", 1)
    node._transport.poll.return_value = []
    sends.begin(Request("a", [1] * 64, 2), "d0")
    node.poll(0.0)
    assert [type(each.message) for each in node.take_messages()] == [Ask]
    node.receive(PeerMessage("d0", Grant(Header(key, 5, 1, 1), 0, 2)))
    node._sender.offered.return_value = [PeerMessage("d0", Renew(Header(key, 1, 5, 1)))]
    num_steps = num_unsent = 0
    has_yielded = False
    for is_offered, is_sent in polls:
        offered = Offered(PartId(key, 1, 5, 1, 0), Mock())
        node._transport.poll.return_value = [offered] * is_offered
        num_unsent += is_offered
        has_yielded = num_unsent > 0 and not has_yielded
        num_steps += not has_yielded
        assert node.poll(0.0), "the loop need not pause"
        assert node._num_started == num_steps
        assert len(node._outbox) == num_unsent
        if is_sent:
            node.take_messages()
            num_unsent = 0
