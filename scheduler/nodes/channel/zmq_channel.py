"""The control channel: messages between the processes of a deployment, over ZeroMQ.

::

    a node        PULL, bound: its address           one PUSH per peer, connected to its inbox
                       ▲                                        │
    others ────────────┘                                        └────────► others

The channel loses messages when a queue is full and when a connection ends. It never repeats or
reorders them. The protocol tolerates all of this.

With a secret, nodes connect only to holders of the same secret (`curve`). The channel counts the
connections that it refuses, and receives nothing from them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import zmq

from ..transport.descriptors import PullInfo
from .address import check_target, host_of
from .codec import (
    MAX_FRAME_BYTES,
    DroppedFrame,
    FrameDroppedError,
    FrameReader,
    Packet,
    encode_frame,
)
from .curve import (
    ALL_FAILURES,
    OVERHEAD_BYTES,
    PROTOCOL_FAILURES,
    CurveKeys,
    HandshakeMonitor,
    RefusedConnection,
    refused_connection,
)
from .errors import ChannelAddressError, ChannelClosedError, UnknownPeerError
from .schema import AnyMessage
from .secret import ENVIRONMENT, Secret

_QUEUE_MESSAGES: Final = 1000
_MAX_PER_CALL: Final = 256
_RECONNECT_MS: Final = 100
_MAX_RECONNECT_MS: Final = 2000
_HEARTBEAT_MS: Final = 2000
_MAX_SOCKETS: Final = 4096
"""Sockets of ZeroMQ. A peer takes three: its own, and both ends of its `HandshakeMonitor`."""


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """Counts of a channel since it was opened.

    Attributes:
        sent, received: messages.
        unsent: messages dropped because the queue to their peer was full.
        dropped: received frames that were dropped, by reason.
        other_versions: channel versions of the frames dropped for their version.
        refused: connections of others that failed, by reason.
    """

    sent: int = 0
    received: int = 0
    unsent: int = 0
    dropped: Counter[DroppedFrame] = field(default_factory=Counter)
    other_versions: frozenset[int] = frozenset()
    refused: Counter[RefusedConnection] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Peer:
    address: str
    socket: zmq.Socket[bytes]
    monitor: HandshakeMonitor

    def close(self) -> None:
        self.socket.close()
        self.monitor.close()


class ZmqChannel:
    """One node's end of the control channel, for one thread. Only `wait` blocks.

    Attributes:
        name: name of this node, by which its peers know it.
        epoch: epoch of this node.
        address: address that peers connect to, ``host:port``.
    """

    def __init__(
        self, name: str, *, epoch: int, bind: str = "127.0.0.1:0", secret: Secret | None = None
    ) -> None:
        """Bind the inbox.

        Args:
            name: unique among the nodes of a deployment.
            epoch: higher than the epoch of every earlier process of this name.
            bind: ``address:port`` with a numeric address; port 0 takes any free port.
            secret: shared by all nodes; required for an address other than loopback.

        Raises:
            ChannelAddressError: for a public address without a secret, or one that cannot be bound.
            SecretError: if there is a secret, and ZeroMQ has no CURVE.
        """
        if not host_of(bind).is_loopback and secret is None:
            raise ChannelAddressError(
                f"{bind} can be reached from other machines, so it needs a secret: set "
                f"{ENVIRONMENT}, or give a file with --secret-file, or bind to 127.0.0.1"
            )
        self.name = name
        self.epoch = epoch
        self._keys = None if secret is None else CurveKeys(secret)
        self._reader = FrameReader(name)
        self._sequence = 0
        self._sent = self._received = self._unsent = 0
        self._dropped: Counter[DroppedFrame] = Counter()
        self._refused: Counter[RefusedConnection] = Counter()
        self._peers: dict[str, _Peer] = {}
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._inbox = self._context.socket(zmq.PULL)
        self._monitor = HandshakeMonitor(self._inbox, ALL_FAILURES)
        self._bind(bind)
        self.address = self._inbox.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def _bind(self, address: str) -> None:
        self._inbox.set(zmq.LINGER, 0)
        self._inbox.set(zmq.RCVHWM, _QUEUE_MESSAGES)
        self._inbox.set(zmq.IPV6, int(host_of(address).version == 6))
        max_bytes = MAX_FRAME_BYTES
        if self._keys is not None:
            self._keys.guard(self._inbox, is_server=True)
            max_bytes += OVERHEAD_BYTES
        self._inbox.set(zmq.MAXMSGSIZE, max_bytes)  # a longer frame closes its connection
        try:
            self._inbox.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise ChannelAddressError(f"cannot bind {address}: {error.strerror}") from None

    def connect(self, peer: str, address: str) -> None:
        """Set the address of a peer, which need not listen yet.

        Raises:
            ChannelAddressError: for an address that is malformed, or that no node can connect to.
            ChannelClosedError: after close.
        """
        self._check_open()
        check_target(address)
        known = self._peers.get(peer)
        if known is None or known.address != address:
            self.disconnect(peer)
            self._peers[peer] = self._open(address)

    def _open(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.PUSH)
        monitor = HandshakeMonitor(socket, PROTOCOL_FAILURES)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, _QUEUE_MESSAGES)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.IPV6, int(host_of(address).version == 6))
        if self._keys is not None:
            self._keys.guard(socket, is_server=False)
        socket.connect(f"tcp://{address}")
        return _Peer(address, socket, monitor)

    def disconnect(self, peer: str) -> None:
        """Forget a peer and the messages in its queue. An unknown peer is ignored."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known.close()

    def send(self, peer: str, message: AnyMessage, pull_info: PullInfo | None = None) -> bool:
        """Send a message.

        Args:
            peer: name of a connected peer.
            message: a message of the hand-off or the gateway.
            pull_info: how to pull the part; required with SEND.

        Returns:
            False if the message was dropped because the peer's queue is full.

        Raises:
            UnknownPeerError: if the peer is not connected.
            EncodeError: for a message that cannot be encoded.
            ChannelClosedError: after close.
        """
        self._check_open()
        if peer not in self._peers:
            raise UnknownPeerError(peer)
        to = self._peers[peer]
        if to.monitor.take(1):  # one side has a secret, the other has none: ZeroMQ gives up
            to.close()
            to = self._peers[peer] = self._open(to.address)
        self._sequence += 1
        packet = Packet(self.name, peer, self.epoch, self._sequence, message, pull_info)
        frame = encode_frame(packet)
        try:
            to.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._unsent += 1
            return False
        self._sent += 1
        return True

    def receive(self) -> list[Packet]:
        """Return the packets that have arrived, at most some hundreds.

        Invalid frames are counted and dropped.

        Raises:
            ChannelClosedError: after close.
        """
        self._check_open()
        for code in self._monitor.take(_MAX_PER_CALL):
            self._refused[refused_connection(code, has_secret=self._keys is not None)] += 1
        packets = []
        for _ in range(_MAX_PER_CALL):
            try:
                parts = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(parts) != 1:
                    raise FrameDroppedError(DroppedFrame.NOT_A_FRAME)
                packets.append(self._reader.read(parts[0]))
            except FrameDroppedError as error:
                self._dropped[error.reason] += 1
        self._received += len(packets)
        return packets

    def wait(self, timeout_s: float) -> bool:
        """Wait for a packet; return whether one has arrived.

        Raises:
            ChannelClosedError: after close.
        """
        self._check_open()
        return bool(self._inbox.poll(max(0, round(timeout_s * 1000))))

    def stats(self) -> ChannelStats:
        """Return the counts so far."""
        return ChannelStats(
            self._sent,
            self._received,
            self._unsent,
            self._dropped.copy(),
            frozenset(self._reader.other_versions),
            self._refused.copy(),
        )

    def close(self) -> None:
        """Close the sockets and drop unsent messages. Closing twice does nothing."""
        if not self._context.closed:
            for peer in self._peers.values():
                peer.close()
            self._inbox.close()
            self._monitor.close()
            self._context.term()

    def _check_open(self) -> None:
        if self._context.closed:
            raise ChannelClosedError("the channel is closed")
