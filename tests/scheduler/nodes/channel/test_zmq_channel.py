"""ZmqChannel on loopback."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import zmq

from radixkv.scheduler.handoff import Abort, Ack, AttemptKey, Header
from radixkv.scheduler.handoff.gateway_messages import Started
from radixkv.scheduler.nodes.channel import (
    ChannelAddressError,
    ChannelClosedError,
    DroppedFrame,
    Packet,
    RefusedConnection,
    Secret,
    TooManyPeersError,
    UnknownPeerError,
    ZmqChannel,
    curve,
    gate,
)
from radixkv.scheduler.nodes.channel.codec import MAX_FRAME_BYTES, encode_frame
from radixkv.scheduler.nodes.channel.curve import CurveKeys, HandshakeMonitor

from ....ports import reserved_port

SECRET = Secret(b"a secret that is long enough")
LATE_S = 30.0

Open: TypeAlias = Callable[..., ZmqChannel]


@pytest.fixture(autouse=True)
def patient_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time alone ends no connection here."""
    monkeypatch.setattr(gate, "PROOF_S", 1000.0)


@pytest.fixture
def opened() -> Iterator[Open]:
    channels: list[ZmqChannel] = []

    def make(name: str, epoch: int = 1, **options: object) -> ZmqChannel:
        channels.append(ZmqChannel(name, epoch=epoch, **options))  # type: ignore[arg-type]
        return channels[-1]

    yield make
    for channel in channels:
        channel.close()


def ack(attempt: int = 1) -> Ack:
    return Ack(Header(AttemptKey("r", attempt), 2))


def next_packets(channel: ZmqChannel, number: int = 1) -> list[Packet]:
    """Receive the next packets; fail if they do not arrive."""
    packets: list[Packet] = []
    while len(packets) < number:
        assert channel.wait(LATE_S), f"{len(packets)} packets, {channel.stats()}"
        packets += channel.receive()
    return packets


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_messages_arrive_in_order_with_their_sender(opened: Open, secret: Secret | None) -> None:
    p, d = opened("p", 7, secret=secret), opened("d", secret=secret)
    p.connect("d", d.address)
    d.connect("p", p.address)
    for attempt in range(100):
        assert p.send("d", ack(attempt))
    packets = next_packets(d, 100)
    assert [packet.message for packet in packets] == [ack(attempt) for attempt in range(100)]
    assert {(packet.sender, packet.epoch) for packet in packets} == {("p", 7)}
    d.send("p", Started(AttemptKey("r", 1)))
    assert next_packets(p)[0].message == Started(AttemptKey("r", 1))
    assert (p.stats().sent, p.stats().received, d.stats().received) == (100, 1, 100)
    assert d.receive() == []
    assert not d.wait(0)


def test_messages_wait_for_a_peer_that_is_not_there_yet(opened: Open) -> None:
    with reserved_port() as port:
        p = opened("p")
        p.connect("d", f"127.0.0.1:{port}")
        assert p.send("d", ack())
        d = opened("d", 2, bind=f"127.0.0.1:{port}")
        assert next_packets(d)[0].message == ack()


def test_a_full_queue_drops_and_counts_messages(opened: Open) -> None:
    p = opened("p")
    with reserved_port() as port:  # nobody listens there
        p.connect("d", f"127.0.0.1:{port}")
        sent = [p.send("d", ack()) for _ in range(1100)]
    assert sent == [True] * 1000 + [False] * 100
    assert (p.stats().sent, p.stats().unsent) == (1000, 100)


def test_a_peer_may_move(opened: Open) -> None:
    p, first, second = opened("p"), opened("d", 1), opened("d", 2)
    p.connect("d", first.address)
    p.send("d", ack(1))
    assert next_packets(first)[0].message == ack(1)
    to_first = p._peers["d"]
    p.connect("d", second.address)
    assert to_first.socket.closed
    to_second = p._peers["d"]
    p.connect("d", second.address)
    assert p._peers["d"] is to_second and not to_second.socket.closed
    p.send("d", ack(2))
    assert next_packets(second)[0].message == ack(2)
    p.disconnect("d")
    p.disconnect("d")
    with pytest.raises(UnknownPeerError, match=r"^no node 'd' is connected$"):
        p.send("d", ack())


