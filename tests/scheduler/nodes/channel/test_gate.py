"""Strangers at the gate: what they occupy, and that peers with the secret come in beside them."""

from __future__ import annotations

import os
import random
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from threading import Lock
from types import SimpleNamespace
from typing import Final
from unittest.mock import Mock

import pytest
import zmq

from radixkv.scheduler.handoff import Ack, AttemptKey, Header
from radixkv.scheduler.nodes.channel import (
    ChannelError,
    RefusedConnection,
    Secret,
    ZmqChannel,
    zmq_channel,
)
from radixkv.scheduler.nodes.channel import gate as gates
from radixkv.scheduler.nodes.channel.codec import MAX_FRAME_BYTES
from radixkv.scheduler.nodes.channel.curve import CurveKeys
from radixkv.scheduler.nodes.channel.gate import FILES_PER_CONNECTION, MAX_UNPROVEN, Gate

from ....readable import readable
from .test_curve import greeting

SECRET: Final = Secret(b"a secret that is long enough")
ACK: Final = Ack(Header(AttemptKey("r", 1), 2))
LATE_S: Final = 25.0
"""Shorter than the 30 s after which ZeroMQ itself closes a connection."""
NUM_STRANGERS: Final = 400
HEADER: Final = greeting(b"CURVE")
LONG_COMMAND: Final = b"\x06" + (1 << 20).to_bytes(8, "big")


