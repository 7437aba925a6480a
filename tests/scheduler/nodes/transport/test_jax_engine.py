"""JaxEngine: transfers between two servers."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.scheduler.nodes.transport import (
    ArraySpec,
    Fault,
    PullFailed,
    PullInfo,
    TransportUnavailableError,
    describe,
    jax_engine,
)
from radixkv.scheduler.nodes.transport.descriptors import make_digest_key
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine, JaxPull
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport
from radixkv.scheduler.nodes.transport.transfer_engine import seal

from ....costs.fake_libraries import jax_engines
from .conformance import LATE_S, EngineConformance, Pair, part_id, wait


@pytest.fixture(autouse=True)
def slow_self_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on a slow machine does not replace its server."""
    monkeypatch.setattr(jax_engine, "_SELF_PULL_S", LATE_S)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Pair(ThreadedTransport(JaxEngine()), ThreadedTransport(JaxEngine()))
    yield ends
    for end in ends:
        end.close()


class TestJax(EngineConformance):
    withdrawn_fault = Fault.TIMED_OUT


def never(engine: JaxEngine) -> JaxPull:
    """A pull that never ends, as from a server that serves nobody."""
    return engine.begin(engine.address, secrets.randbits(63), [ArraySpec((1,), "int8")])


def withdraw_what_is_pulled(engine: JaxEngine, *, serves: bool) -> None:
    """Withdraw an offer that D has begun to pull, so that P cannot pull it.

    Its time is over when the engine has had all the time that it needs to serve its own node.
    """
    offer = engine.offer([jnp.zeros(4)])
    offer.number = secrets.randbits(63)
    offer.withdraw(was_read=False)
    offer._self_pull_until = float("inf")
    assert offer._probe is not None
    while serves and not offer._probe.has_ended():
        time.sleep(1e-3)
    assert not offer.is_withdrawn()
    offer._self_pull_until = 0.0
    assert offer.is_withdrawn()


def test_a_server_that_serves_nobody_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reader = JaxEngine(), JaxEngine()
    address = engine.address
    withdraw_what_is_pulled(engine, serves=True)
    assert engine.address == address
    old = engine.offer([jnp.zeros(4)])
    with monkeypatch.context() as patch:
        patch.setattr(JaxEngine, "probe", never)
        withdraw_what_is_pulled(engine, serves=False)
    assert engine.address != address
    old.withdraw(was_read=False)
    assert old.is_withdrawn()  # it went with its server
    offer = engine.offer([jnp.ones(4)])
    pull = reader.begin(offer.address, offer.number, offer.specs)
    while pull.advance() < 1:
        time.sleep(1e-3)
    assert pull.arrays[0].tolist() == [1.0] * 4
    engine.close()
    reader.close()


def test_pulls_one_after_the_other_share_a_connection_and_others_do_not() -> None:
    engine, reader = JaxEngine(), JaxEngine()

    def begin() -> JaxPull:
        offer = engine.offer([jnp.ones(4)])
        return reader.begin(offer.address, offer.number, offer.specs)

    def end(pull: JaxPull) -> None:
        while pull.advance() < 1:
            time.sleep(1e-3)
        pull.free()

    first = begin()
    end(first)
    second, third = begin(), begin()
    assert second._connection is first._connection is not third._connection
    second.abandon()
    end(third)  # of a server that is not used any more, as it is that of a broken pull
    fourth = begin()
    assert fourth.reader is not third.reader
    end(fourth)  # JAX may crash if a server is deleted while it serves a pull
    engine.close()
    reader.close()


def ends_at_once(pull: JaxPull) -> bool:
    return True


def breaks_nothing(pull: JaxPull) -> None:
    """Like a version of JAX whose connections cannot be broken."""


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("has_ended", ends_at_once, "a pull of an array that was never offered has ended"),
        ("abandon", breaks_nothing, "a broken pull did not end within 0 s"),
    ],
)
def test_a_server_that_fails_its_self_test_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, text: str
) -> None:
    monkeypatch.setattr(jax_engine, "_SELF_TEST_S", 0.0)
    monkeypatch.setattr(JaxPull, name, value)
    with pytest.raises(TransportUnavailableError) as error:
        JaxEngine()
    assert str(error.value) == text


def test_a_server_that_gives_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(10))
    monkeypatch.setattr(jax_engine, "digest_arrays", lambda *_: next(numbers))
    with pytest.raises(
        TransportUnavailableError, match=r"^a pull from this node itself gave other bytes$"
    ):
        JaxEngine()


def test_a_host_is_a_number() -> None:
    with pytest.raises(
        TransportUnavailableError, match=r"^host must be an IP address, got 'here'$"
    ):
        JaxEngine("here")


