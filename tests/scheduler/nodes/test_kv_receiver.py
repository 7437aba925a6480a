"""KVReceiver: copies received parts into blocks, then releases staging memory."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np

from radixkv.kvcache import CacheManager
from radixkv.scheduler import DecodeScheduler
from radixkv.scheduler.handoff import (
    Ask,
    AttemptKey,
    CancelPull,
    Commit,
    Header,
    Hits,
    PartId,
    Pull,
    Renew,
    Send,
    Sent,
    Started,
    Timing,
)
from radixkv.scheduler.nodes import DecodeEngine
from radixkv.scheduler.nodes.kv_receiver import KVReceiver
from radixkv.scheduler.nodes.node import PeerMessage
from radixkv.scheduler.nodes.transport import Fault, PullFailed, Received

TICKET = PartId(AttemptKey("a", 1), 1, 1, 1, 0)

SENT = Sent(num_blocks=2, block_size=4, num_skipped_tokens=0)


def test_staging_memory_is_released_after_its_copies() -> None:
    written: list[Any] = []
    released: list[PartId] = []
    kv = SimpleNamespace(
        describe=lambda *_: None,
        write=lambda *given: written.append(given),
        is_idle=lambda: False,
    )
    transport = SimpleNamespace(pull=lambda *_, **__: None, release=released.append)
    receiver = KVReceiver(kv, transport, timeout_s=1.0)  # type: ignore[arg-type]
    receiver.pull(Pull("p", TICKET, (3, 1), 1, 4, SENT), None)  # type: ignore[arg-type]
    receiver.received(Received(TICKET, ("kv",)), 5)  # type: ignore[arg-type]
    receiver.release_written(5)
    assert (written, released) == ([((3, 1), ("kv",), 1, 4, SENT)], [])  # a copy may still read it
    kv.is_idle = lambda: True
    receiver.release_written(5)
    receiver.release_written(5)
    assert released == [TICKET]


def test_staging_memory_is_released_while_steps_overlap() -> None:
    """The arrays are never idle then: a part waits for a step that began after its copy."""
    released: list[PartId] = []
    kv = SimpleNamespace(describe=lambda *_: None, write=lambda *_: None, is_idle=lambda: False)
    transport = SimpleNamespace(pull=lambda *_, **__: None, release=released.append)
    receiver = KVReceiver(kv, transport, timeout_s=1.0)  # type: ignore[arg-type]
    parts = [TICKET._replace(part=part) for part in range(3)]
    for part, num_started in zip(parts, (4, 4, 6), strict=True):
        receiver.pull(Pull("p", part, (3, 1), 0, 1, SENT), None)  # type: ignore[arg-type]
        receiver.received(Received(part, ("kv",)), num_started)  # type: ignore[arg-type]
    for num_ended, expected in ((3, 0), (4, 0), (5, 2), (6, 2), (7, 3), (8, 3)):
        receiver.release_written(num_ended)
        assert released == parts[:expected], f"after {num_ended} steps"


def test_a_pull_expects_the_blocks_of_the_sender_and_ends_with_an_event() -> None:
    kv, transport, info = Mock(), Mock(), Mock()
    receiver = KVReceiver(kv, transport, timeout_s=1.5)
    receiver.pull(Pull("p", TICKET, (3, 1), 1, 4, Sent(5, 8, 3)), info)
    kv.describe.assert_called_once_with(5, 1, 4, 8)
    expected = kv.describe.return_value
    transport.pull.assert_called_once_with(TICKET, info, expected, timeout_s=1.5)
    receiver.cancel(CancelPull(TICKET))
    transport.cancel.assert_called_once_with(TICKET)
    assert TICKET in receiver._pulls, "it may still arrive"
    receiver.failed(PullFailed(TICKET, Fault.MISMATCH, "no"))
    assert receiver._pulls == {} and not receiver._written
    kv.write.assert_not_called()


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
    node: Any = DecodeEngine.__new__(DecodeEngine)
    node.scheduler, node._runner, node._receiver, node._transport = receives, Mock(), Mock(), Mock()
    node._in_flight, node._num_started, node._outbox, node._on_events = deque(), 0, [], None
    node._reports = []
    node._transport.poll.return_value = [Received(pull.part_id, ())]
    node.set_time(Timing().transfer_s)
    node.receive(PeerMessage("p0", Renew(header)))
    node.poll(Timing().transfer_s)
    assert node.take_reports() == [] and receives.num_receiving == 1
    node._transport.poll.return_value = []
    node.receive(PeerMessage("p0", Commit(header, 1, 9, 4, Hits(0, 0, 0))))
    assert [type(each) for each in node.take_reports()] == [Started]