@pytest.fixture(autouse=True)
def patient_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time alone ends no connection here, unless a test says so."""
    monkeypatch.setattr(gates, "PROOF_S", 1000.0)


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(nodes: ExitStack, name: str, max_peers: int = 8, epoch: int = 1) -> ZmqChannel:
    channel = ZmqChannel(name, epoch=epoch, secret=SECRET, max_peers=max_peers)
    return nodes.enter_context(closing(channel))


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def say_hello(sender: ZmqChannel, receiver: ZmqChannel) -> None:
    """Connect if needed, and send until a message of this sender arrives."""
    sender.connect(receiver.name, receiver.address)
    end = time.monotonic() + LATE_S
    sender.send(receiver.name, ACK)
    while time.monotonic() < end:
        receiver.wait(0.05)
        if sender.name in {packet.sender for packet in receiver.receive()}:
            return
    raise AssertionError(f"{sender.name} was not heard, {receiver.stats()}")


def broken(channel: ZmqChannel) -> int:
    return channel.stats().refused[RefusedConnection.BROKEN]


def stranger_at(channel: ZmqChannel) -> socket.socket:
    host, _, port = channel.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LATE_S)


def greet(stranger: socket.socket) -> None:
    """Exchange greetings."""
    stranger.sendall(HEADER)
    left = len(HEADER)
    while left:
        heard = len(stranger.recv(left))
        assert heard
        left -= heard


def wait_until_closed(strangers: list[socket.socket], number: int) -> None:
    """Wait until a number of these connections are closed from the other side."""
    closed: set[socket.socket] = set()
    end = time.monotonic() + LATE_S
    while len(closed) < number:
        assert time.monotonic() < end, f"{len(closed)} of {number} are closed"
        for each in readable([each for each in strangers if each not in closed], 1):
            with suppress(ConnectionResetError):
                if each.recv(1 << 10):
                    continue
            closed.add(each)


@pytest.mark.parametrize("says", [b"", HEADER[:1], HEADER], ids=["nothing", "a byte", "greeting"])
def test_strangers_occupy_a_bounded_number_of_descriptors(nodes: ExitStack, says: bytes) -> None:
    """A peer that is there stays, one that comes meanwhile is heard, and all is given back."""
    d, p = opened(nodes, "d"), opened(nodes, "p")
    say_hello(p, d)
    before = num_files()
    with ExitStack() as strangers:
        connections = []
        for _ in range(NUM_STRANGERS):
            connections.append(strangers.enter_context(stranger_at(d)))
            with suppress(ConnectionError):
                connections[-1].send(says)
        wait_until_closed(connections, NUM_STRANGERS - MAX_UNPROVEN)
        most = MAX_UNPROVEN * (FILES_PER_CONNECTION if says else 1)
        while num_files() - before - NUM_STRANGERS > most:  # ZeroMQ closes its ends in a thread
            d.wait(0.01)
        say_hello(p, d)
        with closing(ZmqChannel("q", epoch=1, secret=SECRET)) as q:
            say_hello(q, d)
    while num_files() > before:  # the test's limit of time
        d.wait(0.01)
    assert d.stats().received >= 3
    assert d.stats().refused.keys() == {RefusedConnection.BROKEN}
    assert broken(d) >= NUM_STRANGERS  # and a try of q that made room


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_what_a_stranger_says_is_bounded(nodes: ExitStack, more: int) -> None:
    d, p = opened(nodes, "d"), opened(nodes, "p")
    with stranger_at(d) as stranger:
        greet(stranger)
        num_bytes = gates.MAX_UNPROVEN_BYTES - len(HEADER) + more
        stranger.sendall(LONG_COMMAND.ljust(num_bytes, b"x"))  # the inbox waits for its end
        if more > 0:
            wait_until_closed([stranger], 1)
        say_hello(p, d)
        assert readable([stranger], 0) == ([stranger] if more > 0 else [])
    while broken(d) == 0:
        d.wait(0.01)
    assert (d.stats().received, broken(d)) == (1, 1)


def test_an_unproven_connection_ends_in_time(
    nodes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "PROOF_S", 0.2)
    d, p = opened(nodes, "d"), opened(nodes, "p")
    say_hello(p, d)
    with ExitStack() as stack:
        strangers = [stack.enter_context(stranger_at(d)) for _ in range(3)]
        strangers[0].sendall(HEADER[:1])
        strangers[1].sendall(HEADER)
        wait_until_closed(strangers, 3)
    say_hello(p, d)


def test_a_connection_for_which_the_inbox_has_no_room_ends_at_once(nodes: ExitStack) -> None:
    """What it has said is lost; the peer connects again."""
    inbox, name = nodes.enter_context(socket.socket(socket.AF_UNIX)), f"full-{os.getpid()}"
    inbox.bind(f"\0{name}")
    inbox.listen(0)
    with pytest.raises(BlockingIOError):
        while True:
            waiting = nodes.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect(f"\0{name}")
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    nodes.enter_context(closing(Gate(listener, name, None, max_connections=1)))
    with socket.create_connection(address, timeout=LATE_S) as refused:
        refused.sendall(HEADER)
        wait_until_closed([refused], 1)
    nodes.enter_context(inbox.accept()[0])
    with socket.create_connection(address, timeout=LATE_S) as again:
        again.sendall(HEADER)
        with inbox.accept()[0] as inside:
            assert inside.recv(len(HEADER)) == HEADER


def test_those_that_have_come_least_far_make_room(nodes: ExitStack) -> None:
    d = opened(nodes, "d")
    with ExitStack() as stack:
        far = stack.enter_context(stranger_at(d))
        greet(far)
        bare = [stack.enter_context(stranger_at(d)) for _ in range(MAX_UNPROVEN + 10)]
        wait_until_closed(bare, 11)
        assert readable([far], 0) == []


def test_as_many_as_may_be_unproven_stay_until_one_more_comes(nodes: ExitStack) -> None:
    d, strangers = opened(nodes, "d"), list[socket.socket]()
    for _ in range(MAX_UNPROVEN):
        strangers.append(nodes.enter_context(stranger_at(d)))
        greet(strangers[-1])
    assert readable(strangers, 0) == [] and broken(d) == 0
    nodes.enter_context(stranger_at(d))
    wait_until_closed(strangers, 1)
    before = d.stats().refused
    assert before == {RefusedConnection.BROKEN: 1}
    d.stats().refused.clear()
    assert d.stats().refused == before, "what is returned is a copy"


@pytest.mark.parametrize("num_strangers", [0, MAX_UNPROVEN])
def test_with_no_descriptor_left_the_gate_waits(nodes: ExitStack, num_strangers: int) -> None:
    """The soft limit is what is open: the newcomer is heard when the limit is as before.

    If there are as many strangers as there may be, one of them makes room at once.
    """
    d, p, q = opened(nodes, "d"), opened(nodes, "p"), opened(nodes, "q")
    say_hello(p, d)
    q.connect("d", "127.0.0.1:1")  # its sockets are there
    strangers = [nodes.enter_context(stranger_at(d)) for _ in range(num_strangers)]
    for each in strangers:
        greet(each)
    stranger = nodes.enter_context(socket.socket())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                nodes.callback(os.close, os.dup(stranger.fileno()))
        host, _, port = d.address.rpartition(":")
        stranger.connect((host, int(port)))
        end = time.monotonic() + LATE_S
        while strangers and broken(d) == 0:
            assert time.monotonic() < end, "nobody makes room"
            d.wait(0.01)
        say_hello(p, d)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    say_hello(q, d)


def test_the_connection_that_is_silent_the_longest_makes_room(
    nodes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody speaks or connects again unless the test says so.
    times = ("_HEARTBEAT_MS", "_PATIENCE_MS", "_RECONNECT_MS", "_MAX_RECONNECT_MS", "_CONNECT_MS")
    for name in times:
        monkeypatch.setattr(zmq_channel, name, 1_000_000)
    d = opened(nodes, "d", max_peers=2)
    p, q, r = (opened(nodes, name) for name in "pqr")
    for each in (p, q, p, r):
        say_hello(each, d)
    assert d.stats().refused == {RefusedConnection.TOO_MANY: 1}
    for each in (p, r):
        say_hello(each, d)
    assert d.stats().refused == {RefusedConnection.TOO_MANY: 1}, "p was heard after q, and stays"
    q.disconnect("d")
    say_hello(q, d)


def pass_on_heartbeats(client: socket.socket, server: socket.socket, d: ZmqChannel) -> bool:
    """Pass on what both say, until the second heartbeat of a peer; False if one of them ends."""
    before, heartbeats = d.stats().received, 0
    while heartbeats < 2:
        for end in readable([client, server], LATE_S):
            try:
                data = end.recv(1 << 16)
                (server if end is client else client).sendall(data)
            except ConnectionError:
                return False
            if not data:
                return False
            heartbeats += end is client and d.stats().received > before
        d.receive()
    return True


def test_a_peer_that_vanishes_leaves_no_connection(
    nodes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a machine that loses its power: its connection is neither closed nor used."""
    monkeypatch.setattr(zmq_channel, "_HEARTBEAT_MS", 100)
    monkeypatch.setattr(zmq_channel, "_PATIENCE_MS", 500)
    d, p = opened(nodes, "d"), opened(nodes, "p")
    listener = nodes.enter_context(socket.create_server(("127.0.0.1", 0)))
    p.connect("d", f"127.0.0.1:{listener.getsockname()[1]}")
    for _ in range(50):
        p.send("d", ACK)
        client = nodes.enter_context(listener.accept()[0])
        server = nodes.enter_context(stranger_at(d))
        if pass_on_heartbeats(client, server, d):
            break
        client.close()  # this thread was late, and one of the two has given the other up
        server.close()
    else:
        raise AssertionError("no connection stays")
    wait_until_closed([server], 1)


