"""CURVE: refused connections, memory that strangers can occupy, and secrecy on the wire."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Final

import pytest
import zmq
from zmq.utils import z85

from radixkv.scheduler.handoff import Abort, Ack, AttemptKey, Header
from radixkv.scheduler.nodes.channel import (
    Packet,
    RefusedConnection,
    Secret,
    SecretError,
    ZmqChannel,
    gate,
)
from radixkv.scheduler.nodes.channel.curve import CurveKeys

from ....ports import reserved_port
from ....readable import readable

SECRET: Final = Secret(b"a secret that is long enough")
OTHER: Final = Secret(b"another secret, as long as it must be")
LATE_S: Final = 30.0
POLL_S: Final = 0.01
ATTEMPTS: Final = round(LATE_S / POLL_S)
ACK: Final = Ack(Header(AttemptKey("r", 1), 2))
PLAIN: Final = b"words to look for on the wire"

FLOOD_BYTES: Final = 64 << 20
"""More than the system buffers for a connection, and less than one message may have."""
_CHUNK: Final = 1 << 20
MORE: Final = b"\x03" + _CHUNK.to_bytes(8, "big") + bytes(_CHUNK)
"""A frame of an incomplete message, the same in all versions of ZeroMQ."""
READY: Final = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"

GREETING_BYTES: Final = 64
HELLO_BYTES: Final = 2 + 200
WELCOME_BYTES: Final = 2 + 168


def greeting(mechanism: bytes) -> bytes:
    """The greeting of the current ZeroMQ."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


STRANGERS: Final = {
    "without a secret": greeting(b"NULL") + READY,
    "with a password": greeting(b"PLAIN"),
    "without HELLO": greeting(b"CURVE"),
    "of ZeroMQ 3": b"\xff" + bytes(8) + b"\x7f\x01\x08" + b"\0\0",
    "of ZeroMQ 2": b"\x01\0",
    "of the web": b"GET / HTTP/1.1\r\n\r\n",
}


def raw_connection(channel: ZmqChannel) -> socket.socket:
    host, _, port = channel.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LATE_S)


def listening(nodes: ExitStack) -> socket.socket:
    listener = nodes.enter_context(socket.create_server(("127.0.0.1", 0)))
    listener.settimeout(LATE_S)
    return listener


def wait_for_packet(channel: ZmqChannel) -> Packet:
    assert channel.wait(LATE_S), channel.stats()
    [packet] = channel.receive()
    return packet


def send_until_refused(sender: ZmqChannel, receiver: ZmqChannel, reason: RefusedConnection) -> None:
    """Send until a connection is refused for a reason; no message may arrive.

    If only one side has a secret, both close the connection, and the later one sees no reason.
    """
    for _ in range(ATTEMPTS):
        sender.send(receiver.name, ACK)
        receiver.wait(POLL_S)
        assert receiver.receive() == []
        if reason in receiver.stats().refused:
            break
    assert {reason} <= receiver.stats().refused.keys() <= {reason, RefusedConnection.BROKEN}


