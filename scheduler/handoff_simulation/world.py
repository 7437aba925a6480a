"""The simulated hand-off as it stands, and what follows from each operation at once."""

from __future__ import annotations

from dataclasses import dataclass

from ..handoff.actions import (
    CancelPull,
    Failed,
    Finished,
    Offer,
    Post,
    Pull,
    Started,
    Stopped,
    Withdraw,
)
from ..handoff.gateway_messages import (
    GATEWAY,
    CancelAttempt,
    DeliveryAck,
    RunPrefill,
)
from ..handoff.messages import (
    Abort,
    AttemptKey,
    Commit,
    Grant,
    Message,
    NodeId,
    Ticket,
)
from ..request import Request
from .gateway_world import Envelope, GatewayWorld
from .invariants import ONE_START, SimulationError
from .nodes import (
    DecodeNode,
    Node,
    PrefillNode,
    SimulationConfig,
)


@dataclass(eq=False)
class Transfer:
    """A pull that is not fenced.

    Attributes:
        node: which wants it.
        pull: what it wants.
        landed: whether its bytes were written.
        ended: whether D was told how it ended.
        may_fence: whether it has ended, or was cancelled.
        on_the_way: what P had in its blocks when it crashed; it may still be written.
    """

    node: NodeId
    pull: Pull
    landed: bool = False
    ended: bool = False
    may_fence: bool = False
    on_the_way: list[bytes] | None = None


