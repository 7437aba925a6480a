"""A channel opens and connects as a whole or not at all, whatever is raised."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from unittest.mock import patch

import pytest

from radixkv.scheduler.handoff import Ack, AttemptKey, Header
from radixkv.scheduler.nodes.channel import ChannelError, Secret, ZmqChannel, curve, zmq_channel
from radixkv.scheduler.nodes.channel import gate as gates
from radixkv.scheduler.nodes.channel.curve import HandshakeMonitor

from .injection import ERRORS, injections, open_descriptors
from .planting import Bug, bug, planted

MODULE = "scheduler.nodes.channel.zmq_channel"
GATE = "scheduler.nodes.channel.gate"
ACK = Ack(Header(AttemptKey("r", 1), 2))
SECRETS = [None, Secret(b"a secret that is long enough")]


@pytest.fixture(params=SECRETS, ids=["open", "secret"])
def channel(request: pytest.FixtureRequest) -> Iterator[ZmqChannel]:
    with closing(ZmqChannel("a", epoch=1, secret=request.param)) as opened:
        yield opened


def send_after_refusal(channel: ZmqChannel) -> None:
    with patch.object(HandshakeMonitor, "take", return_value=[1]):
        channel.send("b", ACK)


CALLS: dict[str, Callable[[ZmqChannel], object]] = {
    "connect": lambda channel: channel.connect("b", "127.0.0.1:1"),
    "connect elsewhere": lambda channel: channel.connect("b", "127.0.0.1:2"),
    "send after a refused handshake": send_after_refusal,
}
BUGS = {
    "connect elsewhere": bug(
        "a peer is dropped before it is connected anew",
        MODULE,
        (
            "            self._peers[peer] = self._open(address)\n",
            "            self.disconnect(peer)\n"
            "            self._peers[peer] = self._open(address)\n",
        ),
    ),
    "send after a refused handshake": bug(
        "a socket is closed before there is another one",
        MODULE,
        (
            "            refused, to = to, self._open(to.address)\n",
            "            to.close()\n            refused, to = to, self._open(to.address)\n",
        ),
    ),
}


def inject(channel: ZmqChannel, name: str) -> None:
    for injector in injections(zmq_channel, curve, errors=ERRORS, once_per_place=True):
        channel.disconnect("b")
        if name != "connect":
            channel.connect("b", "127.0.0.1:1")
        before = channel._peers.get("b")
        injector.call(lambda: CALLS[name](channel))
        if injector.raised_in:
            after = channel._peers.get("b")
            assert after is before or after is not None, f"lost after {injector.raised_in}"
            assert after is None or not after.socket.closed, f"closed, {injector.raised_in}"
        CALLS[name](channel)
        assert channel.send("b", ACK)


@pytest.mark.parametrize("name", CALLS)
def test_a_peer_stays_connected(channel: ZmqChannel, name: str) -> None:
    inject(channel, name)


@pytest.mark.parametrize(("name", "bug"), BUGS.items(), ids=str)
def test_a_lost_peer_is_found(channel: ZmqChannel, name: str, bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, OSError)):
        inject(channel, name)


@pytest.mark.parametrize("secret", SECRETS, ids=["open", "secret"])
def test_a_channel_that_does_not_open_leaves_nothing(secret: Secret | None) -> None:
    opened: list[ZmqChannel] = []

    def call() -> None:
        opened.append(ZmqChannel("a", epoch=1, secret=secret))

    call()  # what ZeroMQ keeps for the process
    opened.pop().close()
    before = open_descriptors()
    for injector in injections(zmq_channel, curve, gates, errors=ERRORS, once_per_place=True):
        with patch.object(gates.Gate, "_run", lambda gate: gate._selector.close()):
            injector.call(call)
        for channel in opened:
            channel.close()
        opened.clear()
        if not open_descriptors() <= before:
            gc.collect()
        assert open_descriptors() <= before, f"open after {injector.raised_in}"


def heard(channel: ZmqChannel) -> bool:
    channel.wait(0.05)
    return bool(channel.receive())


def fail_once_in_gate() -> None:
    """Let a stranger in first, of whom the selector knows nothing, and then a peer."""
    secret = SECRETS[1]
    with (
        closing(ZmqChannel("a", epoch=1, secret=secret)) as channel,
        closing(ZmqChannel("b", epoch=1, secret=secret)) as peer,
    ):
        gate = channel._gate
        assert gate is not None
        register, failures = gate._selector.register, [OSError(28, "no space left")]

        def failing(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return register(*arguments)

        host, _, port = channel.address.rpartition(":")
        with patch.object(gate._selector, "register", failing):
            with socket.create_connection((host, int(port))) as stranger:
                assert stranger.recv(1) == b""
            peer.connect("a", channel.address)
            peer.send("a", ACK)
            assert any(heard(channel) for _ in range(500))


def test_a_connection_that_fails_does_not_end_the_gate() -> None:
    fail_once_in_gate()


def test_a_gate_that_ends_with_a_connection_is_found() -> None:
    ends = bug(
        "an error of a connection ends the gate",
        GATE,
        (
            "                self._close(connection)\n                continue",
            "                raise",
        ),
    )
    with planted(ends), pytest.raises((AssertionError, ChannelError, TimeoutError)):
        fail_once_in_gate()


def test_a_gate_closes_twice() -> None:
    """The first close was interrupted after it had called the thread."""
    channel = ZmqChannel("a", epoch=1, secret=SECRETS[1])
    assert channel._gate is not None
    with (
        patch.object(channel._gate._thread, "join", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        channel.close()
    channel.close()
    assert not channel._gate._thread.is_alive()
