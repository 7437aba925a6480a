"""A gateway whose nodes are other processes, reached over a lossy network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Final

from ..errors import NodesMissingError
from ..handoff.gateway_messages import (
    IDLE,
    AttemptMessage,
    CacheAsk,
    CacheUpdate,
    CancelAttempt,
    DecodeFailed,
    DeliveryAck,
    Finished,
    FollowAttempt,
    GatewayMessage,
    NewTokens,
    NodeStatus,
    Preempted,
    PrefillFailed,
    Progress,
    RunPrefill,
    Started,
)
from ..handoff.messages import AttemptKey, Message, NodeId
from ..handoff.records import unpack_records
from ..request import Request
from .gateway import Gateway, RunAttempt
from .remote_node import RemoteNode, refusal_of
from .resend import ResendQueue
from .retries import Cancel
from .router import CacheSize

_RETRIES_PER_SILENCE: Final = 5
_MAX_GONE: Final = 100  # of each role


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to a node at this address."""

    peer: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Drop the connection to a node that is gone, with its unsent messages."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Send a message to a connected node."""

    peer: NodeId
    message: GatewayMessage


@dataclass(slots=True)
class _Followed:
    """An attempt whose tokens the gateway has asked for.

    Attributes:
        peer: the decode node.
        has_asked: whether none have come since it asked last.
    """

    peer: NodeId
    has_asked: bool = True


