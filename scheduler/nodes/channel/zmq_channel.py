"""The control channel: messages between the processes of a deployment, over ZeroMQ.

::

    a node        PULL, bound: its address           one PUSH per peer, connected to its inbox
                       ▲                                        │
    others ────────────┘                                        └────────► others

The channel loses messages when a queue is full and when a connection ends. It never repeats or
reorders them. The protocol tolerates all of this.

With a secret, nodes connect only to holders of the same secret (`curve`), and a `gate` accepts
their connections. The channel counts the connections that it refuses, and receives nothing from
them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import zmq

from ..transport.descriptors import PullInfo
from .address import check_bind, check_target, host_of
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
from .errors import (
    ChannelAddressError,
    ChannelClosedError,
    ChannelError,
    TooManyPeersError,
    UnknownPeerError,
)
from .gate import FILES_PER_CONNECTION, Gate
from .schema import AnyMessage
from .secret import Secret

_QUEUE_MESSAGES: Final = 1000
_MAX_PER_CALL: Final = 256
_RECONNECT_MS: Final = 100
_MAX_RECONNECT_MS: Final = 2000
_CONNECT_MS: Final = 1000
"""Then it connects anew: TCP alone would wait twice as long each time, as long as a cut lasted."""
_HEARTBEAT_MS: Final = 2000
_PATIENCE_MS: Final = 10_000
"""Without a word for so long, a handshake has failed, or a peer's connection is dead."""
MAX_PEERS: Final = 1000
_SOCKETS_PER_PEER: Final = 3  # its own, and both ends of its `HandshakeMonitor`
_CLOSING_PEERS: Final = 16
FILES_PER_PEER: Final = 1 + _SOCKETS_PER_PEER + FILES_PER_CONNECTION
"""Descriptors: a connection, one per socket of ZeroMQ, and what the peer's own connection takes."""


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
        self,
        name: str,
        *,
        epoch: int,
        bind: str = "127.0.0.1:0",
        secret: Secret | None = None,
        max_peers: int = MAX_PEERS,
    ) -> None:
        """Bind the inbox.

        Args:
            name: unique among the nodes of a deployment.
            epoch: higher than the epoch of every earlier process of this name.
            bind: ``address:port`` with a numeric address; port 0 takes any free port.
            secret: shared by all nodes; required for an address other than loopback.
            max_peers: number of peers at a time; each takes ``FILES_PER_PEER`` file descriptors.
                Messages of further ones are dropped.

        Raises:
            ChannelAddressError: for a public address without a secret, or one that cannot be bound.
            SecretError: if there is a secret, and ZeroMQ has no CURVE.
        """
        check_bind(bind, has_secret=secret is not None)
        self.name = name
        self.epoch = epoch
        self._keys = None if secret is None else CurveKeys(secret)
        self._reader = FrameReader(name)
        self._sequence = 0
        self._sent = self._received = self._unsent = 0
        self._dropped: Counter[DroppedFrame] = Counter()
        self._refused: Counter[RefusedConnection] = Counter()
        self._peers: dict[str, _Peer] = {}
        self._max_peers = max_peers
        self._gate: Gate | None = None
        self._context = zmq.Context()
        try:
            # A socket that is closed counts until a thread of ZeroMQ has come to it.
            most_peers = 2 * max_peers + _CLOSING_PEERS
            self._context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_PEER * most_peers)
            self._inbox = self._context.socket(zmq.PULL)
            self._monitor = HandshakeMonitor(self._inbox, ALL_FAILURES)
            self.address = self._bind(bind)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, zmq.ZMQError)):
                raise ChannelAddressError(f"cannot bind {bind}: {error.strerror}") from None
            raise

    def _bind(self, address: str) -> str:
        """Bind the inbox, or the gate in front of it; return the address."""
        self._inbox.set(zmq.LINGER, 0)
        self._inbox.set(zmq.RCVHWM, _QUEUE_MESSAGES)
        if self._keys is None:
            self._inbox.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # a longer frame ends its connection
            self._inbox.set(zmq.IPV6, int(host_of(address).version == 6))
            self._inbox.bind(f"tcp://{address}")
            return self._inbox.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._inbox.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + OVERHEAD_BYTES)
        self._gate = Gate.bind(
            self._inbox, self._keys, self._monitor, address, max_connections=self._max_peers
        )
        return self._gate.address

    def connect(self, peer: str, address: str) -> None:
        """Set the address of a peer, which need not listen yet.

        Raises:
            ChannelAddressError: for an address that is malformed, or that no node can connect to.
            TooManyPeersError: for one peer more than max_peers.
            ChannelClosedError: after close.
        """
        self._check_open()
        check_target(address)
        known = self._peers.get(peer)
        if known is None and not self.has_room:
            raise TooManyPeersError(peer, self._max_peers)
        if known is None or known.address != address:
            self._peers[peer] = self._open(address)
            if known is not None:
                known.close()

    @property
    def has_room(self) -> bool:
        """Whether one more peer can be connected."""
        return len(self._peers) < self._max_peers

    def _open(self, address: str) -> _Peer:
        to = self._context.socket(zmq.PUSH)
        try:
            monitor = HandshakeMonitor(to, PROTOCOL_FAILURES)
            try:
                self._connect(to, address)
                return _Peer(address, to, monitor)
            except BaseException:
                monitor.close()
                raise
        except BaseException:
            to.close()
            raise

    def _connect(self, to: zmq.Socket[bytes], address: str) -> None:
        to.set(zmq.LINGER, 0)
        to.set(zmq.SNDHWM, _QUEUE_MESSAGES)
        to.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        to.set(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        to.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        to.set(zmq.HANDSHAKE_IVL, _PATIENCE_MS)
        to.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        to.set(zmq.HEARTBEAT_TTL, _PATIENCE_MS)  # then the peer's inbox closes the connection
        to.set(zmq.IPV6, int(host_of(address).version == 6))
        if self._keys is not None:
            self._keys.guard(to, is_server=False)
        to.connect(f"tcp://{address}")

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
            refused, to = to, self._open(to.address)
            self._peers[peer] = to
            refused.close()
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
            ChannelError: if the gate has ended.
        """
        self._check_open()
        if self._gate is None:
            for code in self._monitor.take(_MAX_PER_CALL):
                self._refused[refused_connection(code, has_secret=False)] += 1
        elif self._gate.crash is not None:
            crash = self._gate.crash
            raise ChannelError(f"no more connections are accepted: {crash!r}") from crash
        packets: list[Packet] = []
        newcomers: set[str] = set()
        for _ in range(_MAX_PER_CALL):
            try:
                parts = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(parts) != 1:
                    raise FrameDroppedError(DroppedFrame.NOT_A_FRAME)
                packet = self._reader.read(parts[0])
                if packet.sender not in self._peers and packet.sender not in newcomers:
                    if len(self._peers) + len(newcomers) >= self._max_peers:
                        raise FrameDroppedError(DroppedFrame.TOO_MANY_SENDERS)
                    newcomers.add(packet.sender)
                packets.append(packet)
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
            self._refused.copy() if self._gate is None else self._gate.refused(),
        )

    def close(self) -> None:
        """Close the sockets and drop unsent messages. Closing twice does nothing."""
        if not self._context.closed:
            if self._gate is not None:
                self._gate.close()
            self._context.destroy(linger=0)

    def _check_open(self) -> None:
        if self._context.closed:
            raise ChannelClosedError("the channel is closed")