def test_nobody_else_reaches_the_inbox(nodes: ExitStack) -> None:
    """A process that connects to the local socket is refused at once."""
    d = opened(nodes, "d")
    gate = d._gate
    assert gate is not None
    program = f"""
import socket
with socket.socket(socket.AF_UNIX) as inside:
    inside.connect({gate._inbox!r})
    inside.settimeout({LATE_S})
    print(inside.recv(1))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout == b"b''\n"


def test_large_messages_pass_in_parts(nodes: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunks, and however slowly the inbox reads."""
    monkeypatch.setattr(gates, "_CHUNK_BYTES", random.choice([1000, 1 << 12, 1 << 16]))
    d, p = opened(nodes, "d"), opened(nodes, "p")
    p.connect("d", d.address)
    p._peers["d"].socket.send(bytes(MAX_FRAME_BYTES))
    p.send("d", ACK)
    assert d.wait(LATE_S)
    end = time.monotonic() + LATE_S
    while not (packets := d.receive()):
        assert time.monotonic() < end
    assert [packet.message for packet in packets] == [ACK]
    assert sum(d.stats().dropped.values()) == 1


def test_what_the_inbox_says_last_passes_before_the_gate_closes() -> None:
    context, keys, words = zmq.Context(), CurveKeys(SECRET), bytes(1 << 25)
    inbox, peer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    gate = Gate.bind(inbox, keys, None, "127.0.0.1:0", max_connections=1)
    keys.guard(peer, is_server=False)
    peer.connect(f"tcp://{gate.address}")
    peer.send(b"here")
    inbox.send_multipart([inbox.recv_multipart()[0], words])
    inbox.close(linger=round(LATE_S * 1000))
    gate.close(drain_s=LATE_S)
    assert peer.poll(round(LATE_S * 1000)) and peer.recv() == words
    context.destroy(linger=0)