class NetworkGateway:
    """A ``Gateway`` that learns of its nodes from their messages, over a lossy network.

    A node joins with a `NodeStatus`. If it cannot serve beside the others it is refused, until a
    later status finds those gone. A node is gone when it is silent for a while, or comes back with
    another epoch; its attempts are retried on other nodes. This class does no I/O: carry out
    `take_actions` after every call.

    Attributes:
        nodes: nodes that have joined and are not gone, by name.
        gone: nodes that are gone and have not come back, by name: of each role those that were lost
            last.
        num_nodes_lost: number of times that a node was gone, also if it has come back.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        silence_s: float = 5.0,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = inf,
        lost_s: float = 600.0,
        epoch: int = 0,
        stream: bool = False,
    ) -> None:
        """Create a gateway without nodes.

        Args:
            model: name of a model configuration; None: all nodes need the first node's.
            silence_s: silence after which a node is gone. An attempt also fails if its prefill
                node has not acknowledged it in this time; the gateway asks five times.
            max_attempts, backoff_s, request_s, lost_s: see ``Gateway``.
            epoch: epoch of the gateway; see ``Gateway``.
            stream: whether decode nodes report the tokens of requests as they come.
        """
        self.nodes: dict[NodeId, RemoteNode] = {}
        self.gone: dict[NodeId, RemoteNode] = {}
        self.num_nodes_lost = 0
        self._model = model
        self._silence_s = silence_s
        self._unacked = ResendQueue(retry_s=silence_s / _RETRIES_PER_SILENCE, patience_s=silence_s)
        self._gateway = Gateway(
            max_attempts=max_attempts,
            backoff_s=backoff_s,
            request_s=request_s,
            lost_s=lost_s,
            epoch=epoch,
        )
        self._is_streaming = stream
        self._followed: dict[AttemptKey, _Followed] = {}
        self._now = 0.0
        self._draining: set[NodeId] = set()  # also those that have ended since
        self._asked: set[NodeId] = set()  # for updates that are missing, since the last status
        self._actions: list[Connect | Disconnect | SendToNode] = []

    @property
    def failures(self) -> dict[str, str]:
        """Reasons of failed requests, by id; these requests have the status ABORTED."""
        return self._gateway.failures

    @property
    def num_moved(self) -> int:
        """Number of times that a preempted request has moved to another decode node."""
        return self._gateway.num_moved

    @property
    def num_attempts_lost(self) -> int:
        """Number of attempts that were lost with a node or a connection."""
        return self._gateway.num_lost

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return self._gateway.num_open

    @property
    def num_unacked(self) -> int:
        """Number of messages that no node has acknowledged."""
        return len(self._unacked)

    @property
    def loads(self) -> dict[NodeId, int]:
        """Estimated number of blocks in progress on each node; see `Router`."""
        return self._gateway.loads

    def count(self, role: str) -> int:
        """Return the number of serving nodes of a role."""
        return sum(node.status.role == role and not node.refusal for node in self.nodes.values())

    def check(self, timeout_s: float, now: float) -> None:
        """Fail if all nodes of a role are gone and none has joined for some time.

        Args:
            timeout_s: time since the last message of those nodes; at least silence_s.
            now: current time.

        Raises:
            NodesMissingError: with the names of the nodes that are gone.
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
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def take_ended(self) -> list[Request]:
        """Return the requests that have ended since the last call, except aborted ones."""
        return self._gateway.take_ended()

    def take_advanced(self) -> list[Request]:
        """Return the requests that got tokens since the last call, before their ends."""
        return self._gateway.take_advanced()

    def drain(self, peer: NodeId) -> None:
        """Give a node no more attempts; those in progress go on.

        The name is not used again: a node that joins with it is refused. When `num_attempts` is 0,
        the node may end, and is not among those that are gone.
        """
        self._draining.add(peer)
        self.gone.pop(peer, None)
        if self._serves(peer):
            self._gateway.drain(peer)

    def num_attempts(self, peer: NodeId) -> int:
        """Return the number of attempts in progress on a node; 0 if it does not serve."""
        return self._gateway.num_attempts(peer) if self._serves(peer) else 0

    def _serves(self, peer: NodeId) -> bool:
        node = self.nodes.get(peer)
        return node is not None and not node.refusal

    # Calls of clients

    def add_request(self, request: Request, now: float) -> None:
        """Add a request; it waits while there are no nodes.

        Raises:
            RequestError: if it was added before, or its id is live.
        """
        self._now = now
        self._gateway.add_request(request, now)
        self._follow()  # what has begun must not outlive its nodes

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no live request has this id."""
        is_live = self._gateway.abort(request_id)
        self._follow()
        return is_live

    # Events of the network and the clock

    def receive(
        self, peer: NodeId, epoch: int, message: Message | GatewayMessage, now: float
    ) -> None:
        """Handle a message of a node.

        Args:
            peer, epoch: name and epoch of the sender.
            message: ignored if it is one between nodes, or from an earlier epoch.
            now: current time.
        """
        self._now = now
        known = self.nodes.get(peer)
        if isinstance(message, NodeStatus):
            self._update_node(peer, epoch, message)
        elif known is not None and known.epoch == epoch:
            self.nodes[peer] = replace(known, heard_at=self._now)
            if not known.refusal:
                self._take_in(peer, message)
        self._follow()

    def unsent(self, peer: NodeId, message: GatewayMessage, error: str = "") -> None:
        """Report that a message could not be sent, as too many wait for its node.

        Args:
            peer, message: the fields of the `SendToNode`.
            error: why it can never be sent; its request fails then.
        """
        if isinstance(message, RunPrefill):
            if error:
                self._gateway.prefill_failed(message.key, error, is_final=True)
            else:
                self._gateway.unsent(message.key, f"too many messages wait for {peer}")
            self._follow()

    def tick(self, now: float) -> None:
        """Advance the clock."""
        self._now = now
        for peer, node in list(self.nodes.items()):
            if now - node.heard_at >= self._silence_s:
                self._lose(peer)
        resend, expired = self._unacked.take_due(now)
        self._actions += [SendToNode(peer, message) for peer, message in resend]
        for peer, message in expired:
            reason = f"{peer} does not acknowledge the request"
            self._gateway.prefill_failed(message.key, reason, is_lost=True)
        self._gateway.tick(now)
        self._follow()

    def _take_in(self, peer: NodeId, message: Message | GatewayMessage) -> None:
        match message:
            case DeliveryAck() as ack:
                self._unacked.acknowledge(peer, ack)
            case Progress(attempts):
                for each in attempts:
                    self._take_in_tokens(peer, each)
            case Preempted(key, tokens, hits, num_preemptions, packed):
                records = unpack_records(packed, tokens)
                self._gateway.preempted(key, tokens, hits, num_preemptions, records)
            case CacheUpdate() as update:
                if not self._gateway.update_cache(peer, update) and peer not in self._asked:
                    self._ask(peer)
            case PrefillFailed() | Started() | Finished() | DecodeFailed() as report:
                self._actions.append(SendToNode(peer, DeliveryAck.of(report)))
                self._unacked.forget(report.key)  # P has received RunPrefill
                self._take_in_report(report)
                if self._is_streaming and isinstance(report, Started):
                    self._follow_attempt(peer, report.key)

    def _take_in_tokens(self, peer: NodeId, new: NewTokens) -> None:
        """Take the tokens that are new; ask again if some before them are missing."""
        num_heard, followed = self._gateway.num_heard(new.key), self._followed.get(new.key)
        if num_heard is None:  # nobody wants it
            self._actions.append(SendToNode(peer, CancelAttempt(new.key, "cancelled")))
        elif followed is None:
            return  # a node that was not asked
        elif new.start <= num_heard:
            followed.has_asked = False
            tokens = new.tokens[num_heard - new.start :]
            records = unpack_records(new.records, new.tokens)[num_heard - new.start :]
            self._gateway.progressed(new.key, tokens, records)
        elif not followed.has_asked:
            self._follow_attempt(peer, new.key)

    def _follow_attempt(self, peer: NodeId, key: AttemptKey) -> None:
        """Ask D for the tokens of an attempt in progress, after those that are known."""
        num_heard = self._gateway.num_heard(key)
        if num_heard is not None:
            self._followed[key] = _Followed(peer)
            self._actions.append(SendToNode(peer, FollowAttempt(key, num_heard)))

    def _follow_again(self, peer: NodeId) -> None:
        """Ask a node again for tokens that have not come, and forget the attempts that ended."""
        for key, followed in list(self._followed.items()):
            if self._gateway.num_heard(key) is None:
                del self._followed[key]
            elif followed.peer == peer and followed.has_asked:
                self._follow_attempt(peer, key)

    def _ask(self, peer: NodeId) -> None:
        """Ask for the updates that are missing: at once, and again at each status."""
        self._asked.add(peer)
        ask = CacheAsk(self._gateway.next_update(peer))
        self._actions.append(SendToNode(peer, ask))

    def _take_in_report(self, report: AttemptMessage) -> None:
        match report:
            case PrefillFailed(key, reason, is_final, is_busy, is_lost):
                self._gateway.prefill_failed(
                    key, reason, is_final=is_final, is_busy=is_busy, is_lost=is_lost
                )
            case Started(key):
                self._gateway.started(key)
            case Finished(key, tokens, hits, num_preemptions, packed):
                records = unpack_records(packed, tokens)
                self._gateway.finished(key, tokens, hits, num_preemptions, records)
            case DecodeFailed(key, reason):
                self._gateway.decode_failed(key, reason)

    def _update_node(self, peer: NodeId, epoch: int, status: NodeStatus) -> None:
        known, unheard, num_updates = self.nodes.get(peer), status.unheard, status.num_updates
        load = status.load
        status = replace(status, unheard=(), num_updates=0, load=IDLE)
        if known is not None and epoch < known.epoch:
            return  # late, or the node's clock went back: it serves when its old epoch is silent
        if known is not None and (known.epoch, known.status) != (epoch, status):
            self._lose(peer)
            known = None
        if known is not None and not known.refusal:
            node = replace(known, heard_at=self._now, load=load)
        else:  # the nodes that it could not serve beside may be gone
            node = RemoteNode(status, epoch, self._now, self._refusal_of(peer, status), load)
        self.nodes[peer] = node
        if node.refusal:
            return
        if known is None or known.refusal:
            self._accept(peer, status)
        self._gateway.set_free(peer, node.num_free)
        self._gateway.set_unheard(peer, unheard)
        self._follow_again(peer)
        self._asked.discard(peer)
        if self._gateway.next_update(peer) < num_updates:
            self._ask(peer)

    def _refusal_of(self, peer: NodeId, status: NodeStatus) -> str:
        if peer in self._draining:
            return "it was drained, and its name is not used again"
        return refusal_of(status, self.nodes, self._model)

    def _accept(self, peer: NodeId, status: NodeStatus) -> None:
        self.gone.pop(peer, None)
        self._actions.append(Connect(peer, status.address))
        size = CacheSize(status.num_blocks, status.block_size)
        if status.role == "prefill":
            self._gateway.add_prefill(peer, size)
        else:
            self._gateway.add_decode(peer, size)

    def _lose(self, peer: NodeId) -> None:
        node = self.nodes.pop(peer)
        self._asked.discard(peer)
        if not node.refusal:
            if peer not in self._draining:
                self.gone[peer] = node
                self.num_nodes_lost += 1
            role = node.status.role
            earlier = [each for each, other in self.gone.items() if other.status.role == role]
            if len(earlier) > _MAX_GONE:  # names of pods are not used again
                del self.gone[earlier[0]]
            self._actions.append(Disconnect(peer))
            self._unacked.forget_peer(peer)
            self._gateway.remove_node(peer)

    def _follow(self) -> None:
        """Turn the gateway's actions into messages to nodes."""
        for action in self._gateway.take_actions():
            match action:
                case RunAttempt(key, request, route):
                    prefill, decode = self.nodes[route.prefill], self.nodes[route.decode]
                    address = decode.status.address
                    run = RunPrefill.of(key, prefill.epoch, request, route.decode, address)
                    self._actions.append(SendToNode(route.prefill, run))
                    self._unacked.add(route.prefill, run, self._now)
                case Cancel(key):
                    self._unacked.forget(key)
                    self._actions += [
                        SendToNode(peer, CancelAttempt(key, "cancelled"))
                        for peer, node in self.nodes.items()
                        if not node.refusal
                    ]