class World(GatewayWorld):
    """Prefill and decode nodes, what is between them, and who uses them.

    Attributes:
        names: of all nodes, prefill nodes first: "p0", ..., "d0", ...
        nodes: by name; None where one has crashed.
        pulls: transfers that may still write.
        draining: nodes that are to forget all KV.
    """

    def __init__(self, config: SimulationConfig | None = None) -> None:
        super().__init__(config)
        config = self.config
        self.prefill_names = [f"p{place}" for place in range(config.num_prefill)]
        self.decode_names = [f"d{place}" for place in range(config.num_decode)]
        self.names = [*self.prefill_names, *self.decode_names]
        self.epochs = dict.fromkeys(self.names, 0)
        self.nodes: dict[NodeId, Node | None] = {name: self._node(name) for name in self.names}
        self.pulls: list[Transfer] = []
        self.draining: set[NodeId] = set()
        self._started: set[AttemptKey] = set()
        for name in self.names:
            self.say_alive(name)
        while self.network:
            self._deliver(self.network.pop())

    def _node(self, name: NodeId) -> Node:
        self.epochs[name] += 1
        kind = PrefillNode if name in self.prefill_names else DecodeNode
        return kind(self.config, self.epochs[name], self.now)

    def prefill(self, name: NodeId) -> PrefillNode | None:
        """Return a prefill node, unless it has crashed."""
        node = self.nodes[name]
        assert not isinstance(node, DecodeNode), f"{name} is a decode node"
        return node

    def decode(self, name: NodeId) -> DecodeNode | None:
        """Return a decode node, unless it has crashed."""
        node = self.nodes[name]
        assert not isinstance(node, PrefillNode), f"{name} is a prefill node"
        return node

    # What follows

    def _act(self) -> None:
        """Carry out what gateway and nodes want done, until they want nothing."""
        more = True
        while more:
            more = False
            for name, node in self.nodes.items():
                if node is None:
                    continue
                node.copies.dispatch()  # before anybody writes where they read
                for action in node.scheduler.take_actions():
                    more = True
                    if isinstance(node, PrefillNode):
                        self._act_prefill(name, node, action)
                    else:
                        self._act_decode(name, node, action)
                for message in node.reporter.take_messages():
                    self._post(Envelope(name, GATEWAY, node.epoch, self.now, message))
        self._act_gateway()

    def _act_prefill(self, name: NodeId, node: PrefillNode, action: object) -> None:
        match action:
            case Post(peer, message):
                if isinstance(message, Commit):
                    node.check_hits(message)
                self.network.append(Envelope(name, peer, node.epoch, self.now, message))
            case Offer():
                node.offer(action)
            case Withdraw(key):
                node.withdrawn.append(key)
            case Failed():
                self.counts["refusals"] += action.is_busy
                node.reporter.report(action, self.now)

    def _act_decode(self, name: NodeId, node: DecodeNode, action: object) -> None:
        match action:
            case Post(peer, message):
                if isinstance(message, Grant):
                    node.granted(message, self.job_of(message.header.key).prompt)
                elif isinstance(message, Abort):
                    node.gave_up(message)
                self.network.append(Envelope(name, peer, node.epoch, self.now, message))
            case Pull():
                self.counts["blocks sent"] += len(action.blocks)
                self.pulls.append(Transfer(name, action))
            case CancelPull(ticket):
                self._cancel_pull(ticket)
            case Started():
                self._start(node, action)
                node.reporter.report(action, self.now)
            case Finished() | Stopped():
                node.reporter.report(action, self.now)

    def _cancel_pull(self, ticket: Ticket) -> None:
        for transfer in self.pulls:
            if transfer.pull.ticket == ticket:
                transfer.may_fence = True

    def _start(self, node: DecodeNode, started: Started) -> None:
        key, request = started.key, started.request
        if key in self._started:
            raise SimulationError(ONE_START, f"{key} starts twice")
        self._started.add(key)
        node.started(key)
        self.counts["starts"] += 1
        self.counts["cached tokens"] += started.num_cached_tokens
        self.counts["hit tokens"] += request.num_hit_tokens
        if request.lease is not None:
            for group in range(self.config.num_groups):
                node.memory.read(request.lease, request.prompt, group, request)

    def _begin(self, name: NodeId, node: PrefillNode, run: RunPrefill) -> None:
        """P is asked to begin an attempt."""

        def begin(request: Request, peer: NodeId, attempt: int) -> None:
            self._watch.begins((name, node.epoch), AttemptKey(request.request_id, attempt))
            self.counts["attempts"] += 1
            node.scheduler.begin(request, peer, attempt)

        node.reporter.begin(run, begin, self.now)

    def _deliver(self, envelope: Envelope) -> None:
        node, message = self.nodes.get(envelope.to), envelope.message
        timing, age = self.config.timing, self.now - envelope.sent_at
        if isinstance(message, RunPrefill) and age >= timing.remember_s - timing.silence_s:
            return  # no connection holds it until P has forgotten the copies that have come
        if envelope.to == GATEWAY:
            self._tell_gateway(envelope)
        elif node is not None:
            self._hear(node, envelope)
        else:
            return
        self.counts[type(message).__name__] += 1

    def _hear(self, node: Node, envelope: Envelope) -> None:
        """Let a node take in a message."""
        match envelope.message:
            case RunPrefill() as run if isinstance(node, PrefillNode):
                self._begin(envelope.to, node, run)
            case DeliveryAck() as heard:
                self._watch.hears((envelope.to, node.epoch), heard)
                node.reporter.acknowledge(envelope.source, heard)
            case CancelAttempt(key, reason):
                node.scheduler.give_up(key, reason)
            case Message() as message:
                node.scheduler.receive(envelope.source, message)

    def say_alive(self, name: NodeId) -> None:
        """A node says that it is up; no more than once is that on its way."""
        node = self.nodes[name]
        assert node is not None, f"{name} has crashed"
        status = node.status
        if all(envelope.message is not status for envelope in self.network):
            self.network.append(Envelope(name, GATEWAY, node.epoch, self.now, status))

    def _source_tags(self, transfer: Transfer) -> list[bytes] | None:
        """What P has, or had when it crashed, for a pull; None if it does not serve it."""
        node = self.prefill(transfer.pull.peer)
        if node is None or transfer.on_the_way is not None:
            return transfer.on_the_way
        return node.serve(transfer.pull.ticket)