def test_a_gate_that_has_crashed_is_an_error(nodes: ExitStack) -> None:
    d = opened(nodes, "d")
    gate = d._gate
    assert gate is not None
    gate._crash = ValueError("why")
    with pytest.raises(ChannelError, match=r"^no more connections are accepted: ValueError"):
        d.receive()


def test_of_several_the_connection_that_was_silent_longest_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new connection counts as heard when it is proven, not when it was accepted."""
    monkeypatch.setattr(gates, "time", SimpleNamespace(monotonic=lambda: 10.0))
    pairs = [socket.socketpair() for _ in range(4)]
    *proven, new = [
        gates._Connection(pair[0], since) for pair, since in zip(pairs, (5, 1, 3, 0), strict=True)
    ]
    gate, closed = Gate.__new__(Gate), list[object]()
    state = {"_proven": dict.fromkeys(proven), "_unproven": {new: None}, "_max_connections": 3}
    vars(gate).update(state, _num_too_many=0, _close=closed.append)
    gate._prove(new)
    assert closed == [proven[1]] and new.since == 10.0 and new in gate._proven
    assert gate._num_too_many == 1
    for pair in pairs:
        for each in pair:
            each.close()


@pytest.mark.parametrize("is_closing", [False, True])
@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("num_unproven", [0, 2])
def test_a_gate_waits_until_the_first_of_its_times(
    num_unproven: int, is_paused: bool, is_closing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the oldest proof, of the end of a pause for want of descriptors, and of its own end."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    unproven = [Mock(since=since) for since in (98.0, 99.0)[:num_unproven]]
    gate = Gate.__new__(Gate)
    gate._unproven = dict.fromkeys(unproven)
    for paused_until, end_s in ((100.5, 101.0), (101.0, 100.5), (99.0, 99.5)):
        gate._paused_until = paused_until if is_paused else None
        gate._end_s = end_s if is_closing else None
        times = [98.0 + gates.PROOF_S] * bool(num_unproven)
        times += [paused_until] * is_paused + [end_s] * is_closing
        assert gate._wait_s() == (max(0.0, min(times) - 100.0) if times else None)


@pytest.mark.parametrize("is_proven", [False, True])
def test_a_connection_whose_ends_are_closed_in_the_same_turn_is_closed_once(
    nodes: ExitStack, is_proven: bool
) -> None:
    (peer, outside), (inbox, inside) = socket.socketpair(), socket.socketpair()
    connection = gates._Connection(outside, time.monotonic())
    connection.inside = gates._End(inside, connection)
    connection.inside.other, connection.outside.other = connection.outside, connection.inside
    gate = Gate.__new__(Gate)
    gate._selector = nodes.enter_context(selectors.DefaultSelector())
    for end in (connection.outside, connection.inside):
        gate._selector.register(end.socket, selectors.EVENT_READ, end)
    proven, unproven = dict.fromkeys([connection] * is_proven), {connection: None}
    state = {"_proven": proven, "_unproven": {} if is_proven else unproven, "_monitor": None}
    vars(gate).update(state, _paused_until=None, _end_s=None, _listener=None, _lock=Lock())
    vars(gate).update(_num_failed=0, _num_too_many=0, _reasons=Counter())
    peer.close()
    inbox.close()
    assert len(gate._selector.select(LATE_S)) == 2
    gate._turn()
    assert not gate._proven and not gate._unproven and len(gate._selector.get_map()) == 0
    assert outside.fileno() == inside.fileno() == -1
    assert gate.refused().total() == (not is_proven)


def test_a_gate_that_crashes_keeps_no_connection(
    nodes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gate: Gate) -> None:
        raise ValueError("why")

    d = opened(nodes, "d")
    strangers = [nodes.enter_context(stranger_at(d))]
    greet(strangers[0])
    monkeypatch.setattr(Gate, "_turn", fail)
    strangers.append(nodes.enter_context(stranger_at(d)))  # wakes it
    wait_until_closed(strangers[:1], 1)
    gate = d._gate
    assert gate is not None
    gate._thread.join(LATE_S)
    with pytest.raises(ChannelError, match=r"^no more connections are accepted: ValueError"):
        d.receive()