@pytest.fixture(autouse=True)
def patient_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time alone ends no connection here."""
    monkeypatch.setattr(gate, "PROOF_S", 1000.0)


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(
    nodes: ExitStack, name: str, secret: Secret | None, bind: str = "127.0.0.1:0"
) -> ZmqChannel:
    return nodes.enter_context(closing(ZmqChannel(name, epoch=1, bind=bind, secret=secret)))


MISMATCHES: Final = pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (SECRET, OTHER, RefusedConnection.OTHER_SECRET),
        (SECRET, None, RefusedConnection.NO_SECRET),
        (None, SECRET, RefusedConnection.UNWANTED_SECRET),
    ],
    ids=["other", "none", "unwanted"],
)


@MISMATCHES
def test_connections_with_another_secret_or_none_are_refused_and_counted(
    nodes: ExitStack, ours: Secret | None, theirs: Secret | None, reason: RefusedConnection
) -> None:
    d, stranger, p = (
        opened(nodes, name, secret) for name, secret in (("d", ours), ("p", theirs), ("p", ours))
    )
    for node in (stranger, p):
        node.connect("d", d.address)
    send_until_refused(stranger, d, reason)
    p.send("d", ACK)
    assert wait_for_packet(d).message == ACK
    assert (d.stats().received, d.stats().dropped) == (1, {})


@MISMATCHES
def test_a_node_reconnects_when_a_peer_with_its_secret_takes_the_address(
    nodes: ExitStack, ours: Secret | None, theirs: Secret | None, reason: RefusedConnection
) -> None:
    """If only one side has a secret, ZeroMQ itself never reconnects."""
    p = opened(nodes, "p", theirs)
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        p.connect("d", address)
        with closing(ZmqChannel("d", epoch=1, bind=address, secret=ours)) as d:
            send_until_refused(p, d, reason)
        d = opened(nodes, "d", theirs, address)
        for _ in range(ATTEMPTS):
            p.send("d", ACK)
            if d.wait(POLL_S):
                break
        assert d.receive()[0].message == ACK


def test_a_node_reconnects_where_zeromq_gives_up(nodes: ExitStack) -> None:
    """The peer has no secret and does not close the connection."""
    p = opened(nodes, "p", SECRET)
    listener = listening(nodes)
    p.connect("d", f"127.0.0.1:{listener.getsockname()[1]}")
    with listener.accept()[0] as peer:
        peer.settimeout(LATE_S)
        peer.sendall(greeting(b"NULL"))
        while peer.recv(1 << 16):
            pass
    for _ in range(ATTEMPTS):
        p.send("d", ACK)
        if readable([listener], POLL_S):
            break
    with listener.accept()[0] as peer:
        peer.settimeout(LATE_S)
        assert peer.recv(1) == b"\xff"


@pytest.mark.parametrize("says", STRANGERS.values(), ids=STRANGERS.keys())
def test_frames_of_a_stranger_are_not_kept(nodes: ExitStack, says: bytes) -> None:
    """Without CURVE, ZeroMQ would keep the whole flood as one incomplete message."""
    d, p = opened(nodes, "d", SECRET), opened(nodes, "p", SECRET)
    with raw_connection(d) as stranger, pytest.raises((ConnectionResetError, BrokenPipeError)):
        stranger.sendall(says)
        for _ in range(FLOOD_BYTES // len(MORE)):
            stranger.sendall(MORE)
    p.connect("d", d.address)
    p.send("d", ACK)
    assert wait_for_packet(d).message == ACK
    assert (d.stats().received, d.stats().dropped) == (1, {})


def recorded(nodes: ExitStack, secret: Secret | None) -> tuple[ZmqChannel, bytes, bytes]:
    """A node that received a message, and the bytes of both directions."""
    d, p = opened(nodes, "d", secret), opened(nodes, "p", secret)
    listener = listening(nodes)
    p.connect("d", f"127.0.0.1:{listener.getsockname()[1]}")
    p.send("d", Abort(ACK.header, PLAIN.decode(), True))
    client = nodes.enter_context(listener.accept()[0])
    server = nodes.enter_context(raw_connection(d))
    sent = {client: b"", server: b""}
    for _ in range(ATTEMPTS):
        if d.wait(0):
            break
        for end in readable([client, server], POLL_S):
            data = end.recv(1 << 16)
            assert data, "the connection has ended"
            sent[end] += data
            (server if end is client else client).sendall(data)
    message = wait_for_packet(d).message
    assert isinstance(message, Abort)
    assert message.reason.encode() == PLAIN
    return d, sent[client], sent[server]


def test_the_wire_shows_neither_messages_nor_keys(nodes: ExitStack) -> None:
    _, sent, answered = recorded(nodes, SECRET)
    keys = CurveKeys(SECRET)
    for hidden in (PLAIN, b"RXKV", keys._private, keys._public, z85.decode(keys._public)):
        assert hidden not in sent
        assert hidden not in answered
    _, sent, _ = recorded(nodes, None)
    assert PLAIN in sent  # where it is not hidden, it is found


def test_a_recorded_connection_cannot_be_played_back(nodes: ExitStack) -> None:
    """The replay starts like the recording, but the answer is encrypted for another key."""
    d, sent, answered = recorded(nodes, SECRET)
    with raw_connection(d) as stranger, stranger.makefile("rb") as said:
        stranger.sendall(sent[: GREETING_BYTES + HELLO_BYTES])
        answer = GREETING_BYTES + WELCOME_BYTES
        again = said.read(answer)
        assert again[:GREETING_BYTES] == answered[:GREETING_BYTES]
        assert len(again) == answer
        assert again[GREETING_BYTES:] != answered[GREETING_BYTES:answer]
        stranger.sendall(sent[GREETING_BYTES + HELLO_BYTES :])
        with suppress(ConnectionResetError):
            assert said.read() == b""  # the end
    assert d.receive() == []
    assert (d.stats().received, d.stats().refused) == (1, {RefusedConnection.OTHER_SECRET: 1})


def test_a_secret_needs_a_zeromq_with_curve(
    nodes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(
        SecretError,
        match=r"^this build of ZeroMQ \(\d+\.\d+\.\d+\) has no CURVE, without which a secret "
        r"protects nothing: install pyzmq from a wheel, or libzmq with libsodium$",
    ):
        ZmqChannel("d", epoch=1, secret=SECRET)
    assert opened(nodes, "d", None).stats().received == 0
