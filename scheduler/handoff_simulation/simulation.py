"""The simulation: nodes, network, gateway and clock as one program of operations.

Operations are plain data: lists of words and numbers, as in JSON. A number that names something is
taken modulo what there is. An operation with nothing to work on does nothing. So every list of
operations is a valid program, and a failing one can be cut anywhere.

==========================================  ====================================================
``submit prompt max_new_tokens seed``       a client submits a request
``cancel i``                                a client cancels an unanswered request
``deliver i``, ``duplicate i``, ``drop i``  a message in the network arrives, arrives and stays,
                                            or is lost
``cut i``                                   all messages from and to node i are lost
``compute i``                               P plans a step, or computes one group of its layers
``decode i``                                D plans a step, or computes it
``pull_write i``                            the bytes of a pull are written, maybe again
``pull_end i ok fenced``                    a pull ends; well only if its bytes are written
``pull_fence i``, ``offer_fence i``         a pull can no longer write; an offer is withdrawn
``crash i``, ``restart i``                  node i (P first) loses its memory; comes back
``new_gateway``                             the gateway loses its memory; clients ask again
``copy i ok``                               a copy from or to a host tier ends
``evict i n``                               node i evicts n blocks
``drain i``                                 node i gives hand-offs up and resets its cache
``tick n``                                  n units of time pass
==========================================  ====================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..gateway.network_gateway import NetworkGateway
from ..handoff.actions import CancelPull, Finished, Offer, Post, Pull, Started, Withdraw
from ..handoff.gateway_messages import (
    GATEWAY,
    CancelAttempt,
    DecodeFailed,
    DeliveryAck,
    PrefillFailed,
    RunPrefill,
)
from ..handoff.messages import Abort, AttemptKey, Commit, Grant, Message, NodeId
from ..request import Request
from .gateway_side import Envelope, GatewaySide, Job
from .invariants import ONE_START, SimulationError
from .nodes import DecodeNode, Node, PrefillNode, SimulationConfig, try_reset
from .observer import Observer

Op: TypeAlias = Sequence[Any]


@dataclass(eq=False)
class Transfer:
    """A pull that is not fenced.

    Attributes:
        node: the decode node.
        pull: its action.
        written: whether its bytes were written.
        ended: whether its end was reported to D.
        may_fence: whether it has ended or was cancelled.
        crashed_source: P's blocks when it crashed, which may still be written.
    """

    node: NodeId
    pull: Pull
    written: bool = False
    ended: bool = False
    may_fence: bool = False
    crashed_source: list[bytes] | None = None


class Simulation:
    """Prefill and decode nodes, a gateway and the network between them, changed by operations.

    Attributes:
        now: the clock, in ticks.
        network: messages in the network, oldest first.
        names: of all nodes, prefill nodes first: "p0", ..., "d0", ...
        nodes: by name; None if a node has crashed.
        pulls: transfers that may still write.
        draining: nodes that are to reset their caches.
        jobs: requests of clients, by id.
        answers: answers to clients, by request id.
        counts: number of events, by kind.
    """

    def __init__(self, config: SimulationConfig | None = None) -> None:
        self.config = config = config or SimulationConfig()
        self.now = 0
        self.network: list[Envelope] = []
        self.counts: Counter[str] = Counter()
        self._observer = Observer(config)
        self._front = GatewaySide(config, self._observer, self.counts, self._send)
        self.jobs = self._front.jobs
        self.answers = self._front.answers
        self.prefill_names = [f"p{place}" for place in range(config.num_prefill)]
        self.decode_names = [f"d{place}" for place in range(config.num_decode)]
        self.names = [*self.prefill_names, *self.decode_names]
        self.epochs = dict.fromkeys(self.names, 0)
        self.nodes: dict[NodeId, Node | None] = {name: self._new_node(name) for name in self.names}
        self.pulls: list[Transfer] = []
        self.draining: set[NodeId] = set()
        self._started: set[AttemptKey] = set()
        for name in self.names:
            self._send_status(name)
        while self.network:
            self._deliver(self.network.pop())

    @property
    def gateway(self) -> NetworkGateway:
        """The gateway since its last restart."""
        return self._front.gateway

    def _new_node(self, name: NodeId) -> Node:
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

    def apply(self, op: Op) -> None:
        """Apply an operation, and carry out all actions that follow.

        Raises:
            SimulationError, AssertionError: if an invariant is broken.
        """
        getattr(self, f"_op_{op[0]}")(*op[1:])
        self._act()

    # Operations: clients, gateway and network

    def _op_submit(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> None:
        self._front.submit(Job(np.array(prompt, np.int32), max_new_tokens, seed), self.now)

    def _op_cancel(self, index: int) -> None:
        open_ids = [each for each in self.jobs if each not in self.answers]
        if open_ids:
            self._front.cancel(open_ids[index % len(open_ids)])

    def _op_new_gateway(self) -> None:
        self._front.restart(self.now)

    def _op_deliver(self, index: int) -> None:
        if self.network:
            self._deliver(self.network.pop(index % len(self.network)))

    def _op_duplicate(self, index: int) -> None:
        if self.network:
            self._deliver(self.network[index % len(self.network)])

    def _op_drop(self, index: int) -> None:
        if self.network:
            del self.network[index % len(self.network)]

    def _op_cut(self, index: int) -> None:
        name = self._name(index)
        self.network = [each for each in self.network if name not in (each.source, each.to)]

    # Operations: nodes

    def _name(self, index: int) -> str:
        return self.names[index % len(self.names)]

    def _op_compute(self, index: int) -> None:
        node = self.prefill(self.prefill_names[index % len(self.prefill_names)])
        if node is not None:
            node.step()

    def _op_decode(self, index: int) -> None:
        node = self.decode(self.decode_names[index % len(self.decode_names)])
        if node is not None:
            before = node.preemptions
            node.step()
            if node.preemptions > before:
                self.counts["preemptions"] += node.preemptions - before

    def _op_crash(self, index: int) -> None:
        name = self._name(index)
        if self.nodes[name] is None:
            return
        if name in self.prefill_names:
            for transfer in self.pulls:
                if transfer.pull.peer == name:
                    transfer.crashed_source = self._source_tags(transfer)
        else:  # its memory is no longer registered
            self.pulls = [transfer for transfer in self.pulls if transfer.node != name]
        self.nodes[name] = None
        self.draining.discard(name)

    def _op_restart(self, index: int) -> None:
        name = self._name(index)
        if self.nodes[name] is None:
            self.nodes[name] = self._new_node(name)
            self._send_status(name)

    def _op_evict(self, index: int, num_blocks: int) -> None:
        node = self.nodes[self._name(index)]
        if node is not None:
            node.manager.evict(num_blocks)

    def _op_drain(self, index: int) -> None:
        name = self._name(index)
        node = self.nodes[name]
        if node is not None:
            node.scheduler.drain("the weights change")
            self.draining.add(name)

    def _op_tick(self, ticks: int) -> None:
        self.now += ticks
        self.gateway.tick(self.now)
        for name, node in self.nodes.items():
            if node is not None:
                node.scheduler.tick(self.now)
                node.reporter.tick(self.now)
                self._send_status(name)
                if name in self.draining and try_reset(node):
                    self.draining.remove(name)
                    self.counts["resets"] += 1

    # Operations: transfers

    def _op_copy(self, index: int, ok: bool) -> None:
        in_flight = [
            (node.copies, place)
            for node in self.nodes.values()
            if node is not None
            for place in range(len(node.copies.in_flight))
        ]
        if in_flight:
            copies, place = in_flight[index % len(in_flight)]
            copies.end(place, ok)
            self.counts["copies"] += 1

    def _op_pull_write(self, index: int) -> None:
        transfer = self._transfer(index)
        tags = None if transfer is None else self._source_tags(transfer)
        if transfer is None or tags is None:
            return
        memory = self._puller(transfer).memory
        for block, tag in zip(transfer.pull.blocks, tags, strict=True):
            memory.tags[block, transfer.pull.group] = tag
        transfer.written = True

    def _op_pull_end(self, index: int, ok: bool, fenced: bool) -> None:
        transfer = self._transfer(index)
        if transfer is None or transfer.ended or (ok and not transfer.written):
            return
        if ok or fenced:
            self.pulls.remove(transfer)
        transfer.ended = transfer.may_fence = True
        scheduler, part_id = self._puller(transfer).scheduler, transfer.pull.part_id
        if ok:
            scheduler.pulled(part_id)
        else:
            scheduler.pull_failed(part_id, fenced=fenced, reason="it was lost")

    def _op_pull_fence(self, index: int) -> None:
        transfer = self._transfer(index)
        if transfer is not None and transfer.may_fence:
            self.pulls.remove(transfer)
            self._puller(transfer).scheduler.pull_fenced(transfer.pull.part_id)

    def _op_offer_fence(self, index: int) -> None:
        waiting = [
            (node, key)
            for node in map(self.prefill, self.prefill_names)
            if node is not None
            for key in node.withdrawn
        ]
        if waiting:
            node, key = waiting[index % len(waiting)]
            node.fence(key)

    def _transfer(self, index: int) -> Transfer | None:
        return self.pulls[index % len(self.pulls)] if self.pulls else None

    def _puller(self, transfer: Transfer) -> DecodeNode:
        node = self.decode(transfer.node)
        assert node is not None, "a pull of a node that has crashed"
        return node

    def _source_tags(self, transfer: Transfer) -> list[bytes] | None:
        """Return the contents of P's blocks for a pull; None if P does not serve them."""
        node = self.prefill(transfer.pull.peer)
        if node is None or transfer.crashed_source is not None:
            return transfer.crashed_source
        return node.serve(transfer.pull.part_id)

    # Actions of the nodes and the gateway

    def _act(self) -> None:
        """Carry out the actions of all nodes until there are none, then the gateway's."""
        more = True
        while more:
            more = False
            for name, node in self.nodes.items():
                if node is None:
                    continue
                node.copies.dispatch()  # before a step writes to its sources
                for action in node.scheduler.take_actions():
                    more = True
                    if isinstance(node, PrefillNode):
                        self._act_prefill(name, node, action)
                    else:
                        self._act_decode(name, node, action)
                for message in node.reporter.take_messages():
                    self._send(Envelope(name, GATEWAY, node.epoch, self.now, message))
        self._front.act(self.now)

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
            case PrefillFailed():
                self.counts["refusals"] += action.is_busy
                node.reporter.report(action, self.now)

    def _act_decode(self, name: NodeId, node: DecodeNode, action: object) -> None:
        match action:
            case Post(peer, message):
                if isinstance(message, Grant):
                    node.granted(message, self._front.job_of(message.header.key).prompt)
                elif isinstance(message, Abort):
                    node.gave_up(message)
                self.network.append(Envelope(name, peer, node.epoch, self.now, message))
            case Pull():
                self.counts["blocks sent"] += len(action.blocks)
                self.pulls.append(Transfer(name, action))
            case CancelPull(part_id):
                for transfer in self.pulls:
                    transfer.may_fence |= transfer.pull.part_id == part_id
            case Started():
                self._start(node, action)
                node.reporter.report(action, self.now)
            case Finished() | DecodeFailed():
                node.reporter.report(action, self.now)

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

    # Messages

    def _send(self, envelope: Envelope) -> None:
        """Send a message from or to the gateway."""
        self._observer.sent((envelope.source, envelope.epoch), envelope.message)
        self.network.append(envelope)

    def _send_status(self, name: NodeId) -> None:
        """Send a node's status to the gateway, unless one is in the network."""
        node = self.nodes[name]
        assert node is not None, f"{name} has crashed"
        status = node.status
        if all(envelope.message is not status for envelope in self.network):
            self.network.append(Envelope(name, GATEWAY, node.epoch, self.now, status))

    def _deliver(self, envelope: Envelope) -> None:
        node, message = self.nodes.get(envelope.to), envelope.message
        timing, age = self.config.timing, self.now - envelope.sent_at
        if isinstance(message, RunPrefill) and age >= timing.remember_s - timing.silence_s:
            return  # a connection does not hold it until P has forgotten the other copies
        if envelope.to == GATEWAY:
            self._front.receive(envelope, self.now)
        elif node is not None:
            self._receive(node, envelope)
        else:
            return
        self.counts[type(message).__name__] += 1

    def _receive(self, node: Node, envelope: Envelope) -> None:
        """Deliver a message to a node."""
        match envelope.message:
            case RunPrefill() as run if isinstance(node, PrefillNode):
                self._begin(envelope.to, node, run)
            case DeliveryAck() as ack:
                self._observer.acknowledged((envelope.to, node.epoch), ack)
                node.reporter.acknowledge(envelope.source, ack)
            case CancelAttempt(key, reason):
                node.scheduler.give_up(key, reason)
            case Message() as message:
                node.scheduler.receive(envelope.source, message)

    def _begin(self, name: NodeId, node: PrefillNode, run: RunPrefill) -> None:
        def begin(request: Request, peer: NodeId, attempt: int) -> None:
            self._observer.begun((name, node.epoch), AttemptKey(request.request_id, attempt))
            self.counts["attempts"] += 1
            node.scheduler.begin(request, peer, attempt)

        node.reporter.begin(run, begin, self.now)
