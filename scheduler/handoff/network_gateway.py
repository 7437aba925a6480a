"""The gateway of nodes in other processes: who is there, and what is said over a bad network."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from ..errors import NodesMissingError
from ..request import Request
from .gateway import (
    Gateway,
    RunAttempt,
)
from .gateway_messages import (
    AttemptMessage,
    CancelAttempt,
    DecodeFailed,
    DeliveryAck,
    Finished,
    GatewayMessage,
    NodeStatus,
    PrefillFailed,
    RunPrefill,
    Started,
)
from .messages import Message, NodeId
from .remote_node import RemoteNode, refusal_of
from .resend import ResendQueue
from .retries import Cancel

_RETRIES_PER_SILENCE: Final = 5


@dataclass(frozen=True, slots=True)
class Connect:
    """Send what is for a node to this address from now on."""

    peer: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A node has gone; what was not sent to it yet is for nobody."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Send a message to a node that was connected."""

    peer: NodeId
    message: GatewayMessage


class NetworkGateway:
    """A `Gateway` with nodes of which it knows only what they say, over a network that may lose it.

    Nodes come by saying so, and go by saying nothing for a while, or by coming back with another
    epoch; what they had is tried again on others. It does no I/O: carry out `take_actions` after
    every call.

    Attributes:
        nodes: those that were heard of and have not gone, by name.
        gone: those that have gone and not come back.
    """

    def __init__(
        self,
        block_size: int,
        *,
        model: str | None = None,
        silence_s: float = 5.0,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = inf,
        epoch: int = 0,
    ) -> None:
        """Make a gateway that has heard of no node.

        Args:
            block_size: tokens per block; a node with another is refused.
            model: the name of a configuration; without it, nodes must have that of the first.
            silence_s: a node not heard of for so long is gone, and one that has not taken a request
                in by then fails an attempt; it is asked five times.
            max_attempts, backoff_s, request_s: of `RequestRetrier`; no limit of time by default.
            epoch: of `Gateway`.
        """
        self.nodes: dict[NodeId, RemoteNode] = {}
        self.gone: dict[NodeId, RemoteNode] = {}
        self._block_size = block_size
        self._model = model
        self._silence_s = silence_s
        self._outbox = ResendQueue(retry_s=silence_s / _RETRIES_PER_SILENCE, patience_s=silence_s)
        self._gateway = Gateway(
            block_size,
            max_attempts=max_attempts,
            backoff_s=backoff_s,
            request_s=request_s,
            epoch=epoch,
        )
        self._now = 0.0
        self._actions: list[Connect | Disconnect | SendToNode] = []

    @property
    def failures(self) -> dict[str, str]:
        """Why requests came to nothing, by id; those have the status ABORTED."""
        return self._gateway.failures

    @property
    def num_open(self) -> int:
        """Requests that have yet to end."""
        return self._gateway.num_open

    @property
    def num_unacked(self) -> int:
        """What was said to nodes, and none of them has acknowledged."""
        return len(self._outbox)

    @property
    def loads(self) -> dict[NodeId, int]:
        """The blocks that are thought to be under way on each node; see `Router`."""
        return self._gateway.loads

    def count(self, role: str) -> int:
        """Count the nodes of a role that serve."""
        return sum(node.status.role == role and not node.refusal for node in self.nodes.values())

    def check(self, timeout_s: float, now: float) -> None:
        """Refuse to go on if no node of a role is left, and none has come for some time.

        Args:
            timeout_s: since the last of them was heard of; silence_s at least.
            now: the time.

        Raises:
            NodesMissingError: with their names.
        """
        timeout_s = max(timeout_s, self._silence_s)
        for role in ("prefill", "decode"):
            gone = [peer for peer, node in self.gone.items() if node.status.role == role]
            heard_at = max([self.gone[peer].heard_at for peer in gone], default=now)
            if not self.count(role) and now - heard_at >= timeout_s:
                have = "has" if len(gone) == 1 else "have"
                raise NodesMissingError(
                    f"{' and '.join(gone)} {have} not been heard of for {timeout_s:g} s, and no "
                    f"other {role} node serves"
                )

    def take_actions(self) -> list[Connect | Disconnect | SendToNode]:
        """Hand out what is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def take_ended(self) -> list[Request]:
        """Hand out the requests that have ended since the last call, but for those aborted."""
        return self._gateway.take_ended()

    # What clients say

    def add_request(self, request: Request, now: float) -> None:
        """Take a request in; it waits while there are no nodes.

        Raises:
            RequestError: for one that was added before, or the id of a live request.
        """
        self._now = now
        self._gateway.add_request(request, now)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        is_live = self._gateway.abort(request_id)
        self._follow()
        return is_live

    # What nodes, the network and the clock say

    def receive(
        self, peer: NodeId, epoch: int, message: Message | GatewayMessage, now: float
    ) -> None:
        """Take in what a node has said.

        Args:
            peer, epoch: of the node that said so.
            message: what is for nodes alone changes nothing.
            now: the time.
        """
        self._now = now
        known = self.nodes.get(peer)
        if isinstance(message, NodeStatus):
            self._hear(peer, epoch, message)
        elif known is not None and known.epoch == epoch:
            self.nodes[peer] = RemoteNode(known.status, epoch, self._now, known.refusal)
            if not known.refusal:
                self._take_in(peer, message)
        # else it is of a life that is over; what it had is tried again
        self._follow()

    def unsent(self, peer: NodeId, message: GatewayMessage, never: str = "") -> None:
        """Take in that a message could not be sent, as too many wait for its node.

        Args:
            peer, message: of `SendToNode`.
            never: why it never can be; its request comes to nothing then.
        """
        if isinstance(message, RunPrefill):
            self._outbox.forget(message.key)
            reason = never or f"too many messages wait for {peer}"
            final = never != ""
            self._gateway.prefill_failed(message.key, reason, is_final=final, is_busy=not final)
            self._follow()

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._now = now
        for peer, node in list(self.nodes.items()):
            if now - node.heard_at >= self._silence_s:
                self._lose(peer)
        again, given_up = self._outbox.take_due(now)
        self._actions += [SendToNode(said.peer, said.message) for said in again]
        for said in given_up:
            reason = f"{said.peer} does not take it in"
            self._gateway.prefill_failed(said.message.key, reason)
        self._gateway.tick(now)
        self._follow()

    # What follows

    def _take_in(self, peer: NodeId, message: Message | GatewayMessage) -> None:
        match message:
            case DeliveryAck() as heard:
                self._outbox.heard(peer, heard)
            case PrefillFailed() | Started() | Finished() | DecodeFailed() as report:
                self._actions.append(SendToNode(peer, DeliveryAck.of(report)))
                self._outbox.forget(report.key)  # P has heard of it
                self._take_in_report(report)

    def _take_in_report(self, report: AttemptMessage) -> None:
        match report:
            case PrefillFailed(key, reason, is_final, is_busy):
                self._gateway.prefill_failed(key, reason, is_final=is_final, is_busy=is_busy)
            case Started(key):
                self._gateway.started(key)
            case Finished(key, tokens, hits, num_preemptions):
                self._gateway.finished(key, tokens, hits, num_preemptions)
            case DecodeFailed(key, reason):
                self._gateway.decode_failed(key, reason)

    def _hear(self, peer: NodeId, epoch: int, status: NodeStatus) -> None:
        known = self.nodes.get(peer)
        if known is not None and epoch < known.epoch:
            return  # it was late, or a clock went back: that life serves when this one is silent
        if known is not None and (known.epoch, known.status) != (epoch, status):
            self._lose(peer)
            known = None
        if known is not None:
            self.nodes[peer] = RemoteNode(status, known.epoch, self._now, known.refusal)
            return
        refusal = refusal_of(status, self.nodes, self._block_size, self._model)
        self.nodes[peer] = RemoteNode(status, epoch, self._now, refusal)
        if refusal:
            return
        self.gone.pop(peer, None)
        self._actions.append(Connect(peer, status.address))
        if status.role == "prefill":
            self._gateway.add_prefill(peer, status.num_blocks)
        else:
            self._gateway.add_decode(peer, status.num_blocks)

    def _lose(self, peer: NodeId) -> None:
        node = self.nodes.pop(peer)
        if not node.refusal:
            self.gone[peer] = node
            self._actions.append(Disconnect(peer))
            self._outbox.forget_peer(peer)
            self._gateway.lose(peer)

    def _follow(self) -> None:
        """Tell nodes what the gateway wants done."""
        for action in self._gateway.take_actions():
            match action:
                case RunAttempt(key, request, route):
                    prefill, decode = self.nodes[route.prefill], self.nodes[route.decode]
                    address = decode.status.address
                    run = RunPrefill.of(key, prefill.epoch, request, route.decode, address)
                    self._actions.append(SendToNode(route.prefill, run))
                    self._outbox.add(route.prefill, run, self._now)
                case Cancel(key):
                    self._outbox.forget(key)
                    self._actions += [
                        SendToNode(peer, CancelAttempt(key, "cancelled"))
                        for peer, node in self.nodes.items()
                        if not node.refusal
                    ]
