"""The simulated hand-off as it stands, and what follows from each operation at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ...kvcache import Int32Array, RequestTooLargeError
from ..request import Request, SamplingParams
from .actions import CancelPull, Failed, Finished, Offer, Post, Pull, Started, Stopped, Withdraw
from .front_desk import Answer, Begin, Cancel, FrontDesk
from .invariants import ONE_ANSWER, ONE_START, SAME_TOKENS, SimulationError
from .messages import Abort, Commit, Grant, Key, Message, NodeId, Ticket
from .nodes import DecodeNode, Node, PrefillNode, SimulationConfig, sample

REQUEST_S: Final = 200
"""After this a request is answered as failed, in ticks."""


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


@dataclass(frozen=True)
class Job:
    """What a client asked for."""

    prompt: Int32Array
    max_new_tokens: int
    seed: int

    def answer(self) -> tuple[int, ...]:
        """What one node alone would generate."""
        tokens = self.prompt
        for _ in range(self.max_new_tokens):
            tokens = np.append(tokens, np.int32(sample(self.seed, tokens)))
        return tuple([int(token) for token in tokens[len(self.prompt) :]])


class Letter(NamedTuple):
    """A message on its way."""

    source: NodeId
    to: NodeId
    message: Message


class World:
    """Prefill and decode nodes, what is between them, and who uses them.

    Attributes:
        now: the clock, in ticks.
        names: of all nodes, prefill nodes first: "p0", ..., "d0", ...
        nodes: by name; None where one has crashed.
        network: messages on their way.
        pulls: transfers that may still write.
        reports: what each node has said to the front desk, and has not arrived.
        draining: nodes that are to forget all KV.
        answers: what clients were told.
        counts: how often each thing happened.
    """

    def __init__(self, config: SimulationConfig | None = None) -> None:
        self.config = config = config or SimulationConfig()
        self.now = 0
        self.prefill_names = [f"p{place}" for place in range(config.num_prefill)]
        self.decode_names = [f"d{place}" for place in range(config.num_decode)]
        self.names = [*self.prefill_names, *self.decode_names]
        self.epochs = dict.fromkeys(self.names, 0)
        self.nodes: dict[NodeId, Node | None] = {name: self._node(name) for name in self.names}
        self.front = FrontDesk(max_attempts=config.max_attempts, backoff_s=2, request_s=REQUEST_S)
        self.jobs: dict[str, Job] = {}
        self.network: list[Letter] = []
        self.pulls: list[Transfer] = []
        self.reports: dict[NodeId, list[Callable[[], None]]] = {name: [] for name in self.names}
        self.draining: set[NodeId] = set()
        self.answers: dict[str, Answer] = {}
        self.counts: Counter[str] = Counter()
        self._started: set[Key] = set()

    def _node(self, name: NodeId) -> Node:
        self.epochs[name] += 1
        kind = PrefillNode if name in self.prefill_names else DecodeNode
        return kind(self.config, self.epochs[name], self.now)

    def route(self, key: Key) -> tuple[NodeId, NodeId]:
        """Choose the nodes of an attempt: the next may have the same P, the same D, or neither."""
        number, attempt = int(key[0][1:]), key[1]
        prefill = self.prefill_names[(number + attempt) % len(self.prefill_names)]
        return prefill, self.decode_names[(number + attempt // 2) % len(self.decode_names)]

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
        """Carry out what front desk and nodes want done, until they want nothing."""
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
            for wanted in self.front.take_actions():
                more = True
                self._act_front(wanted)

    def _act_prefill(self, name: NodeId, node: PrefillNode, action: object) -> None:
        match action:
            case Post(peer, message):
                if isinstance(message, Commit):
                    node.check_hits(message)
                self.network.append(Letter(name, peer, message))
            case Offer():
                node.offer(action)
            case Withdraw(key):
                node.withdrawn.append(key)
            case Failed():
                self._report_failed(name, action)

    def _report_failed(self, name: NodeId, failed: Failed) -> None:
        self.counts["refusals"] += failed.is_busy
        self.reports[name].append(
            lambda: self.front.prefill_failed(
                failed.key, failed.reason, is_final=failed.is_final, is_busy=failed.is_busy
            )
        )

    def _act_decode(self, name: NodeId, node: DecodeNode, action: object) -> None:
        reports, front = self.reports[name], self.front
        match action:
            case Post(peer, message):
                if isinstance(message, Grant):
                    node.granted(message, self.jobs[message.head.key[0]].prompt)
                elif isinstance(message, Abort):
                    node.gave_up(message)
                self.network.append(Letter(name, peer, message))
            case Pull():
                self.counts["blocks sent"] += len(action.blocks)
                self.pulls.append(Transfer(name, action))
            case CancelPull(ticket):
                self._cancel_pull(ticket)
            case Started():
                self._start(node, action)
                reports.append(lambda: front.started(action.key))
            case Finished(key, request):
                tokens = tuple(request.output_tokens)
                reports.append(lambda: front.finished(key, tokens))
            case Stopped(key, reason):
                reports.append(lambda: front.decode_failed(key, reason))

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
        self.counts["own tokens"] += started.num_own_tokens
        self.counts["hit tokens"] += request.num_hit_tokens
        if request.lease is not None:
            for group in range(self.config.num_groups):
                node.memory.read(request.lease, request.prompt, group, request)

    def _act_front(self, action: Begin | Cancel | Answer) -> None:
        match action:
            case Begin(key):
                self._begin(key)
            case Cancel(key):
                for name in self.route(key):
                    node = self.nodes[name]
                    if node is not None:
                        node.scheduler.give_up(key, "cancelled")
            case Answer(request_id, tokens, _):
                if request_id in self.answers:
                    raise SimulationError(ONE_ANSWER, f"{request_id} has two")
                if tokens is not None and tokens != self.jobs[request_id].answer():
                    raise SimulationError(SAME_TOKENS, f"{request_id} has others")
                self.answers[request_id] = action
                self.counts["answers" if tokens is not None else "failures"] += 1

    def _begin(self, key: Key) -> None:
        job = self.jobs[key[0]]
        self.counts["attempts"] += 1
        name, peer = self.route(key)
        node = self.prefill(name)
        if node is None:
            self._report_failed(name, Failed(key, "the prefill node is down"))
            return
        sampling = SamplingParams(seed=job.seed)
        request = Request(key[0], job.prompt, job.max_new_tokens, sampling=sampling)
        try:
            node.scheduler.begin(request, peer, key[1])
        except RequestTooLargeError as large:
            self._report_failed(name, Failed(key, str(large), is_final=True))

    def _source_tags(self, transfer: Transfer) -> list[bytes] | None:
        """What P has, or had when it crashed, for a pull; None if it does not serve it."""
        node = self.prefill(transfer.pull.peer)
        if node is None or transfer.on_the_way is not None:
            return transfer.on_the_way
        return node.serve(transfer.pull.ticket)
