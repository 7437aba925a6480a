"""The simulated gateway, which may restart, and its clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...kvcache import Int32Array
from ..gateway.network_gateway import Connect, Disconnect, NetworkGateway, SendToNode
from ..gateway.retries import Answer
from ..handoff.gateway_messages import GATEWAY, DeliveryAck, GatewayMessage, NodeStatus
from ..handoff.messages import AttemptKey, Message, NodeId
from ..request import Request, RequestStatus, SamplingParams
from .invariants import OLD_EPOCHS, ONE_ANSWER, SAME_TOKENS, SimulationError
from .nodes import SimulationConfig, sample
from .observer import Observer, client_id


@dataclass(frozen=True)
class Job:
    """A client's request."""

    prompt: Int32Array
    max_new_tokens: int
    seed: int

    def answer(self) -> tuple[int, ...]:
        """Return the tokens that one node alone would generate."""
        tokens = self.prompt
        for _ in range(self.max_new_tokens):
            tokens = np.append(tokens, np.int32(sample(self.seed, tokens)))
        return tuple([int(token) for token in tokens[len(self.prompt) :]])


class Envelope(NamedTuple):
    """A message in the network.

    Attributes:
        epoch: of the sender.
        sent_at: time at which it was sent.
    """

    source: NodeId
    to: NodeId
    epoch: int
    sent_at: int
    message: Message | GatewayMessage

    @property
    def is_status(self) -> bool:
        """Whether it is only a sign of life."""
        return isinstance(self.message, NodeStatus)


class GatewaySide:
    """A gateway that can lose its memory, and clients that then ask the next one.

    Attributes:
        gateway: the gateway since its last restart.
        jobs: requests of clients, by id.
        answers: answers to clients, by request id.
    """

    def __init__(
        self,
        config: SimulationConfig,
        observer: Observer,
        counts: Counter[str],
        send: Callable[[Envelope], None],
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.answers: dict[str, Answer] = {}
        self._config = config
        self._observer = observer
        self._counts = counts
        self._send = send
        self._epoch = 0
        self.restart(0)

    def restart(self, now: int) -> None:
        """Replace the gateway by a new one without memory; clients repeat their requests."""
        self._epoch += 1
        self._connected: set[NodeId] = set()
        config = self._config
        self.gateway = NetworkGateway(
            config.block_size,
            silence_s=config.timing.silence_s,
            max_attempts=config.max_attempts,
            backoff_s=2,
            request_s=config.request_s,
            epoch=self._epoch,
        )
        self.gateway.tick(now)
        for request_id in self.jobs:
            if request_id not in self.answers:
                self._add_request(request_id, now)

    def job_of(self, key: AttemptKey) -> Job:
        """Return the job of an attempt."""
        return self.jobs[client_id(key)]

    def submit(self, job: Job, now: int) -> None:
        """Add a client's request."""
        request_id = f"r{len(self.jobs) + 1}"
        self.jobs[request_id] = job
        self._add_request(request_id, now)
        self.gateway.tick(now)

    def cancel(self, request_id: str) -> None:
        """Abort a request at its client's wish."""
        self.gateway.abort(request_id)
        self.answers[request_id] = Answer(request_id, None, "cancelled by the client")

    def act(self, now: int) -> None:
        """Carry out the gateway's actions, and give clients their answers."""
        for action in self.gateway.take_actions():
            match action:
                case SendToNode(peer, message):
                    assert peer in self._connected, f"the gateway has no address of {peer}"
                    self._send(Envelope(GATEWAY, peer, self._epoch, now, message))
                case Connect(peer):
                    self._connected.add(peer)
                case Disconnect(peer):
                    self._connected.remove(peer)
        for request in self.gateway.take_ended():
            self._answer(request, now)

    def receive(self, envelope: Envelope, now: int) -> None:
        """Deliver a node's message to the gateway.

        Raises:
            SimulationError: if it comes from an earlier epoch of the node and changes anything.
        """
        gateway, peer, message = self.gateway, envelope.source, envelope.message
        known = gateway.nodes.get(peer)
        if isinstance(message, DeliveryAck) and known is not None and known.epoch == envelope.epoch:
            self._observer.acknowledged((GATEWAY, self._epoch), message)
        before = known, gateway.num_open, gateway.num_unacked
        gateway.receive(peer, envelope.epoch, message, now)
        if known is not None and envelope.epoch < known.epoch:
            after = gateway.nodes.get(peer), gateway.num_open, gateway.num_unacked
            if after != before or gateway.take_actions():
                raise SimulationError(OLD_EPOCHS, f"{envelope} changes the gateway")

    def _add_request(self, request_id: str, now: int) -> None:
        job = self.jobs[request_id]
        sampling = SamplingParams(seed=job.seed)
        request = Request(request_id, job.prompt, job.max_new_tokens, sampling=sampling)
        self._observer.submitted(request_id, len(job.prompt), now)
        self.gateway.add_request(request, now)

    def _answer(self, request: Request, now: int) -> None:
        name, tokens, reason = request.request_id, None, ""
        if request.status is RequestStatus.FINISHED:
            tokens = tuple(request.output_tokens)
        else:
            reason = self.gateway.failures[name]
        if name in self.answers:
            raise SimulationError(ONE_ANSWER, f"{name} has two answers")
        if tokens is not None and tokens != self.jobs[name].answer():
            raise SimulationError(SAME_TOKENS, f"{name} has other tokens")
        if tokens is None:
            self._observer.failed(name, reason, now)
        self.answers[name] = Answer(name, tokens, reason)
        self._counts["answers" if tokens is not None else "failures"] += 1