def route_of(engine: JaxEngine) -> bytes:
    """The route of an array that is not offered, so that its pull never ends."""
    return seal(secrets.token_bytes(8) + engine.address.encode())


def test_a_peer_has_a_few_connections() -> None:
    engine, reader = JaxEngine(), JaxEngine()
    described, key = describe([np.zeros(1, np.int8)], num_blocks=1), make_digest_key()
    pulls = [reader.pull(route_of(engine), described, key) for _ in range(16)]
    assert all(pulls)
    assert reader.pull(route_of(engine), described, key) is None
    other = JaxEngine()
    assert reader.pull(route_of(other), described, key) is not None
    assert pulls[0] is not None
    pulls[0].abandon()
    assert reader.pull(route_of(engine), described, key) is not None
    for each in (engine, reader, other):
        each.close()


@pytest.mark.parametrize(("free", "begins"), [(73, False), (74, True)])
def test_a_pull_waits_for_descriptors(
    monkeypatch: pytest.MonkeyPatch, free: int, begins: bool
) -> None:
    """A server, a connection, and those that are spared."""
    engine, reader = JaxEngine(), ThreadedTransport(JaxEngine())
    offer = engine.offer([jnp.ones(4)])
    described = describe([jnp.ones(4)], num_blocks=1)
    monkeypatch.setattr(jax_engine, "num_free_descriptors", lambda: free)
    info = PullInfo(part_id(), described, (), "jax", offer.route, make_digest_key())
    reader.pull(part_id(), info, described, timeout_s=LATE_S if begins else 0.0)
    failed = wait(reader, PullFailed)
    reason = "there was no free connection or file descriptor until the deadline"
    expected = (Fault.CORRUPT, "not the bytes that were offered")  # the offer has digests
    assert (failed.fault, failed.reason) == (expected if begins else (Fault.TIMED_OUT, reason))
    engine.close()
    reader.close()


def test_connections_to_all_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reader = JaxEngine(), JaxEngine()
    described, key = describe([np.zeros(1, np.int8)], num_blocks=1), make_digest_key()
    # Its server and that of the reader, and 3 connections; the self-test's reader is closed.
    monkeypatch.setattr(jax_engine, "MAX_FILES", 5 * 5)
    begun = [reader.pull(route_of(engine), described, key) for _ in range(4)]
    assert [each is not None for each in begun] == [True] * 3 + [False]
    for each in (engine, reader):
        each.close()


def test_servers_that_read_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_engine, "_MAX_READERS", 2)
    reader, engines = JaxEngine(), [JaxEngine() for _ in range(3)]
    own, offer = reader.address, engines[0].offer([jnp.ones(4)])
    assert reader.has_room(offer.address, 1)
    pull = reader.begin(offer.address, offer.number, offer.specs)
    assert set(reader._readers) == {own, offer.address}
    for engine in engines[1:]:  # the server of this node's own self-test is not used
        assert reader.has_room(engine.address, 1)
        reader.begin(engine.address, 0, offer.specs).abandon()
        assert own not in reader._readers
    while pull.advance() < 1:
        time.sleep(1e-3)
    pull.free()
    monkeypatch.setattr(jax_engine, "num_free_descriptors", lambda: 0)
    assert not reader.has_room(engines[1].address, 1)
    assert reader._readers == {}
    for each in (reader, *engines):
        each.close()


