"""A request to a threaded transport is made or refused as a whole, whatever is raised."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from radixkv.scheduler.handoff.messages import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import threaded
from radixkv.scheduler.nodes.transport.descriptors import PullInfo, describe
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport

from .injection import ALL_ERRORS, injections
from .planting import Bug, bug, planted

ARRAYS = [np.zeros((1, 2), np.int8)]
DESCRIPTOR = describe(ARRAYS, num_blocks=1)
MODULE = "scheduler.nodes.transport.threaded"


def part(number: int) -> PartId:
    return PartId(AttemptKey("r", 1), epoch=1, peer_epoch=1, grant=1, part=number)


def pull(transport: ThreadedTransport, number: int) -> None:
    info = PullInfo(part(number), DESCRIPTOR, (), "none", b"")
    transport.pull(part(number), info, DESCRIPTOR, timeout_s=9.0)


CALLS: dict[str, Callable[[ThreadedTransport], Any]] = {
    "offer": lambda transport: transport.offer(part(0), ARRAYS, DESCRIPTOR, ttl_s=9.0),
    "withdraw": lambda transport: transport.withdraw(part(0).key),
    "pull": lambda transport: pull(transport, 0),
    "cancel": lambda transport: transport.cancel(part(1)),
    "release": lambda transport: transport.release(part(2)),
}
BUGS = {
    "offer": bug(
        "an offer is known although nobody makes it",
        MODULE,
        ("            self._offered.discard(part_id)\n            raise", "            raise"),
    ),
    "pull": bug(
        "a pull is known although nobody makes it",
        MODULE,
        ("            del self._pulling[part_id]\n            raise", "            raise"),
    ),
    "release": bug(
        "a part is forgotten and not freed",
        MODULE,
        ("self._received.add(part_id)\n                raise", "raise"),
    ),
    "withdraw": bug(
        "a command is queued before the thread is told",
        MODULE,
        ("            self._changed.notify()  # first, so that an error leaves no command\n"
         "            self._commands.append(command)\n",
         "            self._commands.append(command)\n            self._changed.notify()\n"),
    ),
}  # fmt: skip


def state(transport: ThreadedTransport) -> tuple[set[PartId], dict[PartId, bool], set[PartId], int]:
    return (
        set(transport._offered),
        dict(transport._pulling),
        set(transport._received),
        len(transport._commands),
    )


def inject(name: str) -> None:
    for injector in injections(threaded, errors=ALL_ERRORS):
        engine: Any = SimpleNamespace(name="none", copies_offers=True)
        with patch.object(Thread, "start"):
            transport = ThreadedTransport(engine)
        atexit.unregister(transport.close)
        pull(transport, 1)
        transport._received.add(part(2))
        before = state(transport)
        has_ended: list[bool] = []

        def call(transport: ThreadedTransport = transport, ended: list[bool] = has_ended) -> None:
            CALLS[name](transport)
            ended.append(True)

        injector.call(call)
        assert transport._changed.acquire(blocking=False), "the lock is held"
        transport._changed.release()
        if not has_ended:
            assert state(transport) == before, f"half a request after {injector.raised_in}"
            CALLS[name](transport)
        assert len(transport._commands) == before[-1] + 1


@pytest.mark.parametrize("name", CALLS)
def test_a_request_is_made_or_nothing_happens(name: str) -> None:
    inject(name)


@pytest.mark.parametrize(("name", "bug"), BUGS.items(), ids=str)
def test_half_a_request_is_found(name: str, bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        inject(name)
