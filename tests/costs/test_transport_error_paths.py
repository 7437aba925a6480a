"""A threaded transport makes a request as a whole, loses no event, and ends as a whole.

Whatever is raised, in its caller or in its thread.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from radixkv.scheduler.handoff.messages import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import TransportError, threaded, transfer_table
from radixkv.scheduler.nodes.transport.base import (
    Event,
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    Withdrawn,
)
from radixkv.scheduler.nodes.transport.descriptors import (
    PullInfo,
    describe,
    digest_arrays,
    make_digest_key,
)
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport

from .injection import (
    ALL_ERRORS,
    OF_THREADS,
    PAIRS_OF_THREADS,
    injections,
    second_injections,
)
from .node_subjects import LoopEngine, LoopPull
from .planting import Bug, bug, planted, planted_source

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
    "cancel": bug(
        "the lock of a command is taken without with",
        MODULE,
        ("        with self._changed:\n            self._changed.notify()  # first",
         "        self._changed.acquire()\n        if True:\n"
         "            self._changed.notify()  # first"),
        ("            self._commands.append(command)\n",
         "            self._commands.append(command)\n        self._changed.release()\n"),
    ),
    "withdraw": bug(
        "a command is queued before the thread is told",
        MODULE,
        ("            self._changed.notify()  # first, so that an error leaves no command\n"
         "            self._commands.append(command)\n",
         "            self._commands.append(command)\n            self._changed.notify()\n"),
    ),
}  # fmt: skip


def is_held(transport: ThreadedTransport) -> bool:
    """Whether this thread holds the lock, which it could take again."""
    changed: Any = transport._changed
    return bool(changed._is_owned())


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
        assert not is_held(transport), "the lock is held"
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


# Events

OFFER, PULL, CANCELLED, FAILED = range(1, 5)
POLL_BUGS = (
    bug(
        "events are taken before they are accounted",
        MODULE,
        ("            self._accounted += [self._account(self._taken[0])]\n"
         "            del self._taken[0]\n",
         "            event = self._taken.pop(0)\n"
         "            self._accounted += [self._account(event)]\n"),
    ),
    bug(
        "events that are accounted are kept by nobody",
        MODULE,
        ("        while self._taken:  # an error loses none, and counts none twice\n"
         "            self._accounted += [self._account(self._taken[0])]\n"
         "            del self._taken[0]\n",
         "        taken, self._taken = self._taken, []\n"
         "        self._accounted = [self._account(each) for each in taken]\n"),
    ),
    bug(
        "a pull is forgotten before its memory is freed",
        MODULE,
        ("            case Received() if self._pulling[event.part_id]:\n",
         "            case Received() if self._pulling.pop(event.part_id):\n"),
        ("                del self._pulling[event.part_id]\n                return failed\n",
         "                return failed\n"),
        ("                self._received.add(event.part_id)\n"
         "                del self._pulling[event.part_id]\n",
         "                self._received.add(event.part_id)\n"),
    ),
)  # fmt: skip


def inject_into_poll() -> None:
    for injector in injections(threaded, errors=ALL_ERRORS):
        engine: Any = SimpleNamespace(name="none", copies_offers=True)
        with patch.object(Thread, "start"):
            transport = ThreadedTransport(engine)
        atexit.unregister(transport.close)
        CALLS["offer"](transport)
        transport._offered.add(part(OFFER))
        for number in (PULL, CANCELLED, FAILED):
            pull(transport, number)
        transport.cancel(part(CANCELLED))
        num_commands = len(transport._commands)
        transport._events += [
            OfferFailed(part(OFFER), ""),
            Received(part(PULL), ()),
            Received(part(CANCELLED), ()),
            PullFailed(part(FAILED), Fault.FAILED, ""),
            Withdrawn(part(0).key),
        ]
        events: list[Event] = []

        def call(transport: ThreadedTransport = transport, events: list[Event] = events) -> None:
            events += transport.poll()

        injector.call(call)
        call()
        kinds = [type(event) for event in events]
        where = f"after {injector.raised_in}"
        assert kinds == [OfferFailed, Received, PullFailed, PullFailed, Withdrawn], where
        assert (transport._offered, transport._pulling) == (set(), {}), where
        assert transport._received == {part(PULL)}, where
        assert len(transport._commands) == num_commands + 1, f"not freed once {where}"


def test_no_event_is_lost() -> None:
    inject_into_poll()


@pytest.mark.parametrize("bug", POLL_BUGS, ids=str)
def test_a_lost_event_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, KeyError)):
        inject_into_poll()


# The thread

THREAD_BUGS = (
    bug(
        "a thread that has ended is not reported",
        MODULE,
        ("        except Exception as error:\n            self._crash = error\n",
         "        except Exception as error:\n            del error\n"),
    ),
    bug(
        "the last error of a thread is reported, not the first",
        MODULE,
        ("self._crash = self._crash or error", "self._crash = error"),
    ),
    bug(
        "a thread that fails leaves its engine open",
        MODULE,
        ("            self._crash = error\n        try:\n            self._table.close()\n",
         "            self._crash = error\n            return\n"
         "        try:\n            self._table.close()\n"),
    ),
    bug(
        "pulls in flight are left as they are",
        "scheduler.nodes.transport.transfer_table",
        ("give_back(*[pull.abandon for pull in running], self.engine.close)",
         "give_back(self.engine.close)"),
    ),
    bug(
        "the lock of the thread is taken without with",
        MODULE,
        ("            with self._changed:\n                self._events += events\n",
         "            self._changed.acquire()\n            if True:\n"
         "                self._events += events\n"),
        ("                    self._changed.wait(sleep_s if wait_s == 0 else wait_s)\n",
         "                    self._changed.wait(sleep_s if wait_s == 0 else wait_s)\n"
         "            self._changed.release()\n"),
    ),
)  # fmt: skip


class Pull(LoopPull):
    """A pull that is in its engine's list until it is freed or abandoned, and may never arrive."""

    def __init__(self, engine: Turns, route: bytes, digest_key: bytes) -> None:
        super().__init__(engine.served.get(route, ()), digest_key)
        self._pulls = engine.pulls
        self._pulls.append(self)

    def advance(self) -> int:
        return len(self.arrays)

    def free(self) -> None:
        self._pulls.remove(self)

    abandon = free


