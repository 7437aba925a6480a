"""The loop of a node process: its engine, its channel, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ..handoff import NodeId, Timing
from ..handoff.gateway_messages import GATEWAY
from ..handoff.messages import Message
from ..handoff.node_reporter import NodeReporter
from .channel import (
    CancelAttempt,
    DeliveryAck,
    NodeStatus,
    Packet,
    RunPrefill,
    ZmqChannel,
)
from .decode_node import DecodeEngine
from .node import Letter
from .prefill_node import PrefillEngine

_BUSY_WAIT_S: Final = 0.001  # while a transport may have something to say, which wakes nobody
_IDLE_WAIT_S: Final = 0.05


class NodeLoop:
    """Drives the engine of one node by what comes over its channel.

    It sends its address to the gateway and to every node that it works with. A decode node learns
    of a prefill node that way before the first ASK, which comes over the same connection.
    """

    def __init__(
        self,
        engine: PrefillEngine | DecodeEngine,
        channel: ZmqChannel,
        *,
        gateway: str,
        transport: str,
        timing: Timing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join a node with its channel.

        Args:
            engine: nobody else drives it.
            channel: of the same epoch.
            gateway: the address of the gateway.
            transport: the name of the engine's.
            timing: of the engine and its `NodeReporter`. The loop sends its status every retry_s.
            clock: never goes back, in seconds.

        Raises:
            ChannelAddressError: for a malformed address.
            CountError: for a timing that `NodeReporter` cannot have.
        """
        self._engine = engine
        self._channel = channel
        self._clock = clock
        self._peers = {GATEWAY}
        self._timing = timing
        self._says_at = clock()
        self._reporter = NodeReporter(channel.epoch, timing)
        self._status = NodeStatus(
            role="prefill" if isinstance(engine, PrefillEngine) else "decode",
            address=channel.address,
            transport=transport,
            block_size=engine.manager.block_size,
            num_blocks=engine.manager.num_blocks,
            model=engine.model_name,
        )
        channel.connect(GATEWAY, gateway)

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Serve until it is told to stop."""
        while not is_stopped():
            if not self.turn():
                is_waiting = self._engine.scheduler.num_open > 0
                self._channel.wait(_BUSY_WAIT_S if is_waiting else _IDLE_WAIT_S)
        self.turn()  # what has come already counts, as that all was read

    def turn(self) -> bool:
        """Take in what has come, run one step at most, send what is to be said.

        Returns:
            Whether anything was done.
        """
        now = self._clock()
        if now >= self._says_at:
            self._says_at = now + self._timing.retry_s
            for peer in self._peers:
                self._channel.send(peer, self._status)
        self._reporter.tick(now)
        packets = self._channel.receive()
        for packet in packets:
            self._take_in(packet, now)
        self._say()  # before a step, which takes long
        was_busy = self._engine.poll(now)
        for letter in self._engine.take_letters():
            if letter.peer in self._peers:  # else it is from before this life, or from nowhere
                self._channel.send(letter.peer, letter.message, letter.wire)
        for report in self._engine.take_reports():
            self._reporter.report(report, now)
        self._say()
        return was_busy or bool(packets)

    def _take_in(self, packet: Packet, now: float) -> None:
        match packet.message:
            case NodeStatus(address=address):
                self._meet(packet.sender, address)
            case RunPrefill() as run if isinstance(self._engine, PrefillEngine):
                if self._reporter.is_new(run):
                    self._meet(run.decode_node, run.decode_address)
                self._reporter.begin(run, self._engine.begin, now)
            case DeliveryAck() as heard:
                self._reporter.heard(packet.sender, heard)
            case CancelAttempt(key, reason):
                self._engine.give_up(key, reason)
            case Message() as message:
                self._engine.receive(Letter(packet.sender, message, packet.wire))

    def _say(self) -> None:
        for message in self._reporter.take_messages():
            self._channel.send(GATEWAY, message)

    def _meet(self, peer: NodeId, address: str) -> None:
        """Say to another node where this one is, when it is first heard of."""
        is_new = peer not in self._peers
        self._channel.connect(peer, address)
        self._peers.add(peer)
        if is_new:
            self._channel.send(peer, self._status)
