"""The event loop of a node process: connects the engine, the control channel and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Final

from ..gateway.cache_index import CacheReporter
from ..gateway.node_reporter import NodeReporter
from ..handoff import NodeId, Timing
from ..handoff.gateway_messages import (
    GATEWAY,
    CacheAsk,
    CancelAttempt,
    DeliveryAck,
    FollowAttempt,
    NodeStatus,
    RunPrefill,
)
from ..handoff.messages import Message
from .channel import Packet, TooManyPeersError, ZmqChannel
from .channel.schema import MAX_UNHEARD
from .decode_node import DecodeEngine
from .node import PeerMessage
from .prefill_node import PrefillEngine

_BUSY_WAIT_S: Final = 0.001  # with open requests: the transport's events do not wake the channel
_IDLE_WAIT_S: Final = 0.05


class NodeEventLoop:
    """Drives the engine of one node with the messages of its channel.

    The loop sends the node's address to the gateway and to every node that it works with. A decode
    node thus knows a prefill node before its first ASK, which comes over the same connection.
    """

    def __init__(
        self,
        engine: PrefillEngine | DecodeEngine,
        channel: ZmqChannel,
        *,
        gateway: str,
        transport: str,
        timing: Timing,
        cache: CacheReporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect a node to its channel.

        Args:
            engine: driven only by this loop.
            channel: a channel of the same epoch.
            gateway: address of the gateway.
            transport: name of the engine's transport.
            timing: timing of the engine and its `NodeReporter`. The loop sends its status every
                retry_s.
            cache: takes the engine's KV events, and tells the gateway what the node has cached.
                None: the gateway predicts it.
            clock: a monotonic clock, in seconds.

        Raises:
            ChannelAddressError: for a malformed address.
            CountError: for a timing that `NodeReporter` rejects.
        """
        self._engine = engine
        self._channel = channel
        self._clock = clock
        self._cache = cache
        self._heard_at = {GATEWAY: clock()}  # of each peer, or when it was met
        self._timing = timing
        self._next_status_at = clock()
        self._reporter = NodeReporter(channel.epoch, timing)
        self._status = NodeStatus(
            role="prefill" if isinstance(engine, PrefillEngine) else "decode",
            address=channel.address,
            transport=transport,
            block_size=engine.manager.block_size,
            num_blocks=engine.manager.num_blocks,
            model=engine.model_name,
            max_model_len=engine.max_model_len,
        )
        channel.connect(GATEWAY, gateway)

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Serve until is_stopped returns True."""
        while not is_stopped():
            if not self.run_once():
                is_waiting = self._engine.is_waiting
                self._channel.wait(_BUSY_WAIT_S if is_waiting else _IDLE_WAIT_S)
        self.run_once()  # processes messages that have arrived, such as the last ACK

    def run_once(self) -> bool:
        """Process received messages, run at most one step, and send messages.

        Returns:
            Whether anything was done.
        """
        now = self._clock()
        self._reporter.tick(now)
        self._engine.set_time(now)
        packets = self._channel.receive()
        for packet in packets:
            self._process(packet, now)
        if now >= self._next_status_at:  # after a long step, with what has arrived in it
            self._next_status_at = now + self._timing.retry_s
            self._send_status(now)
        was_busy = self._engine.poll(now)
        self._send_all(now)  # before a step, which takes long
        was_busy |= self._engine.step()
        self._send_all(now)
        return was_busy or bool(packets)

    def _send_status(self, now: float) -> None:
        """Tell all peers that this node is alive, and the gateway which peers it does not hear.

        A peer that is silent for as long as attempts are remembered is forgotten. If the channel
        has no room for new peers, the one that is silent the longest is forgotten earlier.
        """
        unheard = []
        for peer, heard_at in sorted(self._heard_at.items(), key=itemgetter(1)):
            silent_s = now - heard_at
            if peer == GATEWAY or silent_s < self._timing.silence_s:
                continue
            patience_s = max(self._timing.remember_s, 2 * self._timing.silence_s)
            if silent_s >= patience_s or not self._channel.has_room:
                self._channel.disconnect(peer)
                del self._heard_at[peer]
            else:
                unheard.append(peer)
        status = replace(
            self._status,
            unheard=tuple(unheard[:MAX_UNHEARD]),
            num_updates=0 if self._cache is None else self._cache.num_updates,
            load=self._engine.load(),
        )
        for peer in self._heard_at:
            self._channel.send(peer, status if peer == GATEWAY else self._status)

    def _process(self, packet: Packet, now: float) -> None:
        if packet.sender in self._heard_at:
            self._heard_at[packet.sender] = now
        match packet.message:
            case NodeStatus(address=address):
                self._connect(packet.sender, address, now)
            case RunPrefill() as run if isinstance(self._engine, PrefillEngine):
                if self._reporter.is_new(run):
                    self._connect(run.decode_node, run.decode_address, now)
                self._reporter.begin(run, self._engine.begin, now)
            case DeliveryAck() as ack:
                self._reporter.acknowledge(packet.sender, ack)
            case FollowAttempt() as follow:
                self._reporter.follow(follow)
            case CacheAsk() as ask if self._cache is not None:
                self._cache.answer(ask)
            case CancelAttempt(key, reason):
                self._engine.give_up(key, reason)
            case Message() as message:
                self._engine.receive(PeerMessage(packet.sender, message, packet.pull_info))

    def _send_all(self, now: float) -> None:
        """Send the node's messages to other nodes, and to the gateway what it reports."""
        for message in self._engine.take_messages():
            if message.peer in self._heard_at:  # else it answers an unknown or earlier peer
                self._channel.send(*message)
        if self._cache is not None:  # before the report that says that its blocks are there
            for update in self._cache.take_messages():
                self._channel.send(GATEWAY, update)
        for report in self._engine.take_reports():
            self._reporter.report(report, now)
        self._reporter.report_progress(now)
        for message_to_gateway in self._reporter.take_messages():
            self._channel.send(GATEWAY, message_to_gateway)

    def _connect(self, peer: NodeId, address: str, now: float) -> None:
        """Connect to a node, and send it this node's status the first time."""
        is_new = peer not in self._heard_at
        try:
            self._channel.connect(peer, address)
        except TooManyPeersError:
            return  # an attempt with it ends as if it were unreachable
        if is_new:
            self._heard_at[peer] = now
            self._channel.send(peer, self._status)
