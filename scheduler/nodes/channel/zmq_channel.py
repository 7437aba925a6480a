"""Messages between the processes of a deployment, over ZeroMQ.

::

    a node        PULL, bound: its address           one PUSH per peer, connected: its inbox
                       ▲                                        │
    others ────────────┘                                        └────────► others

A message may be lost: where a queue is full, and when a connection ends. It is never doubled or
reordered by the channel. The protocol expects worse.

Nodes that share a secret connect with each other alone (`curve`). Who has another, or none, is
counted; no message of it comes in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import zmq

from ..transport.descriptors import WireTicket
from .address import check_target, host_of
from .codec import AnyMessage, Packet
from .curve import OVERHEAD_BYTES, CurveKeys
from .errors import (
    ChannelAddressError,
    ChannelClosedError,
    UnknownPeerError,
)
from .frames import (
    MAX_BYTES,
    Dropped,
    DroppedError,
    FrameReader,
    seal,
)
from .handshakes import (
    ANY,
    SPOKE_OTHERWISE,
    FailedHandshakes,
    Refused,
    why_refused,
)
from .secret import ENVIRONMENT, Secret

_QUEUE_MESSAGES: Final = 1000
_MAX_PER_CALL: Final = 256
_RECONNECT_MS: Final = 100
_MAX_RECONNECT_MS: Final = 2000
_HEARTBEAT_MS: Final = 2000
_MAX_SOCKETS: Final = 4096
"""Of ZeroMQ's: a peer takes three, with both ends of what tells us of its handshakes."""


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """What a channel has done.

    Attributes:
        sent, received: messages.
        unsent: messages that were dropped because the queue to their peer was full.
        dropped: frames that came and were not taken in, by the reason.
        other_versions: of those that a node of ours of another version must have sent.
        refused: connections that others tried to make, and had no leave to or did not finish.
    """

    sent: int = 0
    received: int = 0
    unsent: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)
    other_versions: frozenset[int] = frozenset()
    refused: Counter[Refused] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Peer:
    address: str
    socket: zmq.Socket[bytes]
    failed: FailedHandshakes

    def close(self) -> None:
        self.socket.close()
        self.failed.close()


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
            SecretError: if there is one, and ZeroMQ has nothing to protect it with.
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
        self._dropped: Counter[Dropped] = Counter()
        self._refused: Counter[Refused] = Counter()
        self._peers: dict[str, _Peer] = {}
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._inbox = self._context.socket(zmq.PULL)
        self._failed = FailedHandshakes(self._inbox, ANY)
        self._bind(bind)
        self.address = self._inbox.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def _bind(self, address: str) -> None:
        self._inbox.set(zmq.LINGER, 0)
        self._inbox.set(zmq.RCVHWM, _QUEUE_MESSAGES)
        self._inbox.set(zmq.IPV6, int(host_of(address).version == 6))
        max_bytes = MAX_BYTES
        if self._keys is not None:
            self._keys.guard(self._inbox, is_server=True)
            max_bytes += OVERHEAD_BYTES
        self._inbox.set(zmq.MAXMSGSIZE, max_bytes)  # with more, its connection ends
        try:
            self._inbox.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise ChannelAddressError(f"cannot bind {address}: {error.strerror}") from None

    def connect(self, peer: str, address: str) -> None:
        """Send what is for a peer to an address from now on; it need not be there yet.

        Raises:
            ChannelAddressError: for one that is malformed, or that nobody can connect to.
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
        failed = FailedHandshakes(socket, SPOKE_OTHERWISE)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, _QUEUE_MESSAGES)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.IPV6, int(host_of(address).version == 6))
        if self._keys is not None:
            self._keys.guard(socket, is_server=False)
        socket.connect(f"tcp://{address}")
        return _Peer(address, socket, failed)

    def disconnect(self, peer: str) -> None:
        """Forget a peer, and what was not sent to it yet. Nothing if it is not known."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known.close()

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
        to = self._peers[peer]
        if to.failed.take(1):  # who has a secret met who has none: ZeroMQ does not try again
            to.close()
            to = self._peers[peer] = self._open(to.address)
        self._sequence += 1
        packet = Packet(self.name, peer, self.epoch, self._sequence, message, wire)
        frame = seal(packet)
        try:
            to.socket.send(frame, zmq.NOBLOCK)
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
        for code in self._failed.take(_MAX_PER_CALL):
            self._refused[why_refused(code, has_secret=self._keys is not None)] += 1
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
        return ChannelStats(
            self._sent,
            self._received,
            self._unsent,
            self._dropped.copy(),
            others,
            self._refused.copy(),
        )

    def close(self) -> None:
        """Close the sockets; what was not sent yet is lost. Calling it again does nothing."""
        if not self._context.closed:
            for peer in self._peers.values():
                peer.close()
            self._inbox.close()
            self._failed.close()
            self._context.term()

    def _check_open(self) -> None:
        if self._context.closed:
            raise ChannelClosedError("the channel is closed")
