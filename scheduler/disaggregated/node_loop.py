"""The loop of a node process: its engine, its channel, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from ...kvcache import RequestTooLargeError
from ..channel import (
    DecodeFailed,
    Finished,
    GiveUp,
    Heard,
    NodeStatus,
    Packet,
    PrefillFailed,
    RunPrefill,
    Started,
    ZmqChannel,
)
from ..channel.client_messages import OfAttempt
from ..errors import RequestError
from ..handoff import Failed, Key, NodeId, Stopped, Timing
from ..handoff import Finished as DecodeFinished
from ..handoff import Started as DecodeStarted
from ..handoff.messages import Message
from ..request import Request
from .decode_engine import DecodeEngine, DecodeReport
from .desk import hits_of
from .node_engine import Letter
from .outbox import Outbox
from .prefill_engine import PrefillEngine

DESK: Final[NodeId] = "desk"
"""The name of the front desk in every deployment."""

_BUSY_WAIT_S: Final = 0.001  # while a transport may have something to say, which wakes nobody
_IDLE_WAIT_S: Final = 0.05


class NodeLoop:
    """Drives the engine of one node by what comes over its channel.

    It tells the desk, and every node that it has to do with, where it is; a decode node learns so
    of a prefill node before the first ASK, which comes over the same connection. What it reports to
    the desk it says again until that has heard it.
    """

    def __init__(
        self,
        engine: PrefillEngine | DecodeEngine,
        channel: ZmqChannel,
        *,
        desk: str,
        transport: str,
        timing: Timing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join a node with its channel.

        Args:
            engine: nobody else drives it.
            channel: of the same epoch.
            desk: the address of the front desk.
            transport: the name of the engine's.
            timing: of the engine. After retry_s it says that it is alive, and again what the desk
                has not heard, for transfer_s; for remember_s it knows what it was asked to begin.
            clock: never goes back, in seconds.

        Raises:
            ChannelAddressError: for a malformed address.
        """
        self._engine = engine
        self._channel = channel
        self._clock = clock
        self._peers = {DESK}
        self._timing = timing
        self._says_at = clock()
        self._outbox = Outbox(retry_s=timing.retry_s, patience_s=timing.transfer_s)
        self._begun: dict[Key, float] = {}  # and when it was heard of last, the longest ago first
        self._status = NodeStatus(
            role="prefill" if isinstance(engine, PrefillEngine) else "decode",
            address=channel.address,
            transport=transport,
            block_size=engine.manager.block_size,
            num_blocks=engine.manager.num_blocks,
        )
        channel.connect(DESK, desk)

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
            self._forget_begun(now)
        for said in self._outbox.take_due(now).again:
            self._channel.send(said.peer, said.message)
        packets = self._channel.receive()
        for packet in packets:
            self._take_in(packet, now)
        was_busy = self._engine.poll(now)
        for letter in self._engine.take_letters():
            if letter.peer in self._peers:  # else it is from before this life, or from nowhere
                self._channel.send(letter.peer, letter.message, letter.wire)
        for report in self._engine.take_reports():
            self._say(_as_message(report), now)
        return was_busy or bool(packets)

    def _take_in(self, packet: Packet, now: float) -> None:
        match packet.message:
            case NodeStatus(address=address):
                self._meet(packet.sender, address)
            case RunPrefill() as run if isinstance(self._engine, PrefillEngine):
                self._channel.send(DESK, Heard.of(run))
                if run.key not in self._begun:
                    self._meet(run.decode_node, run.decode_address)
                    self._begin(self._engine, run, now)
                self._begun.pop(run.key, None)
                self._begun[run.key] = now
            case Heard() as heard:
                self._outbox.heard(packet.sender, heard)
            case GiveUp(key, reason):
                self._engine.give_up(key, reason)
            case Message() as message:
                self._engine.receive(Letter(packet.sender, message, packet.wire))

    def _forget_begun(self, now: float) -> None:
        for key, heard_at in list(self._begun.items()):
            if now - heard_at < self._timing.remember_s:
                return
            del self._begun[key]

    def _meet(self, peer: NodeId, address: str) -> None:
        """Say to another node where this one is, when it is first heard of."""
        is_new = peer not in self._peers
        self._channel.connect(peer, address)
        self._peers.add(peer)
        if is_new:
            self._channel.send(peer, self._status)

    def _begin(self, engine: PrefillEngine, run: RunPrefill, now: float) -> None:
        key = run.key
        request = Request(
            key[0],
            np.frombuffer(run.prompt, "<i4").astype(np.int32),
            run.max_new_tokens,
            priority=run.priority,
            sampling=run.sampling,
            stop_token_ids=run.stop_token_ids,
            namespace=run.namespace,
        )
        try:
            engine.begin(request, run.decode_node, key[1])
        except (RequestError, RequestTooLargeError) as error:
            self._say(PrefillFailed(key, str(error), is_final=True, is_busy=False), now)

    def _say(self, message: OfAttempt, now: float) -> None:
        """Tell the desk something, until it is heard."""
        self._outbox.add(DESK, message, now)
        self._channel.send(DESK, message)


def _as_message(report: Failed | DecodeReport) -> OfAttempt:
    match report:
        case Failed(key, reason, is_final, is_busy):
            return PrefillFailed(key, reason, is_final, is_busy)
        case DecodeStarted(key):
            return Started(key)
        case DecodeFinished(key, request):
            tokens = tuple([int(token) for token in request.output_tokens])
            return Finished(key, tokens, hits_of(request), request.num_preemptions)
        case Stopped(key, reason):
            return DecodeFailed(key, reason)