def test_hostile_bytes_are_counted_and_dropped(opened: Open) -> None:
    d = opened("d")
    good = [encode_frame(Packet("p", "d", 1, sequence, ack())) for sequence in range(3)]
    hostile = [
        (b"", DroppedFrame.NOT_A_FRAME),
        (b"\0\0\0\0", DroppedFrame.NOT_A_FRAME),
        (good[0][:4], DroppedFrame.NOT_A_FRAME),
        (b"RXKV\x08" + good[0][5:], DroppedFrame.OTHER_VERSION),
        (good[0][:-1], DroppedFrame.NOT_A_MESSAGE),
        (good[0][:5] + b"junk", DroppedFrame.NOT_A_MESSAGE),
        (encode_frame(Packet("p", "other", 1, 9, ack())), DroppedFrame.OTHER_RECEIVER),
        (good[0], DroppedFrame.OLD),
    ]
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(f"tcp://{d.address}")
        raw.send(good[0])
        for frame, _ in hostile:
            raw.send(frame)
        raw.send_multipart([good[1], b"more"])
        raw.send(good[2])
        packets = next_packets(d, 2)
    assert [packet.sequence for packet in packets] == [0, 2]
    expected = [reason for _, reason in hostile] + [DroppedFrame.NOT_A_FRAME]
    assert d.stats().dropped == {reason: expected.count(reason) for reason in expected}
    assert d.stats().other_versions == {8}
    before = d.stats()
    d._dropped[DroppedFrame.OLD] += 1
    d._refused[RefusedConnection.BROKEN] += 1
    assert (before.dropped[DroppedFrame.OLD], before.refused) == (1, {}), "they do not change"


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_a_frame_that_is_too_long_ends_only_its_connection(
    opened: Open, secret: Secret | None
) -> None:
    d, p = opened("d", secret=secret), opened("p", secret=secret)
    p.connect("d", d.address)
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        if secret is not None:
            CurveKeys(secret).guard(raw, is_server=False)
        raw.set(zmq.LINGER, 0)
        raw.set(zmq.RECONNECT_IVL, -1)
        ended = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.connect(f"tcp://{d.address}")
        raw.send(bytes(MAX_FRAME_BYTES))
        assert d.wait(LATE_S)
        assert (d.receive(), d.stats().dropped) == ([], {DroppedFrame.NOT_A_FRAME: 1})
        raw.send(bytes(MAX_FRAME_BYTES + 1))
        assert ended.poll(int(LATE_S) * 1000)
        raw.disable_monitor()
        ended.close()
    p.send("d", ack())
    assert next_packets(d)[0].message == ack()
    assert d.stats().dropped == {DroppedFrame.NOT_A_FRAME: 1}


def test_the_number_of_peers_is_limited(opened: Open) -> None:
    """A message of one peer more is dropped, as nothing could be answered."""
    d = opened("d", max_peers=2)
    p, q, r = (opened(name) for name in "pqr")
    for peer in (p, q, r):
        peer.connect("d", d.address)
        peer.send("d", ack())
        if peer is not r:
            assert next_packets(d)[0].sender == peer.name
            assert d.has_room
            d.connect(peer.name, peer.address)
    assert not d.has_room
    assert d.wait(LATE_S)
    assert d.receive() == []
    assert d.stats().dropped == {DroppedFrame.TOO_MANY_SENDERS: 1}
    text = (
        "'r' is one peer more than the 2 that this process has file descriptors for (`ulimit -Hn`)"
    )
    with pytest.raises(TooManyPeersError, match=f"^{re.escape(text)}$"):
        d.connect("r", r.address)
    for address in (p.address, d.address) * 8:  # ZeroMQ may have closed none of them yet
        d.connect("q", address)
    d.disconnect("q")
    d.connect("r", r.address)
    r.send("d", ack())
    assert next_packets(d)[0].sender == "r"


def test_newcomers_of_one_call_do_not_exceed_the_limit(opened: Open) -> None:
    d = opened("d", max_peers=2)
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(f"tcp://{d.address}")
        for name in "pqqrpr":
            number = d._sequence = d._sequence + 1
            raw.send(encode_frame(Packet(name, "d", 1, number, ack())))
        heard: list[str] = []
        while len(heard) + d.stats().dropped.total() < 6:
            assert d.wait(LATE_S)
            heard += [packet.sender for packet in d.receive()]
            for name in heard:
                d.connect(name, d.address)
    assert heard == ["p", "q", "q", "p"]


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "192.0.2.1:0", "[::]:0"])
def test_a_public_address_needs_a_secret(bind: str) -> None:
    with pytest.raises(
        ChannelAddressError,
        match=r"can be reached from other machines, so it needs a secret: set RADIXKV_SECRET, or "
        r"give a file with --secret-file, or bind to 127\.0\.0\.1$",
    ):
        ZmqChannel("d", epoch=1, bind=bind)


def test_with_a_secret_a_public_address_is_bound(opened: Open) -> None:
    assert opened("d", bind="0.0.0.0:0", secret=SECRET).address.startswith("0.0.0.0:")


