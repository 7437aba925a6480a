"""Transfers end, and engines give back, whatever their calls raise.

An error that the table does not make an event ends the transport. Then nothing may still be read
into memory that is free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import pytest

from radixkv.scheduler.handoff.messages import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import (
    jax_engine,
    nixl_agent,
    nixl_engine,
    staging,
    transfer_table,
)
from radixkv.scheduler.nodes.transport.base import (
    Event,
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    Withdrawn,
)
from radixkv.scheduler.nodes.transport.descriptors import PullInfo, digest_arrays
from radixkv.scheduler.nodes.transport.errors import TransportUnavailableError
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine
from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine
from radixkv.scheduler.nodes.transport.staging import Slot
from radixkv.scheduler.nodes.transport.transfer_engine import TransferEngine, seal
from radixkv.scheduler.nodes.transport.transfer_table import OfferEntry, PullEntry, TransferTable

from .fake_libraries import JaxNetwork, Nixl, NixlPeer, jax_engines, nixl_engines
from .injection import OF_THREADS, PAIRS_OF_THREADS, Injector, injections, second_injections
from .planting import Bug, bug, planted, planted_source
from .transfer_subjects import ARRAYS, KEY, LAYOUT, STAGING_BYTES

JAX, TABLE = "scheduler.nodes.transport.jax_engine", "scheduler.nodes.transport.transfer_table"
NIXL, AGENT = "scheduler.nodes.transport.nixl_engine", "scheduler.nodes.transport.nixl_agent"
STAGING = "scheduler.nodes.transport.staging"
CLEANING: Final = ("close", "_remove", "notify", "release", "release_prepared", "_restore")
ONE: Final = (MemoryError,)
GOOD, CORRUPT, DAMAGED, LOST = range(4)
FAULTS: Final = {CORRUPT: Fault.CORRUPT, DAMAGED: Fault.MISMATCH, LOST: Fault.CANCELLED}


def part(number: int) -> PartId:
    return PartId(AttemptKey(f"r{number}", 1), epoch=1, peer_epoch=1, grant=1, part=number)


class Side:
    """A table over an engine, and the calls of its thread.

    Attributes:
        events: what it has reported.
        has_ended: whether no error has ended the thread.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self.table = TransferTable(engine)
        self.events: list[Event] = []
        self.has_ended = False

    def turn(self) -> None:
        self.table.step()
        taken = self.table.take_events()
        self.events += taken
        for event in taken:
            if isinstance(event, Received):
                self.table.release(event.part_id)

    def serve(self) -> None:
        """Offer a part, and withdraw it before anybody has read it."""
        self.table.offer(part(0), OfferEntry(tuple(ARRAYS), LAYOUT, math.inf))
        self.turn()
        self.table.withdraw(part(0).key, was_read=False)
        for _ in range(3):
            self.turn()
        self.has_ended = True

    def read(self, infos: list[PullInfo]) -> None:
        """Pull parts, and cancel the one that never arrives."""
        for info in infos:
            self.table.pull(info.part_id, PullEntry(info, LAYOUT, math.inf))
        for _ in range(3):
            self.turn()
        self.table.cancel(part(LOST))
        self.turn()
        self.has_ended = True

    def check(self, injector: Injector) -> None:
        """Each offer and each pull has ended once, as it should if nothing was raised."""
        ends = Counter(
            each.part_id for each in self.events if isinstance(each, (PullFailed, Received))
        )
        served = Counter(
            each.part_id for each in self.events if isinstance(each, (Offered, OfferFailed))
        )
        withdrawn = [each.key for each in self.events if isinstance(each, Withdrawn)]
        if served:
            assert served == {part(0): 1}
            assert withdrawn == [part(0).key]
        else:
            assert ends == {part(number): 1 for number in (GOOD, CORRUPT, DAMAGED, LOST)}
        if injector.raised_in:
            return
        assert not any(isinstance(each, OfferFailed) for each in self.events)
        faults = {each.part_id: each.fault for each in self.events if isinstance(each, PullFailed)}
        assert faults == ({} if served else {part(n): fault for n, fault in FAULTS.items()})


def injectors(
    *modules: ModuleType, errors: Sequence[type[BaseException]], after: Sequence[str]
) -> Iterator[Injector]:
    """Yield injectors of one error; with ``after``, of two, and of one when cleaning up."""
    if not after:
        yield from injections(*modules, errors=errors, cleaning=CLEANING)
        return
    yield from injections(*modules, errors=errors, after=after)
    pairs = PAIRS_OF_THREADS[:1]
    yield from second_injections(*modules, after=after, pairs=pairs, cleaning=CLEANING)


