"""KVReceiver: copies received parts into blocks, then releases staging memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from radixkv.scheduler.handoff import AttemptKey, CancelPull, PartId, Pull, Sent
from radixkv.scheduler.nodes.kv_receiver import KVReceiver
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
