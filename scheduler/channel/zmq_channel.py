"""Messages between the processes of a deployment, over ZeroMQ.

::

    a node        PULL, bound: its address           one PUSH per peer, connected: its inbox
                       ▲                                        │
    others ────────────┘                                        └────────► others

A message may be lost: where a queue is full, and when a connection ends. It is never doubled or
reordered by the channel. The protocol expects worse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import zmq

from ..transport.tickets import WireTicket
from .address import check_target, host_of
from .codec import AnyMessage, Packet
from .errors import ChannelAddressError, ChannelClosedError, UnknownPeerError
from .frames import MAX_BYTES, Dropped, DroppedError, FrameReader, seal
from .secret import ENVIRONMENT, Secret

_QUEUE_MESSAGES: Final = 1000
_MAX_PER_CALL: Final = 256
_RECONNECT_MS: Final = 100
_MAX_RECONNECT_MS: Final = 2000
_HEARTBEAT_MS: Final = 2000


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """What a channel has done.

    Attributes:
        sent, received: messages.
        unsent: messages that were dropped because the queue to their peer was full.
        dropped: frames that came and were not taken in, by the reason.
        other_versions: of those that a node of ours of another version must have sent.
    """

    sent: int = 0
    received: int = 0
    unsent: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)
    other_versions: frozenset[int] = frozenset()


class ZmqChannel:
    """One node's end; no call waits but `wait`. For one thread at a time.

    Attributes:
        name: of this node; its peers call it so.
        epoch: of this node.
        address: that its peers connect to, ``host:port``.
    """

    def __init__(
        self, name: str, *, epoch: int, bind: str = "127.0.0.1:0", secret: Secret | None = None
    ) -> None:
        """Bind the inbox.

        Args:
            name: unique among the nodes of a deployment.
            epoch: higher than that of any earlier life of the node.
            bind: ``address:port``, the address as a number; port 0 takes any.
            secret: shared by all nodes; an address other than loopback needs one.

        Raises:
            ChannelAddressError: if there is none and the address is public, or it cannot be bound.
        """
        host = host_of(bind)
        if not host.is_loopback and secret is None:
            raise ChannelAddressError(
                f"{bind} can be reached from other machines, so it needs a secret: set "
                f"{ENVIRONMENT}, or give a file with --secret-file, or bind to 127.0.0.1"
            )
        self.name = name
        self.epoch = epoch
        self._secret = secret
        self._reader = FrameReader(name, secret)
        self._sequence = 0
        self._sent = self._received = self._unsent = 0
        self._dropped: Counter[Dropped] = Counter()
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[str, str] = {}
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set(zmq.LINGER, 0)
        self._inbox.set(zmq.RCVHWM, _QUEUE_MESSAGES)
        self._inbox.set(zmq.MAXMSGSIZE, MAX_BYTES)  # else the sender is disconnected
        self._inbox.set(zmq.IPV6, int(host.version == 6))
        try:
            self._inbox.bind(f"tcp://{bind}")
        except zmq.ZMQError as error:
            self._inbox.close()
            self._context.term()
            raise ChannelAddressError(f"cannot bind {bind}: {error.strerror}") from None
        self.address = self._inbox.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def connect(self, peer: str, address: str) -> None:
        """Send what is for a peer to an address from now on; it need not be there yet.

        Raises:
            ChannelAddressError: for one that is malformed, or that nobody can connect to.
            ChannelClosedError: after close.
        """
        self._check_open()
        check_target(address)
        version = host_of(address).version
        if self._addresses.get(peer) == address:
            return
        self.disconnect(peer)
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, _QUEUE_MESSAGES)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.IPV6, int(version == 6))
        socket.connect(f"tcp://{address}")
        self._peers[peer], self._addresses[peer] = socket, address

    def disconnect(self, peer: str) -> None:
        """Forget a peer, and what was not sent to it yet. Nothing if it is not known."""
        socket = self._peers.pop(peer, None)
        if socket is not None:
            del self._addresses[peer]
            socket.close()

    def send(self, peer: str, message: AnyMessage, wire: WireTicket | None = None) -> bool:
        """Send a message; False if it was dropped because too many wait for this peer.

        Args:
            peer: that was connected.
            message: of the hand-off, or of `client_messages`.
            wire: with SEND: how to pull the part.

        Raises:
            UnknownPeerError: if the peer was never connected.
            EncodeError: for a message that has no encoding.
            ChannelClosedError: after close.
        """
        self._check_open()
        if peer not in self._peers:
            raise UnknownPeerError(peer)
        self._sequence += 1
        packet = Packet(self.name, peer, self.epoch, self._sequence, message, wire)
        frame = seal(packet, self._secret)
        try:
            self._peers[peer].send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._unsent += 1
            return False
        self._sent += 1
        return True

    def receive(self) -> list[Packet]:
        """Return what has come, up to some hundreds; what is no message is counted and dropped.

        Raises:
            ChannelClosedError: after close.
        """
        self._check_open()
        packets = []
        for _ in range(_MAX_PER_CALL):
            try:
                parts = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(parts) != 1:
                    raise DroppedError(Dropped.NO_FRAME)
                packets.append(self._reader.open(parts[0]))
            except DroppedError as dropped:
                self._dropped[dropped.reason] += 1
        self._received += len(packets)
        return packets

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has come; False if nothing has.

        Raises:
            ChannelClosedError: after close.
        """
        self._check_open()
        return bool(self._inbox.poll(max(0, round(timeout_s * 1000))))

    def stats(self) -> ChannelStats:
        """Return what it has done."""
        others = frozenset(self._reader.other_versions)
        return ChannelStats(self._sent, self._received, self._unsent, self._dropped.copy(), others)

    def close(self) -> None:
        """Close the sockets; what was not sent yet is lost. Calling it again does nothing."""
        if not self._context.closed:
            for socket in (self._inbox, *self._peers.values()):
                socket.close()
            self._context.term()

    def _check_open(self) -> None:
        if self._context.closed:
            raise ChannelClosedError("the channel is closed")
