"""A front desk for nodes in other processes, with the interface of one engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..channel import (
    DecodeFailed,
    Dropped,
    Finished,
    Heard,
    NodeStatus,
    Packet,
    PrefillFailed,
    RunPrefill,
    Started,
    ZmqChannel,
)
from ..channel import GiveUp as GiveUpMessage
from ..channel.client_messages import OfAttempt
from ..errors import NodesMissingError
from ..handoff import NodeId
from ..request import Request
from .desk import Desk, GiveUp, Run
from .outbox import Outbox

_WAIT_S: Final = 0.02
_RETRIES_PER_SILENCE: Final = 5


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """A node that was heard of.

    Attributes:
        epoch: of its life.
        heard_at: when it said something last.
        refusal: why nothing is sent to it; empty if it serves.
    """

    status: NodeStatus
    epoch: int
    heard_at: float
    refusal: str = ""


class RemoteNodes:
    """Serves requests with prefill and decode nodes in other processes, as `Engine` does with one.

    Nodes come by saying so, and go by saying nothing for a while, or by coming back with another
    epoch; what they had is tried again on others. One thread may use it.

    Attributes:
        nodes: those that were heard of and have not gone, by name.
        gone: those that have gone and not come back.
    """

    def __init__(
        self,
        channel: ZmqChannel,
        *,
        block_size: int,
        silence_s: float = 5.0,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the desk's end of a channel.

        Args:
            channel: named `node_loop.DESK`; nodes connect to its address.
            block_size: tokens per block; a node with another is refused.
            silence_s: a node not heard of for so long is gone, and one that has not taken a request
                in by then fails an attempt; it is asked five times.
            max_attempts, backoff_s, request_s: of `FrontDesk`.
            clock: never goes back, in seconds.
        """
        self.nodes: dict[NodeId, RemoteNode] = {}
        self.gone: dict[NodeId, RemoteNode] = {}
        self._channel = channel
        self._block_size = block_size
        self._silence_s = silence_s
        self._clock = clock
        self._outbox = Outbox(retry_s=silence_s / _RETRIES_PER_SILENCE, patience_s=silence_s)
        self._desk = Desk(
            block_size,
            max_attempts=max_attempts,
            backoff_s=backoff_s,
            request_s=request_s,
            epoch=channel.epoch,
        )

    @property
    def failures(self) -> dict[str, str]:
        """Why requests came to nothing, by id; those have the status ABORTED."""
        return self._desk.failures

    @property
    def dropped(self) -> Counter[Dropped]:
        """Count what came and was not taken in, by the reason."""
        return self._channel.stats().dropped

    @property
    def num_open(self) -> int:
        """Requests that have yet to end."""
        return self._desk.num_open

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end."""
        return self.num_open > 0

    def count(self, role: str) -> int:
        """Count the nodes of a role that serve."""
        return sum(node.status.role == role and not node.refusal for node in self.nodes.values())

    def check(self, timeout_s: float) -> None:
        """Refuse to go on if no node of a role is left, and none has come for some time.

        Args:
            timeout_s: since the last of them was heard of; silence_s at least.

        Raises:
            NodesMissingError: with their names.
        """
        timeout_s, now = max(timeout_s, self._silence_s), self._clock()
        for role in ("prefill", "decode"):
            gone = [peer for peer, node in self.gone.items() if node.status.role == role]
            heard_at = max([self.gone[peer].heard_at for peer in gone], default=now)
            if not self.count(role) and now - heard_at >= timeout_s:
                have = "has" if len(gone) == 1 else "have"
                raise NodesMissingError(
                    f"{' and '.join(gone)} {have} not been heard of for {timeout_s:g} s, and no "
                    f"other {role} node serves"
                )

    def add_request(self, request: Request) -> None:
        """Take a request in; it waits while there are no nodes.

        Raises:
            RequestError: for one that was added before, or the id of a live request.
        """
        self._desk.add_request(request, self._clock())

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        is_live = self._desk.abort(request_id)
        self._follow()
        return is_live

    def step(self) -> list[Request]:
        """Take in what nodes say, waiting a moment for it; return the requests that ended."""
        self._channel.wait(_WAIT_S)
        now = self._clock()
        for packet in self._channel.receive():
            self._take_in(packet, now)
        for peer, node in list(self.nodes.items()):
            if now - node.heard_at >= self._silence_s:
                self._lose(peer)
        again, given_up = self._outbox.take_due(now)
        for said in again:
            self._channel.send(said.peer, said.message)
        for said in given_up:
            reason = f"{said.peer} does not take it in"
            self._desk.prefill_failed(said.message.key, reason)
        self._desk.tick(now)
        self._follow()
        return self._desk.take_ended()

    def run(self) -> list[Request]:
        """Run until every request has ended; return those that did, in order of their ends."""
        ended = []
        while self.has_work:
            ended += self.step()
        return ended

    def _take_in(self, packet: Packet, now: float) -> None:
        peer, known = packet.sender, self.nodes.get(packet.sender)
        if isinstance(packet.message, NodeStatus):
            self._hear(packet, packet.message, now)
            return
        if known is None or known.epoch != packet.epoch:
            return  # of a life that is over; what it had is tried again
        self.nodes[peer] = RemoteNode(known.status, known.epoch, now, known.refusal)
        if known.refusal:
            return
        match packet.message:
            case Heard() as heard:
                self._outbox.heard(peer, heard)
            case PrefillFailed() | Started() | Finished() | DecodeFailed() as report:
                self._channel.send(peer, Heard.of(report))
                self._take_in_report(report)

    def _take_in_report(self, report: OfAttempt) -> None:
        match report:
            case PrefillFailed(key, reason, is_final, is_busy):
                self._desk.prefill_failed(key, reason, is_final=is_final, is_busy=is_busy)
            case Started(key):
                self._desk.started(key)
            case Finished(key, tokens, hits, num_preemptions):
                self._desk.finished(key, tokens, hits, num_preemptions)
            case DecodeFailed(key, reason):
                self._desk.decode_failed(key, reason)

    def _hear(self, packet: Packet, status: NodeStatus, now: float) -> None:
        peer, known = packet.sender, self.nodes.get(packet.sender)
        if known is not None and (known.epoch, known.status) != (packet.epoch, status):
            self._lose(peer)
            known = None
        if known is not None:
            self.nodes[peer] = RemoteNode(status, known.epoch, now, known.refusal)
            return
        refusal = self._refusal(status)
        self.nodes[peer] = RemoteNode(status, packet.epoch, now, refusal)
        if refusal:
            return
        self.gone.pop(peer, None)
        self._channel.connect(peer, status.address)
        if status.role == "prefill":
            self._desk.add_prefill(peer, status.num_blocks)
        else:
            self._desk.add_decode(peer, status.num_blocks)

    def _refusal(self, status: NodeStatus) -> str:
        if status.block_size != self._block_size:
            return f"it has blocks of {status.block_size} tokens, not {self._block_size}"
        for peer, node in self.nodes.items():
            if not node.refusal and node.status.transport != status.transport:
                other = node.status.transport
                return f"its transport is {status.transport}, but that of {peer} is {other}"
        return ""

    def _lose(self, peer: NodeId) -> None:
        node = self.nodes.pop(peer)
        if not node.refusal:
            self.gone[peer] = node
            self._channel.disconnect(peer)
            self._outbox.forget_peer(peer)
            self._desk.lose(peer)

    def _follow(self) -> None:
        """Tell nodes what the desk wants done."""
        for action in self._desk.take_actions():
            match action:
                case Run(key, request, route):
                    run = RunPrefill(
                        key,
                        request.prompt.astype("<i4").tobytes(),
                        request.max_new_tokens,
                        request.priority,
                        request.sampling,
                        tuple(request.stop_token_ids),
                        request.namespace,
                        route.decode,
                        self.nodes[route.decode].status.address,
                    )
                    if self._channel.send(route.prefill, run):
                        self._outbox.add(route.prefill, run, self._clock())
                    else:
                        reason = f"too many messages wait for {route.prefill}"
                        self._desk.prefill_failed(key, reason, is_busy=True)
                case GiveUp(key, reason):
                    self._outbox.forget(key)
                    for peer, node in self.nodes.items():
                        if not node.refusal:
                            self._channel.send(peer, GiveUpMessage(key, reason))