class Turns(LoopEngine):
    """An engine that closes its transport after some turns."""

    def __init__(self) -> None:
        super().__init__()
        self.pulls: list[Pull] = []
        self.is_closed = False
        self._questions = 8

    def pull(self, route: bytes, descriptor: object, digest_key: bytes) -> Pull:
        return Pull(self, route, digest_key)

    @property
    def maintain_every_s(self) -> float | None:
        self._questions -= 1
        if self.transport is not None and not self._questions:
            self.transport._is_closed = True
        return None

    def close(self) -> None:
        self.is_closed = True


def offered_info(engine: Turns, number: int, arrays: Sequence[Any]) -> PullInfo:
    key = make_digest_key()
    route = engine.offer(arrays).route if arrays else b"nowhere"
    return PullInfo(part(number), DESCRIPTOR, digest_arrays(arrays, key), engine.name, route, key)


def inject_into_thread() -> None:
    closing = ["close", "abandon"]
    for injector in chain(
        injections(threaded, errors=OF_THREADS, cleaning=["close"]),
        second_injections(
            threaded, transfer_table, after=closing, pairs=PAIRS_OF_THREADS, cleaning=["step"]
        ),
    ):
        engine = Turns()
        with patch.object(Thread, "start"):
            transport = engine.transport = ThreadedTransport(engine)
        atexit.unregister(transport.close)
        CALLS["offer"](transport)
        infos = {each: offered_info(engine, each, ARRAYS) for each in (PULL, FAILED)}
        infos[CANCELLED] = offered_info(engine, CANCELLED, [])
        infos[FAILED] = replace(infos[FAILED], digests=(b"",))
        for number, info in sorted(infos.items()):
            transport.pull(part(number), info, DESCRIPTOR, timeout_s=1e9)
        with patch.object(transport._changed, "wait", lambda timeout_s: None):
            injector.call(transport._run)
        where = f"after {injector.error.__name__} in {injector.raised_in}"
        if injector.raised_in.startswith("ThreadedTransport._run,"):
            continue  # it has not begun
        assert not is_held(transport), f"the lock is held {where}"
        assert engine.is_closed, f"the engine is open {where}"
        received = list(transport._table._received.values())
        assert [*engine.pulls] == received, f"pulls go on {where}"
        if injector.raised_in:
            text = f"^loop has ended: {injector.error.__name__}$"
            with pytest.raises(TransportError, match=text):
                transport.poll()
        else:
            kinds = [type(each) for each in transport.poll()]
            assert kinds == [Offered, Received, PullFailed], kinds


def test_a_thread_ends_as_a_whole() -> None:
    inject_into_thread()


@pytest.mark.parametrize("bug", THREAD_BUGS, ids=str)
def test_what_a_thread_leaves_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, pytest.fail.Exception)):
        inject_into_thread()


def fail_to_start() -> None:
    engine = Turns()
    with (
        patch.object(Thread, "start", side_effect=RuntimeError("can't start new thread")),
        patch.object(atexit, "register") as register,
        patch.object(atexit, "unregister") as unregister,
        pytest.raises(RuntimeError, match=r"^can't start new thread$"),
    ):
        ThreadedTransport(engine)
    assert engine.is_closed, "nobody closes the engine"
    assert unregister.call_args == register.call_args, "the transport is closed at the end"


def test_a_transport_without_a_thread_closes_its_engine() -> None:
    fail_to_start()


START_BUGS = (
    bug(
        "an engine without a thread stays open",
        MODULE,
        ("give_back(partial(atexit.unregister, self.close), engine.close)",
         "give_back(partial(atexit.unregister, self.close))"),
    ),
    bug(
        "a transport without a thread is closed at the end",
        MODULE,
        ("give_back(partial(atexit.unregister, self.close), engine.close)",
         "give_back(engine.close)"),
    ),
)  # fmt: skip


@pytest.mark.parametrize("bug", START_BUGS, ids=str)
def test_what_stays_without_a_thread_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        fail_to_start()


def test_every_bug_fits() -> None:
    for each in (*BUGS.values(), *POLL_BUGS, *THREAD_BUGS, *START_BUGS):
        planted_source(each)
