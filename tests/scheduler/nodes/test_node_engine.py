"""A node between its messages, its transport and its steps, without a model."""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest.mock import Mock

import numpy as np

from radixkv.kvcache import CacheManager
from radixkv.scheduler import DecodeScheduler
from radixkv.scheduler.handoff import (
    Ask,
    AttemptKey,
    Commit,
    Header,
    Hits,
    Pull,
    Renew,
    Send,
    Started,
    Timing,
)
from radixkv.scheduler.nodes import DecodeEngine
from radixkv.scheduler.nodes.node import PeerMessage
from radixkv.scheduler.nodes.transport import Received


def decode_node(scheduler: DecodeScheduler) -> Any:
    """A node whose model takes no time, and whose transport the test plays."""
    node: Any = DecodeEngine.__new__(DecodeEngine)
    node.scheduler, node._runner, node._transport = scheduler, Mock(), Mock()
    node._receiver = Mock()
    node._in_flight, node._num_started, node._waits = deque(), 0, True
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