@pytest.mark.parametrize(
    "address",
    [
        *("", "127.0.0.1", "localhost:1", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:+1"),
        *("127.0.0.1:\N{SUPERSCRIPT TWO}", "127.0.0.1:\N{ARABIC-INDIC DIGIT TWO}"),
    ],
)
def test_a_malformed_address_is_refused(opened: Open, address: str) -> None:
    with pytest.raises(ChannelAddressError, match=r"^an address is like 127\.0\.0\.1:5557 or "):
        ZmqChannel("d", epoch=1, bind=address)
    with pytest.raises(ChannelAddressError, match=r"^an address is like 127\.0\.0\.1:5557 or "):
        opened("p").connect("d", address)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:5557", "[::]:5557"])
def test_an_address_that_nobody_can_connect_to_is_refused(opened: Open, address: str) -> None:
    message = f"nobody can connect to {address}: it must be one address of a machine, with a port"
    with pytest.raises(ChannelAddressError, match=f"^{re.escape(message)}$"):
        opened("p").connect("d", address)


def test_an_address_in_use_is_refused(opened: Open) -> None:
    taken = opened("d").address
    with pytest.raises(ChannelAddressError, match=f"^cannot bind {taken}: Address already in use"):
        ZmqChannel("e", epoch=1, bind=taken)


def test_a_closed_channel_refuses(opened: Open) -> None:
    p = opened("p")
    p.close()
    p.close()
    with pytest.raises(ChannelClosedError, match=r"^the channel is closed$"):
        p.receive()
    with pytest.raises(ChannelClosedError, match=r"^the channel is closed$"):
        p.wait(0)
    with pytest.raises(ChannelClosedError, match=r"^the channel is closed$"):
        p.send("d", Abort(Header(AttemptKey("r", 1), 2), "", True))
    with pytest.raises(ChannelClosedError, match=r"^the channel is closed$"):
        p.connect("d", "127.0.0.1:1")


def test_a_connection_to_a_peer_is_tried_again_soon_and_ends_when_the_peer_is_silent(
    opened: Open,
) -> None:
    p, d = opened("p"), opened("d")
    p.connect("d", d.address)
    [peer] = p._peers.values()
    limits = {
        zmq.CONNECT_TIMEOUT: 1000,
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 2000,
        zmq.HANDSHAKE_IVL: 10_000,
        zmq.HEARTBEAT_IVL: 2000,
        zmq.HEARTBEAT_TTL: 10_000,
        zmq.SNDHWM: 1000,
        zmq.LINGER: 0,
    }
    assert {option: peer.socket.get(option) for option in limits} == limits
    assert (p._inbox.get(zmq.RCVHWM), p._inbox.get(zmq.LINGER)) == (1000, 0)
    assert p._inbox.get(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_a_connection_that_cannot_be_made_leaves_no_socket(
    opened: Open, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    p, made = opened("p"), []
    make_socket = p._context.socket

    def socket(kind: int) -> zmq.Socket[bytes]:
        made.append(make_socket(kind))
        return made[-1]

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(p._context, "socket", socket)
    monkeypatch.setattr(ZmqChannel, "_connect", fail)
    with pytest.raises(error):
        p.connect("d", "127.0.0.1:5")
    assert len(made) == 2 and all(each.closed for each in made) and p._peers == {}


@pytest.mark.parametrize(("address", "is_ipv6"), [("127.0.0.1:65535", 0), ("[::1]:5", 1)])
def test_a_peer_is_reached_by_the_version_of_its_address(
    opened: Open, address: str, is_ipv6: int
) -> None:
    p = opened("p")
    p.connect("d", address)
    assert p._peers["d"].socket.get(zmq.IPV6) == is_ipv6


def test_a_wait_is_in_seconds(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    p, waits = opened("p"), list[int]()
    monkeypatch.setattr(p, "_inbox", SimpleNamespace(poll=waits.append))
    for seconds in (0.25, 0.0, -1.0, 2):
        assert not p.wait(seconds)
    assert waits == [250, 0, 0, 2000]


def test_failed_handshakes_are_taken_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1, 2, 3]
    monitor = HandshakeMonitor.__new__(HandshakeMonitor)
    monitor._events = SimpleNamespace(get=lambda _: zmq.POLLIN if left else 0)
    monkeypatch.setattr(curve, "recv_monitor_message", lambda _: {"value": left.pop(0)})
    assert (monitor.take(2), left) == ([1, 2], [3])
    assert (monitor.take(2), left) == ([3], [])
    assert monitor.take(2) == []