def test_a_withdrawal_waits_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = JaxEngine()
    offer = engine.offer([jnp.zeros(4)])
    with monkeypatch.context() as patch:
        patch.setattr(JaxEngine, "has_room", lambda *_: False)
        offer.withdraw(was_read=False)
        assert not offer.is_withdrawn()
    while not offer.is_withdrawn():
        time.sleep(1e-3)
    (reader,) = engine._readers.values()
    assert (reader.num_running, reader.num_idle > 1) == (0, True)  # they are used again
    engine.close()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is never deleted, in order."""
    kept: list[object] = []
    monkeypatch.setattr(jax_engine, "_keep_for_ever", kept.append)
    return kept


def test_closed_servers_are_kept_while_they_may_be_pulled_from(kept: list[object]) -> None:
    engine = JaxEngine()
    client, server = engine._device.client, engine._server
    engine.offer([jnp.zeros(4)]).withdraw(was_read=True)
    withdrawn, offered = engine.offer([jnp.zeros(4)]), engine.offer([jnp.zeros(4)])
    withdrawn.withdraw(was_read=False)
    while not withdrawn.is_withdrawn():
        time.sleep(1e-3)
    assert (engine.num_open, kept) == (1, [client])
    engine.close()
    assert kept == [client, server]
    other = JaxEngine()
    offered = other.offer([jnp.zeros(4)])
    offered.withdraw(was_read=False)
    while not offered.is_withdrawn():
        time.sleep(1e-3)
    other.close()  # nothing is served
    assert kept == [client, server, client]


@pytest.mark.parametrize("is_broken", [False, True])
def test_closed_servers_are_kept_while_they_read(kept: list[object], is_broken: bool) -> None:
    engine = JaxEngine()
    client, server = engine._device.client, engine._server
    pull = never(engine)
    reader = pull.reader
    if is_broken:
        pull.has_ended = lambda: False  # type: ignore[method-assign]  # of a peer that stopped
        pull.abandon()
    engine.close()
    assert kept == [client, reader, server]
    if not is_broken:
        pull.abandon()


def test_a_server_that_is_replaced_is_kept(kept: list[object]) -> None:
    engine = JaxEngine()
    client, server = engine._device.client, engine._server
    offered = engine.offer([jnp.zeros(4)])
    engine.replace_server()
    offered.withdraw(was_read=False)
    assert (engine.num_open, kept) == (0, [client, server])
    engine.close()
    assert kept == [client, server]


def read_one(engine: JaxEngine, reader: JaxEngine) -> None:
    """Pull a part of an engine completely."""
    offer = engine.offer([np.zeros(1, np.int8)])
    described = describe([np.zeros(1, np.int8)], num_blocks=1)
    pull = reader.pull(offer.route, described, make_digest_key())
    assert pull is not None and pull.advance() == 1
    pull.free()


def test_the_server_that_has_been_idle_longest_is_closed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax_engine, "_MAX_READERS", 2)
    with jax_engines(4) as (_, (reader, *peers)):
        for number, before in ((0, None), (1, 0), (0, 1), (2, 0), (0, 2), (1, 0)):
            read_one(peers[number], reader)
            kept = [each for each in (before, number) if each is not None]
            assert list(reader._readers) == [peers[each].address for each in kept]


@pytest.mark.parametrize("limit", [24, 25])
def test_idle_connections_count_until_others_need_their_descriptors(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    with jax_engines(3) as (_, (reader, *peers)):
        read_one(peers[0], reader)
        # Two servers and a connection take 15, and another server and a connection 10.
        monkeypatch.setattr(jax_engine, "MAX_FILES", limit)
        assert reader.has_room(peers[1].address, 1)
        assert (peers[0].address in reader._readers) is (limit == 25)


@pytest.mark.parametrize(("limit", "has_room"), [(29, False), (30, True)])
def test_both_ends_of_a_connection_to_the_node_itself_count(
    monkeypatch: pytest.MonkeyPatch, limit: int, *, has_room: bool
) -> None:
    with jax_engines(2) as (network, (engine, peer)):
        monkeypatch.setattr(jax_engine, "MAX_FILES", limit - 10)
        assert engine.has_room(engine.address, 1) is has_room  # 5, and then 5 and 10
        network.is_stuck = True
        pull = never(engine)
        monkeypatch.setattr(jax_engine, "MAX_FILES", limit)
        assert engine.has_room(peer.address, 1) is has_room  # 20, and then 5 and 5
        pull.abandon()


def test_idle_connections_are_used_without_new_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with jax_engines(2) as (_, (reader, peer)):
        read_one(peer, reader)
        monkeypatch.setattr(jax_engine, "num_free_descriptors", lambda: 0)
        assert [reader.has_room(peer.address, number) for number in (1, 2, 1)] == [
            True,
            False,
            True,
        ]


MANY = """
import os, resource, time
import numpy as np
from radixkv.scheduler.handoff import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import describe, open_transport

ends = [open_transport("jax"), open_transport("jax")]
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 250, used + 250))  # both ends are here
arrays = [np.ones(1000, np.float32)]
described = describe(arrays, num_blocks=1)
for part in range(100):
    part_id = PartId(AttemptKey("r", 1), 1, 1, 1, part)
    ends[0].offer(part_id, arrays, described, ttl_s=600)
names = []
while len(names) < 100:
    for event in ends[0].poll():
        ends[1].pull(event.part_id, event.info, described, timeout_s=60)
    names += [type(event).__name__ for event in ends[1].poll()]
    time.sleep(1e-3)
print({*names})
"""


def test_many_pulls_need_few_descriptors() -> None:
    """One hundred at a time took a thousand, and the process aborted."""
    done = subprocess.run(
        [sys.executable, "-c", MANY], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "{'Received'}\n"), done.stderr