@contextmanager
def no_clock() -> Iterator[None]:
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    with patch.object(transfer_table, "time", clock):
        yield


def infos_of(engine: JaxEngine | NixlEngine, lost: bytes) -> list[PullInfo]:
    """What a node says of its parts, which are read from it."""
    digests = digest_arrays(ARRAYS, KEY)
    offers = [engine.offer(ARRAYS) for _ in range(2)]
    routes = [*[each.route for each in offers if each is not None], b"damaged", lost]
    return [
        PullInfo(
            part(number), LAYOUT, (digests[0],) * 2 if number == CORRUPT else digests,
            engine.name, route, KEY,
        )
        for number, route in enumerate(routes)
    ]  # fmt: skip


# JAX


def check_jax(engine: JaxEngine, network: JaxNetwork) -> None:
    """Nothing is read, offered or counted as in use."""
    engine.maintain()
    assert not engine.quarantined_bytes, "a pull never leaves the quarantine"
    assert not network.num_busy, f"{network.num_busy} connections still read"
    readers = engine._readers.values()
    assert not any(each.num_running for each in readers), "a connection is never given back"
    assert not any(each.offers for each in network.servers.values()), "an offer is never freed"


def inject_into_jax(serves: bool, *after: str, is_stuck: bool = False) -> None:
    modules, errors = (jax_engine, transfer_table), ONE if serves else OF_THREADS
    for injector in injectors(*modules, errors=errors, after=after):
        with no_clock(), jax_engines(1 if serves else 3) as (network, (engine, *peers)):
            side = Side(engine)
            infos = [] if serves else infos_of(peers[0], route_of_nothing(peers[1]))
            network.is_stuck = is_stuck
            with suppress(TransportUnavailableError):  # of a server in place of one that is stuck
                call = side.serve if serves else partial(side.read, infos)
                injector.call(call, may_handle=True)  # an error of a peer is an event
            try:
                if side.has_ended:
                    side.check(injector)
                    for peer in peers:
                        peer.close()
                    check_jax(engine, network)
                side.table.close()
                assert serves or not network.num_busy, "a pull goes on after the end"
            except AssertionError as error:
                raise AssertionError(str(injector)) from error


def route_of_nothing(engine: JaxEngine) -> bytes:
    return seal(bytes(8) + engine.address.encode())


# NIXL


def check_nixl(engine: NixlEngine) -> None:
    """All staging memory is free, and NIXL holds nothing but the peers that are known."""
    engine.maintain()
    assert engine._pool._free == [Slot(0, STAGING_BYTES)], f"free are {engine._pool._free}"
    assert not engine._num_offers and not engine._unconfirmed
    agent = engine._agent
    library: NixlPeer = agent.nixl
    assert (library.reads, library.lists) == ([], {}), "reads are not released"
    assert not agent._num_pulls, "pulls from a peer never end"
    known = {agent._name, *agent._peers.values()}
    assert set(library.remotes) == known, "a peer is not forgotten"


def inject_into_nixl(serves: bool, *after: str, is_slow: bool = False) -> None:
    modules, errors = (nixl_engine, nixl_agent, staging), OF_THREADS if is_slow else ONE
    for injector in injectors(*modules, transfer_table, errors=errors, after=after):
        with (
            no_clock(),
            patch.object(nixl_engine, "_READ_BYTES", 1),  # a read per array
            patch.object(nixl_engine, "_NEVER_FREED", []),
            patch.object(nixl_agent, "_MAX_PEERS", 1),
            nixl_engines(3, STAGING_BYTES) as (nixl, (engine, peer, other)),
        ):
            infos = nixl_infos(nixl, engine, peer, other)
            nixl.is_slow = is_slow
            side = Side(engine)
            call = side.serve if serves else partial(side.read, infos)
            injector.call(call, may_handle=True)
            try:
                if side.has_ended:
                    side.check(injector)
                    nixl.lost.clear()
                    check_nixl(engine)
                side.table.close()  # deregisters no memory that is written
            except AssertionError as error:
                raise AssertionError(str(injector)) from error


