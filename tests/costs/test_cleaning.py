"""What gives back takes all its steps, whatever one of them raises.

Other tests of this folder meet the same after a first error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest

from radixkv.kvcache.cleanup import give_back
from radixkv.scheduler.handoff.messages import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import in_process, jax_engine, nixl_agent, nixl_engine
from radixkv.scheduler.nodes.transport.base import (
    Fault,
    Offered,
    PullFailed,
    Received,
    Transport,
    Withdrawn,
)
from radixkv.scheduler.nodes.transport.descriptors import PullInfo, describe
from radixkv.scheduler.nodes.transport.in_process import InProcessExchange, InProcessTransport
from radixkv.scheduler.nodes.transport.transfer_engine import seal

from .fake_libraries import jax_engines, nixl_engines
from .injection import ALL_ERRORS, OF_THREADS, injections
from .planting import Bug, bug, planted, planted_source
from .test_transfer_error_paths import Streams, check_nixl
from .transfer_subjects import ARRAYS, KEY, LAYOUT, STAGING_BYTES

TRANSPORT: Final = "scheduler.nodes.transport"

# give_back


def taken_by(*errors: BaseException | None) -> list[int]:
    """Give back in steps, some of which raise, and return those that were taken."""
    taken: list[int] = []

    def step(number: int, error: BaseException | None) -> None:
        taken.append(number)
        if error is not None:
            raise error

    try:
        give_back(*[partial(step, number, each) for number, each in enumerate(errors)])
    finally:
        assert taken == list(range(len(errors)))
    return taken


def test_the_first_error_of_a_step_is_raised() -> None:
    assert taken_by(None, None) == [0, 1]
    for errors in [(OSError("1"), MemoryError("2")), (None, OSError("1"), OSError("2"))]:
        with pytest.raises(OSError, match=r"^1$"):
            taken_by(*errors)
    with pytest.raises(KeyboardInterrupt, match=r"^2$"):
        taken_by(OSError("1"), KeyboardInterrupt("2"), KeyboardInterrupt("3"))


def test_an_error_that_is_handled_stays_and_is_told_of_others() -> None:
    def handle(*errors: BaseException) -> None:
        try:
            raise MemoryError("first")
        except MemoryError:
            taken_by(*errors)
            raise

    with pytest.raises(MemoryError, match=r"^first") as told:
        handle(OSError("a secret"), ValueError())
    assert told.value.__notes__ == [
        "then OSError, when something was given back",
        "then ValueError, when something was given back",
    ]
    with pytest.raises(KeyboardInterrupt) as interrupted:
        handle(OSError(), KeyboardInterrupt())
    assert isinstance(interrupted.value.__context__, MemoryError)


# Engines


def free_of_nixl() -> None:
    """Free a pull whose reads were slow, and confirm it."""
    after = ("release", "release_prepared", "notify", "leave", "_remove")
    for injector in injections(nixl_engine, nixl_agent, errors=OF_THREADS, after=after):
        with nixl_engines(2, STAGING_BYTES) as (nixl, (engine, peer)):
            peer._pool.allocate(STAGING_BYTES * 3 // 4)  # short of room, so it wants to know
            offer = peer.offer(ARRAYS)
            assert offer is not None
            nixl.is_slow = True
            pull = engine.pull(offer.route, LAYOUT, KEY)
            assert pull is not None
            while pull.advance() < len(ARRAYS):
                pass
            injector.call(pull.free)
            peer.maintain()
            assert offer.is_read, f"the read is not confirmed: {injector}"
            check_nixl(engine)


def close_of_nixl() -> None:
    """Close an engine while a pull still reads, or when none does."""
    after = ("shutdown", "maintain", "_close_agent", "take_notifications", "has_ended")
    for is_lost in (False, True):
        for injector in injections(nixl_engine, nixl_agent, errors=OF_THREADS, after=after):
            kept: list[object] = []
            with (
                nixl_engines(2, STAGING_BYTES) as (nixl, (engine, peer)),
                patch.object(nixl_engine, "_NEVER_FREED", kept),
            ):
                offer = peer.offer(ARRAYS)
                assert offer is not None
                if is_lost:
                    nixl.lost.add(peer._agent.address + offer._slot.start)
                    pull = engine.pull(offer.route, LAYOUT, KEY)
                    assert pull is not None
                    pull.advance()
                    pull.abandon()
                injector.call(engine.close)
                library: Any = engine._agent.nixl
                where = f"after {injector}"
                assert library.is_registered == bool(kept) == is_lost, where


def close_of_jax() -> None:
    """Close an engine that serves and reads."""
    after = ("_forget_offers", "_keep_busy", "_keep_for_ever")
    for injector in injections(jax_engine, errors=OF_THREADS, after=after):
        kept: list[object] = []

        def keep(each: object, kept: list[object] = kept) -> None:
            kept.append(each)

        keep.__name__ = "_keep_for_ever"
        keep.__code__ = keep.__code__.replace(co_name="_keep_for_ever")
        with (
            jax_engines(2) as (_, (engine, peer)),
            patch.object(jax_engine, "_keep_for_ever", keep),
        ):
            engine.offer(ARRAYS)
            pull = engine.pull(seal(bytes(8) + peer.address.encode()), LAYOUT, KEY)
            assert pull is not None
            server: Any = engine._server
            injector.call(engine.close)
            assert kept == [pull.reader, server], f"a server may be deleted: {injector}"
            assert (engine._server, engine._readers, server.offers) == (None, {}, {})


def end_of_jax_offers() -> None:
    """Withdraw an offer from a server that serves nobody."""
    for injector in injections(jax_engine, errors=OF_THREADS, after=["abandon", "_abandon"]):
        with jax_engines(1) as (network, (engine,)):
            offer = engine.offer(ARRAYS)
            network.is_stuck = True
            offer.withdraw(was_read=False)
            injector.call(offer._abandon)
            assert not network.num_busy, f"a pull goes on: {injector}"


def start_of_an_agent() -> None:
    """Give the standard streams back."""
    for injector in injections(nixl_agent, after=["dup2", "close", "_restore"]):
        streams = Streams()
        with (
            patch.object(nixl_agent, "os", streams),
            patch.object(nixl_agent, "tempfile", streams),
            patch.object(nixl_agent.sys, "stdout", None),  # type: ignore[attr-defined]
        ):
            injector.call(partial(use, nixl_agent._output_on_stderr))
        assert streams.files == {1: "stdout", 2: "stderr"}, str(injector)


def use(context: Callable[[], Any]) -> None:
    with context():
        pass


# The transport in one process

PARTS: Final = [
    PartId(AttemptKey(f"r{number}", 1), epoch=1, peer_epoch=1, grant=1, part=number)
    for number in range(4)
]
SMALL: Final = [np.zeros((1, 2), np.int8)]
SMALL_LAYOUT: Final = describe(SMALL, num_blocks=1)


def pull_small(transport: Transport, number: int) -> None:
    part = PARTS[number]
    info = PullInfo(part, SMALL_LAYOUT, (), in_process.NAME, b"")
    transport.pull(part, info, SMALL_LAYOUT, timeout_s=9.0)


def offer_small(transport: Transport, number: int) -> None:
    transport.offer(PARTS[number], SMALL, SMALL_LAYOUT, ttl_s=1e9)


CALLS: Final[dict[str, Callable[[InProcessTransport], Any]]] = {
    "offer": lambda transport: offer_small(transport, 3),
    "withdraw": lambda transport: transport.withdraw(PARTS[1].key),
    "pull": lambda transport: pull_small(transport, 1),
    "pull nothing": lambda transport: pull_small(transport, 3),
    "cancel": lambda transport: transport.cancel(PARTS[0]),
    "poll": lambda transport: transport.poll(),
    "close": lambda transport: transport.close(),
}


def state(transport: InProcessTransport) -> list[object]:
    return [
        dict(transport._exchange.offers), dict(transport._expires_at), dict(transport._pulled),
        set(transport._received), list(transport._events),
        {fault: number for fault, number in transport._faults.items() if number},
    ]  # fmt: skip


def in_one_process(name: str) -> None:
    """A call that raises has changed nothing, or can be made again; `close` frees all."""
    for injector in injections(in_process, errors=ALL_ERRORS):
        transport = InProcessTransport(InProcessExchange())
        for number in (0, 1, 2):
            offer_small(transport, number)
        pull_small(transport, 0)
        before = state(transport)
        ended: list[Any] = []

        def call(transport: Any = transport, ended: list[Any] = ended) -> None:
            ended.append(CALLS[name](transport))

        injector.call(call)
        if name == "close":
            transport.close()
            assert not transport._exchange.offers, f"an offer is never freed: {injector}"
            continue
        if not ended:
            if name != "withdraw":  # which may free some offers first, and is whole when repeated
                assert state(transport) == before, f"half a call: {injector}"
            call()
        assert state(transport) != before
        found = [*(ended[-1] or ()), *transport.poll()]
        kinds = {
            "withdraw": [Offered, Offered, Received, Withdrawn],
            "offer": [Offered, Offered, Offered, Received, Offered],
            "pull": [Offered, Offered, Offered, Received, Received],
            "pull nothing": [Offered, Offered, Offered, Received, PullFailed],
            "cancel": [Offered, Offered, Offered, PullFailed],
            "poll": [Offered, Offered, Offered, Received],
        }[name]
        assert [type(each) for each in found] == kinds, f"{injector}: {found}"
        stats = transport.stats()
        assert stats.faults.total() == kinds.count(PullFailed)
        assert stats.parts_received == stats.received == kinds.count(Received)
        assert stats.bytes_received == 2 * kinds.count(Received)
        assert stats.pulls == 0 and Fault.FAILED not in stats.faults


CASES: Final[dict[str, Callable[[], None]]] = {
    "nixl, free": free_of_nixl,
    "nixl, close": close_of_nixl,
    "nixl, start": start_of_an_agent,
    "jax, close": close_of_jax,
    "jax, the end of an offer": end_of_jax_offers,
    **{f"in process, {name}": partial(in_one_process, name) for name in CALLS},
}
BUGS: Final = (
    ("nixl, free", bug(
        "what follows a step that raises is left", f"{TRANSPORT}.nixl_engine",
        ("        give_back(*steps)\n", "        for step in steps:\n            step()\n"),
    )),
    ("nixl, close", bug(
        "memory that is written is freed if the engine cannot be maintained",
        f"{TRANSPORT}.nixl_engine",
        ("        give_back(shutdown, self.maintain, self._close_agent)\n",
         "        shutdown()\n        self.maintain()\n        self._close_agent()\n"),
    )),
    ("nixl, start", bug(
        "a stream is not given back after the other", f"{TRANSPORT}.nixl_agent",
        ("    give_back(*restore, *[partial(os.close, copy) for copy in kept.values()])\n",
         "    for each in (*restore, *[partial(os.close, copy) for copy in kept.values()]):\n"
         "        each()\n"),
    )),
    ("jax, close", bug(
        "servers are kept unless offers cannot be forgotten", f"{TRANSPORT}.jax_engine",
        ("            give_back(self._forget_offers, self._keep_busy, self._readers.clear)\n",
         "            self._forget_offers()\n            self._keep_busy()\n"
         "            self._readers.clear()\n"),
    )),
    ("jax, the end of an offer", bug(
        "the second pull goes on if the first raises", f"{TRANSPORT}.jax_engine",
        ("        give_back(*[pull.abandon for pull in pulls])\n",
         "        for pull in pulls:\n            pull.abandon()\n"),
    )),
    ("in process, offer", bug(
        "an offer is known before it is made", f"{TRANSPORT}.in_process",
        ("        expires_at = time.monotonic() + ttl_s\n",
         "        expires_at = time.monotonic() + ttl_s\n"
         "        self._expires_at[part_id] = expires_at\n"),
    )),
    ("in process, pull", bug(
        "a pull is known before its event", f"{TRANSPORT}.in_process",
        ("            received = Received(part_id, arrays)\n",
         "            received = self._pulled[part_id] = Received(part_id, arrays)\n"),
    )),
    ("in process, pull nothing", bug(
        "a fault is counted before it is told", f"{TRANSPORT}.in_process",
        ("        num_before = self._faults[failed.fault]\n",
         "        num_before = self._faults[failed.fault]\n"
         "        self._faults[failed.fault] = num_before + 1\n"),
    )),
    ("in process, cancel", bug(
        "a pull is forgotten before its event", f"{TRANSPORT}.in_process",
        ("            events = [each for each in self._events if each != part_id]\n",
         "            del self._pulled[part_id]\n"
         "            events = [each for each in self._events if each != part_id]\n"),
        ("            self._events = events\n            del self._pulled[part_id]\n",
         "            self._events = events\n"),
    )),
    ("in process, poll", bug(
        "events are taken before they are accounted", f"{TRANSPORT}.in_process",
        ("        received = [each for each in events if isinstance(each, Received)]\n",
         "        self._events = []\n"
         "        received = [each for each in events if isinstance(each, Received)]\n"),
    )),
    ("in process, close", bug(
        "an offer is forgotten before its arrays are freed", f"{TRANSPORT}.in_process",
        ("        self._exchange.offers.pop(part_id, None)  # first",
         "        del self._expires_at[part_id]\n"
         "        self._exchange.offers.pop(part_id, None)  # first"),
        ("else would take it back\n        del self._expires_at[part_id]\n",
         "else would take it back\n"),
    )),
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_all_is_given_back(name: str) -> None:
    CASES[name]()


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=str)
def test_what_is_left_is_found(name: str, bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, KeyError)):
        CASES[name]()


def test_every_bug_fits() -> None:
    for _, each in BUGS:
        planted_source(each)