def nixl_infos(
    nixl: Nixl, engine: NixlEngine, peer: NixlEngine, other: NixlEngine
) -> list[PullInfo]:
    """Parts of a peer, for an engine that has read from another one, which it forgets."""
    lost, first = peer.offer(ARRAYS), other.offer(ARRAYS)
    assert lost is not None and first is not None
    pull = engine.pull(first.route, LAYOUT, KEY)
    assert pull is not None and pull.advance() >= 0
    pull.advance()
    pull.free()
    nixl.lost.add(peer._agent.address + lost._slot.start)
    return infos_of(peer, lost.route)


def inject_into_agent() -> None:
    """Open an agent; the standard streams are numbers of the test."""
    for injector in injections(nixl_agent, cleaning=CLEANING):
        streams = Streams()
        with (
            nixl_engines(0, 0),
            patch.object(nixl_agent, "os", streams),
            patch.object(nixl_agent, "tempfile", streams),
            patch.object(nixl_agent.sys, "stdout", None),  # type: ignore[attr-defined]
        ):
            try:
                injector.call(lambda: nixl_agent.NixlAgent(1 << 10, devices=None))
            except TransportUnavailableError:
                assert injector.raised_in
        assert streams.files == {1: "stdout", 2: "stderr"}, injector.raised_in


class Streams:
    """Stands for `os` and `tempfile`.

    Attributes:
        files: what descriptors are open, with their files.
    """

    def __init__(self) -> None:
        self.environ: dict[str, str] = {}
        self.files = {1: "stdout", 2: "stderr"}
        self.written = b""

    def dup(self, number: int) -> int:
        self.files[max(self.files) + 1] = self.files[number]
        return max(self.files)

    def dup2(self, source: int, to: int) -> None:
        self.files[to] = self.files[source]

    def close(self, number: int) -> None:
        del self.files[number]

    def pread(self, number: int, num_bytes: int, offset: int) -> bytes:
        return b""

    def write(self, number: int, data: bytes) -> None:
        self.written += data

    @contextmanager
    def TemporaryFile(self) -> Iterator[Any]:
        self.files[9] = "temporary"
        try:
            yield SimpleNamespace(fileno=lambda: 9)
        finally:
            del self.files[9]


OF_JAX: Final = ("abandon", "_abandon", "free", "_poison_connection", "reuse", "_on_abandon")
OF_NIXL: Final = (
    "abandon", "free", "release", "release_prepared", "notify", "leave", "_remove", "withdraw",
)  # fmt: skip
CASES: Final[dict[str, Callable[[], None]]] = {
    "jax, offers": lambda: inject_into_jax(serves=True),
    "jax, lost offers": lambda: inject_into_jax(serves=True, is_stuck=True),
    "jax, pulls": lambda: inject_into_jax(serves=False),
    "nixl, offers": lambda: inject_into_nixl(serves=True),
    "nixl, pulls": lambda: inject_into_nixl(serves=False),
    "nixl, slow pulls": lambda: inject_into_nixl(serves=False, is_slow=True),
    "nixl, the agent": inject_into_agent,
    "jax, offers, cleaning raises": lambda: inject_into_jax(True, *OF_JAX),
    "jax, lost offers, cleaning raises": lambda: inject_into_jax(True, *OF_JAX, is_stuck=True),
    "jax, pulls, cleaning raises": lambda: inject_into_jax(False, *OF_JAX),
    "nixl, offers, cleaning raises": lambda: inject_into_nixl(True, *OF_NIXL),
    "nixl, pulls, cleaning raises": lambda: inject_into_nixl(False, *OF_NIXL),
}


@pytest.mark.parametrize("name", CASES)
def test_transfers_end_and_engines_give_back(name: str) -> None:
    CASES[name]()


BUGS: Final[dict[str, tuple[Bug, ...]]] = {
    "jax, offers": (
        bug(
            "arrays are offered before the offer is made",
            JAX,
            ("        specs = tuple([ArraySpec(tuple(each.shape), str(each.dtype)) for each in "
             "served])\n        offer",
             "        self._server.await_pull(number, served)\n"
             "        specs = tuple([ArraySpec(tuple(each.shape), str(each.dtype)) for each in "
             "served])\n        offer"),
            ("        self._server.await_pull(number, served)  # last: nothing but a pull takes it "
             "back\n", ""),
        ),
        bug(
            "a node that cannot pull its own offer ends",
            JAX,
            ("            except PullError:  # the server",
             "            except TypeError:  # the server"),
        ),
    ),
    "jax, lost offers": (
        bug(
            "a failed probe leaves the other pull",
            JAX,
            ("                self._abandon()\n                engine.replace_server()\n",
             "                self._self_pull = None\n                engine.replace_server()\n"),
        ),
    ),
    "jax, pulls": (
        bug(
            "a connection is in nobody's hands for a moment",
            JAX,
            ("            self.reader.reuse(self._connection)\n"
             "            self._is_connected = False\n",
             "            self._is_connected = False\n"
             "            self.reader.reuse(self._connection)\n"),
        ),
        bug(
            "a pull is counted before it is made",
            JAX,
            ("        try:\n            pull = JaxPull(",
             "        self.num_running += 1\n        try:\n            pull = JaxPull("),
            ("        self.num_running += 1\n        return pull\n", "        return pull\n"),
        ),
        bug(
            "a pull that is not made goes on",
            JAX,
            ("            give_back(connection._poison_connection)\n", ""),
        ),
        bug(
            "a pull is abandoned by half",
            JAX,
            ("            self._connection._poison_connection()\n",
             "            self._is_connected = False\n"
             "            self._connection._poison_connection()\n"),
        ),
        bug(
            "a pull that fails is forgotten before it is abandoned",
            TABLE,
            ("        pull = self._pulls.get(failed.part_id)\n",
             "        pull = self._pulls.pop(failed.part_id, None)\n"),
            ("            del self._pulls[failed.part_id]  # now", "            pass  # now"),
        ),
    ),
    "nixl, offers": (
        bug(
            "an offer that is not made keeps its slot",
            NIXL,
            ("            offer = NixlOffer(self, slot, confirmation)\n"
             "        except BaseException:\n"
             "            give_back(partial(self._pool.free, slot))\n",
             "            offer = NixlOffer(self, slot, confirmation)\n"
             "        except BaseException:\n"),
        ),
        bug(
            "memory is taken before there is a slot",
            STAGING,
            ("                slot = Slot(start, size)\n", ""),
            ("                return slot\n", "                return Slot(start, size)\n"),
        ),
    ),
    "nixl, pulls": (
        bug(
            "a pull that is not made keeps its slot",
            NIXL,
            ("descriptor.arrays, digest_key)\n        except BaseException:\n"
             "            give_back(partial(self._pool.free, slot))\n",
             "descriptor.arrays, digest_key)\n        except BaseException:\n"),
        ),
        bug(
            "a pull that is not made is counted",
            NIXL,
            ("        self._remote = remote\n",
             "        self._peer = self._agent.enter(peer)\n        self._remote = remote\n"),
            ("        self._peer = self._agent.enter(peer)  # last: `free` undoes it\n", ""),
        ),
        bug(
            "a list of reads is kept if the other one fails",
            AGENT,
            ("            give_back(partial(self.release_prepared, made))\n", ""),
        ),
        bug(
            "a peer is added before its name is known",
            AGENT,
            ("        if found not in (name, encoded):\n",
             "        if found not in (name, name.encode()):\n"),
        ),
        bug(
            "a read that fails to begin is not released",
            NIXL,
            ("        finally:\n            if may_write:\n"
             "                self._running[number] = handle\n",
             "        except TypeError:\n            pass\n        else:\n"
             "            if may_write:\n                self._running[number] = handle\n"),
        ),
    ),
    "nixl, slow pulls": (
        bug(
            "an error of Python ends a read",
            AGENT,
            ("        except (MemoryError, OSError):  # of Python",
             "        except TypeError:  # of Python"),
        ),
    ),
    "nixl, the agent": (
        bug(
            "the standard streams are taken before they are given back",
            AGENT,
            ("        kept: dict[int, int] = {}\n        try:\n            for each in (1, 2):\n",
             "        kept: dict[int, int] = {}\n        if True:\n"
             "            for each in (1, 2):\n"),
            ("            yield lambda: os.pread",
             "        try:\n            yield lambda: os.pread"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bug"), [(name, each) for name, bugs in BUGS.items() for each in bugs], ids=str
)
def test_what_is_not_given_back_is_found(name: str, bug: Bug) -> None:
    with planted(bug), pytest.raises(Exception):  # noqa: B017
        CASES[name]()


def test_every_bug_fits() -> None:
    for bugs in BUGS.values():
        for each in bugs:
            planted_source(each)
